"""What a model calls: each function as plain torch, or as kernels where they serve its tensors."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pyramidion.kernels.launching import served


def add_norm(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, *, dropout: float = 0.0, eps: float = 1e-5
) -> Tensor:
    """Give LayerNorm(x + dropout(change)) for x, change [... d]; as kernels under autocast in its half precision."""
    if served(change) and change.shape[-1] % 8 == 0:
        from pyramidion.kernels import residual

        return residual.add_norm(x, change, weight, bias, dropout, eps)
    return F.layer_norm(x + F.dropout(change, dropout), weight.shape, weight, bias, eps)


def stream(x: Tensor) -> Tensor:
    """Give x in the precision in which `add_norm` hands it on: under autocast in half, where the kernels serve."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if served(x) and torch.is_autocast_enabled(kind) else x


def activate(x: Tensor, activation: Callable[[Tensor], Tensor], *, relu: bool, dropout: float = 0.0) -> Tensor:
    """Give dropout(activation(x)); `relu` says that the activation is this one, which has a kernel."""
    if relu and dropout > 0 and served(x):
        from pyramidion.kernels import feed_forward

        return feed_forward.relu_dropout(x, dropout)
    return F.dropout(activation(x), dropout)
