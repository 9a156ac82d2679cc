"""What costs nothing to write: the beginning of a document, and its most central sentences."""

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from pyramidion.evaluation.splitting import sentences
from pyramidion.evaluation.wording import words_of

WORDS = 170
JUMP = 0.15  # the share of a walk that starts anew, anywhere
STEPS, PRECISION = 200, 1e-10


def lead(text: str, words: int = WORDS) -> str:
    """Take the first words."""
    return " ".join(text.split()[:words])


def lexrank(text: str, words: int = WORDS) -> str:
    """Take the most central sentences, in the document's order, one a line; the least central is cut to fit.

    LexRank (Erkan and Radev, 2004) in its continuous form: a walk goes from sentence to sentence with the cosine of
    their TF-IDF vectors as weight, and a sentence counts for how often it is visited. The document itself is the corpus
    that rarity is counted in.
    """
    found = sentences(text)
    scores = centrality(found)
    chosen: dict[int, list[str]] = {}
    room = words
    for place in sorted(range(len(found)), key=lambda place: (-scores[place], place)):
        if room > 0:
            chosen[place] = found[place].split()[:room]
            room -= len(chosen[place])
    return "\n".join(" ".join(chosen[place]) for place in sorted(chosen))


def centrality(found: list[str]) -> np.ndarray:
    """Give how often a walk over similar sentences visits each: the sum is 1.

    The matrix of cosines S = X Xᵀ is never written down: X is sparse, a step takes two sums over its entries, and a
    book costs what its words cost.
    """
    n = len(found)
    if not n:
        return np.zeros(0)
    rows, columns, values = _vectors(found)
    width = int(columns.max(initial=-1)) + 1

    def similar(weights: np.ndarray) -> np.ndarray:  # S w
        inner = np.bincount(columns, values * weights[rows], width)
        return np.bincount(rows, values * inner[columns], n)

    degree = similar(np.ones(n))
    linked = degree > 0
    visits = np.full(n, 1 / n)
    for _ in range(STEPS):
        walked = similar(np.divide(visits, degree, out=np.zeros(n), where=linked))
        lost = visits[~linked].sum()  # a sentence like no other, not even itself: the walk starts anew
        following = JUMP / n + (1 - JUMP) * (walked + lost / n)
        if np.abs(following - visits).sum() < PRECISION:
            return following
        visits = following
    return visits


def _vectors(found: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weigh each sentence's words by TF-IDF, length 1: entries as rows, columns and values."""
    counted = [Counter(words_of(sentence)) for sentence in found]
    holders = Counter(word for words in counted for word in words)
    column = {word: place for place, word in enumerate(holders)}
    rarity = {word: math.log(len(found) / held) for word, held in holders.items()}
    rows, columns, values = [], [], []
    for place, words in enumerate(counted):
        weights = {word: count * rarity[word] for word, count in words.items() if rarity[word] > 0}
        length = math.sqrt(sum(weight * weight for weight in weights.values()))
        for word, weight in weights.items():
            rows.append(place)
            columns.append(column[word])
            values.append(weight / length)
    return np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64), np.array(values, dtype=np.float64)


BASELINES: dict[str, Callable[[str], str]] = {"lead": lead, "lexrank": lexrank}


def check_baselines(names: Iterable[str]) -> None:
    """Refuse a baseline that there is none of."""
    for name in names:
        if name not in BASELINES:
            raise ValueError(f"`--baselines` must be of {', '.join(BASELINES)}, got {name!r}.")


__all__ = ["BASELINES", "WORDS", "centrality", "check_baselines", "lead", "lexrank"]
