"""ROUGE as rouge-score computes it, for each document; and a warning where it cannot see a script's letters."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, lru_cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import numpy as np

from pyramidion.evaluation.splitting import LONG, sentences

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
UNSEEN = 0.1  # share of letters and digits that a text may lose without a warning
WORTH_A_PROCESS = 200  # documents: fewer are scored before processes have started
ASCII = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")

Tell = Callable[[int, int, str], None]


def rouge_settings() -> dict[str, str]:
    """Say how ROUGE is computed, for whoever wants to get the same."""
    return {
        "implementation": f"rouge-score {version('rouge-score')}",
        "value": "F1 of each document, the mean over documents, times 100",
        "tokens": "lower case, a-z and 0-9, Porter stemmer",
        "sentences": (
            f"for Lsum: lines where a text has several, else those of pysbd {version('pysbd')} (English); "
            f"texts above {LONG:,} characters by a plain rule"
        ),
    }


@lru_cache(maxsize=2**20)
def _stem(word: str) -> str:
    stemmed: str = _stemmer().stem(word)
    return stemmed


@cache
def _stemmer() -> Any:
    from nltk.stem import porter

    return porter.PorterStemmer()


class _Stems:
    """Cut a text into rouge-score's tokens, each word stemmed once and remembered."""

    def stem(self, word: str) -> str:
        return _stem(word)

    def tokenize(self, text: str) -> list[str]:
        from rouge_score import tokenize

        tokens: list[str] = tokenize.tokenize(text, self)
        return tokens


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(KINDS), tokenizer=_Stems())


@lru_cache(maxsize=2**14)  # several systems share their references
def by_lines(text: str) -> str:
    """Put each sentence on a line, for ROUGE-Lsum; a text that has several lines is taken to be so already."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines if len(lines) > 1 else sentences(text))


def rouge(
    predictions: Sequence[str], references: Sequence[str], *, workers: int = 1, tell: Tell | None = None
) -> dict[str, np.ndarray]:
    """Score each prediction against its reference: F1 between 0 and 1, an array [documents] for each kind.

    workers  processes that share the work; a script that asks for several must have `if __name__ == "__main__":`
    """
    if len(predictions) != len(references):
        raise ValueError(
            f"`predictions` and `references` must be as many, got {len(predictions)} and {len(references)}."
        )
    values = np.zeros((len(KINDS), len(predictions)))
    with ExitStack() as stack:
        run: Any = map
        if workers > 1 and len(predictions) >= WORTH_A_PROCESS:
            pool = ProcessPoolExecutor(workers, get_context("spawn"))  # not fork: threads may be running here
            run = partial(stack.enter_context(pool).map, chunksize=16)
        for place, scores in enumerate(run(_score, predictions, references)):
            values[:, place] = scores
            if tell is not None:
                tell(place + 1, len(predictions), "scoring")
    return dict(zip(KINDS, values, strict=True))


def _score(prediction: str, reference: str) -> list[float]:
    scores = _scorer().score(by_lines(reference), by_lines(prediction))
    return [scores[kind].fmeasure for kind in KINDS]


def unseen(text: str) -> float:
    """Give the share of a text's letters and digits that rouge-score's tokenizer drops."""
    counted = Counter(character for character in text.lower() if character.isalnum())
    total = counted.total()
    return 1 - sum(counted[character] for character in ASCII) / total if total else 0.0


def script_warning(texts: Sequence[str]) -> str | None:
    """Warn of texts that ROUGE sees only part of, with the scripts that they are written in."""
    poor = [text for text in texts if unseen(text) > UNSEEN]
    if not poor:
        return None
    scripts: Counter[str] = Counter()
    for text in poor:
        letters = (character for character in text[:2000].lower() if character.isalnum() and character not in ASCII)
        scripts.update(unicodedata.name(character, "UNKNOWN").split()[0].split("-")[0] for character in letters)
    named = ", ".join(script for script, _ in scripts.most_common(3))
    return (
        f"ROUGE's tokenizer knows a-z and 0-9 only: {len(poor):,} of {len(texts):,} texts lose more than "
        f"{UNSEEN:.0%} of their letters ({named}), and their scores say little."
    )


__all__ = ["KINDS", "by_lines", "rouge", "rouge_settings", "script_warning", "unseen"]
