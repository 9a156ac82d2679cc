"""The middle of a feed-forward network in one go: what is positive stays, less what dropout takes.

Backward needs nothing but the result: what is above 0 was kept, and everything else passes no gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.chance import keeps, launch_by_draws, new_seed
from pyramidion.kernels.registration import Operator


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """Give dropout(relu(x)) for x of any shape."""
    out: Tensor = _relu_dropout(x, new_seed(x.device), dropout)
    return out


@triton.jit
def relu_dropout_forward(x, out, seeds, size, limit, growth, LANES: tl.constexpr):
    """Decide for 8 numbers by each of LANES draws."""
    lane, part = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[:, None], tl.arange(0, 8)[None, :]
    place = lane * 8 + part
    value = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    kept = (value > 0) & keeps(tl.load(seeds), lane.to(tl.uint32), part, limit)
    tl.store(out + place, tl.where(kept, value * growth, 0.0).to(out.dtype.element_ty), mask=place < size)


@triton.jit
def relu_dropout_backward(grad, out, grad_x, size, limit, growth, LANES: tl.constexpr):
    """Let the gradient of what was kept pass."""
    place = tl.program_id(0).to(tl.int64) * (8 * LANES) + tl.arange(0, 8 * LANES)
    kept = tl.load(out + place, mask=place < size, other=0.0) > 0
    arriving = tl.load(grad + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(grad_x + place, tl.where(kept, arriving * growth, 0.0).to(grad_x.dtype.element_ty), mask=place < size)


def _forward(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    launch_by_draws(relu_dropout_forward, x, out, seed, dropout=dropout)
    return out


def _forward_fake(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _backward(grad: Tensor, out: Tensor, dropout: float) -> Tensor:
    grad = grad.contiguous()
    grad_x = torch.empty_like(grad)
    launch_by_draws(relu_dropout_backward, grad, out, grad_x, dropout=dropout)
    return grad_x


def _backward_fake(grad: Tensor, out: Tensor, dropout: float) -> Tensor:
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dropout = inputs[2]
    ctx.save_for_backward(output)


def _grad(ctx: Any, backward: Any, grad: Tensor) -> tuple[Any, ...]:
    return backward(grad, *ctx.saved_tensors, ctx.dropout), None, None


_relu_dropout = Operator(
    "relu_dropout", _forward, _forward_fake, save=_save, grad=_grad,
    backward=Operator("relu_dropout_backward", _backward, _backward_fake),
)  # fmt: skip
