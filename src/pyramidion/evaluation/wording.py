"""How a text is worded: its length, what it says twice, what it copied."""

import re
from typing import NamedTuple

GRAM = 4
WORD = re.compile(r"\w+")


class Repetition(NamedTuple):
    """Shares between 0 and 1, None where there is nothing to share.

    repeated  of the text's 4-grams, those that stood in it before
    copied    of the text's different 4-grams, those that stand in the source
    distinct  of its words, those that did not stand in it before
    """

    repeated: float | None
    copied: float | None
    distinct: float | None


def words_of(text: str) -> list[str]:
    """Cut a text into words in lower case, of any script that parts them."""
    return WORD.findall(text.lower())


def _grams(words: list[str]) -> list[tuple[str, ...]]:
    return list(zip(*(words[start:] for start in range(GRAM)), strict=False))


def repetition(text: str, source: str | None = None) -> Repetition:
    """Measure how much of a text repeats itself, and how much repeats the source."""
    words = words_of(text)
    grams = _grams(words)
    kinds = set(grams)
    copied = None
    if source is not None and kinds:
        copied = len(kinds.intersection(_grams(words_of(source)))) / len(kinds)
    return Repetition(
        repeated=1 - len(kinds) / len(grams) if grams else None,
        copied=copied,
        distinct=len(set(words)) / len(words) if words else None,
    )


__all__ = ["Repetition", "repetition", "words_of"]
