"""Several products of the same rows in one go: what they ask of the rows is summed by the products themselves.

Where queries, keys, values and a residual connection all start from x, torch adds four gradients up in three passes.
Here each product adds its own to what is there. Gradients of weights come in their own precision, not rounded to half
and widened again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyramidion.kernels import feed_forward

Weighed = tuple[Tensor, Tensor | None]  # a weight [e d], and the bias [e] to add, if any


def multiply(x: Tensor, weighed: Sequence[Weighed], half: torch.dtype, *, relu: bool = False) -> tuple[Tensor, ...]:
    """Give x [... d] itself, and its product [... e] with each weight in the precision `half`; with `relu` its ReLU.

    Whoever goes on with the x that is returned must be done with its gradient before the products' gradients arrive,
    because these are added into it: a residual connection around the products is.
    """
    found: tuple[Tensor, ...] = Products.apply(x, half, relu, *(part for pair in weighed for part in pair))
    return found


class Products(torch.autograd.Function):
    """Multiply rows by weights; see `multiply`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: torch.dtype, relu: bool, *pairs: Any) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1]).to(half)  # [r d]
        weights = [weight.to(half) for weight in pairs[::2]]
        biases = [None if bias is None else bias.to(half) for bias in pairs[1::2]]
        outs = [_product(rows, weight, bias, relu=relu) for weight, bias in zip(weights, biases, strict=True)]
        ctx.save_for_backward(rows, *weights, *(outs if relu else []))
        ctx.set_materialize_grads(False)
        ctx.dtypes, ctx.relu, ctx.shape = [None if part is None else part.dtype for part in (x, *pairs)], relu, x.shape
        return x.view_as(x), *(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_x: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        rows, *saved = ctx.saved_tensors
        weights, results = saved[: len(grads)], saved[len(grads) :]
        wanted, pairs = ctx.needs_input_grad, []
        found: list[Tensor | None] = []
        for number, given in enumerate(grads):
            weight, bias = 3 + 2 * number, 4 + 2 * number  # their places among what was given
            if given is None:
                found += [None, None]
                continue
            grad, sums = given.reshape(-1, given.shape[-1]), None  # [r e]
            if ctx.relu:
                grad, sums = feed_forward.relu_backward(grad, results[number], ctx.dtypes[bias - 2])
            elif wanted[bias]:
                sums = _sum(grad, ctx.dtypes[bias - 2])
            found += [_of_weight(grad, rows, ctx.dtypes[weight - 2]) if wanted[weight] else None, sums]
            pairs.append((grad, weights[number]))
        return _of_x(of_x, pairs, ctx) if wanted[0] else None, None, None, *found


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    if relu:
        assert bias is not None
        return torch._addmm_activation(bias, rows, weight.t())  # its ReLU, without another pass
    return torch.nn.functional.linear(rows, weight, bias)


def _of_x(of_x: Tensor | None, pairs: Sequence[tuple[Tensor, Tensor]], ctx: Any) -> Tensor | None:
    """Sum the gradients of x: what arrives for it, into which products are added where that can be done, and theirs."""
    total: Tensor | None = None
    if of_x is not None and pairs and of_x.is_contiguous() and of_x.dtype == pairs[0][0].dtype:
        total, of_x = of_x.view(-1, of_x.shape[-1]), None
    for grad, weight in pairs:
        total = grad @ weight if total is None else total.addmm_(grad, weight)
    if total is None:
        return of_x
    total = total.view(ctx.shape).to(ctx.dtypes[0])
    return total if of_x is None else total + of_x


def _of_weight(grad: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if grad.is_cuda and grad.dtype != dtype == torch.float32:
        return torch.mm(grad.t(), rows, out_dtype=dtype)
    return (grad.t() @ rows).to(dtype)


def _sum(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum rows [r e] -> [e]: of half precision by a product, which reads them faster than torch's sum does."""
    if grad.is_cuda and grad.dtype != dtype == torch.float32:
        return torch.mm(grad.new_ones(1, grad.shape[0]), grad, out_dtype=dtype).squeeze(0)
    return grad.sum(0).to(dtype)
