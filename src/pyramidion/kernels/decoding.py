"""A decoder's next tokens in one launch: the programs share each product, and wait for each other between two.

At a few rows a product only has to stream its weights, and takes less time than the launch of a kernel. So one program
a multiprocessor stays for the whole step, or for many steps where the likeliest token is taken, and while it waits, the
weights of its next product are on their way to the cache already.

    embed | norm, queries keys values | attend | out | norm, queries | attend | out | norm, widen | narrow | ... | head

A bar is where programs wait. The sum of all sublayers so far (`stream`) and what the next one is added to (`base`) are
float32; every other number is as wide as the weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.launching import interpreted, launch, processors
from pyramidion.kernels.waiting import wait

FEW = tl.constexpr(16)  # columns of a product that a program computes at once
MANY = tl.constexpr(32)  # the same where a product has more columns than the stream
PARTS = tl.constexpr(8)  # of a sum, one a warp
KEYS = tl.constexpr(64)  # that a program attends to at once
LINE = tl.constexpr(128)  # bytes that travel together
NONE = tl.constexpr(2147483647)  # a token that comes after all others
ROWS, COLUMNS, HEAD = 32, 1024, 128  # most texts at once, widest stream, widest head

# ------------------------------------------------------------------------------------------------------- the products


@triton.jit
def fetch(weight, tile, OUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for the rows `tile` of a weight [OUT K] to be brought to the cache."""
    if AHEAD:  # noqa: SIM102, one is asked while compiling, the other while running
        if tile * N < OUT:
            line: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)  # numbers
            count: tl.constexpr = triton.next_power_of_2(triton.cdiv(N * K, line))
            place = tl.minimum(tl.minimum(tl.arange(0, count) * line, N * K - 1) + tile * (N * K), OUT * K - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + place], tl.int32, is_pure=False, pack=1
            )


@triton.jit
def read(source, start, rows, K: tl.constexpr, M: tl.constexpr, PART: tl.constexpr):
    """Load what others have just written, [rows K] from column `start` on -> [PARTS M PART]."""
    row = tl.arange(0, M)[None, :, None]
    column = start + tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    return tl.load(source + row * K + column, mask=(row < rows) & (column < K), other=0.0, cache_modifier=".cg")


@triton.jit
def read_stream(
    stream, base, norm, plain, tile, rows, eps,
    D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PART: tl.constexpr, PRE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load the stream and normalise it, unless `plain`; put the tile's part of what a sublayer is added to aside."""
    total = read(stream, 0, rows, D, M, PART)  # [PARTS M PART]
    row = tl.arange(0, M)[None, :, None]
    column = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    mean = tl.sum(tl.sum(total, 2), 0) / D  # [M]
    centred = tl.where(column < D, total - mean[None, :, None], 0.0)
    spread = 1.0 / tl.sqrt(tl.sum(tl.sum(centred * centred, 2), 0) / D + eps)
    gain = tl.load(norm + column, mask=column < D, other=0.0)
    offset = tl.load(norm + D + column, mask=column < D, other=0.0)
    normed = tl.where(plain, total, centred * spread[None, :, None] * gain + offset).to(KIND)
    mine = (row < rows) & (column < D) & (column // N == tile)
    tl.store(base + row * D + column, total if PRE else normed.to(tl.float32), mask=mine)
    return normed


@triton.jit
def times(
    x, weight, tile, start, OUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Multiply x [PARTS M PART], the columns from `start` on, by N rows of a weight [OUT K] -> float32 [PARTS M N].

    Each warp sums a part of its own: one after the other, products would wait longer for each other than for memory.
    """
    out = (tl.arange(0, N) + tile * N)[None, None, :]
    into = start + tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, :, None]
    factor = tl.load(weight + out * K + into, mask=(out < OUT) & (into < K), other=0.0)  # [PARTS PART N]
    return tl.dot(x, factor, input_precision="ieee")


@triton.jit
def product(x, weight, bias, tile, OUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PART: tl.constexpr):
    """Give the tile's columns of x @ weight [OUT K] + bias -> float32 [M N]."""
    out = tl.arange(0, N) + tile * N
    offset = tl.load(bias + out, mask=out < OUT, other=0.0).to(tl.float32)
    return tl.sum(times(x, weight, tile, 0, OUT, K, N, PART), 0) + offset[None, :]


@triton.jit
def add_products(
    source, weight, bias, base, stream, worker, programs, rows,
    D: tl.constexpr, K: tl.constexpr, M: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Give the stream base + source [rows K] @ weight [D K] + bias."""
    for tile in range(worker, tl.cdiv(D, FEW), programs):
        summed = tl.zeros([PARTS, M, FEW], tl.float32)
        for start in range(0, K, PARTS * PART):
            summed += times(read(source, start, rows, K, M, PART), weight, tile, start, D, K, FEW, PART)
        row, column = tl.arange(0, M)[:, None], (tl.arange(0, FEW) + tile * FEW)[None, :]
        inside = (row < rows) & (column < D)
        change = tl.sum(summed, 0) + tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
        change = change.to(source.dtype.element_ty).to(tl.float32)  # as wide as a product by itself would be
        before = tl.load(base + row * D + column, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(stream + row * D + column, before + change, mask=inside)


# ------------------------------------------------------------------------------------------------------ the attention


@triton.jit
def blend(summed, total, highest, part, amount, peak):
    """Add another part of a softmax to what there is, both relative to their own peaks."""
    top = tl.maximum(highest, peak)
    known = tl.where(top == float("-inf"), 0.0, top)
    fade, grow = tl.exp(highest - known), tl.exp(peak - known)
    return summed * fade[:, None] + part * grow[:, None], total * fade + amount * grow, top


@triton.jit
def look(
    x, keys, values, seen, writers, first, last,
    E: tl.constexpr, BEAMS: tl.constexpr, LIMIT: tl.constexpr, Q: tl.constexpr, WIDTH: tl.constexpr,
    OWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend from x [Q WIDTH] to the keys from `first` to `last` -> sum of values, sum of weights, highest score.

    Beams see a key where `writers` [BEAMS LIMIT] says that the beam which wrote it is their own past (OWN), or where
    `seen` [last] says that it is real (MASKED).
    """
    beam, lane = tl.arange(0, Q), tl.arange(0, WIDTH)
    highest, total = tl.full([Q], float("-inf"), tl.float32), tl.zeros([Q], tl.float32)
    summed = tl.zeros([Q, WIDTH], tl.float32)
    for start in range(first, last, KEYS):
        place = start + tl.arange(0, KEYS)
        spot, there = place[:, None] * E + lane[None, :], (place < last)[:, None] & (lane < E)[None, :]
        key = tl.load(keys + spot, mask=there, other=0.0, cache_modifier=".cg")  # [KEYS WIDTH]
        visible = (place < last)[None, :] & (beam < BEAMS)[:, None]
        if OWN and BEAMS > 1:
            writer = tl.load(writers + beam[:, None] * LIMIT + (place // BEAMS)[None, :], mask=visible, other=-1)
            visible = visible & (writer == (place % BEAMS)[None, :])
        if MASKED:
            visible = visible & (tl.load(seen + place, mask=place < last, other=0) != 0)[None, :]
        score = tl.where(visible, tl.dot(x, tl.trans(key), input_precision="ieee") * E**-0.5, float("-inf"))  # [Q KEYS]
        peak = tl.max(score, 1)
        weight = tl.exp(score - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
        value = tl.load(values + spot, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        summed, total, highest = blend(summed, total, highest, part, tl.sum(weight, 1), peak)
    return summed, total, highest


@triton.jit
def attend(
    query, keys, values, mixed, partial, arrivals, seen, origin, worker, programs, documents, count, used, splits,
    D: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, BEAMS: tl.constexpr, LIMIT: tl.constexpr,
    Q: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Let every head of every document look at its keys, of which the first `used` of `count` are there.

    Each is shared by `splits` programs; the one that is last puts their parts together.
    """
    beam, lane = tl.arange(0, Q), tl.arange(0, WIDTH)
    grid = beam[:, None] * WIDTH + lane[None, :]
    inside = (beam < BEAMS)[:, None] & (lane < E)[None, :]
    share = tl.cdiv(tl.cdiv(used, splits), KEYS) * KEYS
    size: tl.constexpr = Q * (WIDTH + 2)
    for task in range(worker, documents * HEADS * splits, programs):
        group = task // splits
        document, head, first = group // HEADS, group % HEADS, task % splits * share
        here = (document * BEAMS + beam)[:, None] * D + head * E + lane[None, :]  # [Q WIDTH]
        x = tl.load(query + here, mask=inside, other=0.0, cache_modifier=".cg")
        apart = group.to(tl.int64) * count * E
        writers, real = origin + document * BEAMS * LIMIT, seen + document.to(tl.int64) * count
        last = tl.minimum(first + share, used)
        summed, total, highest = look(
            x, keys + apart, values + apart, real, writers, first, last, E, BEAMS, LIMIT, Q, WIDTH, OWN, MASKED
        )
        whole = splits == 1
        if splits > 1:
            mine = partial + task * size
            tl.store(mine + beam, highest)
            tl.store(mine + Q + beam, total)
            tl.store(mine + 2 * Q + grid, summed)
            tl.debug_barrier()
            whole = tl.atomic_add(arrivals + group, 1, sem="acq_rel", scope="gpu") == splits - 1
            tl.debug_barrier()
            if whole:
                tl.store(arrivals + group, 0)
                highest, total = tl.full([Q], float("-inf"), tl.float32), tl.zeros([Q], tl.float32)
                summed = tl.zeros([Q, WIDTH], tl.float32)
                for other in range(splits):
                    one = partial + (group * splits + other) * size
                    peak, amount = (
                        tl.load(one + beam, cache_modifier=".cg"),
                        tl.load(one + Q + beam, cache_modifier=".cg"),
                    )
                    part = tl.load(one + 2 * Q + grid, cache_modifier=".cg")
                    summed, total, highest = blend(summed, total, highest, part, amount, peak)
        out = summed / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(mixed + here, out.to(mixed.dtype.element_ty), mask=inside & whole)


# ---------------------------------------------------------------------------------------------------------- the tokens


@triton.jit
def embed(
    table, positions, running, stream, worker, programs, position, rows, growth,
    D: tl.constexpr, LIMIT: tl.constexpr, M: tl.constexpr, PLACED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Put the vectors of the newest tokens into the stream, rounded wherever they are elsewhere."""
    own: tl.constexpr = table.dtype.element_ty
    row = tl.arange(0, M)[:, None]
    token = tl.load(running + row * LIMIT + position, mask=row < rows, other=0, cache_modifier=".cg")  # [M 1]
    for tile in range(worker, tl.cdiv(D, FEW), programs):
        column = (tl.arange(0, FEW) + tile * FEW)[None, :]
        inside = (row < rows) & (column < D)
        x = (tl.load(table + token * D + column, mask=inside, other=0.0).to(tl.float32) * growth).to(own)
        if PLACED:
            where = tl.load(positions + position * D + column, mask=column < D, other=0.0)
            x = (x.to(tl.float32) + where.to(tl.float32)).to(own)
        tl.store(stream + row * D + column, x.to(KIND).to(tl.float32), mask=inside)


@triton.jit
def take_likeliest(
    scores, tokens, running, done, live, steps, ending, place, position, rows, programs, filler,
    M: tl.constexpr, LIMIT: tl.constexpr, CROWD: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Append the likeliest of all programs' candidates [programs M] to each text, and note which texts have ended."""
    row, program = tl.arange(0, M), tl.arange(0, CROWD)
    spot, there = program[:, None] * M + row[None, :], (program < programs)[:, None] & (row < rows)[None, :]
    score = tl.load(scores + spot, mask=there, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + spot, mask=there, other=NONE, cache_modifier=".cg")
    chosen = tl.min(tl.where(score == tl.max(score, 0)[None, :], token, NONE), 0).to(tl.int64)  # [M]
    going = tl.load(live) != 0
    tl.store(steps, tl.load(steps) + going.to(tl.int64))
    if ENDS:
        over = tl.load(done + row, mask=row < rows, other=1) != 0
        chosen = tl.where(over, filler, chosen)
        over = over | (tl.load(ending + chosen, mask=row < rows, other=1) != 0)
        tl.store(done + row, over.to(done.dtype.element_ty), mask=row < rows)
        tl.store(live, (going & (tl.min(over.to(tl.int32), 0) == 0)).to(live.dtype.element_ty))
    tl.store(running + row * LIMIT + position + 1, chosen, mask=row < rows)
    tl.store(place, position + 1)


# ------------------------------------------------------------------------------------------------------------ the step

COUNTS = [
    "turns",
    "layers",
    "documents",
    "rows",
    "memories",
    "own_splits",
    "cross_splits",
    "programs",
    "filler",
    "floor",
]


@triton.jit(do_not_specialize=[*COUNTS, "floor"])
def decode(
    table, positions, weights, biases, norms, head, cache, memory, seen, running, origin, place,
    floats, halves, ints, logits, done, live, steps, ending,
    turns, layers, documents, rows, memories, own_splits, cross_splits, programs, filler, floor, growth, eps,
    D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, BEAMS: tl.constexpr, LIMIT: tl.constexpr,
    M: tl.constexpr, Q: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, CROWD: tl.constexpr,
    PRE: tl.constexpr, PLACED: tl.constexpr, MASKED: tl.constexpr, TAKES: tl.constexpr, ENDS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Take the likeliest token for every text, `turns` times; or (not TAKES) give the logits of the next one."""
    worker = tl.program_id(0)
    kind: tl.constexpr = weights.dtype.element_ty
    wide: tl.constexpr = kind if not PRE else tl.float32  # of what enters the stream
    E: tl.constexpr = D // HEADS
    room: tl.constexpr = (LIMIT - 1) * BEAMS  # keys of a text
    stream, base, scores = floats, floats + M * D, floats + 2 * M * D
    partial = scores + CROWD * M
    query, mixed, hidden = halves, halves + M * D, halves + 2 * M * D
    counter, leavers, tokens = ints, ints + 32, ints + 64  # a cache line each: nobody polls where others count
    arrivals = tokens + CROWD * M
    row = tl.arange(0, M)[:, None]
    heads = documents.to(tl.int64) * HEADS
    met = 0
    for _ in range(turns):
        position = tl.load(place, volatile=True)
        embed(table, positions, running, stream, worker, programs, position, rows, growth, D, LIMIT, M, PLACED, wide)
        fetch(weights, worker, 3 * D, D, MANY, AHEAD)
        met += programs
        wait(counter, met)
        for layer in range(layers):
            to_qkv = weights + tl.cast(layer, tl.int64) * (6 * D * D + 2 * F * D)
            to_out, to_query, to_cross = to_qkv + 3 * D * D, to_qkv + 4 * D * D, to_qkv + 5 * D * D
            to_wide, to_narrow = to_qkv + 6 * D * D, to_qkv + 6 * D * D + F * D
            bias, norm = biases + layer * (7 * D + F), norms + layer * 6 * D
            keys = cache + layer * 2 * heads * room * E
            their_keys = memory + layer * 2 * heads * memories * E

            fetch(to_out, worker, D, D, FEW, AHEAD)
            for tile in range(worker, tl.cdiv(3 * D, MANY), programs):
                plain = layer == 0 if not PRE else False
                x = read_stream(stream, base, norm, plain, tile, rows, eps, D, MANY, M, PART, PRE, kind)
                result = product(x, to_qkv, bias, tile, 3 * D, D, MANY, PART).to(kind)
                out = (tl.arange(0, MANY) + tile * MANY)[None, :]
                inside, lane = (row < rows) & (out < 3 * D), out % D
                tl.store(query + row * D + out, result, mask=inside & (out < D))
                spot = (out // D - 1) * heads + row // BEAMS * HEADS + lane // E  # keys, then values
                spot = (spot * room + position * BEAMS + row % BEAMS) * E + lane % E
                tl.store(keys + spot, result, mask=inside & (out >= D))
            met += programs
            wait(counter, met)

            attend(
                query, keys, keys + heads * room * E, mixed, partial, arrivals, seen, origin, worker, programs,
                documents, room, ((position + 1) * BEAMS).to(tl.int32), own_splits,
                D, E, HEADS, BEAMS, LIMIT, Q, WIDTH, True, False,
            )  # fmt: skip
            fetch(to_query, worker, D, D, FEW, AHEAD)
            met += programs
            wait(counter, met)

            add_products(mixed, to_out, bias + 3 * D, base, stream, worker, programs, rows, D, D, M, PART)
            fetch(to_cross, worker, D, D, FEW, AHEAD)
            met += programs
            wait(counter, met)

            for tile in range(worker, tl.cdiv(D, FEW), programs):
                x = read_stream(stream, base, norm + 2 * D, False, tile, rows, eps, D, FEW, M, PART, PRE, kind)
                result = product(x, to_query, bias + 4 * D, tile, D, D, FEW, PART)
                out = (tl.arange(0, FEW) + tile * FEW)[None, :]
                tl.store(query + row * D + out, result.to(kind), mask=(row < rows) & (out < D))
            fetch(to_wide, worker, F, D, MANY, AHEAD)
            met += programs
            wait(counter, met)

            attend(
                query, their_keys, their_keys + heads * memories * E, mixed, partial, arrivals, seen, origin, worker,
                programs, documents, memories, memories, cross_splits,
                D, E, HEADS, BEAMS, LIMIT, Q, WIDTH, False, MASKED,
            )  # fmt: skip
            fetch(to_narrow, worker, D, F, FEW, AHEAD)
            met += programs
            wait(counter, met)

            add_products(mixed, to_cross, bias + 5 * D, base, stream, worker, programs, rows, D, D, M, PART)
            met += programs
            wait(counter, met)

            for tile in range(worker, tl.cdiv(F, MANY), programs):
                x = read_stream(stream, base, norm + 4 * D, False, tile, rows, eps, D, MANY, M, PART, PRE, kind)
                result = product(x, to_wide, bias + 6 * D, tile, F, D, MANY, PART)
                out = (tl.arange(0, MANY) + tile * MANY)[None, :]
                tl.store(hidden + row * F + out, tl.maximum(result, 0.0).to(kind), mask=(row < rows) & (out < F))
            if layer + 1 < layers:
                fetch(to_narrow + F * D, worker, 3 * D, D, MANY, AHEAD)
            met += programs
            wait(counter, met)

            add_products(hidden, to_narrow, bias + 6 * D + F, base, stream, worker, programs, rows, D, F, M, PART)
            met += programs
            wait(counter, met)

        best, token = tl.full([M], float("-inf"), tl.float32), tl.full([M], NONE, tl.int32)
        x = read_stream(stream, base, norms + layers * 6 * D, False, -1, rows, eps, D, MANY, M, PART, PRE, kind)
        for tile in range(worker, tl.cdiv(V, MANY), programs):
            out = (tl.arange(0, MANY) + tile * MANY)[None, :]
            result = tl.sum(times(x, head, tile, 0, V, D, MANY, PART), 0).to(kind)
            if TAKES:
                score = tl.where(out < V, result.to(tl.float32), float("-inf"))
                if ENDS:
                    barred = (tl.load(ending + out, mask=out < V, other=0) != 0) & (position + 1 < floor)
                    score = tl.where(barred, float("-inf"), score)
                top = tl.max(score, 1)
                token = tl.where(top > best, tl.min(tl.where(score == top[:, None], out, NONE), 1), token)
                best = tl.maximum(top, best)
            else:
                tl.store(logits + row * V + out, result, mask=(row < rows) & (out < V))
        if TAKES:
            tl.store(scores + worker * M + tl.arange(0, M), best)
            tl.store(tokens + worker * M + tl.arange(0, M), token)
            met += programs
            wait(counter, met)
            if worker == 0:
                take_likeliest(
                    scores, tokens, running, done, live, steps, ending, place, position, rows, programs, filler,
                    M, LIMIT, CROWD, ENDS,
                )  # fmt: skip
            met += programs
            wait(counter, met)
    left = tl.atomic_add(leavers, 1, sem="acq_rel", scope="gpu")
    if left == programs - 1:  # nobody waits any more: the next launch counts from 0
        tl.store(counter, 0)
        tl.store(leavers, 0)


# ---------------------------------------------------------------------------------------------------------- from torch


@dataclass(frozen=True)
class Weights:
    """The weights of a decoder with L layers, packed.

    table, positions  [v d], [t d]        of tokens, and of positions or None
    matrices          [L 6*d*d+2*f*d]     a layer's products: queries keys values, out, queries, out, widen, narrow
    biases            [L 7*d+f]           theirs, in the same order
    norms             [3*L+1 2 d]         gain and offset in the order of use, float32; `pre`: in front of a sublayer.
                                          Else the first is not looked at: nothing is normalised before it
    head              [v d]
    """

    table: Tensor
    positions: Tensor | None
    matrices: Tensor
    biases: Tensor
    norms: Tensor
    head: Tensor
    layers: int
    heads: int
    inner: int
    growth: float
    eps: float
    pre: bool


@dataclass(frozen=True)
class Texts:
    """What is written, and what it is written about.

    running, origin  [b beams t+1]       tokens, and whose keys are one's past
    position         [1]                 of the newest tokens
    cache            [L 2 b h t beams e] keys and values of the texts
    memory           [L 2 b h k e]       of the documents
    mask             [b k]               True for a real representation; None where all are
    """

    running: Tensor
    origin: Tensor
    position: Tensor
    cache: Tensor
    memory: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Ends:
    """What taking the likeliest token knows and notes.

    done [b 1], live [1], steps [1]  which texts have ended, whether any goes on, tokens written before all had
    ending [v]                       tokens that end a text
    """

    done: Tensor
    live: Tensor
    steps: Tensor
    ending: Tensor
    filler: int
    floor: int
    any: bool


class Step:
    """Launch steps of a decoder over the same texts, with room to compute in."""

    def __init__(self, weights: Weights, texts: Texts) -> None:
        self.weights, self.texts = weights, texts
        matrices, (documents, beams, _) = weights.matrices, texts.running.shape
        device, (v, d) = matrices.device, weights.head.shape
        self.rows = documents * beams
        self.m, self.q = (max(16, triton.next_power_of_2(count)) for count in (self.rows, beams))
        self.programs = 1 if interpreted() else processors(device)
        self.crowd = triton.next_power_of_2(self.programs)
        groups = documents * weights.heads
        self.splits = max(1, self.programs // groups)
        self.width = max(16, triton.next_power_of_2(d // weights.heads))
        partial = groups * self.splits * self.q * (self.width + 2) if self.splits > 1 else 0
        self.floats = torch.zeros(2 * self.m * d + self.crowd * self.m + partial, device=device)
        self.halves = torch.zeros(self.m * (2 * d + weights.inner), dtype=matrices.dtype, device=device)
        self.ints = torch.zeros(64 + self.crowd * self.m + groups, dtype=torch.int32, device=device)
        self.result = torch.zeros(self.rows, v, dtype=matrices.dtype, device=device)

    def logits(self) -> Tensor:
        """Give the logits [b*beams v] of the next tokens."""
        self._launch(1, None)
        return self.result

    def take(self, turns: int, ends: Ends) -> None:
        """Write so many tokens, each the likeliest."""
        self._launch(turns, ends)

    def _launch(self, turns: int, ends: Ends | None) -> None:
        weights, texts = self.weights, self.texts
        (documents, beams, limit), (v, d) = texts.running.shape, weights.head.shape
        memories = texts.memory.shape[4]
        own, cross = (min(self.splits, triton.cdiv(count, KEYS.value)) for count in (beams * (limit - 1), memories))
        nothing = texts.position
        options: dict[str, Any] = {} if interpreted() else {"launch_cooperative_grid": True}
        launch(
            decode, (self.programs,), weights.table,
            nothing if weights.positions is None else weights.positions,
            weights.matrices, weights.biases, weights.norms, weights.head, texts.cache, texts.memory,
            nothing if texts.mask is None else texts.mask, texts.running, texts.origin, texts.position,
            self.floats, self.halves, self.ints, self.result,
            *((nothing,) * 4 if ends is None else (ends.done, ends.live, ends.steps, ends.ending)),
            turns, weights.layers, documents, self.rows, memories, own, cross, self.programs,
            0 if ends is None else ends.filler, 0 if ends is None else ends.floor, weights.growth, weights.eps,
            D=d, F=weights.inner, V=v, HEADS=weights.heads, BEAMS=beams, LIMIT=limit,
            M=self.m, Q=self.q, WIDTH=self.width, PART=max(16, triton.next_power_of_2(triton.cdiv(d, PARTS.value))),
            CROWD=self.crowd, PRE=weights.pre, PLACED=weights.positions is not None, MASKED=texts.mask is not None,
            TAKES=ends is not None, ENDS=ends is not None and ends.any, AHEAD=not interpreted(),
            num_warps=PARTS.value, num_stages=2 if self.m == 16 else 1, **options,
        )  # fmt: skip


def serves(weights_dtype: torch.dtype, rows: int, d: int, heads: int) -> bool:
    """Tell whether the sizes fit: few rows, a stream and heads that a program can hold."""
    return weights_dtype != torch.float64 and rows <= ROWS and d <= COLUMNS and d // heads <= HEAD


__all__ = ["Ends", "Step", "Texts", "Weights", "serves"]
