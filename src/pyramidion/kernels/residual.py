"""A residual connection in one go: add what a sublayer gives, with dropout, and normalise the sum.

Each way is one kernel that reads and writes every number once: the sum, its mean and its deviation never leave the
registers, and backward computes them again from what went in.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.chance import PARTS, keeps, new_seed, scale, threshold
from pyramidion.kernels.launching import launch, processors
from pyramidion.kernels.registration import Operator

ROWS = 4  # of one program on the way forward
CROWD = 8  # programs of a multiprocessor on the way back


def add_norm(x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, dropout: float, eps: float) -> Tensor:
    """Give LayerNorm(x + dropout(change)) for x, change [... d], d a multiple of 8; under autocast in half."""
    kind = x.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    seed = new_seed(x.device) if dropout > 0 else None
    out: Tensor = _add_norm(x, change, weight, bias, seed, dropout, eps, half)[0]
    return out


@triton.jit
def load_sum(x, change, seed, row, column, inside, part, lane, limit, growth, D: tl.constexpr, DROPS: tl.constexpr):
    """Load a row of both [n 8] and add them, after dropout; also say who was kept."""
    mine = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(change + row * D + column, mask=inside, other=0.0).to(tl.float32)
    kept = inside
    if DROPS:
        kept = inside & keeps(seed, (row * (D // 8) + lane).to(tl.uint32), part, limit)
        other = tl.where(kept, other * growth, 0.0)
    return mine + other, kept


@triton.jit(do_not_specialize=["rows"])
def add_norm_forward(
    x, change, weight, bias, out, means, spreads, seeds, rows, limit, growth, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Normalise the sums of ROWS rows, one after the other."""
    lane, part = tl.arange(0, BLOCK)[:, None], tl.arange(0, 8)[None, :]
    column, inside = lane * 8 + part, (lane < D // 8) & (part < 8)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    seed = tl.load(seeds) if DROPS else 0
    for turn in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + turn
        if row < rows:
            total, _ = load_sum(x, change, seed, row, column, inside, part, lane, limit, growth, D, DROPS)
            mean = tl.sum(total) / D
            centred = tl.where(inside, total - mean, 0.0)
            spread = 1.0 / tl.sqrt(tl.sum(centred * centred) / D + eps)
            tl.store(out + row * D + column, (centred * spread * gain + offset).to(out.dtype.element_ty), mask=inside)
            tl.store(means + row, mean)
            tl.store(spreads + row, spread)


@triton.jit(do_not_specialize=["rows"])
def add_norm_backward(
    grad, x, change, weight, means, spreads, seeds, grad_x, grad_change, grad_weight, grad_bias,
    rows, limit, growth, D: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Go back through the rows of one program, and sum what they ask of weight and bias."""
    lane, part = tl.arange(0, BLOCK)[:, None], tl.arange(0, 8)[None, :]
    column, inside = lane * 8 + part, (lane < D // 8) & (part < 8)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    seed = tl.load(seeds) if DROPS else 0
    of_gain, of_offset = tl.zeros([BLOCK, 8], tl.float32), tl.zeros([BLOCK, 8], tl.float32)
    for start in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(start, tl.int64)
        total, kept = load_sum(x, change, seed, row, column, inside, part, lane, limit, growth, D, DROPS)
        mean, spread = tl.load(means + row), tl.load(spreads + row)
        standard = tl.where(inside, (total - mean) * spread, 0.0)
        arriving = tl.load(grad + row * D + column, mask=inside, other=0.0).to(tl.float32)
        of_gain += arriving * standard
        of_offset += arriving
        pull = arriving * gain
        along, level = tl.sum(pull * standard) / D, tl.sum(pull) / D
        leaving = (pull - level - standard * along) * spread
        tl.store(grad_x + row * D + column, leaving.to(grad_x.dtype.element_ty), mask=inside)
        if TWO:
            passed = tl.where(kept, leaving * growth, 0.0)
            tl.store(grad_change + row * D + column, passed.to(grad_change.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * D + column
    tl.store(grad_weight + place, of_gain, mask=inside)
    tl.store(grad_bias + place, of_offset, mask=inside)


def _forward(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None,
    dropout: float, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, change = x.contiguous(), change.contiguous()
    d, rows = x.shape[-1], x.numel() // x.shape[-1]
    out = torch.empty_like(x, dtype=dtype)
    means, spreads = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)
    if rows:
        launch(
            add_norm_forward, (triton.cdiv(rows, ROWS),),
            x, change, weight, bias, out, means, spreads, seed, rows, threshold(dropout), scale(dropout), eps,
            D=d, BLOCK=_block(d), ROWS=ROWS, DROPS=seed is not None, num_warps=_warps(d),
        )  # fmt: skip
    return out, means, spreads


def _forward_fake(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None,
    dropout: float, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = x.numel() // x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return out, x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _backward(
    grad: Tensor, x: Tensor, change: Tensor, weight: Tensor, means: Tensor, spreads: Tensor, seed: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad, x, change = grad.contiguous(), x.contiguous(), change.contiguous()
    d, rows = x.shape[-1], x.numel() // x.shape[-1]
    two = seed is not None or x.dtype != change.dtype  # else one gradient serves both
    grad_x, grad_change = torch.empty_like(x), torch.empty_like(change) if two else change.new_empty(0)
    programs = max(1, min(rows, CROWD * processors(x.device)))
    sums = x.new_empty(2, programs, d, dtype=torch.float32)
    launch(
        add_norm_backward, (programs,),
        grad, x, change, weight, means, spreads, seed, grad_x, grad_change, sums[0], sums[1],
        rows, threshold(dropout), scale(dropout), D=d, BLOCK=_block(d), DROPS=seed is not None, TWO=two,
        num_warps=_warps(d),
    )  # fmt: skip
    of_weight, of_bias = sums.sum(1).to(weight.dtype)
    return grad_x, grad_change, of_weight.clone(), of_bias.clone()


def _backward_fake(
    grad: Tensor, x: Tensor, change: Tensor, weight: Tensor, means: Tensor, spreads: Tensor, seed: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    two = seed is not None or x.dtype != change.dtype
    grad_change = torch.empty_like(change) if two else change.new_empty(0)
    return torch.empty_like(x), grad_change, torch.empty_like(weight), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, change, weight, _, seed, ctx.dropout, _, _ = inputs
    ctx.save_for_backward(x, change, weight, output[1], output[2], seed)
    ctx.mark_non_differentiable(output[1], output[2])


def _grad(ctx: Any, backward: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    grad_x, grad_change, grad_weight, grad_bias = backward(grad, *ctx.saved_tensors, ctx.dropout)
    return grad_x, grad_change if grad_change.numel() else grad_x, grad_weight, grad_bias, None, None, None, None


def _block(d: int) -> int:
    return triton.next_power_of_2(d // PARTS)


def _warps(d: int) -> int:
    return max(1, min(8, _block(d) * PARTS // 256))


_add_norm = Operator(
    "add_norm", _forward, _forward_fake, save=_save, grad=_grad,
    backward=Operator("add_norm_backward", _backward, _backward_fake),
)  # fmt: skip
