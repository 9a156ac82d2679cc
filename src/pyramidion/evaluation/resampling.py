"""How sure a mean is, and a difference: documents drawn again with replacement."""

from typing import NamedTuple

import numpy as np

SAMPLES = 1000
LEVEL = 95.0


class Difference(NamedTuple):
    """A mean difference, its 95 % interval, and how often chance alone would give one as large."""

    difference: float
    low: float
    high: float
    p: float


def _means(values: np.ndarray, seed: int, n: int) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"`values` must be finite numbers, one a document and at least one, got shape {values.shape}.")
    if n < 1:
        raise ValueError(f"`n` must be at least 1, got {n}.")
    random = np.random.default_rng(seed)
    return np.array([values[random.integers(values.size, size=values.size)].mean() for _ in range(n)])


def bootstrap(values: np.ndarray, seed: int = 0, n: int = SAMPLES) -> tuple[float, float]:
    """Give the 95 % interval of a mean: the same for the same seed."""
    low, high = np.percentile(_means(values, seed, n), [50 - LEVEL / 2, 50 + LEVEL / 2])
    return float(low), float(high)


def paired_bootstrap(a: np.ndarray, b: np.ndarray, seed: int = 0, n: int = SAMPLES) -> Difference:
    """Compare two systems on the same documents: a minus b.

    p is two-sided: twice the share of samples on the other side of 0, of which the data themselves count as one.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"`a` and `b` must be of the same documents, got {a.size} and {b.size} values.")
    means = _means(a - b, seed, n)
    low, high = np.percentile(means, [50 - LEVEL / 2, 50 + LEVEL / 2])
    beyond = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return Difference(float((a - b).mean()), float(low), float(high), min(1.0, 2 * (beyond + 1) / (n + 1)))


__all__ = ["Difference", "bootstrap", "paired_bootstrap"]
