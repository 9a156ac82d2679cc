"""Shorten a sequence: score, select, pool. What goes between two layers of any model.

    pooler = Pooler(LinearScorer(width), k)
    x, mask, selection = pooler(x, mask)  # [b n d] -> [b k d]

`Pooler` keeps what a scorer asks for; `StridedPooler` blends neighbours, whatever they say. Both return at most k
representations, in order, and a Selection that accounts for every token.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyramidion.scoring import SCORERS, PowerScorer, ranks, score_dtype, whole_number
from pyramidion.topk import Selection, hard_topk, soft_topk, straight_through_topk

POOLINGS = ("soft", "hard", "straight-through", "power", "mean", "max", "funnel")
SELECTS = ("soft", "hard", "straight-through")
REDUCES = ("mean", "max")


class Pooled(NamedTuple):
    """What is left of a batch: representations x [b k d], mask [b k] of those that exist, and how they came about."""

    x: Tensor
    mask: Tensor
    selection: Selection


class Pooler(nn.Module):
    """Keep the k representations that a scorer asks for (section 3.1).

    select `soft` blends by the tournament of section 4; `hard` keeps the true top k; `straight-through` keeps them
    too, but learns as `soft` does. `temperature`, `base` and `sort` are those of `soft_topk`; `hard` has no use for
    them. Nothing flows back through `hard`, so it freezes its scorer: a parameter that asks for a gradient and never
    gets one breaks distributed training.

    Documents shorter than k keep all they have. The result has min(k, n) places, n being the width of the batch.
    """

    def __init__(
        self,
        scorer: nn.Module,
        k: int,
        *,
        select: str = "soft",
        temperature: float = 1.0,
        base: float | None = None,
        sort: bool = True,
    ) -> None:
        super().__init__()
        if not (isinstance(temperature, int | float) and 0 < temperature < math.inf):
            raise ValueError(f"`temperature` must be a positive number, got {temperature!r}.")
        if base is not None and not (isinstance(base, int | float) and 1 < base < math.inf):
            raise ValueError(f"`base` must be a number above 1, so that a better score weighs more, got {base!r}.")
        self.k = whole_number("k", k, 1)
        self.select = _one_of("select", select, SELECTS)
        self.temperature, self.base, self.sort = temperature, base, sort
        self.scorer = scorer.requires_grad_(False) if select == "hard" else scorer

    @property
    def wants_attention(self) -> bool:
        """Tell whether `forward` needs `received`."""
        return isinstance(self.scorer, PowerScorer)

    def forward(self, x: Tensor, mask: Tensor | None = None, received: Tensor | None = None) -> Pooled:
        """Pool x [b n d] into [b k d]; `received` [b n] is the attention that a PoWER scorer goes by."""
        _check(x, mask)
        scores = self.scorer(x, mask, received)  # [b n]
        k = self.k if self.k < x.shape[1] else x.shape[1]  # asked, not computed: a graph then knows that number
        selection = self._choose(scores, k, mask)
        return Pooled(selection.pool(x), selection.mask, selection)  # [b k d]

    def _choose(self, scores: Tensor, k: int, mask: Tensor | None) -> Selection:
        if self.select == "hard":
            return hard_topk(scores, k, mask=mask)
        choose = soft_topk if self.select == "soft" else straight_through_topk
        return choose(scores, k, mask=mask, temperature=self.temperature, base=self.base, sort=self.sort)

    def extra_repr(self) -> str:
        """Show what is kept, and how."""
        tournament = f", temperature={self.temperature}, base={self.base}, sort={self.sort}"
        return f"k={self.k}, select={self.select!r}" + ("" if self.select == "hard" else tournament)


class StridedPooler(nn.Module):
    """Blend each k-th part of a document, a window of neighbours, into one: the mean or the maximum of each coordinate.

    For n = s·k that is pooling with window and stride s, as the paper has it; other lengths get windows that differ
    by at most one token, and documents of up to k tokens stay as they are. The result has min(k, n) places.

    The maximum is not linear, so its Selection keeps the account and not the arithmetic: a token's weight is the
    share of the coordinates that it won, without gradient, and the winner is the token with the largest.
    """

    wants_attention = False

    def __init__(self, k: int, *, reduce: str = "mean") -> None:
        super().__init__()
        self.k = whole_number("k", k, 1)
        self.reduce = _one_of("reduce", reduce, REDUCES)

    def forward(self, x: Tensor, mask: Tensor | None = None, received: Tensor | None = None) -> Pooled:
        """Pool x [b n d] into [b k d]."""
        _check(x, mask)
        selection = windows(x, self.k, mask=mask)
        if self.reduce == "max":
            return _maximum(x, selection)
        return Pooled(selection.pool(x), selection.mask, selection)  # [b k d]

    def extra_repr(self) -> str:
        """Show what is kept, and how."""
        return f"k={self.k}, reduce={self.reduce!r}"


def windows(x: Tensor, k: int, *, mask: Tensor | None = None) -> Selection:
    """Cut the real tokens of x [b n d] into min(k, n) even windows of neighbours, each token with an equal share.

    Token r of n real ones goes to slot floor(r · min(k, n) / n); the first of a window stands for it.
    """
    b, n = x.shape[:2]
    places = min(k, n)
    m = -(-n // places)  # no window is longer: known from shapes, so no device is asked
    rank = ranks(mask, x)  # [b n]
    count = rank[:, -1:] + 1  # [b 1] real tokens
    parts = count.clamp(max=places)
    inside = (rank * parts) // count.clamp(min=1)  # [b n] the slot, for real tokens
    start = (inside * count + parts - 1) // parts.clamp(min=1)  # [b n] the rank with which that slot begins
    place = inside * m + rank - start
    if mask is not None:
        place = place.masked_fill(~mask, places * m)  # padding: one last place, cut off
    token = torch.arange(n, device=x.device).expand(b, n)
    members = token.new_full((b, places * m + 1), -1).scatter(1, place, token)[:, :-1].view(b, places, m)
    filled = members >= 0
    slots = inside if mask is None else inside.masked_fill(~mask, -1)
    size = filled.sum(-1).clamp(min=1).gather(1, slots.clamp(min=0))  # [b n] tokens in the window
    weights = size.to(score_dtype(x)).reciprocal().masked_fill(slots < 0, 0)
    return Selection(slots, weights, filled[..., 0], weights.new_zeros(b, places), members[..., 0], members)


def _maximum(x: Tensor, window: Selection) -> Pooled:
    """Take the maximum of each coordinate over each window; equal ones go to the earlier token."""
    members, filled = window.members, window.mask
    assert members is not None
    row = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1)
    value = x.detach()[row, members.clamp(min=0)].masked_fill((members < 0).unsqueeze(-1), -torch.inf)  # [b k m d]
    chosen = members.gather(2, value.argmax(2)).clamp(min=0)  # [b k d] who won each coordinate
    pooled = x.gather(1, chosen).masked_fill(~filled.unsqueeze(-1), 0)

    won = filled.unsqueeze(-1).expand_as(chosen).to(window.weights.dtype)
    weights = torch.zeros_like(window.weights).scatter_add(1, chosen.flatten(1), won.flatten(1)) / x.shape[2]  # [b n]
    share = weights.gather(1, members.clamp(min=0).flatten(1)).view_as(members).masked_fill(members < 0, -1)
    winners = members.gather(2, share.argmax(2, keepdim=True)).squeeze(2)  # [b k]
    selection = Selection(window.slots, weights, filled, window.scores, winners, members)
    return Pooled(pooled, filled, selection)


def make_pooler(
    pooling: str,
    k: int,
    width: int,
    *,
    scorer: str | None = None,
    temperature: float = 1.0,
    base: float | None = None,
    sort: bool = True,
    seed: int = 0,
    index: int = 0,
) -> Pooler | StridedPooler:
    """Make a pooler by name, one of `POOLINGS`, for representations of size `width`.

    `soft`, `hard` and `straight-through` take the name of a scorer, one of `SCORERS`, by default `linear`. `power`
    is the hard choice by the attention received. `mean`, `max` and `funnel` are strided; Funnel's is the mean, and
    sending the result back to the full length is left to the model (`Selection.unpool`). The other options go to
    those that have a use for them: `seed` to the random scorer, `index` to the one that reads a coordinate.
    """
    _one_of("pooling", pooling, POOLINGS)
    if scorer is not None and pooling not in SELECTS:
        raise ValueError(f"`scorer` must be None with the pooling {pooling!r}, which has its own rule, got {scorer!r}.")
    if pooling not in (*SELECTS, "power"):
        return StridedPooler(k, reduce="max" if pooling == "max" else "mean")
    name = "power" if pooling == "power" else _one_of("scorer", "linear" if scorer is None else scorer, tuple(SCORERS))
    if name == "embedding" and not index < width:
        raise ValueError(f"`index` must be below the width, {width}, got {index}.")
    inputs = {"linear": width, "nonlinear": width, "embedding": index, "random": seed, "index": k}
    chosen = SCORERS[name](inputs[name]) if name in inputs else SCORERS[name]()
    select = "hard" if pooling == "power" else pooling
    return Pooler(chosen, k, select=select, temperature=temperature, base=base, sort=sort)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}.")
    return value


def _check(x: Tensor, mask: Tensor | None) -> None:
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(f"`x` must be floating point [b n d], got {x.dtype} of shape {list(x.shape)}.")
    if x.shape[1] < 1:
        raise ValueError(f"`x` must hold at least one token a row, got shape {list(x.shape)}.")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"`mask` must be a bool tensor, True for a real token, got {mask.dtype}.")
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError(f"`mask` must have the shape {list(x.shape[:2])} of x, got {list(mask.shape)}.")
