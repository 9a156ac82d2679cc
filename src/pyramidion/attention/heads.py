"""What every attention shares: projections into heads and back, and dot-product attention as a function."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyramidion.attention.layout import Layout
from pyramidion.kernels.dropout import dropout as drop
from pyramidion.kernels.functions import multiply

Attend = Callable[..., tuple[Tensor, Tensor | None]]


def eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, Tensor]:
    """Attend with the matrix written out: query [b h q e], key and value [b h n e] -> [b q h e], weights [b h q n].

    `mask` is bool, True for a key to attend to, and fits [b h q n]; a mask of numbers is added. The weights are those
    before dropout: what a token receives should not depend on chance.
    """
    products = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5  # [b h q n]
    if mask is not None and mask.dtype == torch.bool:
        products = products.masked_fill(~mask, torch.finfo(products.dtype).min)
    elif mask is not None:
        products = products + mask
    weights = products.softmax(-1, dtype=torch.promote_types(products.dtype, torch.float32)).to(query.dtype)
    mixed = drop(weights, dropout) @ value
    return mixed.transpose(1, 2), weights


def fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """Attend by torch's own fused kernels: the arguments of `eager`, and no weights."""
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout).transpose(1, 2), None


class SelfAttention(nn.Module):
    """Project blocks into heads, let a subclass mix them, and project back.

    A subclass says in `mix` over which geometry its heads attend: blocks, documents, buckets. All of them take blocks
    [B m d] with their Layout and return blocks, so that projections are computed for real tokens only.
    """

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"`width` must be a multiple of `heads`, got a width of {width} and {heads} heads.")
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: Tensor, layout: Layout, attend: Attend = fused, *, bare: bool = False
    ) -> tuple[Any, Tensor | None]:
        """Mix blocks x [B m d] -> [B m d], and the weights where `attend` gives them.

        attend  dot-product attention by any implementation, with the arguments of `eager`
        bare    leave the bias of the last product to the caller, and give x too, as `multiply` does
        """
        x, query, key, value = self.project(x)  # [B m h e]
        mixed, weights = self.mix(query, key, value, layout, attend)  # [B m h e]
        _, (out, shift) = multiply(mixed.flatten(2), self.out, bare=bare)
        return ((out, shift, x) if bare else out), weights

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Turn x [B m d] into queries, keys and values [B m h e]; give x, as `multiply` does, first."""
        x, *heads = multiply(x, self.query, self.key, self.value)
        query, key, value = (self.split(product) for product, _ in heads)
        return x, query, key, value

    def split(self, x: Tensor) -> Tensor:
        """Part the width into heads: [B m d] -> [B m h e]."""
        return x.unflatten(-1, (self.heads, -1))

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the values [B m h e] of each head."""
        raise NotImplementedError

    @property
    def rate(self) -> float:
        """Give the share of attention weights to drop now."""
        return self.dropout if self.training else 0.0


def received(weights: Tensor, mask: Tensor | None) -> Tensor:
    """Sum what each token receives, over all heads and real queries: weights [b h n n] -> [b n] (PoWER's score)."""
    weights = weights.float()
    if mask is not None:
        weights = weights * mask[:, None, :, None]
    return weights.sum((1, 2))
