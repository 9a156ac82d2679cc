"""The operator in batched PyTorch: any device, any dtype, compiled or not. The default where there is no kernel.

Two steps. The *bracket* says who meets whom: integers, decided in float64 and without gradient. The *play* says how
much of each survives: smooth in the scores, a binary tree of pair weights over each slot's members.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyramidion.topk.selection import Selection

BYE = torch.finfo(torch.float64).min  # the score of a missing opponent: below every real one, and safe to compute with


def soft_topk(
    scores: Tensor, k: int, mask: Tensor | None, *, temperature: float, base: float | None, sort: bool
) -> Selection:
    """Play the tournament of all documents at once."""
    usable = torch.isfinite(scores)
    exact = scores.double().where(usable, 0)
    members = bracket(exact.detach(), k, mask, temperature=temperature, base=base, sort=sort)
    shares, blended = play(exact, members, temperature=temperature, base=base)

    dtype = torch.promote_types(scores.dtype, torch.float32)
    place = _places(members, scores.shape[1])  # [b n] where in the bracket each token starts
    weights = shares.flatten(1).gather(1, place.clamp(min=0)).to(dtype).masked_fill(place < 0, 0)
    weights = weights.masked_fill((place >= 0) & ~usable, torch.nan)  # where nobody looked, nothing is hidden
    slots = torch.div(place, members.shape[2], rounding_mode="floor")
    winners = members[..., 0]
    filled = winners >= 0
    return Selection(slots, weights, filled, blended.to(dtype).masked_fill(~filled, 0), winners, members)


def count_rounds(n: int, k: int) -> int:
    """Count the halvings that bring n places to at most k: ceil(log2(n / k)).

    Written as comparisons, so that under torch.compile with dynamic n one graph serves all n of the same count.
    """
    rounds = 0
    while k * 2**rounds < n:
        rounds += 1
    return rounds


@torch.no_grad()
def bracket(
    scores: Tensor, k: int, mask: Tensor | None, *, temperature: float, base: float | None, sort: bool
) -> Tensor:
    """Decide who meets whom: scores [b n] float64 -> members [b k m], m = 2 ** rounds, -1 for byes.

    A slot's members are the leaves of its tree in order: members 2i and 2i+1 meet in the first round, and the
    stronger side of every meeting stands first, so `members[..., 0]` won them all. A row with fewer real tokens than
    half the places meets only byes, so it sits rounds out by itself: no row depends on another's length.
    """
    b, n = scores.shape
    rounds = count_rounds(n, k)
    score = F.pad(scores, (0, k * 2**rounds - n), value=BYE)  # [b places]
    token = torch.arange(n, device=scores.device).expand(b, n)
    if mask is not None:
        score[:, :n].masked_fill_(~mask, BYE)
        token = token.masked_fill(~mask, -1)
    leaves = F.pad(token, (0, score.shape[1] - n), value=-1).unsqueeze(-1)  # [b places 1]
    if not sort and rounds:
        score, leaves = _reorder((leaves[..., 0] < 0).to(torch.uint8).argsort(dim=1, stable=True), score, leaves)

    for _ in range(rounds):
        if sort:
            score, leaves = _reorder(score.argsort(dim=1, descending=True, stable=True), score, leaves)
        half = score.shape[1] // 2
        first, second = score[:, :half], score[:, half:].flip(1)
        ahead, behind = leaves[:, :half], leaves[:, half:].flip(1)
        if not sort:
            upset = second > first
            first, second = first.where(~upset, second), second.where(~upset, first)
            ahead, behind = ahead.where(~upset[..., None], behind), behind.where(~upset[..., None], ahead)
        score, _ = meet(first, second, temperature, base)
        leaves = torch.cat((ahead, behind), dim=-1)  # [b half 2m]

    winner = leaves[..., 0]
    _, leaves = _reorder(winner.masked_fill(winner < 0, n).argsort(dim=1, stable=True), score, leaves)
    return leaves


def play(scores: Tensor, members: Tensor, *, temperature: float, base: float | None) -> tuple[Tensor, Tensor]:
    """Give each member its share of its slot, and each slot its score: -> [b k m], [b k], float64, differentiable."""
    b, k, m = members.shape
    score = scores.gather(1, members.clamp(min=0).view(b, k * m)).view(b, k, m).masked_fill(members < 0, BYE)
    losing = []
    while score.shape[-1] > 1:
        first, second = score.unflatten(-1, (-1, 2)).unbind(-1)
        score, share = meet(first, second, temperature, base)
        losing.append(share)
    shares = torch.ones_like(score)  # [b k 1]
    for share in reversed(losing):
        shares = torch.stack((shares * (1 - share), shares * share), dim=-1).flatten(-2)
    return shares, score.squeeze(-1)


def meet(first: Tensor, second: Tensor, temperature: float, base: float | None) -> tuple[Tensor, Tensor]:
    """Blend the scores of pairs, the first at least as strong: -> the new score, the second's share of it."""
    bye = second == BYE
    second = first.where(bye, second)
    gap = first - second if base is None else base**first - base**second
    share = torch.sigmoid(-gap / temperature).masked_fill(bye, 0)
    return first - (first - second) * share, share


def _reorder(order: Tensor, score: Tensor, leaves: Tensor) -> tuple[Tensor, Tensor]:
    return score.gather(1, order), leaves.gather(1, order.unsqueeze(-1).expand_as(leaves))


def _places(members: Tensor, n: int) -> Tensor:
    """Invert members [b k m] -> the flat place [b n] of each token, -1: none."""
    flat = members.flatten(1)  # [b km]
    place = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    column = flat.masked_fill(flat < 0, n)  # byes: a last column, cut off
    return torch.full_like(flat[:, :1], -1).expand(-1, n + 1).scatter(1, column, place)[:, :n]
