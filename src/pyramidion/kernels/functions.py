"""What a model calls: each function as plain torch, or as kernels where they serve its tensors.

Norms divide by a deviation of at least `eps` in the square. As kernels, under autocast, they give its half precision.
What a linear layer gives may come without its bias (`multiply`), which is then added here as the `shift`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

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
    return F.layer_norm(x + F.dropout(_shifted(change, shift), dropout), weight.shape, weight, bias, eps)


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
    x = x + F.dropout(_shifted(change, shift), dropout)
    return x, F.layer_norm(x, weight.shape, weight, bias, eps)


def add(x: Tensor, change: Tensor, *, shift: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Give x + dropout(change + shift)."""
    if (dropout > 0 or shift is not None) and _fits(change):
        from pyramidion.kernels import residual

        return residual.add(x, change, shift, dropout)
    return x + F.dropout(_shifted(change, shift), dropout)


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
    return F.dropout(activation(_shifted(x, shift)), dropout)


def multiply(linear: nn.Module, x: Tensor, *, bare: bool = True) -> tuple[Tensor, Tensor | None]:
    """Give linear(x) and None; or, if `bare`, the product alone and its bias, where a kernel sums its gradient.

    The functions above take both: what a bias learns costs them nothing, and torch a pass over the product's gradient.
    Whoever replaced the layer, or looks on by a hook, has it called.
    """
    if bare and _fits(x) and type(linear) is nn.Linear and unwatched(linear):
        bias = linear.bias
        if bias is not None and bias.requires_grad and torch.is_grad_enabled() and linear.out_features % 8 == 0:
            return F.linear(x, linear.weight), bias
    return linear(x), None


def unwatched(module: nn.Module) -> bool:
    """Tell whether calling a module does nothing but what its class says: no hooks, no other `forward`."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not (any(hooks) or _has_any_global_hook() or "forward" in vars(module))


def stream(x: Tensor) -> Tensor:
    """Give x in the precision in which `add_norm` hands it on: under autocast in half, where the kernels serve."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if served(x) and torch.is_autocast_enabled(kind) else x


def _fits(x: Tensor) -> bool:
    """Tell whether the kernels of norms serve x: they take 8 numbers at a time."""
    return served(x) and x.shape[-1] % 8 == 0


def _shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    return x if shift is None else x + shift.to(x.dtype)
