"""The definition of the operator: section 4 and Algorithm 1, one document, plain loops, float64. Never optimised.

What Algorithm 1 leaves open is settled here, and the other backends follow: sorting is stable, missing opponents are
byes that stand last, and slots are numbered by the positions of their winners.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidion.topk.selection import Selection


@dataclass
class Candidate:
    """One contender: its score, the token that won it through every round, and each token's share of it."""

    score: Tensor
    winner: int
    shares: dict[int, Tensor]


def soft_topk(
    scores: Tensor, k: int, mask: Tensor | None, *, temperature: float, base: float | None, sort: bool
) -> Selection:
    """Play the tournament of each document by itself."""
    b, n = scores.shape
    real = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    slots, winners = scores.new_full((b, n), -1, dtype=torch.long), scores.new_full((b, k), -1, dtype=torch.long)
    weights, blended = [], []
    for row in range(b):
        tokens = [i for i in range(n) if real[row, i]]
        candidates = [
            Candidate(scores[row, i].double(), i, {i: scores.new_ones((), dtype=torch.double)}) for i in tokens
        ]
        places = k
        while places < len(candidates):
            places *= 2
        while places > k:
            candidates = halve(candidates, places, temperature, base, sort)
            places //= 2
        candidates.sort(key=lambda candidate: candidate.winner)

        zero = scores.new_zeros((), dtype=torch.double)
        shares = {token: share for candidate in candidates for token, share in candidate.shares.items()}
        for slot, candidate in enumerate(candidates):
            slots[row, list(candidate.shares)] = slot
            winners[row, slot] = candidate.winner
        weights.append(torch.stack([shares.get(i, zero) for i in range(n)]))
        blended.append(torch.stack([candidate.score for candidate in candidates] + [zero] * (k - len(candidates))))
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return Selection(slots, torch.stack(weights).to(dtype), winners >= 0, torch.stack(blended).to(dtype), winners)


def halve(
    candidates: list[Candidate], places: int, temperature: float, base: float | None, sort: bool
) -> list[Candidate]:
    """Play one round: the i-th of `places` meets the i-th from the end; a place without a candidate is a bye."""
    if sort:
        candidates = sorted(candidates, key=lambda candidate: -candidate.score.item())
    byes: list[Candidate | None] = [None] * (places - len(candidates))
    standing = [*candidates, *byes]
    pairs = [(standing[i], standing[places - 1 - i]) for i in range(places // 2)]
    return [meet(first, second, temperature, base) for first, second in pairs if first is not None]


def meet(first: Candidate, second: Candidate | None, temperature: float, base: float | None) -> Candidate:
    """Blend two candidates by the softmax of their scores; the stronger is the winner, the first if they are equal."""
    if second is None:
        return first
    score = torch.stack([first.score, second.score])
    energy = score if base is None else base**score
    weight = torch.softmax(energy / temperature, dim=0)
    return Candidate(
        score=(weight * score).sum(),
        winner=first.winner if first.score >= second.score else second.winner,
        shares={token: share * weight[0] for token, share in first.shares.items()}
        | {token: share * weight[1] for token, share in second.shares.items()},
    )
