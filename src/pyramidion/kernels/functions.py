"""What a model calls: each function as plain torch, or as kernels where they serve its tensors.

Norms divide by a deviation of at least `eps` in the square. As kernels, under autocast, they give its half precision.
What a linear layer gives may come without its bias (`multiply`), which is then added here as the `shift`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from pyramidion.kernels.dropout import dropout as drop
from pyramidion.kernels.launching import served


def norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Give LayerNorm(x) for x [... d]."""
    if _fits(x):
        from pyramidion.kernels import residual

        return residual.norm(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_norm(
    x: Tensor,
    change: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    eps: float = 1e-5,
) -> Tensor:
    """Give LayerNorm(x + dropout(change + shift)) for x, change [... d], with a bias `shift` [d] of the change."""
    if _fits(change):
        from pyramidion.kernels import residual

        return residual.add_norm(x, change, shift, weight, bias, dropout, eps)
    return F.layer_norm(x + drop(_shifted(change, shift), dropout), weight.shape, weight, bias, eps)


def add_and_norm(
    x: Tensor,
    change: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Give the sum x + dropout(change + shift) itself, in the precision of x, and its LayerNorm."""
    if _fits(change):
        from pyramidion.kernels import residual

        return residual.add_and_norm(x, change, shift, weight, bias, dropout, eps)
    x = x + drop(_shifted(change, shift), dropout)
    return x, F.layer_norm(x, weight.shape, weight, bias, eps)


def add(x: Tensor, change: Tensor, *, shift: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Give x + dropout(change + shift)."""
    if (dropout > 0 or shift is not None) and _fits(change):
        from pyramidion.kernels import residual

        return residual.add(x, change, shift, dropout)
    return x + drop(_shifted(change, shift), dropout)


def activate(
    x: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    relu: bool,
    shift: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Give dropout(activation(x + shift)); `relu` says that the activation is this one, which has a kernel."""
    if relu and (dropout > 0 or shift is not None) and _fits(x):
        from pyramidion.kernels import feed_forward

        return feed_forward.relu_dropout(x, shift, dropout)
    return drop(activation(_shifted(x, shift)), dropout)


def multiply(x: Tensor, *linears: Any, bare: bool = False) -> tuple[Any, ...]:
    """Give x, for a residual connection to go on with, and of each layer linear(x) and None.

    If `bare`, the product alone and its bias, where a kernel sums its gradient: the functions above take both, and what
    a bias learns costs them nothing, and torch a pass over the product's gradient. Whoever replaced a layer, or looks
    on by a hook, has it called.
    """
    if not _learns(x, *linears):
        return x, *((linear(x), None) for linear in linears)
    shifts = [linear.bias if bare and _hands_over(linear) else None for linear in linears]
    biases = [linear.bias if shift is None else None for linear, shift in zip(linears, shifts, strict=True)]
    if (half := _product_dtype(x, *linears)) is None:
        outs = [F.linear(x, linear.weight, bias) for linear, bias in zip(linears, biases, strict=True)]
    else:
        from pyramidion.kernels import products

        weighed = [(linear.weight, bias) for linear, bias in zip(linears, biases, strict=True)]
        x, *outs = products.multiply(x, weighed, half)
    return x, *zip(outs, shifts, strict=True)


def multiply_and_activate(
    x: Tensor, linear: Any, activation: Callable[[Tensor], Tensor], *, relu: bool, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Give x, as `multiply` does, and dropout(activation(linear(x)))."""
    plain = relu and not dropout and _learns(x, linear) and _hands_over(linear)
    if plain and (half := _product_dtype(x, linear)) is not None:
        from pyramidion.kernels import products

        x, activated = products.multiply(x, [(linear.weight, linear.bias)], half, relu=True)
        return x, activated
    x, (product, shift) = multiply(x, linear, bare=relu)
    return x, activate(product, activation, relu=relu, shift=shift, dropout=dropout)


def _learns(x: Tensor, *linears: Any) -> bool:
    """Tell whether there are gradients to be spared: the layers are torch's own, and nobody looks on."""
    own = all(type(linear) is nn.Linear and unwatched(linear) for linear in linears)
    return own and torch.is_grad_enabled() and _fits(x)


def _hands_over(linear: nn.Linear) -> bool:
    """Tell whether a layer has a bias that learns, of a size that kernels take."""
    return linear.bias is not None and linear.bias.requires_grad and linear.out_features % 8 == 0


def _product_dtype(x: Tensor, *linears: nn.Linear) -> torch.dtype | None:
    """Name the precision of products that sum their gradients themselves, if they can: a compiled graph has its own."""
    if torch.compiler.is_compiling():
        return None
    kind = x.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    fits = torch.is_autocast_enabled(kind) or all(linear.weight.dtype == x.dtype for linear in linears)
    return half if fits else None


def unwatched(module: nn.Module) -> bool:
    """Tell whether calling a module does nothing but what its class says: no hooks, no other `forward`."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not (any(hooks) or _has_any_global_hook() or "forward" in vars(module))


def stream(x: Tensor) -> Tensor:
    """Give x in the precision in which `add_norm` hands it on: under autocast in half, where the kernels serve."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if served(x) and torch.is_autocast_enabled(kind) else x


def embed(
    tokens: Tensor,
    weight: Tensor,
    *,
    padding: int | None,
    factor: float,
    places: Tensor | None,
    table: Tensor | None,
    dropout: float,
    narrow: bool,
) -> Tensor:
    """Give dropout(weight[tokens] * factor + table[places - 1]) for tokens [...]: vectors [... d].

    weight   [v d]  a vector for each token; that of `padding` learns nothing
    places   [...]  the row of the table [n d] for each token, counted from 1: at 0 nothing is added
    narrow   in the precision in which `add_norm` hands on
    """
    if _fits(weight):
        from pyramidion.kernels import embedding

        dtype = stream(weight[:0]).dtype if narrow else weight.dtype
        return embedding.embed(tokens, weight, places, table, padding, factor, dropout, dtype)
    x = F.embedding(tokens, weight, padding) * factor
    return place(x, places=places, table=table, dropout=dropout, narrow=narrow)


def place(x: Tensor, *, places: Tensor | None, table: Tensor | None, dropout: float, narrow: bool) -> Tensor:
    """Do the same with the vectors x [... d] at hand."""
    if places is not None and table is not None:
        x = x + F.pad(table.to(x.dtype), (0, 0, 1, 0))[places]
    x = drop(x, dropout)
    return stream(x) if narrow else x


def score(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Give x·weight + bias for x [... d], a weight [1 d] and a bias [1]: [...], in at least float32."""
    if _fits(x):
        from pyramidion.kernels import direction

        return direction.score(x, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), bias.to(wide)).squeeze(-1)


def _fits(x: Tensor) -> bool:
    """Tell whether the kernels of norms serve x: they take 8 numbers at a time."""
    return served(x) and x.shape[-1] % 8 == 0


def _shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    return x if shift is None else x + shift.to(x.dtype)
