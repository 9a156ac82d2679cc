"""The one abstraction: which of n inputs went into which of k slots, and with what share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyramidion.kernels.registration import Operator
from pyramidion.topk import backends


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """Hold where each of n inputs went, and pool anything by it.

    Every input sits in at most one slot, and the weights of a slot sum to 1, so a whole tournament over vectors is
    one weighted segment sum: each vector is read once. Whatever shortens a sequence linearly is a Selection.

    slots    [b n]    the slot of each input, -1: dropped
    weights  [b n]    its share of that slot
    mask     [b k]    True where a slot is filled; filled slots come first
    scores   [b k]    the slot's own score, 0 where it is empty
    winners  [b k]    the input that dominates the slot, -1 where it is empty; ascending, so order is kept
    members  [b k m]  the inputs of each slot, -1 in unused places: `slots` inverted, found when first needed if absent
    """

    slots: Tensor
    weights: Tensor
    mask: Tensor
    scores: Tensor
    winners: Tensor
    members: Tensor | None = None

    def __repr__(self) -> str:
        return f"Selection(b={self.slots.shape[0]}, n={self.n}, k={self.k})"

    @property
    def n(self) -> int:
        """Count the inputs, padding included."""
        return self.slots.shape[1]

    @property
    def k(self) -> int:
        """Count the slots, empty ones included."""
        return self.mask.shape[1]

    def pool(self, x: Tensor, *, backend: str = "auto") -> Tensor:
        """Blend x [b n ...] into [b k ...]: a slot holds the weighted sum of its inputs, an empty one zeros.

        Sums in at least float32 and returns the dtype of x. Differentiable in x and in the weights.
        """
        self._check(x, self.slots.shape, "[b n ...]")
        flat = x if x.ndim == 3 else x.reshape(*self.slots.shape, -1)  # [b n d]
        members = invert(self.slots, self.k) if self.members is None else self.members
        if backends.resolve(backend, x) == "triton":
            from pyramidion.topk import fused

            pooled = fused.pool(flat, self.slots, self.weights, members)
        else:
            pooled = _pool(flat, self.slots, self.weights, members)
        return pooled if x.ndim == 3 else pooled.view(x.shape[0], self.k, *x.shape[2:])

    def unpool(self, y: Tensor) -> Tensor:
        """Send y [b k ...] back: each input gets its slot's vector, unweighted, a dropped one zeros: [b n ...]."""
        self._check(y, self.mask.shape, "[b k ...]")
        flat = y.reshape(*self.mask.shape, -1)  # [b k d]
        index = self.slots.clamp(min=0).unsqueeze(-1).expand(-1, -1, flat.shape[-1])
        spread = flat.gather(1, index).masked_fill((self.slots < 0).unsqueeze(-1), 0)
        return spread.view(y.shape[0], self.n, *y.shape[2:])

    def then(self, other: "Selection") -> "Selection":
        """Compose: the Selection that does this one and then `other` on its slots.

        `first.then(second).pool(x)` is `second.pool(first.pool(x))`. Slots go through slots and weights multiply, so
        the composition over all pooling layers says which source token is in which memory slot, and how much.
        """
        if other.slots.shape != self.mask.shape:
            raise ValueError(
                f"`other` must select from the {tuple(self.mask.shape)} slots of this Selection, "
                f"got one that selects from {tuple(other.slots.shape)}."
            )
        through = self.slots.clamp(min=0)
        slots = other.slots.gather(1, through).masked_fill(self.slots < 0, -1)
        weights = self.weights * other.weights.gather(1, through).masked_fill(slots < 0, 0)
        winners = _follow(self.winners, other.winners)
        members = None
        if self.members is not None and other.members is not None:
            b, k, m = other.members.shape
            inner = self.members.shape[2]
            row = other.members.clamp(min=0).reshape(b, k * m, 1).expand(-1, -1, inner)
            hole = (other.members < 0).reshape(b, k * m, 1)
            members = self.members.gather(1, row).masked_fill(hole, -1).view(b, k, m * inner)
        return Selection(slots, weights, other.mask, other.scores, winners, members)

    def dense(self) -> Tensor:
        """Write the Selection out as a matrix [b k n], so that pooling is `dense() @ x`."""
        choice = self.weights.new_zeros(self.slots.shape[0], self.k + 1, self.n)
        row = self.slots.masked_fill(self.slots < 0, self.k).unsqueeze(1)  # dropped inputs: a last row, cut off
        return choice.scatter(1, row, self.weights.unsqueeze(1))[:, : self.k]

    def _check(self, x: Tensor, shape: torch.Size, form: str) -> None:
        if x.shape[:2] != shape:
            raise ValueError(f"Expected {form} with [b, ·] = {list(shape)}, got shape {list(x.shape)}.")
        if not x.is_floating_point():
            raise ValueError(f"Expected a floating-point tensor, got {x.dtype}.")
        if x.device != self.slots.device:
            raise ValueError(f"Expected a tensor on {self.slots.device}, where the Selection is, got {x.device}.")


def _follow(first: Tensor, second: Tensor) -> Tensor:
    """Look `second`'s entries up in `first`, -1 staying -1."""
    return first.gather(1, second.clamp(min=0)).masked_fill(second < 0, -1)


def invert(slots: Tensor, k: int) -> Tensor:
    """List the inputs of each slot: slots [b n] -> members [b k m], ascending, -1 where a slot has fewer than m."""
    b, n = slots.shape
    key = slots.masked_fill(slots < 0, k)
    order = key.argsort(dim=1, stable=True)  # [b n] inputs, slot by slot
    count = key.new_zeros(b, k + 1).scatter_add_(1, key, torch.ones_like(key))
    start = count.cumsum(1) - count
    key = key.gather(1, order)
    place = torch.arange(n, device=slots.device) - start.gather(1, key)
    m = max(int(count[:, :k].max()), 1)
    table = slots.new_full((b, k + 1, m), -1)
    row = torch.arange(b, device=slots.device).unsqueeze(1).expand_as(key)
    kept = key < k
    table[row[kept], key[kept], place[kept]] = order[kept]
    return table[:, :k]


# One weighted segment sum and its two gathers, all documents laid end to end. Nothing of the size of x is kept but x.

TILE = 512  # inputs a step of the backward pass on a CPU, so that they stay in its cache


def _weigh(x: Tensor, slots: Tensor, weights: Tensor, members: Tensor) -> Tensor:
    b, n, d = x.shape
    k, m = members.shape[1:]
    hole = members < 0
    inside = torch.where(hole, members.amax(-1, keepdim=True).clamp(min=0), members)  # a hole reads a member, times 0
    share = weights.gather(1, inside.view(b, k * m)).view(b, k, m).masked_fill(hole, 0)
    row = (inside + n * torch.arange(b, device=x.device).view(b, 1, 1)).view(b * k, m)
    table = x.reshape(b * n, d).to(torch.promote_types(x.dtype, torch.float32))
    pooled = F.embedding_bag(row, table, per_sample_weights=share.view(b * k, m).to(table.dtype), mode="sum")
    return pooled.view(b, k, d).masked_fill_(hole.all(-1, keepdim=True), 0).to(x.dtype)


def _weigh_backward(grad: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    b, n, d = x.shape
    k = grad.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    source, given = grad.reshape(b * k, d).to(wide), x.reshape(b * n, d)
    row = (slots.clamp(min=0) + k * torch.arange(b, device=x.device).unsqueeze(1)).flatten()
    share = weights.masked_fill(slots < 0, 0).to(wide).view(b * n, 1)
    grad_x, grad_weights = x.new_empty(b * n, d), weights.new_empty(b * n)
    step = max(1, min(TILE if x.device.type == "cpu" else b * n, b * n))
    room, product = x.new_empty(2, step, d, dtype=wide)
    for start in range(0, b * n, step):
        tile = slice(start, min(start + step, b * n))
        size = tile.stop - start
        arriving = grad_x[tile] if wide == x.dtype else room[:size]  # [tile d], in place where it can be
        torch.index_select(source, 0, row[tile], out=arriving)
        grad_weights[tile] = torch.mul(arriving, given[tile], out=product[:size]).sum(-1)
        torch.mul(arriving, share[tile], out=grad_x[tile])
    return grad_x.view(b, n, d), grad_weights.view(b, n).masked_fill_(slots < 0, 0)


def pool_fake(x: Tensor, slots: Tensor, weights: Tensor, members: Tensor) -> Tensor:
    """Shape the result of pooling."""
    return x.new_empty(x.shape[0], members.shape[1], x.shape[2])


def pool_backward_fake(grad: Tensor, x: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Shape the gradients of pooling."""
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


def pool_save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Keep what the gradient of pooling needs: what was there anyway."""
    x, slots, weights, _ = inputs
    ctx.save_for_backward(x, slots, weights)


def pool_grad(ctx: Any, backward: Callable[..., Any], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Send the gradient of a slot to its members: weighted to x, along x to the weights."""
    grad_x, grad_weights = backward(grad.contiguous(), *ctx.saved_tensors)
    return grad_x, None, grad_weights, None


_pool_backward = Operator("pool_backward", _weigh_backward, pool_backward_fake)
_pool = Operator("pool", _weigh, pool_fake, save=pool_save, grad=pool_grad, backward=_pool_backward)
