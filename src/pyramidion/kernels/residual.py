"""Residual connections in one go: add what a sublayer gives, with dropout, and normalise the sum.

Each way is one kernel that reads and writes every number once. Where the sum itself goes on beside its norm, backward
reads that; where it does not, backward computes it again from what went in. What a sublayer gives may come without its
bias: it is added here, and its gradient is summed on the way back.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.chance import PARTS, keeps, new_seed
from pyramidion.kernels.dropout import scale, threshold
from pyramidion.kernels.launching import launch
from pyramidion.kernels.registration import Operator
from pyramidion.kernels.tiles import Tiling, launch_by_columns, load_row, room_for_sums, store_row, tile

# A row of up to 768 numbers belongs to one warp, so that its sums need no barrier.
FORWARD = Tiling(rows=1, each=3, crowd=8, stages=3)
BACKWARD = Tiling(rows=1, each=3, crowd=8, stages=3)
ADD_FORWARD = Tiling(rows=2, each=1, crowd=48, stages=1)
ADD_BACKWARD = Tiling(rows=1, each=1, crowd=16, stages=1)


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Give LayerNorm(x) for x [... d], d a multiple of 8; under autocast in half."""
    out: Tensor = _normed(x, None, None, weight, bias, None, 0.0, eps, _half(x), False)[0]
    return out


def add_norm(
    x: Tensor, change: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, dropout: float, eps: float
) -> Tensor:
    """Give LayerNorm(x + dropout(change + shift)) for x, change [... d], d a multiple of 8; under autocast in half."""
    seed = new_seed(x.device) if dropout > 0 else None
    out: Tensor = _normed(x, change, shift, weight, bias, seed, dropout, eps, _half(x), False)[0]
    return out


def add_and_norm(
    x: Tensor, change: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, dropout: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Give x + dropout(change + shift), in the precision of x, and its norm, under autocast in half."""
    seed = new_seed(x.device) if dropout > 0 else None
    out, total, _, _ = _normed(x, change, shift, weight, bias, seed, dropout, eps, _half(x), True)
    return total, out


def add(x: Tensor, change: Tensor, shift: Tensor | None, dropout: float) -> Tensor:
    """Give x + dropout(change + shift) for x, change [... d], d a multiple of 8, in the precision of x."""
    seed = new_seed(x.device) if dropout > 0 else None
    out: Tensor = _added(x, change, shift, seed, dropout)
    return out


def drop_backward(grad: Tensor, seed: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """Go back through dropout by that seed, to a gradient of that precision."""
    return _add_backward(grad, seed, dropout, dtype, None)[0]


def _half(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# --------------------------------------------------------------------------------------------------- sum and its norm


@triton.jit
def load_total(
    x, change, shift, seed, draw, place, inside, part, limit, growth, ADDS: tl.constexpr, DROPS: tl.constexpr
):
    """Load a tile [r n 8] and add what changes it, after dropout; also say who was kept."""
    total = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        other = tl.load(change + place, mask=inside, other=0.0).to(tl.float32) + shift
    kept = inside
    if DROPS:  # once all loads are on their way
        kept = inside & keeps(seed, draw, part, limit)
    if ADDS:
        total += tl.where(kept, other * growth, 0.0) if DROPS else other
    return total, kept


@triton.jit
def load_each(numbers, start, rows, ROWS: tl.constexpr):
    """Load a number of each row of a tile: [r 1 1]. Only as a vector does each thread load it once."""
    row = start + tl.arange(0, ROWS)
    return tl.load(numbers + row, mask=row < rows, other=0.0)[:, None, None]


@triton.jit
def sum_rows(x):
    """Sum each row of a tile: [r n 8] -> [r 1 1]."""
    return tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    x, change, shifts, weight, bias, out, sums, means, spreads, seeds, rows, limit, growth, eps,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ADDS: tl.constexpr, SHIFTS: tl.constexpr, DROPS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Normalise the rows of one program, ROWS at a time."""
    gain, offset = load_row(weight, 0, D, LANES, True), load_row(bias, 0, D, LANES, True)
    shift = load_row(shifts, 0, D, LANES, SHIFTS)
    seed = tl.load(seeds) if DROPS else 0
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, draw, place, inside, part = tile(start, 0, rows, D, LANES, ROWS)
        total, _ = load_total(x, change, shift, seed, draw, place, inside, part, limit, growth, ADDS, DROPS)
        if KEEPS:
            rounded = total.to(sums.dtype.element_ty)  # what goes on is what is normalised, and what backward reads
            tl.store(sums + place, rounded, mask=inside)
            total = rounded.to(tl.float32)
        mean = sum_rows(total) / D
        centred = tl.where(inside, total - mean, 0.0)
        spread = 1.0 / tl.sqrt(sum_rows(centred * centred) / D + eps)
        tl.store(out + place, (centred * spread * gain + offset).to(out.dtype.element_ty), mask=inside)
        tl.store(means + row, mean, mask=row < rows)
        tl.store(spreads + row, spread, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_backward(
    grad, grad_sum, x, change, shifts, weight, means, spreads, seeds, grad_x, grad_change, vectors,
    rows, limit, growth, D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ADDS: tl.constexpr, SHIFTS: tl.constexpr, DROPS: tl.constexpr, KEEPS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Go back through the rows of one program, and sum what they ask of weight, bias and shift."""
    gain = load_row(weight, 0, D, LANES, True)
    shift = load_row(shifts, 0, D, LANES, SHIFTS and ADDS)
    seed = tl.load(seeds) if DROPS else 0
    of_gain = tl.zeros([1, LANES, 8], tl.float32)
    of_offset, of_shift = of_gain, of_gain
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _, draw, place, inside, part = tile(start, 0, rows, D, LANES, ROWS)
        arriving = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        total, kept = load_total(x, change, shift, seed, draw, place, inside, part, limit, growth, ADDS, DROPS)
        mean, spread = load_each(means, start, rows, ROWS), load_each(spreads, start, rows, ROWS)
        standard = tl.where(inside, (total - mean) * spread, 0.0)
        of_gain += tl.sum(arriving * standard, 0, keep_dims=True)
        of_offset += tl.sum(arriving, 0, keep_dims=True)
        pull = arriving * gain
        along, level = sum_rows(pull * standard) / D, sum_rows(pull) / D
        leaving = (pull - level - standard * along) * spread
        if KEEPS:
            leaving += tl.load(grad_sum + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, leaving.to(grad_x.dtype.element_ty), mask=inside)
        if TWO or SHIFTS:
            passed = tl.where(kept, leaving * growth, 0.0)
        if TWO:
            tl.store(grad_change + place, passed.to(grad_change.dtype.element_ty), mask=inside)
        if SHIFTS:
            of_shift += tl.sum(passed, 0, keep_dims=True)
    number, programs = tl.program_id(0), tl.num_programs(0)
    store_row(vectors, number, of_gain, 0, D, LANES)
    store_row(vectors, number + programs, of_offset, 0, D, LANES)
    if SHIFTS:
        store_row(vectors, number + 2 * programs, of_shift, 0, D, LANES)


def _forward(
    x: Tensor, change: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor | None,
    dropout: float, eps: float, dtype: torch.dtype, keeps_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, change = x.contiguous(), None if change is None else change.contiguous()
    d, rows = x.shape[-1], x.numel() // x.shape[-1]
    out, sums, means, spreads = _forward_fake(x, change, shift, weight, bias, seed, dropout, eps, dtype, keeps_sum)
    launch(
        norm_forward, (FORWARD.programs(rows, 1, x.device),),
        x, change, shift, weight, bias, out, sums, means, spreads, seed, rows, threshold(dropout), scale(dropout), eps,
        D=d, **FORWARD.options(d // PARTS),
        ADDS=change is not None, SHIFTS=shift is not None, DROPS=seed is not None, KEEPS=keeps_sum,
    )  # fmt: skip
    return out, sums, means, spreads


def _forward_fake(
    x: Tensor, change: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor | None,
    dropout: float, eps: float, dtype: torch.dtype, keeps_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = x.numel() // x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    sums = torch.empty(x.shape if keeps_sum else (0,), dtype=x.dtype, device=x.device)
    return out, sums, x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, change: Tensor | None, shift: Tensor | None, weight: Tensor,
    means: Tensor, spreads: Tensor, seed: Tensor | None, dropout: float, of_change: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Go back; x is the sum where there is no `change`; `of_change` is the precision of its gradient, if it has one.

    The gradients of weight, bias and shift come together, [2 d] or [3 d], in float32.
    """
    grad, x = grad.contiguous(), x.contiguous()
    grad_sum, change = (None if one is None else one.contiguous() for one in (grad_sum, change))
    d, rows = x.shape[-1], x.numel() // x.shape[-1]
    grad_x, grad_change, vectors = _backward_fake(
        grad, grad_sum, x, change, shift, weight, means, spreads, seed, dropout, of_change
    )
    programs = BACKWARD.programs(rows, 1, x.device)
    sums = vectors.new_empty(len(vectors), programs, d)
    launch(
        norm_backward, (programs,),
        grad, grad_sum, x, change, shift, weight, means, spreads, seed, grad_x, grad_change, sums,
        rows, threshold(dropout), scale(dropout), D=d, **BACKWARD.options(d // PARTS), ADDS=change is not None,
        SHIFTS=shift is not None, DROPS=seed is not None, KEEPS=grad_sum is not None, TWO=grad_change.numel() > 0,
    )  # fmt: skip
    return grad_x, grad_change, torch.sum(sums, 1, out=vectors)


def _backward_fake(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, change: Tensor | None, shift: Tensor | None, weight: Tensor,
    means: Tensor, spreads: Tensor, seed: Tensor | None, dropout: float, of_change: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    two = of_change is not None and (seed is not None or of_change != x.dtype)  # else one gradient serves both
    grad_change = torch.empty(x.shape if two else (0,), dtype=of_change or x.dtype, device=x.device)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return grad_x, grad_change, x.new_empty(2 if shift is None else 3, x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, change, shift, weight, bias, seed, ctx.dropout, _, _, ctx.keeps_sum = inputs
    ctx.of_change, ctx.shifts = None if change is None else change.dtype, shift is not None
    ctx.vectors = [one.dtype for one in (weight, bias, shift) if one is not None]
    source = (output[1], None) if ctx.keeps_sum else (x, change)
    ctx.save_for_backward(*source, shift, weight, output[2], output[3], seed)
    ctx.mark_non_differentiable(*(() if ctx.keeps_sum else output[1:2]), *output[2:])


def _grad(ctx: Any, backward: Any, grad: Tensor, grad_sum: Tensor, *_: Any) -> tuple[Any, ...]:
    arriving = grad, grad_sum if ctx.keeps_sum else None
    grad_x, grad_change, vectors = backward(*arriving, *ctx.saved_tensors, ctx.dropout, ctx.of_change)
    of_weight, of_bias, *of_shift = (one.to(dtype) for one, dtype in zip(vectors, ctx.vectors, strict=True))
    given = grad_change if grad_change.numel() else grad_x
    of_change = None if ctx.of_change is None else given
    return grad_x, of_change, of_shift[0] if ctx.shifts else None, of_weight, of_bias, *[None] * 5


_normed = Operator(
    "normed", _forward, _forward_fake, save=_save, grad=_grad,
    backward=Operator("normed_backward", _backward, _backward_fake),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- sum by itself


@triton.jit(do_not_specialize=["rows"])
def add_forward(
    x, change, shifts, out, seeds, rows, limit, growth,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    SHIFTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Add what dropout leaves of a change, for rows of a group of columns."""
    group = tl.program_id(1)
    shift = load_row(shifts, group, D, LANES, SHIFTS)
    seed = tl.load(seeds) if DROPS else 0
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _, draw, place, inside, part = tile(start, group, rows, D, LANES, ROWS)
        total, _ = load_total(x, change, shift, seed, draw, place, inside, part, limit, growth, True, DROPS)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_backward(
    grad, grad_change, seeds, sums, rows, limit, growth,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    SHIFTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Let the gradient of what was kept pass, and sum it over the rows."""
    group = tl.program_id(1)
    seed = tl.load(seeds) if DROPS else 0
    of_shift = tl.zeros([1, LANES, 8], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _, draw, place, inside, part = tile(start, group, rows, D, LANES, ROWS)
        passed = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if DROPS:
            passed = tl.where(keeps(seed, draw, part, limit), passed * growth, 0.0)
        tl.store(grad_change + place, passed.to(grad_change.dtype.element_ty), mask=inside)
        if SHIFTS:
            of_shift += tl.sum(passed, 0, keep_dims=True)
    if SHIFTS:
        store_row(sums, tl.program_id(0), of_shift, group, D, LANES)


def _add_forward(x: Tensor, change: Tensor, shift: Tensor | None, seed: Tensor | None, dropout: float) -> Tensor:
    x, change = x.contiguous(), change.contiguous()
    out = _add_fake(x, change, shift, seed, dropout)
    options = {"SHIFTS": shift is not None, "DROPS": seed is not None}
    launch_by_columns(add_forward, ADD_FORWARD, x, change, shift, out, seed, dropout=dropout, **options)
    return out


def _add_fake(x: Tensor, change: Tensor, shift: Tensor | None, seed: Tensor | None, dropout: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _add_backward(
    grad: Tensor, seed: Tensor | None, dropout: float, dtype: torch.dtype, of_shift: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Go back to a change of that precision; `of_shift` is that of its bias, if it has one."""
    grad = grad.contiguous()
    grad_change, grad_shift = _add_backward_fake(grad, seed, dropout, dtype, of_shift)
    sums = None if of_shift is None else room_for_sums(ADD_BACKWARD, grad)
    options = {"SHIFTS": sums is not None, "DROPS": seed is not None}
    launch_by_columns(add_backward, ADD_BACKWARD, grad, grad_change, seed, sums, dropout=dropout, **options)
    return grad_change, grad_shift if sums is None else sums.sum(0).to(of_shift)


def _add_backward_fake(
    grad: Tensor, seed: Tensor | None, dropout: float, dtype: torch.dtype, of_shift: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    grad_change = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    return grad_change, grad.new_empty(0 if of_shift is None else grad.shape[-1], dtype=of_shift)


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, change, shift, seed, ctx.dropout = inputs
    ctx.dtype, ctx.of_shift = change.dtype, None if shift is None else shift.dtype
    ctx.save_for_backward(seed)


def _add_grad(ctx: Any, backward: Any, grad: Tensor) -> tuple[Any, ...]:
    of_change, of_shift = backward(grad, *ctx.saved_tensors, ctx.dropout, ctx.dtype, ctx.of_shift)
    return grad, of_change, None if ctx.of_shift is None else of_shift, None, None


_added = Operator(
    "added", _add_forward, _add_fake, save=_add_save, grad=_add_grad,
    backward=Operator("added_backward", _add_backward, _add_backward_fake),
)  # fmt: skip
