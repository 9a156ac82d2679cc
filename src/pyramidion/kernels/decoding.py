"""A decoder's next token in few launches: a product with all that stands before and behind it is one kernel.

At a few rows a product only has to stream its weights, which takes less time than a kernel takes to begin and to end.
So there are eight launches a layer, and each one begins while the one before it still computes: it fetches its weights,
and waits only then for what it multiplies them by (`AHEAD`).

    embed | norm, queries keys values | attend | out | norm, queries | attend | out | norm, widen | narrow | ... | head

The sum of all sublayers so far (`stream`) and what the next one is added to (`base`) are float32; every other number is
as wide as the weights. Rows are texts: the beams of a document one after the other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pyramidion.kernels.launching import interpreted, launch, processors

PARTS = tl.constexpr(8)  # of a sum, one a warp
NONE = tl.constexpr(2147483647)  # a token that comes after all others
ROWS = 32  # that a program multiplies at most
COLUMNS, HEAD = 1024, 128  # widest stream, widest head
FEW, MANY = 16, 32  # columns of a product that a program computes at once
KEYS = 64  # that a program attends to at once
CROWD = 4  # programs of a multiprocessor that attend, where there are keys for so many


@triton.jit
def begin(AHEAD: tl.constexpr):
    """Let the next launch begin."""
    if AHEAD:
        gdc_launch_dependents()


@triton.jit
def wait(AHEAD: tl.constexpr):
    """Wait until the launch before has ended; what it wrote is then seen."""
    if AHEAD:
        gdc_wait()


# ------------------------------------------------------------------------------------------------------- the products


@triton.jit
def read(source, first, start, rows, K: tl.constexpr, M: tl.constexpr, PART: tl.constexpr):
    """Load M rows of [rows K] from row `first` and column `start` on -> [PARTS M PART]."""
    row = first + tl.arange(0, M)[None, :, None]
    column = start + tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    return tl.load(source + row * K + column, mask=(row < rows) & (column < K), other=0.0)


@triton.jit
def read_weight(weight, tile, start, OUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PART: tl.constexpr):
    """Load N rows of a weight [OUT K] from column `start` on -> [PARTS PART N]."""
    out = (tl.arange(0, N) + tile * N)[None, None, :]
    into = start + tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, :, None]
    return tl.load(weight + out * K + into, mask=(out < OUT) & (into < K), other=0.0)


@triton.jit
def times(x, factor):
    """Multiply x [PARTS M PART] by [PARTS PART N] -> float32 [PARTS M N].

    Each warp sums a part of its own: one after the other, products would wait longer for each other than for memory.
    """
    return tl.dot(x, factor, input_precision="ieee")


@triton.jit
def read_normed(
    stream, gain, offset, first, rows, eps,
    D: tl.constexpr, M: tl.constexpr, PART: tl.constexpr, PLAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Wait for M rows of the stream -> themselves and their norm (PLAIN: themselves), float32 [PARTS M PART]."""
    column = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    if not PLAIN:
        weight = tl.load(gain + column, mask=column < D, other=0.0).to(tl.float32)
        bias = tl.load(offset + column, mask=column < D, other=0.0).to(tl.float32)
    wait(AHEAD)
    total = read(stream, first, 0, rows, D, M, PART)
    normed = total
    if not PLAIN:
        mean = tl.sum(tl.sum(total, 2), 0) / D  # [M]
        centred = tl.where(column < D, total - mean[None, :, None], 0.0)
        spread = 1.0 / tl.sqrt(tl.sum(tl.sum(centred * centred, 2), 0) / D + eps)
        normed = centred * spread[None, :, None] * weight + bias
    return total, normed


@triton.jit(do_not_specialize=["rows", "documents"])
def decode_enter(
    stream, base, gain, offset, weight, bias, result, cache, place, rows, documents, eps,
    D: tl.constexpr, OUT: tl.constexpr, HEADS: tl.constexpr, BEAMS: tl.constexpr, LIMIT: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, PART: tl.constexpr,
    PRE: tl.constexpr, PLAIN: tl.constexpr, RELU: tl.constexpr, FILLS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Enter a sublayer: normalise the stream, put what the sublayer is added to aside, and multiply.

    FILLS: the first D columns are queries, the others keys and values, which go to the cache [2 b h t beams e].
    """
    begin(AHEAD)
    tile, first = tl.program_id(0), tl.program_id(1) * M
    kind: tl.constexpr = weight.dtype.element_ty
    factor = read_weight(weight, tile, 0, OUT, D, N, PART)
    out = (tl.arange(0, N) + tile * N)[None, :]
    shift = tl.load(bias + out, mask=out < OUT, other=0.0).to(tl.float32)
    total, normed = read_normed(stream, gain, offset, first, rows, eps, D, M, PART, PLAIN, AHEAD)
    x = normed.to(kind)

    row = first + tl.arange(0, M)[None, :, None]
    column = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    mine = (row < rows) & (column < D) & (column // N == tile)
    tl.store(base + row * D + column, total if PRE else x.to(tl.float32), mask=mine)

    product = tl.sum(times(x, factor), 0) + shift  # [M N]
    product = (tl.maximum(product, 0.0) if RELU else product).to(kind)
    text = first + tl.arange(0, M)[:, None]
    inside = (text < rows) & (out < OUT)
    if FILLS:
        E: tl.constexpr = D // HEADS
        lane, position = out % D, tl.load(place)
        tl.store(result + text * D + out, product, mask=inside & (out < D))
        spot = (out // D - 1) * documents.to(tl.int64) * HEADS + text // BEAMS * HEADS + lane // E
        spot = (spot * (LIMIT - 1) + position) * BEAMS + text % BEAMS
        tl.store(cache + spot * E + lane % E, product, mask=inside & (out >= D))
    else:
        tl.store(result + text * OUT + out, product, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def decode_add(
    source, weight, bias, base, stream, rows,
    D: tl.constexpr, K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PART: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Leave a sublayer: the stream is base + source [rows K] @ weight [D K] + bias."""
    begin(AHEAD)
    tile, first = tl.program_id(0), tl.program_id(1) * M
    row, column = first + tl.arange(0, M)[:, None], (tl.arange(0, N) + tile * N)[None, :]
    inside = (row < rows) & (column < D)
    shift = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    factor = read_weight(weight, tile, 0, D, K, N, PART)
    wait(AHEAD)
    before = tl.load(base + row * D + column, mask=inside, other=0.0)
    summed = times(read(source, first, 0, rows, K, M, PART), factor)
    for start in range(PARTS * PART, K, PARTS * PART):
        summed += times(read(source, first, start, rows, K, M, PART), read_weight(weight, tile, start, D, K, N, PART))
    change = (tl.sum(summed, 0) + shift).to(source.dtype.element_ty)  # as wide as a product by itself would be
    tl.store(stream + row * D + column, before + change.to(tl.float32), mask=inside)


# ------------------------------------------------------------------------------------------------------ the attention


@triton.jit(do_not_specialize=["used", "count", "share"])
def decode_attend(
    query, keys, values, mixed, partial, arrivals, seen, origin, place, used, count, share,
    D: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, BEAMS: tl.constexpr, LIMIT: tl.constexpr,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Attend from one head of one text to `share` of its keys; the last of those that share a head puts them together.

    keys, values  [b h count e], of which the first `used` are there; OWN: [b h count beams e], up to the text's own
                  position, where `origin` [b beams LIMIT] names the beam that wrote what is one's past
    seen          [b count] whether a key is real (MASKED)
    """
    begin(AHEAD)
    group, split = tl.program_id(0), tl.program_id(1)
    row, head = group // HEADS, group % HEADS
    document = row // BEAMS
    lane = tl.arange(0, WIDTH)
    wait(AHEAD)
    if OWN:
        used = (tl.load(place) + 1).to(tl.int32)
    sharers = tl.cdiv(used, share)
    if split < sharers:
        x = tl.load(query + row * D + head * E + lane, mask=lane < E, other=0.0).to(tl.float32) * E**-0.5
        apart = (document * HEADS + head).to(tl.int64) * count * E
        if OWN:
            apart *= BEAMS
        highest, total = -float("inf"), 0.0
        summed = tl.zeros([WIDTH], tl.float32)
        for start in range(split * share, tl.minimum(used, split * share + share), N):
            at = start + tl.arange(0, N)
            there = at < used
            spot = at
            if OWN and BEAMS > 1:
                spot = at * BEAMS + tl.load(origin + row.to(tl.int64) * LIMIT + at, mask=there, other=0).to(tl.int32)
            where, inside = spot[:, None] * E + lane[None, :], there[:, None] & (lane < E)[None, :]
            key = tl.load(keys + apart + where, mask=inside, other=0.0)  # [N WIDTH]
            value = tl.load(values + apart + where, mask=inside, other=0.0)
            if MASKED:
                there = there & (tl.load(seen + document.to(tl.int64) * count + at, mask=there, other=0) != 0)
            score = tl.where(there, tl.sum(key.to(tl.float32) * x[None, :], 1), -float("inf"))  # [N]
            top = tl.maximum(highest, tl.max(score, 0))
            known = tl.where(top == -float("inf"), 0.0, top)
            fade, weight = tl.exp(highest - known), tl.exp(score - known)
            summed = summed * fade + tl.sum(value.to(tl.float32) * weight[:, None], 0)
            total, highest = total * fade + tl.sum(weight, 0), top
        whole = True
        if SPLITS > 1:
            whole = sharers == 1
            if sharers > 1:
                mine = partial + (group * SPLITS + split) * (WIDTH + 2)
                tl.store(mine + lane, summed)
                tl.store(mine + WIDTH, highest)
                tl.store(mine + WIDTH + 1, total)
                tl.debug_barrier()
                whole = tl.atomic_add(arrivals + group, 1, sem="acq_rel", scope="gpu") == sharers - 1
                tl.debug_barrier()
                if whole:
                    tl.store(arrivals + group, 0)
                    other = tl.arange(0, SPLITS)
                    ours = partial + (group * SPLITS + other) * (WIDTH + 2)
                    peak = tl.load(ours + WIDTH, mask=other < sharers, other=-float("inf"), cache_modifier=".cg")
                    amount = tl.load(ours + WIDTH + 1, mask=other < sharers, other=0.0, cache_modifier=".cg")
                    parts = tl.load(
                        ours[:, None] + lane[None, :], mask=(other < sharers)[:, None], other=0.0, cache_modifier=".cg"
                    )
                    top = tl.max(peak, 0)
                    grow = tl.exp(peak - tl.where(top == -float("inf"), 0.0, top))
                    summed, total = tl.sum(parts * grow[:, None], 0), tl.sum(amount * grow, 0)
        out = summed / tl.where(total == 0, 1.0, total)
        tl.store(mixed + row * D + head * E + lane, out.to(mixed.dtype.element_ty), mask=(lane < E) & whole)


# ---------------------------------------------------------------------------------------------------------- the tokens


@triton.jit(do_not_specialize=["rows"])
def decode_embed(
    table, positions, running, stream, place, rows, growth,
    D: tl.constexpr, LIMIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PLACED: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Put the vectors of the newest tokens into the stream, rounded wherever they are elsewhere."""
    begin(AHEAD)
    wait(AHEAD)
    own: tl.constexpr = table.dtype.element_ty
    position = tl.load(place)
    row = (tl.program_id(1) * M + tl.arange(0, M))[:, None]
    column = (tl.program_id(0) * N + tl.arange(0, N))[None, :]
    inside = (row < rows) & (column < D)
    token = tl.load(running + row.to(tl.int64) * LIMIT + position, mask=row < rows, other=0)  # [M 1]
    x = (tl.load(table + token * D + column, mask=inside, other=0.0).to(tl.float32) * growth).to(own)
    if PLACED:
        x = (x.to(tl.float32) + tl.load(positions + position * D + column, mask=column < D, other=0.0)).to(own)
    tl.store(stream + row * D + column, x.to(WIDE).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["rows", "floor"])
def decode_head(
    stream, gain, offset, weight, logits, scores, tokens, ending, place, rows, floor, eps,
    D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PART: tl.constexpr,
    TAKES: tl.constexpr, ENDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Give logits [rows V]; or (TAKES) the likeliest token of each program, and its logit [programs rows]."""
    begin(AHEAD)
    worker, programs, first = tl.program_id(0), tl.num_programs(0), tl.program_id(1) * M
    kind: tl.constexpr = weight.dtype.element_ty
    _, normed = read_normed(stream, gain, offset, first, rows, eps, D, M, PART, False, AHEAD)
    x = normed.to(kind)
    text = first + tl.arange(0, M)
    best, token = tl.full([M], float("-inf"), tl.float32), tl.full([M], NONE, tl.int32)
    position = tl.load(place)
    for tile in range(worker, tl.cdiv(V, N), programs):
        out = (tl.arange(0, N) + tile * N)[None, :]
        result = tl.sum(times(x, read_weight(weight, tile, 0, V, D, N, PART)), 0).to(kind)
        if TAKES:
            score = tl.where(out < V, result.to(tl.float32), float("-inf"))
            if ENDS:
                barred = (tl.load(ending + out, mask=out < V, other=0) != 0) & (position + 1 < floor)
                score = tl.where(barred, float("-inf"), score)
            top = tl.max(score, 1)
            token = tl.where(top > best, tl.min(tl.where(score == top[:, None], out, NONE), 1), token)
            best = tl.maximum(top, best)
        else:
            spot = text.to(tl.int64)[:, None] * V + out
            tl.store(logits + spot, result, mask=(text < rows)[:, None] & (out < V))
    if TAKES:
        tl.store(scores + worker * rows + text, best, mask=text < rows)
        tl.store(tokens + worker * rows + text, token, mask=text < rows)


@triton.jit(do_not_specialize=["rows", "programs", "filler"])
def decode_take(
    scores, tokens, running, done, live, steps, ending, place, rows, programs, filler,
    ALL: tl.constexpr, CROWD: tl.constexpr, LIMIT: tl.constexpr, ENDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Append the likeliest of all programs' candidates [programs rows] to each text, and note which have ended."""
    begin(AHEAD)
    row, program = tl.arange(0, ALL), tl.arange(0, CROWD)
    wait(AHEAD)
    spot, there = program[:, None] * rows + row[None, :], (program < programs)[:, None] & (row < rows)[None, :]
    score = tl.load(scores + spot, mask=there, other=float("-inf"))
    token = tl.load(tokens + spot, mask=there, other=NONE)
    chosen = tl.min(tl.where(score == tl.max(score, 0)[None, :], token, NONE), 0).to(tl.int64)  # [ALL]
    going, position = tl.load(live) != 0, tl.load(place)
    tl.store(steps, tl.load(steps) + going.to(tl.int64))
    if ENDS:
        over = tl.load(done + row, mask=row < rows, other=1) != 0
        chosen = tl.where(over, filler, chosen)
        over = over | (tl.load(ending + chosen, mask=row < rows, other=1) != 0)
        tl.store(done + row, over.to(done.dtype.element_ty), mask=row < rows)
        tl.store(live, (going & (tl.min(over.to(tl.int32), 0) == 0)).to(live.dtype.element_ty))
    tl.store(running + row.to(tl.int64) * LIMIT + position + 1, chosen, mask=row < rows)
    tl.debug_barrier()  # all have read the position
    tl.store(place, position + 1)


# ---------------------------------------------------------------------------------------------------------- from torch


class Launcher:
    """Launch what one step over the same texts is made of, with room to compute in.

    running, origin  [b beams t+1]  tokens, and whose keys are one's past
    position         [1]            of the newest tokens
    d, heads, inner  widths of the stream and within a feed-forward network, heads of an attention
    dtype            of weights, keys and values
    keys             most keys of a text or of a document
    """

    def __init__(
        self, running: Tensor, origin: Tensor, position: Tensor,
        *, d: int, heads: int, inner: int, dtype: torch.dtype, keys: int, eps: float, pre: bool,
    ) -> None:  # fmt: skip
        (documents, beams, limit), device = running.shape, running.device
        self.running, self.origin, self.position = running, origin, position
        self.documents, self.beams, self.limit, self.rows = documents, beams, limit, documents * beams
        self.d, self.heads, self.eps, self.pre, self.single = d, heads, eps, pre, dtype == torch.float32
        self.m = min(ROWS, max(16, triton.next_power_of_2(self.rows)))
        self.blocks = triton.cdiv(self.rows, self.m)
        self.part = max(16, triton.next_power_of_2(triton.cdiv(d, PARTS.value)))
        self.programs = processors(device)
        self.crowd = triton.next_power_of_2(self.programs)
        self.splits = triton.next_power_of_2(min(self._most(keys), triton.cdiv(keys, KEYS)))
        groups, width = self.rows * heads, self._width
        self.stream, self.base = torch.zeros(2, self.rows, d, device=device)
        self.query, self.mixed = torch.zeros(2, self.rows, d, dtype=dtype, device=device)
        self.hidden = torch.zeros(self.rows, inner, dtype=dtype, device=device)
        self.partial = torch.zeros(groups * self.splits * (width + 2) if self.splits > 1 else 1, device=device)
        self.arrivals = torch.zeros(groups, dtype=torch.int32, device=device)
        self.scores = torch.zeros(self.programs, self.rows, device=device)
        self.tokens = torch.zeros(self.programs, self.rows, dtype=torch.int32, device=device)
        self.ahead = not interpreted()

    @property
    def _width(self) -> int:
        return max(16, triton.next_power_of_2(self.d // self.heads))

    def _most(self, keys: int) -> int:
        """Say how many programs share a head at most: as many as run at once, but each has something to do."""
        return max(1, min(CROWD * self.programs // (self.rows * self.heads), 64), triton.cdiv(keys, 64 * KEYS))

    def _run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        options = {"num_warps": PARTS.value, "AHEAD": self.ahead} | options
        if self.ahead:
            options["launch_pdl"] = True
        launch(kernel, grid, *arguments, **options)

    def embed(self, table: Tensor, positions: Tensor | None, growth: float, wide: torch.dtype) -> None:
        """Begin with the newest tokens: their rows of a table [v d] times `growth`, and of positions [t d]."""
        placed, columns = positions is not None, 128
        self._run(
            decode_embed, (triton.cdiv(self.d, columns), self.blocks),
            table, positions if placed else table, self.running, self.stream, self.position, self.rows, growth,
            D=self.d, LIMIT=self.limit, M=self.m, N=columns, PLACED=placed, WIDE=_kind(wide), num_warps=4,
        )  # fmt: skip

    def enter(
        self, norm: tuple[Tensor, Tensor] | None, weight: Tensor, bias: Tensor, result: Tensor,
        *, cache: Tensor | None = None, relu: bool = False,
    ) -> None:  # fmt: skip
        """Multiply the stream, normalised, by a weight [out d]; keys and values among the results go to the cache."""
        out, fills = weight.shape[0], cache is not None
        columns = MANY if out > 3 * self.d and not self.single else FEW
        gain, offset = (weight, weight) if norm is None else norm
        self._run(
            decode_enter, (triton.cdiv(out, columns), self.blocks),
            self.stream, self.base, gain, offset, weight, bias, result, cache if fills else result, self.position,
            self.rows, self.documents, self.eps,
            D=self.d, OUT=out, HEADS=self.heads, BEAMS=self.beams, LIMIT=self.limit, N=columns, M=self.m,
            PART=self.part, PRE=self.pre, PLAIN=norm is None, RELU=relu, FILLS=fills,
        )  # fmt: skip

    def add(self, source: Tensor, weight: Tensor, bias: Tensor) -> None:
        """Add source [rows k] @ weight [d k] + bias to what the sublayer was entered with."""
        self._run(
            decode_add, (triton.cdiv(self.d, FEW), self.blocks),
            source, weight, bias, self.base, self.stream, self.rows,
            D=self.d, K=weight.shape[1], N=FEW, M=self.m, PART=self.part, num_stages=1 if self.single else 3,
        )  # fmt: skip

    def attend(self, keys: Tensor, values: Tensor, *, length: int | None = None, mask: Tensor | None = None) -> None:
        """Attend to the memory [b h k e] and its mask [b k]; or to `length` tokens of texts [b h t beams e] at most."""
        own, count = length is not None, keys.shape[2]
        reach = count if length is None else length
        splits = max(1, min(self.splits, triton.cdiv(reach, KEYS)))
        share = triton.cdiv(triton.cdiv(reach, splits), KEYS) * KEYS
        self._run(
            decode_attend, (self.rows * self.heads, triton.cdiv(reach, share)),
            self.query, keys, values, self.mixed, self.partial, self.arrivals,
            self.position if mask is None else mask, self.origin, self.position, reach, count, share,
            D=self.d, E=self.d // self.heads, HEADS=self.heads, BEAMS=self.beams, LIMIT=self.limit,
            WIDTH=self._width, SPLITS=self.splits, N=KEYS, OWN=own, MASKED=mask is not None, num_warps=4,
        )  # fmt: skip

    def logits(self, norm: tuple[Tensor, Tensor], weight: Tensor, out: Tensor) -> None:
        """Give the logits [rows v] of the next tokens."""
        self._head(norm, weight, out, None, 0)

    def take(
        self, norm: tuple[Tensor, Tensor], weight: Tensor, done: Tensor, live: Tensor, steps: Tensor,
        ending: Tensor, *, ends: bool, filler: int, floor: int,
    ) -> None:  # fmt: skip
        """Append the likeliest tokens; `done` [b], `live` [1] and `steps` [1] are as `Greedy` keeps them.

        ending  [v] which tokens end a text; `ends`: whether there are any
        """
        self._head(norm, weight, None, ending if ends else None, floor)
        self._run(
            decode_take, (1,),
            self.scores, self.tokens, self.running, done, live, steps, ending, self.position,
            self.rows, self.programs, filler,
            ALL=triton.next_power_of_2(self.rows), CROWD=self.crowd, LIMIT=self.limit, ENDS=ends,
        )  # fmt: skip

    def _head(
        self, norm: tuple[Tensor, Tensor], weight: Tensor, out: Tensor | None, ending: Tensor | None, floor: int
    ) -> None:
        self._run(
            decode_head, (self.programs, self.blocks),
            self.stream, *norm, weight, weight if out is None else out, self.scores, self.tokens,
            self.position if ending is None else ending, self.position, self.rows, floor, self.eps,
            D=self.d, V=weight.shape[0], N=FEW if self.single else MANY, M=self.m, PART=self.part,
            TAKES=out is None, ENDS=ending is not None, num_stages=1 if self.single else 3,
        )  # fmt: skip


def _kind(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def serves(dtype: torch.dtype, d: int, heads: int) -> bool:
    """Tell whether the sizes fit: a stream and heads that a program can hold."""
    return dtype != torch.float64 and d <= COLUMNS and d // heads <= HEAD


__all__ = ["Launcher", "serves"]
