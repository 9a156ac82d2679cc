"""Score rows by a direction in one go: x·w + b in float32, whatever the precision of x, which is read once each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.chance import PARTS
from pyramidion.kernels.launching import launch
from pyramidion.kernels.registration import Operator
from pyramidion.kernels.residual import load_each, sum_rows
from pyramidion.kernels.tiles import Tiling, load_row, store_row, tile

FORWARD = Tiling(rows=1, each=3, crowd=8, stages=3)
BACKWARD = Tiling(rows=1, each=3, crowd=8, stages=3)


def score(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Give x·weight + bias for x [... d], d a multiple of 8, a weight [1 d] and a bias [1]: [...], in float32."""
    scores: Tensor = _scored(x, weight.squeeze(0))
    return scores + bias.float()


@triton.jit(do_not_specialize=["rows"])
def score_forward(
    x, weight, out, rows, D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Score the rows of one program, ROWS at a time."""
    direction = load_row(weight, 0, D, LANES, True)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, _, place, inside, _ = tile(start, 0, rows, D, LANES, ROWS)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row, sum_rows(value * direction), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def score_backward(
    grad, x, weight, grad_x, vectors, rows,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go back through the rows of one program, and sum what they ask of the direction."""
    direction = load_row(weight, 0, D, LANES, True)
    asked = tl.zeros([1, LANES, 8], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        _, _, place, inside, _ = tile(start, 0, rows, D, LANES, ROWS)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        arriving = load_each(grad, start, rows, ROWS)
        tl.store(grad_x + place, (arriving * direction).to(grad_x.dtype.element_ty), mask=inside)
        asked += tl.sum(arriving * value, 0, keep_dims=True)
    store_row(vectors, tl.program_id(0), asked, 0, D, LANES)


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    x, out, d = x.contiguous(), _forward_fake(x, weight), x.shape[-1]
    grid = (FORWARD.programs(out.numel(), 1, x.device),)
    launch(score_forward, grid, x, weight.contiguous(), out, out.numel(), D=d, **FORWARD.options(d // PARTS))
    return out


def _forward_fake(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad, x, d = grad.contiguous(), x.contiguous(), x.shape[-1]
    grad_x, of_weight = _backward_fake(grad, x, weight)
    programs = BACKWARD.programs(grad.numel(), 1, x.device)
    sums = grad.new_empty(programs, d)
    launch(
        score_backward, (programs,),
        grad, x, weight.contiguous(), grad_x, sums, grad.numel(), D=d, **BACKWARD.options(d // PARTS),
    )  # fmt: skip
    return grad_x, of_weight.copy_(sums.sum(0))


def _backward_fake(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad(ctx: Any, backward: Any, grad: Tensor) -> tuple[Any, ...]:
    found: tuple[Any, ...] = backward(grad, *ctx.saved_tensors)
    return found


_scored = Operator(
    "scored", _forward, _forward_fake, save=_save, grad=_grad,
    backward=Operator("scored_backward", _backward, _backward_fake),
)  # fmt: skip
