"""What a model calls: each function as plain torch, or as kernels where they serve its tensors.

Norms divide by a deviation of at least `eps` in the square. As kernels, under autocast, they give its half precision.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pyramidion.kernels.launching import served


def norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Give LayerNorm(x) for x [... d]."""
    if _fits(x):
        from pyramidion.kernels import residual

        return residual.norm(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_norm(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, *, dropout: float = 0.0, eps: float = 1e-5
) -> Tensor:
    """Give LayerNorm(x + dropout(change)) for x, change [... d]."""
    if _fits(change):
        from pyramidion.kernels import residual

        return residual.add_norm(x, change, weight, bias, dropout, eps)
    return F.layer_norm(x + F.dropout(change, dropout), weight.shape, weight, bias, eps)


def add_and_norm(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, *, dropout: float = 0.0, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Give the sum x + dropout(change) itself, in the precision of x, and its LayerNorm."""
    if _fits(change):
        from pyramidion.kernels import residual

        return residual.add_and_norm(x, change, weight, bias, dropout, eps)
    x = x + F.dropout(change, dropout)
    return x, F.layer_norm(x, weight.shape, weight, bias, eps)


def add(x: Tensor, change: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Give x + dropout(change)."""
    if dropout > 0 and served(change):
        from pyramidion.kernels import residual

        return residual.add(x, change, dropout)
    return x + F.dropout(change, dropout)


def activate(x: Tensor, activation: Callable[[Tensor], Tensor], *, relu: bool, dropout: float = 0.0) -> Tensor:
    """Give dropout(activation(x)); `relu` says that the activation is this one, which has a kernel."""
    if relu and dropout > 0 and served(x):
        from pyramidion.kernels import feed_forward

        return feed_forward.relu_dropout(x, dropout)
    return F.dropout(activation(x), dropout)


def stream(x: Tensor) -> Tensor:
    """Give x in the precision in which `add_norm` hands it on: under autocast in half, where the kernels serve."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if served(x) and torch.is_autocast_enabled(kind) else x


def _fits(x: Tensor) -> bool:
    """Tell whether the kernels of norms serve x: they take 8 numbers at a time."""
    return served(x) and x.shape[-1] % 8 == 0
