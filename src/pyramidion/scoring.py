"""Score the tokens of a document: x [b n d] -> scores [b n] (section 3.1, and the appendix on scorers' ablations).

All scorers have one signature, `forward(x, mask=None, received=None)`, and use of it what they need:

x         [b n d]  the representations
mask      [b n]    bool, True for a real token; what a scorer says of the others means nothing
received  [b n]    the attention each token received in the layer before

Scores are float32, or float64 for float64, whatever the precision of x and of an autocast around: of two thousand
scores in bfloat16 about half share their value with another, and ties are decided by position, not by the scorer.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyramidion.kernels.functions import score


class LinearScorer(nn.Module):
    """Score by a learned direction, S(e) = e·w + b: the paper's choice (section 3.1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(whole_number("width", width, 1), 1)

    def forward(self, x: Tensor, mask: Tensor | None = None, received: Tensor | None = None) -> Tensor:
        """Score x [b n d] -> [b n]."""
        with full_precision(x):
            return score(x, self.linear.weight, self.linear.bias)  # [b n]


class NonlinearScorer(nn.Module):
    """Score by RoBERTa's classification head, S(e) = tanh(e W + b₁)·w₂ + b₂.

    The paper prints the inner weight as a vector, with which the formula does not type-check: it is a matrix, as in
    RoBERTa.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(whole_number("width", width, 1), width)
        self.outer = nn.Linear(width, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None, received: Tensor | None = None) -> Tensor:
        """Score x [b n d] -> [b n]."""
        with full_precision(x):
            return _affine(self.outer, torch.tanh(_affine(self.inner, x))).squeeze(-1)  # [b n]


class PowerScorer(nn.Module):
    """Score by the attention each token received, summed over heads and real queries (PoWER-BERT)."""

    def forward(self, x: Tensor, mask: Tensor | None = None, received: Tensor | None = None) -> Tensor:
        """Return `received` [b n]."""
        if received is None:
            raise ValueError("`received` must be the attention each token received, [b n], to be scored by, got None.")
        if received.shape != x.shape[:2]:
            raise ValueError(f"`received` must have shape {list(x.shape[:2])} as x has, got {list(received.shape)}.")
        return received.to(score_dtype(received))


class EmbeddingScorer(nn.Module):
    """Score by one coordinate of the representation, S(e) = e[index]: a linear scorer that nobody trains."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = whole_number("index", index, 0)

    def forward(self, x: Tensor, mask: Tensor | None = None, received: Tensor | None = None) -> Tensor:
        """Score x [b n d] -> [b n]."""
        return x[..., self.index].to(score_dtype(x))  # [b n]

    def extra_repr(self) -> str:
        """Show the coordinate."""
        return f"index={self.index}"


class RandomScorer(nn.Module):
    """Score uniformly in [0, 1), by a hash of the token's place among the real tokens of its document.

    So neither padding nor neighbours change a score. In evaluation the sequence is fixed by `seed` and the same for
    every document. In training it is new in each call and each row, from a seed drawn from torch's generator: what
    repeats that generator's state, as activation checkpointing does, repeats the scores.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = whole_number("seed", seed, 0)

    def forward(self, x: Tensor, mask: Tensor | None = None, received: Tensor | None = None) -> Tensor:
        """Draw scores [b n]."""
        row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)  # [b 1]
        if self.training:
            recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()  # then the host's number would stay
            drawn = torch.randint(2**32, (), device=x.device if recorded else "cpu")
            key = _mix(_mix(row) ^ drawn)
        else:
            key = torch.zeros_like(row) ^ (self.seed & MASK)
        bits = _mix(_mix(ranks(mask, x)) ^ _mix(key))  # [b n]
        return (bits >> 8).to(score_dtype(x)) / 2**24  # as many bits as a float32 holds below 1

    def extra_repr(self) -> str:
        """Show the seed."""
        return f"seed={self.seed}"


class IndexScorer(nn.Module):
    """Score 1 for k evenly spread tokens of each document, 0 for the others.

    Token r of n real ones is chosen when r·k mod n < k: exactly k are, or all when there are fewer. For n = s·k that
    is every s-th token, the paper's rule, and it holds for every other n.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = whole_number("k", k, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None, received: Tensor | None = None) -> Tensor:
        """Choose among x [b n d]: scores [b n]."""
        rank = ranks(mask, x)
        count = (rank[:, -1:] + 1).clamp(min=1)  # [b 1] real tokens
        chosen = rank * self.k % count < self.k
        return (chosen if mask is None else chosen & mask).to(score_dtype(x))

    def extra_repr(self) -> str:
        """Show how many are chosen."""
        return f"k={self.k}"


SCORERS: dict[str, type[nn.Module]] = {
    "linear": LinearScorer,
    "nonlinear": NonlinearScorer,
    "power": PowerScorer,
    "embedding": EmbeddingScorer,
    "random": RandomScorer,
    "index": IndexScorer,
}


def ranks(mask: Tensor | None, like: Tensor) -> Tensor:
    """Count the real tokens of its document before each one: [b n], for `like` [b n ...].

    The last rank is the document's length less 1. A padding token has the rank of the real token before it, or -1.
    """
    if mask is None:
        return torch.arange(like.shape[1], device=like.device).expand(like.shape[:2])
    return mask.cumsum(1) - 1


def score_dtype(x: Tensor) -> torch.dtype:
    """Name the precision of the scores of x: float32, float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def whole_number(name: str, value: int, least: int) -> int:
    """Return `value`, a whole number of at least `least`, or refuse it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    return value


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off where x is; the device `meta`, of shapes without values, has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _affine(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply `layer` in at least float32, whatever the precision of x and of its parameters."""
    dtype = score_dtype(x)
    return F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))


MASK = 2**32 - 1


def _mix(word: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64, one to one; the factors are below 2³¹, so that no product overflows."""
    word = (word + 0x9E3779B9) & MASK  # else 0 would stay 0
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & MASK
    word = ((word ^ (word >> 15)) * 0x735A2D97) & MASK
    return word ^ (word >> 15)
