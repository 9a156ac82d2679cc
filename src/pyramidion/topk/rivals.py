"""The relaxations of top-k that the tournament is compared with, behind one signature.

    rival(scores [b n], k, *, mask=None, ...) -> choice [b k n]

`choice[b, j]` says which share of each token is in output j, so `choice @ x` pools. Rows are in order of rank, the best
first. Each is non-negative and sums to 1 over the real tokens; a masked token has weight 0 whatever its score, and a
document of m real tokens has its rows from m on zero. Real scores must be finite. Half precision is computed, and
returned, in float32. Every method here writes k n numbers per document, which the tournament does not; the complexities
below are per document.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_NEVER = -1e30  # a logit that no softmax notices, yet finite: inf - inf has no gradient


def iterative_softmax(scores: Tensor, k: int, *, mask: Tensor | None = None, temperature: float = 0.01) -> Tensor:
    """Attend k times to what lies near the running maximum.

    Row j is softmax(-(s - m_j)^2 / temperature), with m_j the j-th largest score: the maximum once the j - 1 values
    found before are masked. The masking is of the hard search for m_j alone; each softmax runs over all tokens, so an
    early winner keeps a share of later rows. The gradient takes m_j as the score it is.

    Goyal, Neubig, Dyer and Berg-Kirkpatrick 2017, the continuous top-k-argmax, whose peakedness is 1 / temperature.
    O(nk), and a sort.
    """
    _positive(temperature=temperature)
    scores, mask, ranks = _real(scores, mask, k)
    best = scores.gather(1, _order(scores, mask)[:, :ranks])
    distance = (scores[:, None] - best[:, :, None]).square()
    return _finish(_softmax(-distance / temperature, mask), mask, k)


def subset_sampling(
    scores: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    temperature: float = 0.1,
    noise: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw k tokens without replacement, softly.

    Scores are log weights; Gumbel noise makes them keys. k times a softmax of the keys is taken, and the log of what it
    left of each token, log(1 - row), is added to that token's key. Without noise it relaxes the top k itself.

    Xie and Ermon 2019, with the relaxed top-k of Plötz and Roth 2018. O(nk), in k steps that wait for each other.
    """
    _positive(temperature=temperature)
    scores, mask, ranks = _real(scores, mask, k)
    keys, rows = scores, []
    if noise:
        keys = keys - torch.empty_like(scores).exponential_(generator=generator).clamp_min(_tiny(scores)).log()
    for _ in range(ranks):
        rows.append(_softmax(keys[:, None] / temperature, mask)[:, 0])
        keys = keys + (1 - rows[-1]).clamp_min(_tiny(scores)).log()
    return _finish(torch.stack(rows, 1), mask, k)


def optimal_transport(
    scores: Tensor, k: int, *, mask: Tensor | None = None, epsilon: float = 0.1, iterations: int = 100
) -> Tensor:
    """Ship n tokens of mass 1 to k bins of mass 1 and one bin for the rest.

    Bins stand one apart on a line, the best on top (t_j = -j), and the cost is the squared distance (s_i - t_j)^2. Of
    it only -2 s_i t_j matters, since the marginals absorb the squares. Entropy of weight epsilon blurs the plan.
    Sinkhorn starts from the potentials of the problem without entropy, where bins j and j + 1 tie half-way between the
    scores of those ranks, and ends on the bins: rows sum to 1 always, columns to at most 1 once it has converged. The
    gradient is that of the converged plan, by the optimality conditions.

    Xie, Dai, Chen, Dai, Zhao, Zha, Wei and Pfister 2020, Section 2.4, the sorted SOFT top-k. O(nk iterations) time both
    ways, O(nk) memory.
    """
    _positive(epsilon=epsilon, iterations=iterations)
    scores, mask, ranks = _real(scores, mask, k)
    best = scores.detach().gather(1, _order(scores, mask)[:, : ranks + 1])  # [b ranks+1]
    ties = (best + torch.cat([best[:, 1:], best[:, -1:]], 1))[:, :ranks] / 2
    start = torch.nn.functional.pad(2 * ties / epsilon, (1, 0)).cumsum(1)
    bins = torch.arange(ranks + 1, device=scores.device)
    logits = start[:, :, None] - 2 / epsilon * bins[:, None] * scores[:, None]  # [b ranks+1 n]
    count = mask.sum(1, keepdim=True)
    mass = torch.where(bins < ranks, bins < count, count - ranks).clamp_min(0).to(scores.dtype)
    return _finish(_Sinkhorn.apply(logits, mass, mask, iterations)[:, :ranks], mask, k)


def softsort(scores: Tensor, k: int, *, mask: Tensor | None = None, temperature: float = 0.1) -> Tensor:
    """Attend from each sorted score to the scores it is near.

    Row j is softmax(-|sort(s)_j - s| / temperature).

    Prillo and Eisenschlos 2020, with the absolute difference as their semimetric d. O(nk), and a sort.
    """
    _positive(temperature=temperature)
    scores, mask, ranks = _real(scores, mask, k)
    best = scores.gather(1, _order(scores, mask)[:, :ranks])
    distance = (scores[:, None] - best[:, :, None]).abs()
    return _finish(_softmax(-distance / temperature, mask), mask, k)


def neuralsort(scores: Tensor, k: int, *, mask: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """Relax the identity that the sum of the j largest is a maximum over sums.

    Row j of m real tokens is softmax(((m + 1 - 2j) s_i - sum_l |s_i - s_l|) / temperature), j from 1. The sums of
    distances come from a sort and a prefix sum, never from an n x n table.

    Grover, Wang, Zweig and Ermon 2019, Corollary 3 with its argmax made a softmax. O(nk), and a sort.
    """
    _positive(temperature=temperature)
    scores, mask, ranks = _real(scores, mask, k)
    count = mask.sum(1, keepdim=True)
    mean = scores.detach().masked_fill(~mask, 0).sum(1, keepdim=True) / count.clamp_min(1)
    scores = (scores - mean).masked_fill(~mask, 0)  # a shift moves no row, and the sums stay small
    order = _order(scores, mask)
    ordered, place = scores.gather(1, order), torch.arange(scores.shape[1], device=scores.device)
    before = ordered.cumsum(1) - ordered
    spread = 2 * before - ordered.sum(1, keepdim=True) + (count - 2 * place) * ordered
    spread = torch.zeros_like(scores).scatter(1, order, spread)  # back to the tokens' own places
    slope = (count - 1 - 2 * place[:ranks])[:, :, None]  # m + 1 - 2j, [b ranks 1]
    return _finish(_softmax((slope * scores[:, None] - spread[:, None]) / temperature, mask), mask, k)


def lapsum(scores: Tensor, k: int, *, mask: Tensor | None = None, alpha: float = 0.1) -> Tensor:
    """Difference the soft top-j sets, j = 1 to k.

    Token i is in the top j to the degree p_i = F((s_i - theta_j) / alpha), F the Laplace distribution function and
    theta_j such that the degrees sum to j. Row j is p for j less p for j - 1: theta falls as j grows, so it is
    non-negative. theta is found in closed form and differentiated by the implicit function theorem (once).

    Struski, Bednarczyk, Podolak and Tabor 2025. O(nk), and a sort.
    """
    _positive(alpha=alpha)
    scores, mask, ranks = _real(scores, mask, k)
    theta = _laplace_thresholds(scores.detach(), mask, ranks, alpha)[:, :, None]  # [b ranks 1], float64
    high = theta.to(scores.dtype)
    low = (theta - high).to(scores.dtype)  # high + low: near tokens keep their digits in float32
    gap = scores[:, None] - high - low  # [b ranks n]
    slack = (_softmax(-gap.detach().abs() / alpha, mask) * (scores - scores.detach())[:, None]).sum(-1, keepdim=True)
    gap = (gap - slack) / alpha  # slack is 0, and its gradient that of theta
    tail = (-gap.abs()).exp() / 2
    everyone = (torch.arange(1, ranks + 1, device=scores.device) >= mask.sum(1, keepdim=True))[:, :, None]
    degrees = torch.where(everyone, torch.ones_like(tail), torch.where(gap > 0, 1 - tail, tail))
    rows = torch.diff(degrees, dim=1, prepend=torch.zeros_like(degrees[:, :1]))
    return _finish(rows.clamp_min(0), mask, k)  # only rounding could be below 0


def perturbed(
    scores: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    sigma: float = 0.05,
    samples: int = 128,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Average the hard top k of noisy scores.

    Each sample adds sigma times a standard normal Z to the scores and ranks them. The gradient is the unbiased estimate
    from the same samples: the mean of <gradient, one-hot rows> Z / sigma.

    Berthet, Blondel, Teboul, Cuturi, Vert and Bach 2020; Cordonnier et al. 2021 for top-k, there with the winners in
    order of position rather than rank. O(samples n log k) time, O(samples n + nk) memory.
    """
    _positive(sigma=sigma, samples=samples)
    scores, mask, ranks = _real(scores, mask, k)
    noise = torch.randn(
        (len(scores), samples, scores.shape[1]), dtype=scores.dtype, device=scores.device, generator=generator
    )
    return _finish(_Perturbed.apply(scores, mask, ranks, noise, sigma), mask, k)


def straight_through(scores: Tensor, k: int, *, mask: Tensor | None = None, temperature: float = 0.1) -> Tensor:
    """Take the hard top k forward and the gradient of `softsort` backward.

    The result is exactly 0 or 1, equal scores going to the earlier position.

    Bengio, Léonard and Courville 2013 for the estimator. O(nk), and a sort.
    """
    soft = softsort(scores, k, mask=mask, temperature=temperature)
    scores, mask, ranks = _real(scores.detach(), mask, k)
    winners = _order(scores, mask)[:, :ranks, None]
    hard = scores.new_zeros(len(scores), ranks, scores.shape[1]).scatter_(2, winners, 1)
    return _finish(hard, mask, k) + (soft - soft.detach())  # the bracket is 0 to the bit


RIVALS: dict[str, Callable[..., Tensor]] = {
    "iterative_softmax": iterative_softmax,
    "subset_sampling": subset_sampling,
    "optimal_transport": optimal_transport,
    "softsort": softsort,
    "neuralsort": neuralsort,
    "lapsum": lapsum,
    "perturbed": perturbed,
    "straight_through": straight_through,
}


class _Sinkhorn(torch.autograd.Function):
    """The plan [b c n] with tokens of mass 1 and bins of the given masses [b c]; c bins, some of mass 0."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, mass: Tensor, mask: Tensor, iterations: int) -> Tensor:
        live = mass > 0
        dead = ~(live[:, :, None] & mask[:, None])
        logits, log_mass = logits.masked_fill(dead, _NEVER), mass.where(live, 1).log()
        of_bins = torch.zeros_like(mass)
        for _ in range(iterations):
            of_tokens = -(logits + of_bins[:, :, None]).logsumexp(1).where(mask, 0)
            of_bins = (log_mass - (logits + of_tokens[:, None]).logsumexp(2)).where(live, 0)
        plan = mass[:, :, None] * (logits + of_tokens[:, None]).softmax(2).masked_fill(dead, 0)
        ctx.save_for_backward(plan, mass)
        ctx.iterations = iterations
        return plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Solve the adjoint of the two marginal constraints by the same alternation, at the same rate."""
        plan, mass = ctx.saved_tensors
        flow = grad * plan
        into_bins, from_tokens = flow.sum(2), flow.sum(1)
        of_bins = torch.zeros_like(mass)
        for _ in range(ctx.iterations):
            of_tokens = from_tokens - torch.einsum("bcn,bc->bn", plan, of_bins)
            of_bins = (into_bins - torch.einsum("bcn,bn->bc", plan, of_tokens)) / mass.where(mass > 0, 1)
        return flow - plan * (of_tokens[:, None] + of_bins[:, :, None]), None, None, None


class _Perturbed(torch.autograd.Function):
    """The mean one-hot rows [b ranks n]; only the winners [b samples ranks] and the noise are kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, ranks: int, noise: Tensor, sigma: float) -> Tensor:
        (b, n), samples = scores.shape, noise.shape[1]
        noisy = (scores[:, None] + sigma * noise).masked_fill(~mask[:, None], -torch.inf)
        winners = noisy.topk(ranks, dim=2).indices
        cells = (winners + n * torch.arange(ranks, device=scores.device)).flatten(1)  # a cell of the [ranks n] table
        wins = scores.new_zeros(b, ranks * n).scatter_add_(1, cells, torch.ones_like(cells, dtype=scores.dtype))
        ctx.save_for_backward(winners, noise)
        ctx.sigma = sigma
        return (wins / samples).view(b, ranks, n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        winners, noise = ctx.saved_tensors
        merit = grad.gather(2, winners.transpose(1, 2)).sum(1)  # <grad, one-hot rows>, [b samples]
        return torch.einsum("bs,bsn->bn", merit, noise) / (ctx.sigma * noise.shape[1]), None, None, None, None


@torch.no_grad()
def _laplace_thresholds(scores: Tensor, mask: Tensor, ranks: int, alpha: float) -> Tensor:
    """Solve sum_i F((s_i - theta) / alpha) = j for j = 1 to ranks, in float64; 0 where j is not below the count.

    With r scores above theta, U the sum of exp(-s / alpha) over them, L that of exp(s / alpha) over the others, and
    z = exp(theta / alpha), the equation is U z^2 + 2 (j - r) z - L = 0. Its root is taken in the logarithm. r is found
    among the sums at theta = s.
    """
    order, count = _order(scores, mask), mask.sum(1, keepdim=True)
    ordered = scores.double().gather(1, order) / alpha
    padding = torch.arange(scores.shape[1], device=scores.device) >= count
    none = ordered.new_full((len(scores), 1), -torch.inf)
    above = torch.cat([none, (-ordered).logcumsumexp(1)], 1)  # log U for r = 0 to n
    below = ordered.masked_fill(padding, -torch.inf).flip(1).logcumsumexp(1).flip(1)
    below = torch.cat([below, none], 1)  # log L
    place = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    sums = place - (above[:, 1:] + ordered).exp() / 2 + (below[:, 1:] - ordered).exp() / 2
    wanted = torch.arange(1, ranks + 1, device=scores.device).double().expand(len(scores), -1).contiguous()
    r = torch.searchsorted(sums.masked_fill(padding, torch.inf), wanted, right=True)
    above, below, short = above.gather(1, r), below.gather(1, r), wanted - r
    root = (short.abs() + (short.square() + (above + below).exp()).sqrt()).log()
    theta = torch.where(short < 0, root - above, below - root)
    theta = torch.where(short == 0, (below - above) / 2, theta)
    return torch.where(wanted < count, alpha * theta, 0)


def _real(scores: Tensor, mask: Tensor | None, k: int) -> tuple[Tensor, Tensor, int]:
    """Refuse bad input; return scores of at least float32 with fillers at the masked, the mask, and min(k, n).

    A filler is the document's lowest real score: finite, of the right size, and cut off from the gradient.
    """
    if scores.ndim != 2 or scores.shape[1] < 1:
        raise ValueError(f"`scores` must be [b n] with n at least 1, got shape {tuple(scores.shape)}.")
    if not scores.is_floating_point():
        raise ValueError(f"`scores` must be floating point, got {scores.dtype}.")
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}.")
    if mask is None:
        mask = torch.ones_like(scores, dtype=torch.bool)
    if mask.dtype != torch.bool or mask.shape != scores.shape:
        raise ValueError(
            f"`mask` must be bool of shape {tuple(scores.shape)}, got {mask.dtype} of shape {tuple(mask.shape)}."
        )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    lowest = scores.detach().masked_fill(~mask, torch.inf).amin(1, keepdim=True)
    filler = lowest.where(mask.any(1, keepdim=True), 0)
    return scores.where(mask, filler), mask, min(k, scores.shape[1])


def _positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"`{name}` must be positive, got {value}.")


def _order(scores: Tensor, mask: Tensor) -> Tensor:
    """Rank real tokens from the best, equal scores by position; the masked come last."""
    return scores.detach().masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)


def _softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Normalise logits [b r n] over the real tokens; rows of a document without any are left to `_finish`."""
    return logits.masked_fill(~mask[:, None], torch.finfo(logits.dtype).min).softmax(-1)


def _finish(rows: Tensor, mask: Tensor, k: int) -> Tensor:
    """Clear masked columns and the rows past the last real token, and append zero rows up to k."""
    filled = torch.arange(rows.shape[1], device=rows.device) < mask.sum(1, keepdim=True)  # [b ranks]
    rows = rows.masked_fill(~(filled[:, :, None] & mask[:, None]), 0)
    return torch.nn.functional.pad(rows, (0, 0, 0, k - rows.shape[1]))


def _tiny(scores: Tensor) -> float:
    return torch.finfo(scores.dtype).tiny
