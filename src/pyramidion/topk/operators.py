"""The public door of the operator: validate once, choose a backend, return a Selection."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyramidion.topk import backends, reference, tournament
from pyramidion.topk.selection import Selection


def _kernels(*inputs: Any, **options: Any) -> Selection:
    from pyramidion.topk import fused  # late: it imports Triton

    return fused.soft_topk(*inputs, **options)


BACKENDS = {"reference": reference.soft_topk, "torch": tournament.soft_topk, "triton": _kernels}


def soft_topk(
    scores: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    base: float | None = None,
    sort: bool = True,
    backend: str = "auto",
) -> Selection:
    """Blend n scored inputs into k, dominated by the best, by a differentiable tournament (section 4).

    Rounds of pairs halve the candidates until k remain: sorted by score, the i-th meets the i-th from the end, and
    the two blend with the softmax of their scores divided by `temperature`, or, with `base`, of `base ** score`.
    The new score is the same blend. Missing opponents are byes, so any n and k will do, and each document plays only
    the rounds its own length asks for.

    scores  [b n] floating point; half precision is taken up to float32
    mask    [b n] bool, True for a real input; what stands elsewhere is never looked at
    sort    False pairs the candidates as they stand (the paper's ablation)
    backend `reference`, `torch`, `triton`, or `auto`: the fastest that serves the tensors

    Scores that are not finite are refused where looking costs nothing: on the CPU, outside torch.compile. Elsewhere
    such an input's weight is NaN, and so is whatever is pooled from it.
    """
    _check(scores, k, mask)
    if not (isinstance(temperature, int | float) and 0 < temperature < math.inf):
        raise ValueError(f"`temperature` must be a positive number, got {temperature!r}.")
    if base is not None and not (isinstance(base, int | float) and 1 < base < math.inf):
        raise ValueError(f"`base` must be a number above 1, so that a better score weighs more, got {base!r}.")
    if base is not None and scores.shape[0] and _looks(scores):
        top = float(scores.detach().amax() if mask is None else scores.detach().where(mask, -torch.inf).amax())
        if top * math.log(base) > 700:
            raise ValueError(f"`base ** scores` must stay finite, got {base} ** {top}.")
    play = BACKENDS[backends.resolve(backend, scores)]
    return play(scores, k, mask, temperature=float(temperature), base=None if base is None else float(base), sort=sort)


def hard_topk(scores: Tensor, k: int, *, mask: Tensor | None = None) -> Selection:
    """Keep the true top k, in order of position, each with weight 1; the rest are dropped.

    Equal scores go to the earlier position. Nothing flows back to the scores: train with `soft_topk` or
    `straight_through_topk`.
    """
    _check(scores, k, mask)
    b, n = scores.shape
    score = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    usable = torch.isfinite(score)
    key = score.where(usable, torch.inf)  # what should have been refused is kept, and shows
    if mask is not None:
        key = key.masked_fill(~mask, -torch.inf)
    best = key.argsort(dim=1, descending=True, stable=True)[:, :k]
    kept = torch.zeros_like(usable).scatter(1, best, True)
    if mask is not None:
        kept = kept & mask
    slots = (kept.cumsum(1) - 1).masked_fill(~kept, -1)  # numbered by position
    token = torch.arange(n, device=scores.device).expand(b, n)
    winners = slots.new_full((b, k + 1), -1).scatter(1, slots.masked_fill(~kept, k), token)[:, :k]
    filled = winners >= 0
    weights = kept.to(score.dtype).masked_fill(kept & ~usable, torch.nan)
    blended = score.gather(1, winners.clamp(min=0)).masked_fill(~filled, 0)
    return Selection(slots, weights, filled, blended, winners, winners.unsqueeze(-1))


def straight_through_topk(
    scores: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    base: float | None = None,
    sort: bool = True,
    backend: str = "auto",
) -> Selection:
    """Choose like `hard_topk` and learn like `soft_topk`: what is pooled is hard, its gradient that of the blends.

    Each kept input sits somewhere in the tournament; backward treats its slot as if it held that blend. So hard
    training, and training soft but inferring hard, can be compared with the soft operator on equal terms.
    """
    soft = soft_topk(scores, k, mask=mask, temperature=temperature, base=base, sort=sort, backend=backend)
    hard = hard_topk(scores, k, mask=mask)
    return _StraightThrough(hard.slots, hard.weights, hard.mask, hard.scores, hard.winners, hard.members, soft)


@dataclass(frozen=True, eq=False, repr=False)
class _StraightThrough(Selection):
    """A hard Selection whose pooling has the gradient of `soft`. `then` composes the hard one: what was kept."""

    soft: Selection | None = None

    def pool(self, x: Tensor, *, backend: str = "auto") -> Tensor:
        assert self.soft is not None
        hard = super().pool(x.detach(), backend=backend)
        blend = self.soft.pool(x, backend=backend).view(*self.mask.shape, math.prod(x.shape[2:]))  # [b k d]
        source = self.soft.slots.gather(1, self.winners.clamp(min=0)).clamp(min=0)  # [b k] the blend with each winner
        blend = blend.gather(1, source.unsqueeze(-1).expand(-1, -1, blend.shape[-1]))
        blend = blend.masked_fill(~self.mask.unsqueeze(-1), 0)
        return hard + (blend - blend.detach()).view_as(hard)  # adds exactly 0: hard in value, soft in slope


def _looks(scores: Tensor) -> bool:
    """Tell whether values may be inspected: not where that would stall a device or break a graph."""
    return scores.device.type == "cpu" and not torch.compiler.is_compiling()


def _check(scores: Tensor, k: int, mask: Tensor | None) -> None:
    if not isinstance(scores, Tensor) or scores.ndim != 2:
        raise ValueError(f"`scores` must be a tensor [b n], got {_describe(scores)}.")
    if not scores.is_floating_point():
        raise ValueError(f"`scores` must be floating point, got {scores.dtype}.")
    if scores.shape[1] < 1:
        raise ValueError(f"`scores` must hold at least one input a row, got shape {list(scores.shape)}.")
    if isinstance(k, bool) or not isinstance(k, int | torch.SymInt):
        raise ValueError(f"`k` must be a whole number, got {k!r}.")
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}.")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise ValueError(f"`mask` must be a bool tensor, True for a real input, got {_describe(mask)}.")
        if mask.shape != scores.shape:
            raise ValueError(f"`mask` must have the shape of `scores`, {list(scores.shape)}, got {list(mask.shape)}.")
        if mask.device != scores.device:
            raise ValueError(f"`mask` must be on the device of `scores`, {scores.device}, got {mask.device}.")
    if _looks(scores):
        bad = ~torch.isfinite(scores) if mask is None else ~torch.isfinite(scores) & mask
        if bad.any():
            row, column = (int(i) for i in bad.nonzero()[0])
            value = float(scores.detach()[row, column])
            raise ValueError(f"`scores` must be finite where `mask` is True, got {value} at row {row}, input {column}.")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return f"{type(value).__name__}"
