"""A decoder's next token in few launches: a product with all that stands before and behind it is one kernel.

At a few rows a product only has to stream its weights, which takes less time than a chain of kernels takes to hand its
numbers on. So there are seven launches a layer, and each one begins long before its turn: it fetches its weights, and
whatever else is known to be there, and waits only then for the launch before it to end (`AHEAD`).

    embed | norm, queries keys values | attend | out, queries | attend | out | norm, widen | narrow | ... | head

A launch lets the next one begin as soon as it has begun itself, so that before its turn a launch finds nothing but
weights and the memory. Two wait for their own turn first. Who attends does, and so who leaves an attention finds all
that was written before it. And who embeds does: whatever comes behind it finds the tokens and keys of earlier steps.

Out of an attention and to the queries of the next one is one launch, although a norm stands between the two. With x
what the attention was entered with and a what it found, the stream becomes s = x + out(a), and queries are taken of

    norm(s) = gain * (s - mean) / spread + offset

All of it is linear but the spread, one number a row. Let `own` be the weight of the queries times the gain, less the
mean of each of its rows, and `mixed` = own @ out. Then own @ x + mixed @ a are the queries, lacking only the spread and
what the offset gives: who reads them adds that, since the spread is known by then (`Fold`). own @ x is computed beside
the first attention's queries, keys and values.

The stream, the sum of all sublayers so far, is float32; every other number is as wide as the weights. Who adds to it
notes the moments of the columns it has written, from which the next ones find mean and spread without reading a whole
row. Rows are texts: the beams of a document one after the other. Products are taken as weight @ x, since the tensor
cores take 8 columns, but no fewer than 16 rows; so is attention, whose keys and values wait in shared memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pyramidion.kernels.launching import interpreted, launch, processors

WARPS, FEWER = 8, 4  # of a program; of one that leaves a sublayer. Each warp of a product sums a part of it
NONE = tl.constexpr(2147483647)  # a token that comes after all others
ROWS = 8  # that a program multiplies
COLUMNS, HEAD = 1024, 128  # widest stream, widest head
FEW, MANY = 16, 32  # columns of a product that a program computes at once
TOKENS, CHUNK = 64, 128  # logits that a program computes, from so many columns at once
HELD = 3  # such pieces that it asks for before it waits
KEYS = 256  # that a program asks for before it waits, where it has a multiprocessor to itself
HOPPER, SHARED = 9, 160 << 10  # architecture, and bytes of shared memory for a program: it takes up to 144 KiB


@triton.jit
def invite(AHEAD: tl.constexpr):
    """Let the next launch begin, up to where it takes its turn."""
    if AHEAD:
        gdc_launch_dependents()


@triton.jit
def take_turn(AHEAD: tl.constexpr):
    """Wait until the launch before has ended, and what it wrote is seen."""
    if AHEAD:
        gdc_wait()


# ------------------------------------------------------------------------------------------------------- the products


@triton.jit
def places(
    start, K: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """Number K columns in parts of STEP, from `start` on, and tell which there are -> [PARTS 1 PART].

    TURNED: [PARTS PART 1].
    """
    lane = tl.arange(0, PART)
    lane = lane[None, :, None] if TURNED else lane[None, None, :]
    column = start + tl.arange(0, PARTS)[:, None, None] * STEP + lane
    return column, (lane < STEP) & (column < K)


@triton.jit
def read(
    matrix, first, height, start,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr,
    TURNED: tl.constexpr = False,
):  # fmt: skip
    """Load N rows of a matrix [height K] from row `first` on -> [PARTS N PART].

    TURNED: [PARTS PART N]. Turned only after it is loaded, it would change hands twice.
    """
    row = first + tl.arange(0, N)
    row = row[None, None, :] if TURNED else row[None, :, None]
    column, there = places(start, K, PARTS, STEP, PART, TURNED)
    return tl.load(matrix + row * K + column, mask=there & (row < height), other=0.0)


@triton.jit
def times(weight, x):
    """Multiply weight [PARTS N PART] by x [PARTS PART R] -> float32 [PARTS N R].

    Each warp sums a part of its own: one after the other, products would wait longer for each other than for memory.
    """
    return tl.dot(weight, x, input_precision="ieee")


@triton.jit
def add_parts(x):
    """Sum [PARTS N R] over the parts, of which each warp has its own: one exchange, and none behind it."""
    PARTS: tl.constexpr = x.shape[0]
    x = tl.permute(x, (1, 2, 0))
    for step in tl.static_range(5):
        if PARTS >> step > 1:
            x = tl.reshape(x, [x.shape[0], x.shape[1], PARTS >> (step + 1), 2])
            one, other = tl.split(x)
            x = one + other
    return tl.reshape(x, [x.shape[0], x.shape[1]])


@triton.jit
def together(x, AHEAD: tl.constexpr):
    """Have three loads under way at once: the compiler would put each off until it is used."""
    if AHEAD and x[0].dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $3; mov.b32 $1, $4; mov.b32 $2, $5;", "=r,=r,=r,r,r,r", [x[0], x[1], x[2]],
            dtype=(x[0].dtype, x[0].dtype, x[0].dtype), is_pure=False, pack=2,
        )  # fmt: skip
    return x


@triton.jit
def note(moments, x, there, tile, row, rows, start, D: tl.constexpr, N: tl.constexpr):
    """Store mean and summed squares around it of N columns x [N R] of the stream, of which some are there."""
    TILES: tl.constexpr = (D + N - 1) // N
    mean = tl.sum(tl.where(there, x, 0.0), 0) / tl.minimum(D - start, N).to(tl.float32)
    apart = tl.where(there, x - mean[None, :], 0.0)
    seen = (row < rows) & (tile < TILES)
    tl.store(moments + row * 2 * TILES + tile, mean, mask=seen)
    tl.store(moments + (row * 2 + 1) * TILES + tile, tl.sum(apart * apart, 0), mask=seen)


@triton.jit
def noted(moments, row, rows, D: tl.constexpr, N: tl.constexpr):
    """Load the moments [rows 2 programs] of rows of the stream, 32 programs at a time, a row a warp."""
    TILES: tl.constexpr = (D + N - 1) // N
    means, squares = (), ()
    for start in tl.static_range(0, TILES, 32):
        program = (start + tl.arange(0, 32))[None, :]
        spot, there = row[:, None] * 2 * TILES + program, (program < TILES) & (row < rows)[:, None]
        means += (tl.load(moments + spot, mask=there, other=0.0),)  # type: ignore[assignment]
        squares += (tl.load(moments + TILES + spot, mask=there, other=0.0),)  # type: ignore[assignment]
    return means, squares


@triton.jit
def gauge(means, squares, eps, D: tl.constexpr, N: tl.constexpr):
    """Give mean and 1 / spread [R] of rows of the stream, from the moments of N columns each."""
    TILES: tl.constexpr = (D + N - 1) // N
    total = tl.zeros_like(means[0])
    for start in tl.static_range(0, TILES, 32):
        total += means[start // 32] * parted(start, D, N)
    mean, spread = tl.sum(total, 1) / D, tl.zeros_like(total)
    for start in tl.static_range(0, TILES, 32):
        apart = means[start // 32] - mean[:, None]
        spread += squares[start // 32] + apart * apart * parted(start, D, N)
    return mean, 1.0 / tl.sqrt(tl.sum(spread, 1) / D + eps)


@triton.jit
def parted(start, D: tl.constexpr, N: tl.constexpr):
    """Count the columns of 32 programs -> [1 32]."""
    program = (start + tl.arange(0, 32))[None, :]
    return tl.minimum(tl.maximum(D - program * N, 0), N).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "documents"])
def decode_enter(
    stream, moments, gain, offset, weight, bias, own, carried, result, asked, cache, place, rows, documents, eps,
    D: tl.constexpr, OUT: tl.constexpr, HEADS: tl.constexpr, BEAMS: tl.constexpr, LIMIT: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, APART: tl.constexpr,
    NORMED: tl.constexpr, BARE: tl.constexpr, FILLS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Enter a sublayer: normalise the stream and multiply it by a weight [OUT D]; unless it FILLS, the ReLU of that.

    FILLS: the first D columns are queries, the others keys and values, which go to the cache [2 b h t beams e]. Behind
    these programs others give `asked` = own [D D] @ x + carried, where x is the stream itself if it is BARE.
    """
    invite(AHEAD)
    E: tl.constexpr = D // HEADS
    FIRST: tl.constexpr = (OUT + N - 1) // N
    tile, first = tl.program_id(0), tl.program_id(1) * R
    kind: tl.constexpr = weight.dtype.element_ty
    asks = tile >= FIRST
    matrix, start, height = weight, tile * N, OUT
    if asks:
        matrix, start, height = own, (tile - FIRST) * N, D
    factor = read(matrix, start, height, 0, D, N, PARTS, PART, PART)
    out = (tl.arange(0, N) + start)[:, None]
    shift = tl.load(bias + out, mask=(out < OUT) & (tile < FIRST), other=0.0).to(tl.float32)
    if FILLS:
        shift += tl.load(carried + out, mask=(out < D) & asks, other=0.0)
    column, there = places(0, D, PARTS, PART, PART, True)
    if NORMED:
        gains = tl.load(gain + column, mask=there, other=0.0).to(tl.float32)
        offsets = tl.load(offset + column, mask=there, other=0.0).to(tl.float32)
    take_turn(AHEAD)
    position = tl.load(place)
    if NORMED:
        means, squares = noted(moments, first + tl.arange(0, R), rows, D, APART)
    x = read(stream, first, rows, 0, D, R, PARTS, PART, PART, True)
    if NORMED:
        mean, spread = gauge(means, squares, eps, D, APART)
        normed = tl.where(there, (x - mean[None, None, :]) * spread[None, None, :] * gains + offsets, 0.0)
        x = tl.where(asks, x, normed) if BARE else normed
    product = add_parts(times(factor, x.to(kind))) + shift  # [N R]
    text, lane = first + tl.arange(0, R)[None, :], out % D
    inside = (text < rows) & (out < height)
    if FILLS:
        tl.store(asked + text * D + out, product, mask=inside & asks)
        product, inside = product.to(kind), inside & (tile < FIRST)
        tl.store(result + text * D + out, product, mask=inside & (out < D))
        spot = (out // D - 1) * documents.to(tl.int64) * HEADS + text // BEAMS * HEADS + lane // E
        spot = (spot * (LIMIT - 1) + position) * BEAMS + text % BEAMS
        tl.store(cache + spot * E + lane % E, product, mask=inside & (out >= D))
    else:
        tl.store(result + text * OUT + out, tl.maximum(product, 0.0).to(kind), mask=inside)


@triton.jit
def entered(
    stream, moments, gains, offsets, column, row, rows, there, eps,
    D: tl.constexpr, APART: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Load columns of what a sublayer was entered with, the stream or (NORMED) its norm -> float32 [N R]."""
    before = tl.load(stream + row[None, :] * D + column, mask=there, other=0.0)
    if NORMED:
        means, squares = noted(moments, row, rows, D, APART)
        mean, spread = gauge(means, squares, eps, D, APART)
        before = ((before - mean[None, :]) * spread[None, :] * gains + offsets).to(KIND).to(tl.float32)
    return before


@triton.jit(do_not_specialize=["rows"])
def decode_narrow(
    source, weight, bias, stream, moments, newer, gain, offset, rows, eps,
    D: tl.constexpr, K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    HELD: tl.constexpr, NORMED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Leave a feed-forward network: add source [rows K] @ weight [D K] + bias. HELD: pieces fetched ahead."""
    invite(AHEAD)
    tile, first = tl.program_id(0), tl.program_id(1) * R
    row, column = first + tl.arange(0, R), (tl.arange(0, N) + tile * N)[:, None]
    shift = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    gains = tl.load(gain + column, mask=column < D, other=0.0).to(tl.float32)
    offsets = tl.load(offset + column, mask=column < D, other=0.0).to(tl.float32)
    kind: tl.constexpr = weight.dtype.element_ty
    WHOLE: tl.constexpr = PARTS * PART
    factors, pieces = (), ()
    for piece in tl.static_range(HELD):
        factors += (read(weight, tile * N, D, piece * WHOLE, K, N, PARTS, PART, PART),)  # type: ignore[assignment]
    inside = (column < D) & (row < rows)[None, :]
    take_turn(AHEAD)
    for piece in tl.static_range(HELD):
        pieces += (read(source, first, rows, piece * WHOLE, K, R, PARTS, PART, PART, True),)  # type: ignore[assignment]
    before = entered(stream, moments, gains, offsets, column, row, rows, inside, eps, D, N, kind, NORMED)
    summed = tl.zeros([PARTS, N, R], tl.float32)
    for piece in tl.static_range(HELD):
        summed += times(factors[piece], pieces[piece])
    for start in range(HELD * WHOLE, K, WHOLE):
        factor = read(weight, tile * N, D, start, K, N, PARTS, PART, PART)
        summed += times(factor, read(source, first, rows, start, K, R, PARTS, PART, PART, True))
    total = before + (add_parts(summed) + shift).to(kind).to(tl.float32)  # as wide as a product by itself would be
    tl.store(stream + row[None, :] * D + column, total, mask=inside)
    note(newer, total, inside, tile, row, rows, tile * N, D, N)


@triton.jit
def shares(level):
    """Turn logarithms [PARTS R 2] into shares of 1; of nothing at all, none."""
    top = tl.max(level, 2)
    share = tl.exp(level - tl.where(top == float("-inf"), 0.0, top)[:, :, None])
    total = tl.sum(share, 2)
    return share / tl.where(total == 0, 1.0, total)[:, :, None]


@triton.jit(do_not_specialize=["rows"])
def decode_gather(
    parts, levels, weight, bias, mixed, asked, query, stream, moments, newer, gain, offset, rows, eps,
    D: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, APART: tl.constexpr, NORMED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Leave an attention: put together what programs found, a, add weight [D D] @ a + bias, and note the moments.

    Programs behind those that do so give the next attention's `query` = asked + mixed [D D] @ a, which is folded.

    parts   [SPLITS rows D]      what each program found
    levels  [SPLITS rows HEADS]  logarithm of its share
    """
    invite(AHEAD)
    E: tl.constexpr = D // HEADS
    FIRST: tl.constexpr = (D + N - 1) // N
    tile, first = tl.program_id(0), tl.program_id(1) * R
    kind: tl.constexpr = weight.dtype.element_ty
    asks = tile >= FIRST
    matrix, start = weight, tile * N
    if asks:
        matrix, start = mixed, (tile - FIRST) * N
    factor = read(matrix, start, D, 0, D, N, PARTS, E, WIDTH)
    row, column = first + tl.arange(0, R), (tl.arange(0, N) + start)[:, None]
    inside = (row < rows)[None, :] & (column < D)
    leaving = inside & (tile < FIRST)
    shift = tl.load(bias + column, mask=(tile < FIRST) & (column < D), other=0.0).to(tl.float32)
    shift += tl.load(asked + row[None, :] * D + column, mask=inside & asks, other=0.0)
    gains = tl.load(gain + column, mask=column < D, other=0.0).to(tl.float32)
    offsets = tl.load(offset + column, mask=column < D, other=0.0).to(tl.float32)
    before = entered(stream, moments, gains, offsets, column, row, rows, leaving, eps, D, APART, kind, NORMED)
    take_turn(AHEAD)
    each, head = tl.arange(0, R * SPLITS), tl.arange(0, PARTS)  # what was found of a row stands side by side
    text = first + each // SPLITS
    spot, there = each % SPLITS * rows + text, (text < rows)[None, :] & (head < HEADS)[:, None]
    level = tl.load(levels + spot[None, :] * HEADS + head[:, None], mask=there, other=0.0, volatile=True)  # first
    lane = tl.arange(0, WIDTH)[None, :, None]
    where = spot[None, None, :] * D + head[:, None, None] * E + lane
    x = tl.load(parts + where, mask=there[:, None, :] & (lane < E), other=0.0)  # [PARTS WIDTH R*SPLITS]
    product = times(factor, x)  # [PARTS N R*SPLITS]
    if SPLITS == 2:
        share = tl.reshape(shares(tl.reshape(level, [PARTS, R, 2])), [PARTS, 1, R * 2])
        product = tl.sum(tl.reshape(product * share, [PARTS, N, R, 2]), 3)
    change = (add_parts(product) + shift).to(kind)  # [N R]
    tl.store(query + row[None, :] * D + column, change, mask=inside & asks)
    total = before + change.to(tl.float32)
    tl.store(stream + row[None, :] * D + column, total, mask=leaving)
    note(newer, total, leaving, tile, row, rows, start, D, N)


# ------------------------------------------------------------------------------------------------------ the attention


@triton.jit
def find(at, origin, used, E: tl.constexpr, BEAMS: tl.constexpr, OWN: tl.constexpr):
    """Find where the keys `at` stand: of several beams, those of one's own past."""
    spot = at
    if OWN and BEAMS > 1:
        spot = at * BEAMS + tl.load(origin + at, mask=at < used, other=0).to(tl.int32)
    return spot * E


@triton.jit
def pieces_of(
    x, where, there, E: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr = False
):
    """Load E numbers from each of some places [PARTS EACH 1] -> PIECES of [PARTS EACH WIDTH].

    TURNED: from places [PARTS 1 EACH] -> [PARTS WIDTH EACH].
    """
    found = ()
    for piece in tl.static_range(PIECES):
        lane = piece * WIDTH + tl.arange(0, WIDTH)
        lane = lane[None, :, None] if TURNED else lane[None, None, :]
        found += (tl.load(x + where + lane, mask=there & (lane < E), other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def unfold(query, rest, spread, PIECES: tl.constexpr):
    """Give the pieces of a folded query what they lack: the spread, and a rest."""
    result = ()
    for piece in tl.static_range(PIECES):
        x = query[piece].to(tl.float32) * spread + rest[piece]
        result += (x.to(query[piece].dtype),)  # type: ignore[assignment]
    return result


@triton.jit
def repeated(query, PARTS: tl.constexpr, R: tl.constexpr, PIECES: tl.constexpr):
    """Repeat the pieces [1 WIDTH 1] of a query -> [PARTS WIDTH R]; by an eighth of it, which keeps the digits.

    What is loaded and multiplied as it is, the compiler would load a piece after the other.
    """
    result = ()
    for piece in tl.static_range(PIECES):
        x = (query[piece].to(tl.float32) * 0.125).to(query[piece].dtype)
        result += (tl.broadcast_to(x, [PARTS, x.shape[1], R]),)  # type: ignore[assignment]
    return result


@triton.jit
def joined(own, total, other, weight):
    """Give the highest score, and the summed exponentials beside it, of two sets together."""
    top = tl.maximum(own, other)
    known = tl.where(top == float("-inf"), 0.0, top)
    return top, total * tl.exp(own - known) + weight * tl.exp(other - known)


@triton.jit
def look(x, keys, values, real, highest, total, summed, SCALE: tl.constexpr, PIECES: tl.constexpr):
    """Attend to keys [PARTS EACH WIDTH] and values [PARTS WIDTH EACH], some of them real [PARTS EACH 1], after others.

    x               pieces of [PARTS WIDTH R], R times the same: a product takes no fewer
    highest, total  [PARTS]                  highest score so far, and the sum of all exponentials beside it
    summed          pieces of [PARTS WIDTH]  values, summed by these
    """
    score = times(keys[0], x[0])
    for piece in tl.static_range(1, PIECES):
        score += times(keys[piece], x[piece])
    score = tl.where(real, score * SCALE, float("-inf"))  # [PARTS EACH R]
    top = tl.maximum(tl.max(score, 1), highest[:, None])  # [PARTS R]
    known = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(score - known[:, None, :])
    top, news = tl.max(top, 1), tl.max(tl.sum(weight, 1), 1)
    fade = tl.exp(highest - tl.where(top == float("-inf"), 0.0, top))
    weight, result = weight.to(values[0].dtype), ()
    for piece in tl.static_range(PIECES):
        result += (summed[piece] * fade[:, None] + tl.max(times(values[piece], weight), 2),)  # type: ignore[assignment]
    return top, total * fade + news, result


@triton.jit(do_not_specialize=["used", "count", "share", "rows"])
def decode_attend(
    query, moments, shift, keys, values, parts, levels, seen, origin, place, used, count, share, rows, eps,
    D: tl.constexpr, HEADS: tl.constexpr, BEAMS: tl.constexpr, LIMIT: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
    APART: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr, ONCE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attend from one head of one text to `share` of its keys: what is found there, and the logarithm of its share.

    N keys are taken at once, as [PARTS EACH]: a warp attends to a part by itself, and all meet at the end. ONCE: these
    are all. A key is taken in PIECES of WIDTH numbers, 3 or 1, so that a width that is no power of two takes no room in
    vain.

    keys, values  [b h count e], of which the first `used` are there; OWN: [b h count beams e], up to the text's own
                  position, where `origin` [b beams LIMIT] names the beam that wrote what is one's past
    seen          [b count] whether a key is real (MASKED)
    query         [rows D]; unless OWN it is folded, and lacks the spread, which `moments` tell, and the shift [D]
    """
    E: tl.constexpr = D // HEADS
    EACH: tl.constexpr = N // PARTS
    group, split = tl.program_id(0), tl.program_id(1)
    row, head = group // HEADS, group % HEADS
    document = row // BEAMS
    apart = (document * HEADS + head).to(tl.int64) * count * E
    if OWN:
        apart *= BEAMS
        used = tl.load(place).to(tl.int32)  # the newest key is being written; all others are there already
    keys, values, origin = keys + apart, values + apart, origin + row.to(tl.int64) * LIMIT
    seen += document.to(tl.int64) * count
    at = split * share + tl.arange(0, PARTS)[:, None, None] * EACH + tl.arange(0, EACH)[None, :, None]
    last = tl.minimum(used, split * share + share)
    turned = split * share + tl.arange(0, PARTS)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :]
    where, real = find(at, origin, used, E, BEAMS, OWN), at < last
    key = pieces_of(keys, where, real, E, PIECES, WIDTH)
    value = pieces_of(values, find(turned, origin, used, E, BEAMS, OWN), turned < last, E, PIECES, WIDTH, True)
    if MASKED:
        real = real & (tl.load(seen + at, mask=real, other=0) != 0)
    one = tl.zeros([1, 1, 1], tl.int32)
    if not OWN:
        rest = pieces_of(shift, one + head * E, one == 0, E, PIECES, WIDTH, True)
    take_turn(AHEAD)
    invite(AHEAD)
    if not OWN:
        means, squares = noted(moments, row + tl.arange(0, 1), rows, D, APART)
    x = pieces_of(query, one + row * D + head * E, one == 0, E, PIECES, WIDTH, True)  # of [1 WIDTH 1]
    if OWN:
        newest = one + (used * BEAMS + row % BEAMS) * E  # one's own
        new_key = pieces_of(keys, newest, one == 0, E, PIECES, WIDTH, True)
        new_value = pieces_of(values, newest, one == 0, E, PIECES, WIDTH, True)
        if PIECES == 3:
            x = together(x, AHEAD)
            new_key = together(new_key, AHEAD)
            new_value = together(new_value, AHEAD)
    else:
        _, spread = gauge(means, squares, eps, D, APART)
        x = unfold(x, rest, spread[None, None, :], PIECES)
    asked = repeated(x, PARTS, R, PIECES)
    highest, total, summed = tl.full([PARTS], float("-inf"), tl.float32), tl.zeros([PARTS], tl.float32), ()
    for _ in tl.static_range(PIECES):
        summed += (tl.zeros([PARTS, WIDTH], tl.float32),)  # type: ignore[assignment]
    highest, total, summed = look(asked, key, value, real, highest, total, summed, 8 * E**-0.5, PIECES)
    if not ONCE:
        for _ in range(split * share + N, last, N):
            at, turned = at + N, turned + N
            where, real = find(at, origin, used, E, BEAMS, OWN), at < last
            more = pieces_of(keys, where, real, E, PIECES, WIDTH)
            worth = pieces_of(values, find(turned, origin, used, E, BEAMS, OWN), turned < last, E, PIECES, WIDTH, True)
            if MASKED:
                real = real & (tl.load(seen + at, mask=real, other=0) != 0)
            highest, total, summed = look(asked, more, worth, real, highest, total, summed, 8 * E**-0.5, PIECES)
    if OWN:
        here = (tl.arange(0, PARTS) == 0) & (used >= split * share) & (used < split * share + share)
        score = tl.sum(x[0].to(tl.float32) * new_key[0].to(tl.float32), 1)
        for piece in tl.static_range(1, PIECES):
            score += tl.sum(x[piece].to(tl.float32) * new_key[piece].to(tl.float32), 1)
        score = tl.where(here, tl.reshape(score, [1]) * E**-0.5, float("-inf"))  # [PARTS]
        top, total = joined(highest, total, score, 1.0)
        known = tl.where(top == float("-inf"), 0.0, top)
        fade, weight, newer = tl.exp(highest - known)[:, None], tl.exp(score - known)[:, None], ()
        for piece in tl.static_range(PIECES):
            worth = tl.reshape(new_value[piece], [1, WIDTH]).to(tl.float32)
            newer += (summed[piece] * fade + worth * weight,)  # type: ignore[assignment]
        highest, summed = top, newer
    top, whole = tl.reduce((highest, total), 0, joined)
    safe = tl.where(whole == 0, 1.0, whole)
    fade = tl.exp(highest - tl.where(top == float("-inf"), 0.0, top)) / safe
    lane, spot = tl.arange(0, WIDTH)[:, None], split * rows + row
    if PIECES == 3:
        both = tl.join(tl.join(summed[0], summed[1]), tl.join(summed[2], summed[2]))  # type: ignore[misc]
        both, which = tl.reshape(both, [PARTS, WIDTH, 4]), tl.arange(0, 4)[None, :]
        at = lane + WIDTH * tl.where(which == 0, 0, tl.where(which == 2, 1, 2))
    else:
        both, at = summed[0][:, :, None], lane  # type: ignore[misc]
    found = add_parts(both * fade[:, None, None]).to(parts.dtype.element_ty)
    tl.store(parts + spot * D + head * E + at, found, mask=at < E)
    tl.store(levels + spot * HEADS + head, top + tl.log(safe))  # minus infinity where there is no key


# ---------------------------------------------------------------------------------------------------------- the tokens


@triton.jit(do_not_specialize=["rows"])
def decode_embed(
    table, positions, running, stream, newer, place, rows, growth,
    D: tl.constexpr, LIMIT: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    PLACED: tl.constexpr, WIDE: tl.constexpr, NOTES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Put the vectors of the newest tokens into the stream, rounded wherever they are elsewhere."""
    take_turn(AHEAD)
    invite(AHEAD)
    own: tl.constexpr = table.dtype.element_ty
    position = tl.load(place)
    row = (tl.program_id(1) * R + tl.arange(0, R))[:, None]
    column = (tl.program_id(0) * N + tl.arange(0, N))[None, :]
    inside = (row < rows) & (column < D)
    token = tl.load(running + row.to(tl.int64) * LIMIT + position, mask=row < rows, other=0)  # [R 1]
    x = (tl.load(table + token * D + column, mask=inside, other=0.0).to(tl.float32) * growth).to(own)
    if PLACED:
        x = (x.to(tl.float32) + tl.load(positions + position * D + column, mask=column < D, other=0.0)).to(own)
    x = x.to(WIDE).to(tl.float32)
    tl.store(stream + row * D + column, x, mask=inside)
    if NOTES:
        tile, text = tl.program_id(0), tl.program_id(1) * R + tl.arange(0, R)
        note(newer, tl.trans(x), tl.trans(inside), tile, text, rows, tile * N, D, N)


@triton.jit
def decode_norm(
    stream, gain, offset, out, eps, D: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Normalise a row of the stream."""
    invite(AHEAD)
    row, column = tl.program_id(0), tl.arange(0, WHOLE)
    there = column < D
    gains = tl.load(gain + column, mask=there, other=0.0).to(tl.float32)
    offsets = tl.load(offset + column, mask=there, other=0.0).to(tl.float32)
    take_turn(AHEAD)
    x = tl.load(stream + row * D + column, mask=there, other=0.0)
    centred = tl.where(there, x - tl.sum(x, 0) / D, 0.0)
    spread = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / D + eps)
    tl.store(out + row * D + column, (centred * spread * gains + offsets).to(out.dtype.element_ty), mask=there)


@triton.jit
def piece_of(matrix, row, height, start, D: tl.constexpr, CHUNK: tl.constexpr):
    """Load CHUNK columns from `start` on of some rows of a matrix [height D]."""
    column = (start + tl.arange(0, CHUNK))[None, :]
    there = (row < height)[:, None] & (column < D)
    return tl.load(matrix + row.to(tl.int64)[:, None] * D + column, mask=there, other=0.0)


@triton.jit(do_not_specialize=["rows", "floor"])
def decode_head(
    x, weight, logits, scores, tokens, ending, place, rows, floor,
    D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, HELD: tl.constexpr,
    TAKES: tl.constexpr, ENDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Give N logits of each row [rows V]; or (TAKES) the likeliest of these tokens, and its logit [programs rows].

    HELD: pieces of the weight that are fetched ahead.
    """
    invite(AHEAD)
    tile, first = tl.program_id(0), tl.program_id(1) * R
    kind: tl.constexpr = weight.dtype.element_ty
    out, row = tl.arange(0, N) + tile * N, first + tl.arange(0, R)
    factors = ()
    for piece in tl.static_range(HELD):
        factors += (piece_of(weight, out, V, piece * CHUNK, D, CHUNK),)  # type: ignore[assignment]
    take_turn(AHEAD)
    position = tl.load(place)
    summed = tl.zeros([N, R], tl.float32)
    for piece in tl.static_range(HELD):
        part = piece_of(x, row, rows, piece * CHUNK, D, CHUNK)
        summed = tl.dot(factors[piece], tl.trans(part), summed, input_precision="ieee")
    for start in range(HELD * CHUNK, D, CHUNK):
        factor, part = piece_of(weight, out, V, start, D, CHUNK), piece_of(x, row, rows, start, D, CHUNK)
        summed = tl.dot(factor, tl.trans(part), summed, input_precision="ieee")
    result = summed.to(kind)  # [N R]
    if TAKES:
        score = tl.where((out < V)[:, None], result.to(tl.float32), float("-inf"))
        if ENDS:
            barred = (tl.load(ending + out, mask=out < V, other=0) != 0) & (position + 1 < floor)
            score = tl.where(barred[:, None], float("-inf"), score)
        top = tl.max(score, 0)
        tl.store(scores + tile * rows + row, top, mask=row < rows)
        token = tl.min(tl.where(score == top[None, :], out[:, None], NONE), 0)
        tl.store(tokens + tile * rows + row, token, mask=row < rows)
    else:
        spot = row.to(tl.int64)[None, :] * V + out[:, None]
        tl.store(logits + spot, result, mask=(row < rows)[None, :] & (out < V)[:, None])


@triton.jit(do_not_specialize=["rows", "programs", "filler"])
def decode_take(
    scores, tokens, running, done, live, steps, ending, place, rows, programs, filler,
    ALL: tl.constexpr, CROWD: tl.constexpr, LIMIT: tl.constexpr, ENDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Append the likeliest of all programs' candidates [programs rows] to each text, and note which have ended."""
    invite(AHEAD)
    row, program = tl.arange(0, ALL), tl.arange(0, CROWD)
    take_turn(AHEAD)
    spot, there = program[:, None] * rows + row[None, :], (program < programs)[:, None] & (row < rows)[None, :]
    score = tl.load(scores + spot, mask=there, other=float("-inf"))
    token = tl.load(tokens + spot, mask=there, other=NONE)
    going, position = tl.load(live) != 0, tl.load(place)
    chosen = tl.min(tl.where(score == tl.max(score, 0)[None, :], token, NONE), 0).to(tl.int64)  # [ALL]
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

Linear = tuple[Tensor, Tensor]  # weight [out in] and bias [out]
Norm = tuple[Tensor, Tensor]  # gain and offset [d]


class Fold(NamedTuple):
    """An attention's last product, the norm behind it and the queries of the next one, as two products.

    own      [d d]  of what the attention was entered with
    mixed    [d d]  of what it found
    carried  [d]    what its bias gives
    shift    [d]    what is added once the spread is known
    """

    own: Tensor
    mixed: Tensor
    carried: Tensor
    shift: Tensor

    @classmethod
    def of(cls, outs: Sequence[Linear], norms: Sequence[Norm], products: Sequence[Linear]) -> "Fold":
        """Fold those of several layers, in few operations -> [layers ...]."""
        (out, bias), (gain, offset), (weight, added) = (
            (torch.stack(first), torch.stack(second))
            for first, second in (zip(*pairs, strict=True) for pairs in (outs, norms, products))
        )
        own = weight.float() * gain.float()[:, None]
        own = (own - own.mean(2, keepdim=True)).to(weight.dtype)
        carried = (own.float() @ bias.float()[..., None])[..., 0]
        shift = (weight.float() @ offset.float()[..., None])[..., 0] + added.float()
        return cls(own, own @ out, carried, shift)

    def layers(self) -> list["Fold"]:
        """Give that of each layer, in the memory of all."""
        return [Fold(*parts) for parts in zip(*self, strict=True)]


class Launcher:
    """Launch what one step over the same texts is made of, with room to compute in.

    running, origin  [b beams t+1]  tokens, and whose keys are one's past
    position         [1]            of the newest tokens
    d, heads, inner  widths of the stream and within a feed-forward network, heads of an attention
    dtype            of weights, keys and values
    """

    def __init__(
        self, running: Tensor, origin: Tensor, position: Tensor, vocabulary: int,
        *, d: int, heads: int, inner: int, dtype: torch.dtype, eps: float,
    ) -> None:  # fmt: skip
        (documents, beams, limit), device = running.shape, running.device
        self.running, self.origin, self.position = running, origin, position
        self.documents, self.beams, self.limit, self.rows = documents, beams, limit, documents * beams
        self.d, self.heads, self.eps, self.single = d, heads, eps, dtype == torch.float32
        self.blocks = triton.cdiv(self.rows, ROWS)
        self.width = max(16, triton.next_power_of_2(d // heads))
        room = processors(device) // (self.rows * heads)  # for programs, each on a multiprocessor of its own
        self.most = 2 if room >= 2 else 1
        self.keys = KEYS if room and not self.single else KEYS // 2
        self.split = 1  # programs that shared the keys of the last attention: two at most
        self.candidates = triton.cdiv(vocabulary, TOKENS)
        self.whole = triton.next_power_of_2(d)
        self.stream = torch.zeros(self.rows, d, device=device)
        self.moments, self.newer = torch.zeros(2, self.rows, 2, triton.cdiv(d, FEW), device=device)  # now, and next
        self.apart = FEW  # columns of each
        self.asked = torch.zeros(self.rows, d, device=device)
        self.query = torch.zeros(self.rows, d, dtype=dtype, device=device)
        self.hidden = torch.zeros(self.rows, inner, dtype=dtype, device=device)
        self.parts = torch.zeros(self.most, self.rows, d, dtype=dtype, device=device)
        self.levels = torch.zeros(self.most, self.rows, heads, device=device)
        self.scores = torch.zeros(self.candidates, self.rows, device=device)
        self.tokens = torch.zeros(self.candidates, self.rows, dtype=torch.int32, device=device)

    def _run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        ahead = not interpreted()
        if ahead:
            options["launch_pdl"] = True
        else:
            options.pop("maxnreg", None)
        launch(kernel, grid, *arguments, AHEAD=ahead, **{"num_warps": WARPS, **options})

    def embed(
        self, table: Tensor, positions: Tensor | None, growth: float, wide: torch.dtype, *, noted: bool
    ) -> None:  # fmt: skip
        """Begin with the newest tokens: their rows of a table [v d] times `growth`, and of positions [t d].

        noted  whether the moments of that are, because a norm is taken of it
        """
        placed, columns = positions is not None, 128
        self.moments, self.newer, self.apart = self.newer, self.moments, columns
        self._run(
            decode_embed, (triton.cdiv(self.d, columns), self.blocks),
            table, positions if placed else table, self.running, self.stream, self.moments, self.position, self.rows,
            growth,
            D=self.d, LIMIT=self.limit, R=ROWS, N=columns, PLACED=placed, WIDE=_kind(wide),
            NOTES=noted, num_warps=4,
        )  # fmt: skip

    def enter(self, norm: Norm | None, weight: Tensor, bias: Tensor, cache: Tensor, fold: Fold, *, bare: bool) -> None:
        """Multiply the stream, normalised, by a weight [3d d]; keys and values among the results go to the cache.

        The next attention's queries begin with the same, or with the stream itself if they are `bare`.
        """
        self._enter(norm, weight, bias, self.query, fold.own, fold.carried, cache, fills=True, bare=bare)

    def widen(self, norm: Norm | None, weight: Tensor, bias: Tensor) -> None:
        """Multiply the stream, normalised, by a weight [inner d], and take the ReLU of it."""
        self._enter(norm, weight, bias, self.hidden, weight, bias, weight, fills=False, bare=False)

    def _enter(
        self, norm: Norm | None, weight: Tensor, bias: Tensor, result: Tensor, own: Tensor, carried: Tensor,
        cache: Tensor, *, fills: bool, bare: bool,
    ) -> None:  # fmt: skip
        out = weight.shape[0]
        columns = FEW if self.single else MANY
        self._run(
            decode_enter, (triton.cdiv(out, columns) + fills * triton.cdiv(self.d, columns), self.blocks),
            self.stream, self.moments, *(norm or (weight, weight)), weight, bias, own, carried, result,
            self.asked, cache, self.position, self.rows, self.documents, self.eps,
            D=self.d, OUT=out, HEADS=self.heads, BEAMS=self.beams, LIMIT=self.limit, N=columns, R=ROWS,
            PARTS=WARPS, PART=_part(self.d, WARPS), APART=self.apart, NORMED=norm is not None, BARE=bare, FILLS=fills,
        )  # fmt: skip

    def look_back(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Attend to at most `length` tokens of texts [b h t beams e]."""
        self._attend(keys, values, length, None, None)

    def look_up(self, keys: Tensor, values: Tensor, shift: Tensor, mask: Tensor | None) -> None:
        """Attend to the memory [b h k e] and its mask [b k], by queries that lack the spread and a shift [d]."""
        self._attend(keys, values, keys.shape[2], shift, mask)

    def _attend(self, keys: Tensor, values: Tensor, reach: int, shift: Tensor | None, mask: Tensor | None) -> None:
        at_once = max(16, min(self.keys, triton.next_power_of_2(triton.cdiv(reach, self.most))))
        share = triton.cdiv(triton.cdiv(reach, self.most), at_once) * at_once
        self.split = triton.cdiv(reach, share)
        pieces, width = _pieces(self.d // self.heads)
        self._run(
            decode_attend, (self.rows * self.heads, self.split),
            self.query, self.moments, self.moments if shift is None else shift, keys, values, self.parts, self.levels,
            self.position if mask is None else mask, self.origin, self.position, reach, keys.shape[2],
            share, self.rows, self.eps, D=self.d, HEADS=self.heads, BEAMS=self.beams, LIMIT=self.limit,
            PIECES=pieces, WIDTH=width, N=at_once, R=ROWS, PARTS=max(1, min(WARPS, at_once // 16)),
            APART=FEW, OWN=shift is None, MASKED=mask is not None, ONCE=share == at_once, maxnreg=128,
        )  # fmt: skip

    def gather(self, norm: Norm | None, weight: Tensor, bias: Tensor, mixed: Tensor | None = None) -> None:
        """Add what the attention found, times a weight [d d], to what it was entered with by a norm.

        mixed  [d d]  of the next attention's queries, where it follows at once
        """
        asks = mixed is not None
        self._run(
            decode_gather, ((1 + asks) * triton.cdiv(self.d, FEW), self.blocks),
            self.parts, self.levels, weight, bias, mixed if asks else weight, self.asked, self.query,
            self.stream, self.moments, self.newer, *(norm or (weight, weight)), self.rows, self.eps,
            D=self.d, HEADS=self.heads, N=FEW, R=ROWS, PARTS=triton.next_power_of_2(self.heads), WIDTH=self.width,
            SPLITS=self.split, APART=self.apart, NORMED=norm is not None, num_warps=FEWER, maxnreg=96,
        )  # fmt: skip
        self.moments, self.newer, self.apart = self.newer, self.moments, FEW

    def narrow(self, norm: Norm | None, weight: Tensor, bias: Tensor) -> None:
        """Add what was widened, times a weight [d inner], to what was entered by a norm."""
        inner, part = weight.shape[1], _part(self.d, FEWER)
        held = 0 if self.single else min(3, triton.cdiv(inner, FEWER * part))
        self._run(
            decode_narrow, (triton.cdiv(self.d, FEW), self.blocks),
            self.hidden, weight, bias, self.stream, self.moments, self.newer, *(norm or (weight, weight)), self.rows,
            self.eps,
            D=self.d, K=inner, N=FEW, R=ROWS, PARTS=FEWER, PART=part, HELD=held,
            NORMED=norm is not None, num_warps=FEWER, num_stages=1 if self.single else 4,
        )  # fmt: skip
        self.moments, self.newer = self.newer, self.moments

    def logits(self, norm: Norm, weight: Tensor, out: Tensor) -> None:
        """Give the logits [rows v] of the next tokens."""
        self._head(norm, weight, out, None, 0)

    def take(
        self, norm: Norm, weight: Tensor, done: Tensor, live: Tensor, steps: Tensor, ending: Tensor,
        *, ends: bool, filler: int, floor: int,
    ) -> None:  # fmt: skip
        """Append the likeliest tokens; `done` [b], `live` [1] and `steps` [1] are as `Greedy` keeps them.

        ending  [v] which tokens end a text; `ends`: whether there are any
        """
        self._head(norm, weight, None, ending if ends else None, floor)
        self._run(
            decode_take, (1,),
            self.scores, self.tokens, self.running, done, live, steps, ending, self.position,
            self.rows, self.candidates, filler,
            ALL=triton.next_power_of_2(self.rows), CROWD=triton.next_power_of_2(self.candidates), LIMIT=self.limit,
            ENDS=ends,
        )  # fmt: skip

    def _head(self, norm: Norm, weight: Tensor, out: Tensor | None, ending: Tensor | None, floor: int) -> None:
        chunk = max(16, min(CHUNK, self.whole))
        self._run(
            decode_norm, (self.rows,), self.stream, *norm, self.query, self.eps, D=self.d, WHOLE=self.whole, num_warps=4
        )  # fmt: skip
        self._run(
            decode_head, (self.candidates, self.blocks),
            self.query, weight, weight if out is None else out, self.scores, self.tokens,
            self.position if ending is None else ending, self.position, self.rows, floor,
            D=self.d, V=weight.shape[0], N=TOKENS, R=ROWS, CHUNK=chunk, HELD=min(HELD, triton.cdiv(self.d, chunk)),
            TAKES=out is None, ENDS=ending is not None, num_warps=4, num_stages=1 if self.single else 4,
        )  # fmt: skip


def _part(width: int, warps: int) -> int:
    """Share a sum out among warps: columns of each."""
    return max(16, triton.next_power_of_2(triton.cdiv(width, warps)))


def _pieces(width: int) -> tuple[int, int]:
    """Take a head in pieces of a power of two: three if that is what it is three times, else one that is filled up."""
    wide = width // 3
    if width == 3 * wide and wide >= 16 and wide & (wide - 1) == 0:
        return 3, wide
    return 1, max(16, triton.next_power_of_2(width))


def _kind(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def serves(dtype: torch.dtype, d: int, heads: int) -> bool:
    """Tell whether the sizes fit: a stream and heads that a program can hold."""
    return dtype != torch.float64 and d <= COLUMNS and d // heads <= HEAD and heads <= 32


def runs_on(device: torch.device) -> bool:
    """Tell whether a device lets launches begin before their turn, and has the shared memory that they take."""
    if device.type != "cuda" or torch.version.cuda is None:
        return interpreted()
    found = torch.cuda.get_device_properties(device)
    return found.major >= HOPPER and getattr(found, "shared_memory_per_block_optin", 0) >= SHARED


__all__ = ["Fold", "Launcher", "runs_on", "serves"]
