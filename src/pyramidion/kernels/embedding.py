"""What enters the first layer in one go: look tokens up, scale them, add positions, and drop some.

Vectors are written once, in the precision that layers go on with. Of the gradients that arrive, dropout's are decided
again from the seed, and torch sums those of equal tokens.
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
from pyramidion.kernels.residual import drop_backward
from pyramidion.kernels.tiles import Tiling, tile

FORWARD = Tiling(rows=1, each=3, crowd=8, stages=3)


def embed(
    tokens: Tensor, weight: Tensor, places: Tensor | None, table: Tensor | None, padding: int | None,
    factor: float, dropout: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Give dropout(weight[tokens] * factor + table[places - 1]) for tokens [...], d a multiple of 8, as `dtype`.

    weight   [v d]  a vector for each token; that of `padding` learns nothing
    places   [...]  the row of the table [n d] for each token, counted from 1: at 0 nothing is added
    """
    seed = new_seed(weight.device) if dropout > 0 else None
    out: Tensor = _embedded(tokens, weight, places, table, seed, padding, factor, dropout, dtype)
    return out


@triton.jit(do_not_specialize=["rows", "words"])
def embed_forward(
    tokens, weight, places, table, out, seeds, rows, words, limit, growth, factor,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    PLACED: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Write the vectors of one program's tokens, ROWS at a time; of a token that does not exist, not a number."""
    seed = tl.load(seeds) if DROPS else 0
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row, draw, place, inside, part = tile(start, 0, rows, D, LANES, ROWS)
        column = place - row * D
        token = tl.load(tokens + row, mask=row < rows, other=0).to(tl.int64)
        known = (token >= 0) & (token < words)
        value = tl.load(weight + token * D + column, mask=inside & known, other=float("nan")).to(tl.float32) * factor
        if PLACED:
            spot = tl.load(places + row, mask=row < rows, other=0).to(tl.int64) - 1
            value += tl.load(table + spot * D + column, mask=inside & (spot >= 0), other=0.0).to(tl.float32)
        if DROPS:
            value = tl.where(keeps(seed, draw, part, limit), value * growth, 0.0)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def _forward(
    tokens: Tensor, weight: Tensor, places: Tensor | None, table: Tensor | None, seed: Tensor | None,
    padding: int | None, factor: float, dropout: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    tokens = tokens.contiguous()
    places, table = (None if one is None else one.contiguous() for one in (places, table))
    out, d = _forward_fake(tokens, weight, places, table, seed, padding, factor, dropout, dtype), weight.shape[1]
    launch(
        embed_forward, (FORWARD.programs(tokens.numel(), 1, weight.device),),
        tokens, weight.contiguous(), places, table, out, seed, tokens.numel(), weight.shape[0], threshold(dropout),
        scale(dropout), factor, D=d, **FORWARD.options(d // PARTS), PLACED=places is not None, DROPS=seed is not None,
    )  # fmt: skip
    return out


def _forward_fake(
    tokens: Tensor, weight: Tensor, places: Tensor | None, table: Tensor | None, seed: Tensor | None,
    padding: int | None, factor: float, dropout: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return torch.empty(*tokens.shape, weight.shape[1], dtype=dtype, device=weight.device)


def _backward(
    grad: Tensor, tokens: Tensor, seed: Tensor | None, words: int, padding: int | None, factor: float, dropout: float
) -> Tensor:
    """Go back to the table of vectors, in float32."""
    wide = grad.float() if seed is None else drop_backward(grad, seed, dropout, torch.float32)
    of_weight = torch.ops.aten.embedding_dense_backward(wide, tokens, words, -1 if padding is None else padding, False)
    return of_weight.mul_(factor)


def _backward_fake(
    grad: Tensor, tokens: Tensor, seed: Tensor | None, words: int, padding: int | None, factor: float, dropout: float
) -> Tensor:
    return torch.empty(words, grad.shape[-1], dtype=torch.float32, device=grad.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, weight, _, _, seed, *ctx.options, _ = inputs
    ctx.words, ctx.dtype = weight.shape[0], weight.dtype
    ctx.save_for_backward(tokens, seed)


def _grad(ctx: Any, backward: Any, grad: Tensor) -> tuple[Any, ...]:
    tokens, seed = ctx.saved_tensors
    of_weight = backward(grad, tokens, seed, ctx.words, *ctx.options)
    return None, of_weight.to(ctx.dtype), *[None] * 7


_embedded = Operator(
    "embedded", _forward, _forward_fake, save=_save, grad=_grad,
    backward=Operator("embedded_backward", _backward, _backward_fake),
)  # fmt: skip
