"""The operator as Triton kernels: one for the tournament on scores, one for the pooling, and their backwards.

Read `tournament.py` first: names, arguments and results are the same. The *ladder* of all rounds lies in one scratch
row a document: round t has `k * 2 ** (rounds - t)` places and starts where round t - 1 ends. Several programs share a
document. They sort a round block by block, by counting, merge the sorted runs by bisection, and so on to the last
round; then they walk every token down the ladder to its slot. Between these steps the programs of a document wait for
each other.

Scores are float64 on the way, because a rounding error that swaps two candidates changes who meets whom: all backends
decide alike (docs/decisions/0001-decide-in-double.md). Python floats reach Triton as float32, so the two options travel
as the bits of a float64.
"""

import math
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.launching import interpreted, launch, processors
from pyramidion.kernels.registration import Operator
from pyramidion.topk import tournament
from pyramidion.topk.selection import Selection, pool_backward_fake, pool_fake, pool_grad, pool_save

BYE = tl.constexpr(tournament.BYE)
# Chosen together on an H200: small programs of few registers, so that all programs of a batch run at the same time.
BLOCK = 128  # candidates sorted by counting, merged in one go, or tokens walked down in one go
GROUP = 4  # sorted runs merged at a time
TILE = 16  # candidates compared with a block in one go
WARPS = 2  # a program
CROWD = 8  # programs a multiprocessor
# Arguments of the kernels that vary from call to call: no value of theirs is worth compiling for.
SIZES = ["n", "k", "leaves", "rounds", "length", "room", "programs", "first_step", "last_step"]
SIZES += ["temperature_bits", "base_bits"]
MEMBERS = 512  # leaves of all trees that a program of `play_backward` walks at once
LEAVES = 4096  # the deepest tree a program of `play_backward` holds in registers


def soft_topk(
    scores: Tensor, k: int, mask: Tensor | None, *, temperature: float, base: float | None, sort: bool
) -> Selection:
    """Play the tournament of all documents on the GPU."""
    if scores.shape[0] == 0 or 2 ** tournament.count_rounds(scores.shape[1], k) > LEAVES:
        return tournament.soft_topk(scores, k, mask, temperature=temperature, base=base, sort=sort)
    options = k, temperature, 0.0 if base is None else base, sort
    if sort or mask is None:
        return _select(_tournament(scores.float(), mask, *options))
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # byes stand last: bring the real tokens forward
    front = _tournament(scores.float().gather(1, order), mask.gather(1, order), *options)
    return _rename(_select(front), order)


def pool(x: Tensor, slots: Tensor, weights: Tensor, members: Tensor) -> Tensor:
    """Blend x [b n d] into [b k d], reading it once."""
    return _pool(x, slots, weights, members)


# ---------------------------------------------------------------------------------------------------- the tournament


@triton.jit
def wait(counter, target):
    """Wait until programs have arrived here `target` times in all; what they wrote is then seen.

    All of them must run at the same time: no more than the device has room for, and nothing else that waits.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < target:
        arrived = tl.load(counter, volatile=True)
    tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit
def meet(strong, weak, temperature, base, SHARP: tl.constexpr):
    """Blend the scores of pairs -> the new score, the weaker's share of it."""
    bye = weak == BYE
    weak = tl.where(bye, strong, weak)
    gap = tl.exp(strong * base) - tl.exp(weak * base) if SHARP else strong - weak
    share = tl.where(bye, 0.0, 1.0 / (1.0 + tl.exp(gap / temperature)))
    return strong - (strong - weak) * share, share


@triton.jit
def just_below(score):
    """Give the next smaller float64, so that `x > just_below(y)` is `x >= y`: one comparison settles a tie."""
    bits = score.to(tl.int64, bitcast=True)
    bits = tl.where(score > 0, bits - 1, bits + 1)
    return tl.where(score == 0, -5e-324, bits.to(tl.float64, bitcast=True))


@triton.jit
def enter(scores, mask, place, n, MASKED: tl.constexpr):
    """Give the scores with which the tokens at `place` enter the first round: byes where there is no real token."""
    real = place < n
    if MASKED:
        real = real & (tl.load(mask + place, mask=real, other=0) != 0)
    score = tl.load(scores + place, mask=real, other=0.0).to(tl.float64)
    return tl.where(real, tl.where(tl.abs(score) < float("inf"), score, 0.0), BYE)


@triton.jit
def advance(ladder, place, places, temperature, base, SHARP: tl.constexpr):
    """Give the scores with which the pairs of the round before `ladder` enter the round that starts there."""
    inside = place < places
    one = tl.load(ladder - 2 * places + place, mask=inside, other=BYE)
    two = tl.load(ladder - 1 - place, mask=inside, other=BYE)
    score, _ = meet(tl.maximum(one, two), tl.minimum(one, two), temperature, base, SHARP)
    return score


@triton.jit
def count_ahead(standing, mine, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Rank a window: count for each candidate those that are stronger, or equal and standing earlier."""
    local = tl.arange(0, BLOCK)
    tl.store(standing + local, mine)
    tl.debug_barrier()
    lower = just_below(mine)
    ahead = tl.zeros([BLOCK], tl.int32)
    for tile in range(0, BLOCK, TILE):
        bar = tl.where(local >= tile + TILE, lower, mine)  # a tile that stands earlier as a whole goes ahead if equal
        for i in tl.static_range(TILE):
            ahead += (tl.load(standing + tile + i) > bar).to(tl.int32)
    grid = tl.reshape(mine, [BLOCK // TILE, TILE])
    earlier = tl.arange(0, TILE)[None, :] < tl.arange(0, TILE)[:, None]
    twins = (grid[:, None, :] == grid[:, :, None]) & earlier[None, :, :]
    return ahead + tl.reshape(tl.sum(twins.to(tl.int32), 2), [BLOCK])


@triton.jit
def merge(runs, position, run, places, mine, own, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Place a block of a sorted run among GROUP runs: its place in its own, plus those before it in the others.

    Neighbours look for neighbouring scores, so the bisections of a warp read the same lines.
    """
    first = own // GROUP * GROUP
    other = first + tl.arange(0, GROUP)[:, None]  # [GROUP 1]
    bar = tl.where(other < own, just_below(mine)[None, :], mine[None, :])  # equal ones of an earlier run go ahead
    found = tl.zeros([GROUP, BLOCK], tl.int32) + other * run
    step = run // 2
    while step > 0:
        score = tl.load(runs + found + (step - 1), mask=found + (step - 1) < places, other=-float("inf"))
        found += tl.where(score > bar, step, 0)
        step = step // 2
    score = tl.load(runs + found, mask=found < places, other=-float("inf"))
    found += (score > bar).to(tl.int32) - other * run
    found = tl.where(other == own, (position - own * run)[None, :], found)
    return first * run + tl.sum(found, 0)


@triton.jit
def sort_blocks(
    scores, mask, ladder, rank, standing, runs, order, worker, programs, places, n, first, last, temperature, base,
    MASKED: tl.constexpr, SHARP: tl.constexpr, SORT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Let the candidates of a round stand up, and sort them block by block; `last`: that is the whole round."""
    for block in range(worker, tl.cdiv(places, BLOCK), programs):
        place = block * BLOCK + tl.arange(0, BLOCK)
        inside = place < places
        if first:
            mine = enter(scores, mask, place, n, MASKED)
        else:
            mine = advance(ladder, place, places, temperature, base, SHARP)
        mine = tl.where(inside, mine, -float("inf"))
        after = place
        if SORT:
            after = block * BLOCK + count_ahead(standing + block * BLOCK, mine, BLOCK, TILE)
        if last:
            tl.store(ladder + after, mine, mask=inside)
            tl.store(rank + place, after, mask=inside)
        else:
            tl.store(runs + after, mine, mask=inside)
            tl.store(order + after, place, mask=inside)


@triton.jit
def merge_runs(
    ladder, rank, runs, order, merged, merged_order, worker, programs, places, run,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge sorted runs GROUP at a time, into longer runs or, where one is left, into the ladder."""
    for block in range(worker, tl.cdiv(places, BLOCK), programs):
        position = block * BLOCK + tl.arange(0, BLOCK)
        inside = position < places
        mine = tl.load(runs + position, mask=inside, other=BYE)
        candidate = tl.load(order + position, mask=inside, other=0)
        place = merge(runs, position, run, places, mine, block * BLOCK // run, GROUP, BLOCK)
        if run * GROUP >= places:
            tl.store(ladder + place, mine, mask=inside)
            tl.store(rank + candidate, place, mask=inside)
        else:
            tl.store(merged + place, mine, mask=inside)
            tl.store(merged_order + place, candidate, mask=inside)


@triton.jit
def descend(
    scores, mask, ladder, rank, token, n, k, rounds, temperature, base,
    MASKED: tl.constexpr, SHARP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk tokens down the ladder -> real, candidate, leaf of its tree, share, whether it won, its last score."""
    real = token < n
    if MASKED:
        real = real & (tl.load(mask + token, mask=real, other=0) != 0)
    score = enter(scores, mask, token, n, MASKED)
    candidate = token
    won = real
    leaf = tl.zeros([BLOCK], tl.int32)
    share = tl.full([BLOCK], 1.0, tl.float64)
    for t in range(rounds):
        places = k << (rounds - t)
        place = tl.load(rank + candidate, mask=real, other=0)
        mine = tl.load(ladder + place, mask=real, other=BYE)
        rival = tl.load(ladder + places - 1 - place, mask=real, other=BYE)
        first = place < places // 2
        lost = (rival > mine) | ((rival == mine) & ~first)
        score, losing = meet(tl.maximum(mine, rival), tl.minimum(mine, rival), temperature, base, SHARP)
        share *= tl.where(lost, losing, 1.0 - losing)
        won = won & ~lost
        leaf += tl.where(lost, 1 << t, 0)
        candidate = tl.where(first, place, places - 1 - place)
        ladder += places
        rank += places
    return real, candidate, leaf, share, won, score


@triton.jit
def walk_down(
    scores, mask, ladder, rank, slots, weights, members, blended, leaves, nth, winners, champion, final,
    worker, programs, n, k, rounds, temperature, base, MASKED: tl.constexpr, SHARP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give every token its last candidate and its share, count the winners of each block, and clear the tables."""
    for block in range(worker, tl.cdiv(n, BLOCK), programs):
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < n
        real, candidate, leaf, share, won, score = descend(
            scores, mask, ladder, rank, token, n, k, rounds, temperature, base, MASKED, SHARP, BLOCK
        )
        usable = tl.abs(tl.load(scores + token, mask=real, other=0.0)) < float("inf")
        tl.store(weights + token, tl.where(real, tl.where(usable, share, float("nan")), 0.0), mask=inside)
        tl.store(slots + token, tl.where(real, candidate, -1).to(tl.int64), mask=inside)
        tl.store(leaves + token, leaf, mask=inside)
        tl.store(nth + token, tl.cumsum(won.to(tl.int32), 0), mask=inside)
        tl.store(winners + block, tl.sum(won.to(tl.int32), 0))
        tl.store(champion + candidate, token, mask=won)
        tl.store(final + candidate, score, mask=won)
    for block in range(worker, tl.cdiv(k << rounds, BLOCK), programs):
        place = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(members + place, tl.full([BLOCK], -1, tl.int64), mask=place < (k << rounds))
        tl.store(blended + place, tl.zeros([BLOCK], tl.float32), mask=place < k)


@triton.jit
def number_slots(
    slots, members, blended, leaves, nth, winners, champion, final, worker, programs, n, rounds,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Number the slots by their winners' positions: winners in earlier blocks, and in the same block before it."""
    blocks = tl.cdiv(n, BLOCK)
    for block in range(worker, blocks, programs):
        token = block * BLOCK + tl.arange(0, BLOCK)
        candidate = tl.load(slots + token, mask=token < n, other=-1)
        real = candidate >= 0
        winner = tl.load(champion + candidate, mask=real, other=0)
        before = tl.zeros([TILE, BLOCK], tl.int32)
        for tile in range(0, blocks, TILE):
            other = tile + tl.arange(0, TILE)[:, None]
            count = tl.load(winners + other, mask=other < blocks, other=0)
            before += tl.where(other < (winner // BLOCK)[None, :], count, 0)
        slot = (tl.load(nth + winner, mask=real, other=1) - 1 + tl.sum(before, 0)).to(tl.int64)
        leaf = tl.load(leaves + token, mask=real, other=0)
        won = real & (winner == token)
        tl.store(slots + token, slot, mask=real)
        tl.store(members + (slot << rounds) + leaf, token.to(tl.int64), mask=real)
        tl.store(blended + slot, tl.load(final + candidate, mask=won, other=0.0).to(tl.float32), mask=won)


@triton.jit(do_not_specialize=SIZES)
def play(
    scores, mask, doubles, ints, counters, slots, weights, members, blended,
    n, k, rounds, length, room, programs, first_step, last_step, temperature_bits, base_bits,
    MASKED: tl.constexpr, SHARP: tl.constexpr, SORT: tl.constexpr, WAIT: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Play the tournament of a document with `programs` programs, step by step.

    A program takes its number when it starts, so whoever it waits for is running or next in line: no deadlock as long
    as the programs of one document fit on the device. Where programs run one after the other (the interpreter), each
    launch does the steps from `first_step` to `last_step` alone, and nobody waits.
    """
    temperature, base = temperature_bits.to(tl.float64, bitcast=True), base_bits.to(tl.float64, bitcast=True)
    ticket = tl.program_id(0)
    if WAIT:
        ticket = tl.atomic_add(counters, 1)
    row, worker = (ticket // programs).to(tl.int64), ticket % programs
    counter = counters + 32 * (1 + row)  # a cache line each: nobody polls where others count
    scores += row * n
    mask += row * n
    slots += row * n
    weights += row * n
    members += row * (k << rounds)
    blended += row * k
    ladder = doubles + row * (length + 3 * room + k)  # the scores of every round, sorted
    standing = ladder + length  # those of one round, as they stand
    runs = standing + room  # two of these, merged back and forth
    final = runs + 2 * room  # the scores of the last candidates
    rank = ints + row * (length + 2 * room + 2 * n + tl.cdiv(n, BLOCK) + k)  # where each candidate was sorted to
    order = rank + length  # two of these, beside the runs
    leaves = order + 2 * room
    nth = leaves + n  # counts the winners of a block
    winners = nth + n  # of each block
    champion = winners + tl.cdiv(n, BLOCK)  # of each last candidate

    step = 0
    for t in range(rounds):
        places = k << (rounds - t)
        run = BLOCK
        if not SORT:
            run = places
        if (step >= first_step) & (step < last_step):
            sort_blocks(
                scores, mask, ladder, rank, standing, runs, order, worker, programs, places, n, t == 0, run >= places,
                temperature, base, MASKED, SHARP, SORT, BLOCK, TILE,
            )  # fmt: skip
        step += 1
        if WAIT:
            wait(counter, step * programs)
        source = 0
        while run < places:
            if (step >= first_step) & (step < last_step):
                here, there = source * room, (1 - source) * room
                merge_runs(
                    ladder, rank, runs + here, order + here, runs + there, order + there, worker, programs, places, run,
                    GROUP, BLOCK,
                )  # fmt: skip
            step += 1
            if WAIT:
                wait(counter, step * programs)
            run = run * GROUP
            source = 1 - source
        ladder += places
        rank += places
    ladder -= length
    rank -= length

    if (step >= first_step) & (step < last_step):
        walk_down(
            scores, mask, ladder, rank, slots, weights, members, blended, leaves, nth, winners, champion, final,
            worker, programs, n, k, rounds, temperature, base, MASKED, SHARP, BLOCK,
        )  # fmt: skip
    step += 1
    if WAIT:
        wait(counter, step * programs)
    if (step >= first_step) & (step < last_step):
        number_slots(
            slots, members, blended, leaves, nth, winners, champion, final, worker, programs, n, rounds, BLOCK, TILE
        )


def _play(
    scores: Tensor, mask: Tensor | None, k: int, temperature: float, base: float, sort: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Play: scores [b n] float32 -> slots [b n], weights [b n], members [b k m], blended scores [b k]."""
    b, n = scores.shape
    scores = scores.contiguous()
    rounds = tournament.count_rounds(n, k)
    length = k * (2 ** (rounds + 1) - 2)  # the ladder: k (2^rounds + ... + 2) places
    blocks = triton.cdiv(k << rounds if rounds else n, BLOCK)
    room = blocks * BLOCK if rounds else 0
    many = processors(scores.device)
    programs = max(1, min(blocks, CROWD * many // b, many))
    doubles = scores.new_empty(b * (length + 3 * room + k), dtype=torch.float64)
    ints = scores.new_empty(b * (length + 2 * room + 2 * n + triton.cdiv(n, BLOCK) + k), dtype=torch.int32)
    counters = scores.new_zeros(32 * (1 + b), dtype=torch.int32)
    slots, weights = scores.new_empty(b, n, dtype=torch.int64), scores.new_empty(b, n)
    members, blended = scores.new_empty(b, k, 1 << rounds, dtype=torch.int64), scores.new_empty(b, k)
    waits = not interpreted()
    steps = [(0, 1 << 30)] if waits else [(step, step + 1) for step in range(_count_steps(rounds, k, sort))]
    for first, last in steps:
        launch(
            play, (b * programs,),
            scores, scores if mask is None else mask.contiguous().view(torch.uint8), doubles, ints, counters,
            slots, weights, members, blended, n, k, rounds, length, room, programs, first, last,
            _bits(temperature), _bits(math.log(base) if base else 1.0),
            MASKED=mask is not None, SHARP=base > 0, SORT=sort, WAIT=waits,
            TILE=TILE, GROUP=GROUP, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return slots, weights, members, blended


def _play_fake(
    scores: Tensor, mask: Tensor | None, k: int, temperature: float, base: float, sort: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, n = scores.shape
    slots, weights = scores.new_empty(b, n, dtype=torch.int64), scores.new_empty(b, n)
    members = scores.new_empty(b, k, 2 ** tournament.count_rounds(n, k), dtype=torch.int64)
    return slots, weights, members, scores.new_empty(b, k)


@triton.jit
def climb(score, value, temperature, base, LEVELS: tl.constexpr, SHARP: tl.constexpr):
    """Play LEVELS rounds up from the leaves, blending `value` along with the scores: [s m] -> [s m / 2^LEVELS]."""
    for _ in tl.static_range(LEVELS):
        strong, weak = tl.split(tl.reshape(score, [score.shape[0], score.shape[1] // 2, 2]))
        one, two = tl.split(tl.reshape(value, [value.shape[0], value.shape[1] // 2, 2]))
        score, share = meet(strong, weak, temperature, base, SHARP)
        value = one + (two - one) * share
    return score, value


@triton.jit(do_not_specialize=SIZES)
def play_backward(
    grad_weights, grad_blended, scores, members, grad_scores, n, k, temperature_bits, base_bits,
    ROUNDS: tl.constexpr, SHARP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Take the gradient of `play`, with the pair weights computed anew (topk/README.md derives it)."""
    temperature, base = temperature_bits.to(tl.float64, bitcast=True), base_bits.to(tl.float64, bitcast=True)
    LEAVES: tl.constexpr = 1 << ROUNDS
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    leaf = slot[:, None] * LEAVES + tl.arange(0, LEAVES)[None, :]
    token = tl.load(members + row * k * LEAVES + leaf, mask=(slot < k)[:, None], other=-1)  # [s m]
    real = token >= 0
    score = tl.load(scores + row * n + token, mask=real, other=0.0).to(tl.float64)
    score = tl.where(real, tl.where(tl.abs(score) < float("inf"), score, 0.0), BYE)
    value = tl.load(grad_weights + row * n + token, mask=real, other=0.0).to(tl.float64)
    weight = tl.full([SLOTS, 1], 1.0, tl.float64)
    slope = tl.reshape(tl.load(grad_blended + row * k + slot, mask=slot < k, other=0.0).to(tl.float64), [SLOTS, 1])
    for level in tl.static_range(ROUNDS):
        below, carried = climb(score, value, temperature, base, ROUNDS - 1 - level, SHARP)  # [s 2^(level + 1)]
        strong, weak = tl.split(tl.reshape(below, [SLOTS, 1 << level, 2]))
        one, two = tl.split(tl.reshape(carried, [SLOTS, 1 << level, 2]))
        _, share = meet(strong, weak, temperature, base, SHARP)
        bye = weak == BYE
        weak = tl.where(bye, strong, weak)
        pull = (weight * (one - two) + slope * (strong - weak)) * share * (1.0 - share) / temperature
        if SHARP:
            up, down = pull * base * tl.exp(strong * base), pull * base * tl.exp(weak * base)
        else:
            up, down = pull, pull
        slope = tl.reshape(tl.join(slope * (1.0 - share) + up, slope * share - down), [SLOTS, 2 << level])
        weight = tl.reshape(tl.join(weight * (1.0 - share), weight * share), [SLOTS, 2 << level])
    tl.store(grad_scores + row * n + token, slope.to(tl.float32), mask=real)


def _play_backward(
    grad_weights: Tensor, grad_blended: Tensor, scores: Tensor, members: Tensor, temperature: float, base: float
) -> Tensor:
    b, k, leaves = members.shape
    grad_scores = torch.zeros_like(scores)
    slots = max(1, MEMBERS // leaves)
    launch(
        play_backward, (triton.cdiv(k, slots), b),
        grad_weights, grad_blended, scores, members, grad_scores, scores.shape[1], k,
        _bits(temperature), _bits(math.log(base) if base else 1.0),
        ROUNDS=leaves.bit_length() - 1, SHARP=base > 0, SLOTS=slots, num_warps=4 if leaves <= 512 else 8,
    )  # fmt: skip
    return grad_scores


def _play_backward_fake(
    grad_weights: Tensor, grad_blended: Tensor, scores: Tensor, members: Tensor, temperature: float, base: float
) -> Tensor:
    return torch.empty_like(scores)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, _, _, ctx.temperature, ctx.base, _ = inputs
    ctx.save_for_backward(scores, output[2])
    ctx.mark_non_differentiable(output[0], output[2])


def _grad(ctx: Any, backward: Any, _: Any, grad_weights: Tensor, __: Any, grad_blended: Tensor) -> tuple[Any, ...]:
    scores, members = ctx.saved_tensors
    grads = grad_weights.contiguous(), grad_blended.contiguous()
    return backward(*grads, scores.contiguous(), members, ctx.temperature, ctx.base), None, None, None, None, None


_tournament = Operator(
    "tournament", _play, _play_fake, save=_save, grad=_grad,
    backward=Operator("tournament_backward", _play_backward, _play_backward_fake),
)  # fmt: skip


def _count_steps(rounds: int, k: int, sort: bool) -> int:
    """Count the steps of `play`: in each round a sort and the merges it takes, then the walk and the numbering."""
    steps = 2
    for t in range(rounds):
        run, steps = BLOCK, steps + 1
        while sort and run < k << (rounds - t):
            run, steps = run * GROUP, steps + 1
    return steps


def _select(played: tuple[Tensor, Tensor, Tensor, Tensor]) -> Selection:
    slots, weights, members, blended = played
    winners = members[..., 0]
    return Selection(slots, weights, winners >= 0, blended, winners, members)


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _rename(front: Selection, order: Tensor) -> Selection:
    """Say a Selection over reordered inputs in terms of the inputs themselves: input order[i] stood at i."""
    back = order.argsort(dim=1)
    assert front.members is not None
    hole = front.members < 0
    b, k, m = front.members.shape
    members = order.gather(1, front.members.clamp(min=0).view(b, k * m)).view(b, k, m).masked_fill(hole, -1)
    slots, weights = front.slots.gather(1, back), front.weights.gather(1, back)
    return Selection(slots, weights, front.mask, front.scores, members[..., 0], members)


# ------------------------------------------------------------------------------------------------------- the pooling


@triton.jit(do_not_specialize=SIZES)
def pool_forward(
    x, weights, members, out, n, k, d, leaves, BLOCK: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """Sum one slot's members, weighted: each vector is read once, in full lines."""
    row, slot = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, leaves, UNROLL):
        leaf = first + tl.arange(0, UNROLL)
        token = tl.load(members + (row * k + slot) * leaves + leaf, mask=leaf < leaves, other=-1)
        share = tl.load(weights + row * n + token, mask=token >= 0, other=0.0).to(tl.float32)
        line = x + (row * n + token)[:, None] * d + column[None, :]
        value = tl.load(line, mask=(token >= 0)[:, None] & (column < d)[None, :], other=0.0)  # [UNROLL BLOCK]
        total += tl.sum(value.to(tl.float32) * share[:, None], 0)
    tl.store(out + (row * k + slot) * d + column, total.to(out.dtype.element_ty), mask=column < d)


@triton.jit(do_not_specialize=SIZES)
def pool_backward(
    grad, x, slots, weights, grad_x, grad_weights, n, k, d, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Fetch each token's arriving gradient once, for x and for its weight."""
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < n
    slot = tl.load(slots + row * n + token, mask=inside, other=-1)
    kept = slot >= 0
    share = tl.load(weights + row * n + token, mask=inside, other=0.0).to(tl.float32)
    along = tl.zeros([TOKENS], tl.float32)
    for first in range(0, d, BLOCK):
        column = first + tl.arange(0, BLOCK)
        wide = (column < d)[None, :]
        line = (row * n + token)[:, None] * d + column[None, :]
        arriving = tl.load(grad + (row * k + slot)[:, None] * d + column[None, :], mask=kept[:, None] & wide, other=0.0)
        arriving = arriving.to(tl.float32)
        value = tl.load(x + line, mask=kept[:, None] & wide, other=0.0).to(tl.float32)  # [TOKENS BLOCK]
        along += tl.sum(arriving * value, 1)
        tl.store(grad_x + line, (arriving * share[:, None]).to(grad_x.dtype.element_ty), mask=inside[:, None] & wide)
    tl.store(grad_weights + row * n + token, along.to(grad_weights.dtype.element_ty), mask=inside)


def _pool_forward(x: Tensor, slots: Tensor, weights: Tensor, members: Tensor) -> Tensor:
    b, n, d = x.shape
    k, leaves = members.shape[1:]
    out = x.new_empty(b, k, d)
    block = min(1024, triton.next_power_of_2(d))
    launch(
        pool_forward, (k, b, triton.cdiv(d, block)),
        x.contiguous(), weights.contiguous(), members.contiguous(), out, n, k, d, leaves,
        BLOCK=block, UNROLL=min(8, triton.next_power_of_2(leaves)), num_warps=_warps(block, x),
    )  # fmt: skip
    return out


def _pool_backward(grad: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    b, n, d = x.shape
    grad_x, grad_weights = x.new_empty(b, n, d), weights.new_empty(b, n)
    block, tokens = min(1024, triton.next_power_of_2(d)), 4
    launch(
        pool_backward, (triton.cdiv(n, tokens), b),
        grad, x.contiguous(), slots.contiguous(), weights.contiguous(), grad_x, grad_weights, n, grad.shape[1], d,
        BLOCK=block, TOKENS=tokens, num_warps=_warps(block, x),
    )  # fmt: skip
    return grad_x, grad_weights


def _warps(block: int, x: Tensor) -> int:
    """Count the warps that read a line of `block` values in one 16-byte access a thread."""
    return max(1, min(8, block * x.element_size() // 16 // 32))


_pool = Operator(
    "pool_fused", _pool_forward, pool_fake, save=pool_save, grad=pool_grad,
    backward=Operator("pool_fused_backward", _pool_backward, pool_backward_fake),
)  # fmt: skip
