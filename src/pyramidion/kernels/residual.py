"""Residual connections in one go: add what a sublayer gives, with dropout, and normalise the sum.

Each way is one kernel that reads and writes every number once. Where the sum itself goes on beside its norm, backward
reads that; where it does not, backward computes it again from what went in.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.chance import PARTS, keeps, launch_by_draws, new_seed, scale, threshold
from pyramidion.kernels.launching import launch, processors
from pyramidion.kernels.registration import Operator

ROWS = 4  # of one program on the way forward
CROWD = 8  # programs of a multiprocessor on the way back


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Give LayerNorm(x) for x [... d], d a multiple of 8; under autocast in half."""
    out: Tensor = _normed(x, None, weight, bias, None, 0.0, eps, _half(x), False)[0]
    return out


def add_norm(x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, dropout: float, eps: float) -> Tensor:
    """Give LayerNorm(x + dropout(change)) for x, change [... d], d a multiple of 8; under autocast in half."""
    seed = new_seed(x.device) if dropout > 0 else None
    out: Tensor = _normed(x, change, weight, bias, seed, dropout, eps, _half(x), False)[0]
    return out


def add_and_norm(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, dropout: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Give x + dropout(change), in the precision of x, and its norm, under autocast in half."""
    seed = new_seed(x.device) if dropout > 0 else None
    out, total, _, _ = _normed(x, change, weight, bias, seed, dropout, eps, _half(x), True)
    return total, out


def add(x: Tensor, change: Tensor, dropout: float) -> Tensor:
    """Give x + dropout(change), in the precision of x."""
    out: Tensor = _added(x, change, new_seed(x.device), dropout)
    return out


def _half(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# --------------------------------------------------------------------------------------------------- sum and its norm


@triton.jit
def load_total(
    x, change, seed, row, column, inside, part, lane, limit, growth,
    D: tl.constexpr, ADDS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Load a row [n 8] and add what changes it, after dropout; also say who was kept."""
    total = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    kept = inside
    if DROPS:
        kept = inside & keeps(seed, (row * (D // 8) + lane).to(tl.uint32), part, limit)
    if ADDS:
        other = tl.load(change + row * D + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(kept, other * growth, 0.0) if DROPS else other
    return total, kept


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    x, change, weight, bias, out, sums, means, spreads, seeds, rows, limit, growth, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ADDS: tl.constexpr, DROPS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows, one after the other."""
    lane, part = tl.arange(0, BLOCK)[:, None], tl.arange(0, 8)[None, :]
    column, inside = lane * 8 + part, (lane < D // 8) & (part < 8)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    seed = tl.load(seeds) if DROPS else 0
    for turn in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + turn
        if row < rows:
            total, _ = load_total(x, change, seed, row, column, inside, part, lane, limit, growth, D, ADDS, DROPS)
            if KEEPS:
                rounded = total.to(sums.dtype.element_ty)  # what goes on is what is normalised, and what backward reads
                tl.store(sums + row * D + column, rounded, mask=inside)
                total = rounded.to(tl.float32)
            mean = tl.sum(total) / D
            centred = tl.where(inside, total - mean, 0.0)
            spread = 1.0 / tl.sqrt(tl.sum(centred * centred) / D + eps)
            tl.store(out + row * D + column, (centred * spread * gain + offset).to(out.dtype.element_ty), mask=inside)
            tl.store(means + row, mean)
            tl.store(spreads + row, spread)


@triton.jit(do_not_specialize=["rows"])
def norm_backward(
    grad, grad_sum, x, change, weight, means, spreads, seeds, grad_x, grad_change, grad_weight, grad_bias,
    rows, limit, growth, D: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, DROPS: tl.constexpr,
    KEEPS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Go back through the rows of one program, and sum what they ask of weight and bias."""
    lane, part = tl.arange(0, BLOCK)[:, None], tl.arange(0, 8)[None, :]
    column, inside = lane * 8 + part, (lane < D // 8) & (part < 8)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    seed = tl.load(seeds) if DROPS else 0
    of_gain, of_offset = tl.zeros([BLOCK, 8], tl.float32), tl.zeros([BLOCK, 8], tl.float32)
    for start in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(start, tl.int64)
        total, kept = load_total(x, change, seed, row, column, inside, part, lane, limit, growth, D, ADDS, DROPS)
        mean, spread = tl.load(means + row), tl.load(spreads + row)
        standard = tl.where(inside, (total - mean) * spread, 0.0)
        arriving = tl.load(grad + row * D + column, mask=inside, other=0.0).to(tl.float32)
        of_gain += arriving * standard
        of_offset += arriving
        pull = arriving * gain
        along, level = tl.sum(pull * standard) / D, tl.sum(pull) / D
        leaving = (pull - level - standard * along) * spread
        if KEEPS:
            leaving += tl.load(grad_sum + row * D + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + row * D + column, leaving.to(grad_x.dtype.element_ty), mask=inside)
        if TWO:
            passed = tl.where(kept, leaving * growth, 0.0)
            tl.store(grad_change + row * D + column, passed.to(grad_change.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * D + column
    tl.store(grad_weight + place, of_gain, mask=inside)
    tl.store(grad_bias + place, of_offset, mask=inside)


def _forward(
    x: Tensor, change: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor | None,
    dropout: float, eps: float, dtype: torch.dtype, keeps_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, change = x.contiguous(), None if change is None else change.contiguous()
    d, rows = x.shape[-1], x.numel() // x.shape[-1]
    out, sums, means, spreads = _forward_fake(x, change, weight, bias, seed, dropout, eps, dtype, keeps_sum)
    if rows:
        launch(
            norm_forward, (triton.cdiv(rows, ROWS),),
            x, change, weight, bias, out, sums, means, spreads, seed, rows, threshold(dropout), scale(dropout), eps,
            D=d, BLOCK=_block(d), ROWS=ROWS, ADDS=change is not None, DROPS=seed is not None, KEEPS=keeps_sum,
            num_warps=_warps(d),
        )  # fmt: skip
    return out, sums, means, spreads


def _forward_fake(
    x: Tensor, change: Tensor | None, weight: Tensor, bias: Tensor, seed: Tensor | None,
    dropout: float, eps: float, dtype: torch.dtype, keeps_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = x.numel() // x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    sums = torch.empty(x.shape if keeps_sum else (0,), dtype=x.dtype, device=x.device)
    return out, sums, x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, change: Tensor | None, weight: Tensor, means: Tensor,
    spreads: Tensor, seed: Tensor | None, dropout: float, of_change: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Go back; x is the sum where there is no `change`; `of_change` is the precision of its gradient, if it has one."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_sum, change = (None if one is None else one.contiguous() for one in (grad_sum, change))
    d, rows = x.shape[-1], x.numel() // x.shape[-1]
    grad_x, grad_change, _, _ = _backward_fake(
        grad, grad_sum, x, change, weight, means, spreads, seed, dropout, of_change
    )
    programs = max(1, min(rows, CROWD * processors(x.device)))
    sums = x.new_empty(2, programs, d, dtype=torch.float32)
    launch(
        norm_backward, (programs,),
        grad, grad_sum, x, change, weight, means, spreads, seed, grad_x, grad_change, sums[0], sums[1],
        rows, threshold(dropout), scale(dropout), D=d, BLOCK=_block(d), ADDS=change is not None,
        DROPS=seed is not None, KEEPS=grad_sum is not None, TWO=grad_change.numel() > 0, num_warps=_warps(d),
    )  # fmt: skip
    of_weight, of_bias = sums.sum(1).to(weight.dtype)
    return grad_x, grad_change, of_weight.clone(), of_bias.clone()


def _backward_fake(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, change: Tensor | None, weight: Tensor, means: Tensor,
    spreads: Tensor, seed: Tensor | None, dropout: float, of_change: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    two = of_change is not None and (seed is not None or of_change != x.dtype)  # else one gradient serves both
    grad_change = torch.empty(x.shape if two else (0,), dtype=of_change or x.dtype, device=x.device)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return grad_x, grad_change, torch.empty_like(weight), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, change, weight, _, seed, ctx.dropout, _, _, ctx.keeps_sum = inputs
    ctx.of_change = None if change is None else change.dtype
    source = (output[1], None) if ctx.keeps_sum else (x, change)
    ctx.save_for_backward(*source, weight, output[2], output[3], seed)
    ctx.mark_non_differentiable(*(() if ctx.keeps_sum else output[1:2]), *output[2:])


def _grad(ctx: Any, backward: Any, grad: Tensor, grad_sum: Tensor, *_: Any) -> tuple[Any, ...]:
    arriving = grad, grad_sum if ctx.keeps_sum else None
    grad_x, grad_change, *others = backward(*arriving, *ctx.saved_tensors, ctx.dropout, ctx.of_change)
    given = grad_change if grad_change.numel() else grad_x
    return grad_x, None if ctx.of_change is None else given, *others, *[None] * 5


def _block(d: int) -> int:
    return triton.next_power_of_2(d // PARTS)


def _warps(d: int) -> int:
    return max(1, min(8, _block(d) * PARTS // 256))


_normed = Operator(
    "normed", _forward, _forward_fake, save=_save, grad=_grad,
    backward=Operator("normed_backward", _backward, _backward_fake),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- sum by itself


@triton.jit
def add_forward(x, change, out, seeds, size, limit, growth, LANES: tl.constexpr):
    """Add what dropout leaves of a change, 8 numbers by each draw."""
    lane, part = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[:, None], tl.arange(0, 8)[None, :]
    place = lane * 8 + part
    kept = keeps(tl.load(seeds), lane.to(tl.uint32), part, limit)
    mine = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    other = tl.load(change + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + place, (mine + tl.where(kept, other * growth, 0.0)).to(out.dtype.element_ty), mask=place < size)


@triton.jit
def add_backward(grad, grad_change, seeds, size, limit, growth, LANES: tl.constexpr):
    """Let the gradient of what was kept pass."""
    lane, part = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[:, None], tl.arange(0, 8)[None, :]
    place = lane * 8 + part
    kept = keeps(tl.load(seeds), lane.to(tl.uint32), part, limit)
    arriving = tl.load(grad + place, mask=place < size, other=0.0).to(tl.float32)
    passed = tl.where(kept, arriving * growth, 0.0)
    tl.store(grad_change + place, passed.to(grad_change.dtype.element_ty), mask=place < size)


def _add_forward(x: Tensor, change: Tensor, seed: Tensor, dropout: float) -> Tensor:
    x, change = x.contiguous(), change.contiguous()
    out = _add_fake(x, change, seed, dropout)
    launch_by_draws(add_forward, x, change, out, seed, dropout=dropout)
    return out


def _add_fake(x: Tensor, change: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _add_backward(grad: Tensor, seed: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    grad = grad.contiguous()
    grad_change = _add_backward_fake(grad, seed, dropout, dtype)
    launch_by_draws(add_backward, grad, grad_change, seed, dropout=dropout)
    return grad_change


def _add_backward_fake(grad: Tensor, seed: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    return torch.empty(grad.shape, dtype=dtype, device=grad.device)


def _add_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, change, seed, ctx.dropout = inputs
    ctx.dtype = change.dtype
    ctx.save_for_backward(seed)


def _add_grad(ctx: Any, backward: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad, backward(grad, *ctx.saved_tensors, ctx.dropout, ctx.dtype), None, None


_added = Operator(
    "added", _add_forward, _add_fake, save=_add_save, grad=_add_grad,
    backward=Operator("added_backward", _add_backward, _add_backward_fake),
)  # fmt: skip
