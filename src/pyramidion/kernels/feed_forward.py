"""The middle of a feed-forward network in one go: a bias, what is positive stays, less what dropout takes.

Backward needs nothing but the result: what is above 0 was kept, and everything else passes no gradient. It sums what
it passes, which is the gradient of the bias.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.chance import keeps, new_seed
from pyramidion.kernels.registration import Operator
from pyramidion.kernels.tiles import Tiling, launch_by_columns, load_row, room_for_sums, store_row, tile

FORWARD = Tiling(rows=2, each=1, crowd=48, stages=1)
BACKWARD = Tiling(rows=1, each=1, crowd=16, stages=1)


def relu_dropout(x: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """Give dropout(relu(x + bias)) for x [... d], d a multiple of 8."""
    seed = new_seed(x.device) if dropout > 0 else None
    out: Tensor = _relu_dropout(x, bias, seed, dropout)
    return out


def relu_backward(grad: Tensor, out: Tensor, of_bias: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Go back through out = relu(x + bias), whoever computed it: the gradients of x and of a bias of that precision."""
    return _backward(grad, out, 0.0, of_bias)


@triton.jit(do_not_specialize=["rows"])
def relu_dropout_forward(
    x, bias, out, seeds, rows, limit, growth,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    SHIFTS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Go through rows of a group of columns, and decide for 8 numbers by each draw."""
    group = tl.program_id(1)
    shift = load_row(bias, group, D, LANES, SHIFTS)
    seed = tl.load(seeds) if DROPS else 0
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _, draw, place, inside, part = tile(start, group, rows, D, LANES, ROWS)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + shift
        kept = value > 0
        if DROPS:
            kept = kept & keeps(seed, draw, part, limit)
        tl.store(out + place, tl.where(kept, value * growth, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def relu_dropout_backward(
    grad, out, grad_x, sums, rows, limit, growth,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, SHIFTS: tl.constexpr,
):  # fmt: skip
    """Let the gradient of what was kept pass, and sum it over the rows."""
    group = tl.program_id(1)
    total = tl.zeros([1, LANES, 8], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _, _, place, inside, _ = tile(start, group, rows, D, LANES, ROWS)
        kept = tl.load(out + place, mask=inside, other=0.0) > 0
        arriving = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        passed = tl.where(kept, arriving * growth, 0.0)
        tl.store(grad_x + place, passed.to(grad_x.dtype.element_ty), mask=inside)
        if SHIFTS:
            total += tl.sum(passed, 0, keep_dims=True)
    if SHIFTS:
        store_row(sums, tl.program_id(0), total, group, D, LANES)


def _forward(x: Tensor, bias: Tensor | None, seed: Tensor | None, dropout: float) -> Tensor:
    x = x.contiguous()
    out = _forward_fake(x, bias, seed, dropout)
    options = {"SHIFTS": bias is not None, "DROPS": seed is not None}
    launch_by_columns(relu_dropout_forward, FORWARD, x, bias, out, seed, dropout=dropout, **options)
    return out


def _forward_fake(x: Tensor, bias: Tensor | None, seed: Tensor | None, dropout: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _backward(grad: Tensor, out: Tensor, dropout: float, of_bias: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Go back; `of_bias` is the precision of the bias, if there is one."""
    grad = grad.contiguous()
    grad_x, grad_bias = _backward_fake(grad, out, dropout, of_bias)
    sums = None if of_bias is None else room_for_sums(BACKWARD, grad)
    launch_by_columns(
        relu_dropout_backward, BACKWARD, grad, out, grad_x, sums, dropout=dropout, SHIFTS=sums is not None
    )
    return grad_x, grad_bias if sums is None else sums.sum(0).to(of_bias)


def _backward_fake(grad: Tensor, out: Tensor, dropout: float, of_bias: torch.dtype | None) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    return grad_x, grad.new_empty(0 if of_bias is None else grad.shape[-1], dtype=of_bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, ctx.dropout = inputs
    ctx.of_bias = None if bias is None else bias.dtype
    ctx.save_for_backward(output)


def _grad(ctx: Any, backward: Any, grad: Tensor) -> tuple[Any, ...]:
    grad_x, grad_bias = backward(grad, *ctx.saved_tensors, ctx.dropout, ctx.of_bias)
    return grad_x, None if ctx.of_bias is None else grad_bias, None, None


_relu_dropout = Operator(
    "relu_dropout", _forward, _forward_fake, save=_save, grad=_grad,
    backward=Operator("relu_dropout_backward", _backward, _backward_fake),
)  # fmt: skip
