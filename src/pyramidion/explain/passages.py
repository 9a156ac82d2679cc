"""The parts of a text that people know, as stretches of tokens: words, sentences, blocks, sections."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pyramidion.evaluation.splitting import by_rule

RUN = re.compile(r"\S+")
BLANK = re.compile(r"\s+")
LONGEST = 32  # characters: a longer run without a space is no word, but an address, a formula, or noise
# Scripts that put no space between words: Thai to Khmer, then Chinese and Japanese.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
MARKED = re.compile(r"#{1,6}\s+\S")
NEWLINES = "\n\r\u2028\u2029"
SHORT_LINE = 72  # characters: a heading is no longer
MOST_PARTS = 12  # of a text without headings


@dataclass(frozen=True, eq=False)
class Words:
    """Hold where the words of a text are, and which tokens each is made of.

    Every token is in exactly one word, so sums over words are sums over tokens. White space within a line goes with the
    word behind it, though not into its characters; a line break is a word by itself. So is a token that stands for no
    character, as the end token does: its start is its end.

    start, end  [w]    characters of each word, ascending
    token       [w+1]  the first token of each word, and behind the last word the number of tokens
    """

    start: np.ndarray
    end: np.ndarray
    token: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    @property
    def tokens(self) -> int:
        """Count the tokens of all words."""
        return int(self.token[-1])

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Add values [... n] of tokens up to words [... w]."""
        return np.add.reduceat(values, self.token[:-1], axis=-1)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Take the largest of the values [... n] of each word's tokens: [... w]."""
        return np.maximum.reduceat(values, self.token[:-1], axis=-1)

    def check(self, text: str) -> None:
        """Refuse words that overlap, leave the text, or have no token."""
        if not len(self) or self.token[0] != 0 or (np.diff(self.token) < 1).any():
            raise ValueError(
                f"`words` must have at least one token each, from token 0 on, got {self.token.tolist()[:9]}."
            )
        edges = np.stack([self.start, self.end], 1).flatten()
        if edges[0] < 0 or edges[-1] > len(text) or (np.diff(edges) < 0).any():
            raise ValueError(
                f"`words` must follow each other in the {len(text):,} characters, got {edges.tolist()[:9]}."
            )


def find_words(text: str, offsets: Sequence[tuple[int, int]]) -> Words:
    """Group tokens into words by the characters that each stands for.

    A word is what stands between white space, punctuation included. Where no space can be expected, in Chinese or in
    runs of more than 32 characters, each token is a word; tokens that share a character always stay together.
    """
    runs = [match.span() for match in RUN.finditer(text)]
    starts = [start for start, _ in runs]
    found: list[tuple[int, int, int]] = []  # start, end, first token
    before: object = None  # what the word so far is: a run, white space, or a token
    reached = 0  # characters that the words so far stand for
    for token, (start, end) in enumerate(offsets):
        start = max(start, found[-1][0] if found else 0)
        run = bisect_right(starts, start) - 1
        run += run < 0 or runs[run][1] <= start  # the token begins with white space
        if run == len(runs) or runs[run][0] >= end:
            key: object = "blank" if end > start else ("none", token)
            first, last = max(start, reached), max(end, reached)
        elif _is_dense(text, *runs[run]):
            first, last = max(start, runs[run][0]), min(end, runs[run][1])
            key = before if first < reached else ("piece", token)
        else:
            key, (first, last) = run, runs[run]
        if key == before:
            first, last, token = found[-1][0], max(last, found[-1][1]), found.pop()[2]
        elif before == "blank" and last > first and not _breaks(text, *found[-1][:2]):
            token = found.pop()[2]
        found.append((first, last, token))
        before, reached = key, max(reached, last)
    table = np.array(found, dtype=np.int64).reshape(-1, 3)
    return Words(table[:, 0], table[:, 1], np.append(table[:, 2], len(offsets)))


def _breaks(text: str, start: int, end: int) -> bool:
    return any(mark in text[start:end] for mark in NEWLINES)


def _is_dense(text: str, start: int, end: int) -> bool:
    return end - start > LONGEST or UNSPACED.search(text, start, end) is not None


# --------------------------------------------------------------------------------------------------------------------
# Blocks and sections
# --------------------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Place a line of the text, with the white space behind it; `heading` says whether it announces what follows."""

    start: int
    end: int
    heading: bool


class Section(NamedTuple):
    """Name a stretch of words."""

    title: str
    start: int
    end: int


def find_blocks(text: str) -> list[Block]:
    """Cut a text into its lines, which together are the text, and find the headings among them.

    A heading is a short line that ends in no punctuation mark. It begins with # marks; or, in a text with blank lines,
    it stands between two of them, above a line that is no heading; or, in a text without, above a long line.
    """
    gaps = [match.span() for match in BLANK.finditer(text) if _breaks(text, *match.span())]
    gaps = [(start, end) for start, end in gaps if start > 0 and end < len(text)]
    edges = [0, *(end for _, end in gaps), len(text)]
    wide = [True, *(_blank_line(text[start:end]) for start, end in gaps), True]  # a blank line before each, and behind
    spans = list(pairwise(edges))
    short = [_is_short(text[start:end].strip()) for start, end in spans]
    blocks = []
    for i, (start, end) in enumerate(spans):
        above = i + 1 < len(spans) and not short[i + 1]
        if any(wide[1:-1]):
            alone = wide[i] and wide[i + 1] and above
        else:
            alone = above and len(text[slice(*spans[i + 1])].strip()) > SHORT_LINE
        heading = short[i] and (alone or MARKED.match(text, start) is not None)
        blocks.append(Block(start, end, heading))
    return blocks


def _blank_line(gap: str) -> bool:
    lines = gap.replace("\r\n", "\n")
    return sum(lines.count(mark) for mark in NEWLINES) > 1


def _is_short(line: str) -> bool:
    return 0 < len(line) <= SHORT_LINE and line[-1] not in ".!?…:;,。！？" and any(map(str.isalpha, line))


def find_sections(text: str, words: Words, blocks: Sequence[Block]) -> list[Section]:
    """Cut the words at the headings; in a text without any, into at most 12 parts of whole lines, or sentences."""
    headings = [block for block in blocks if block.heading]
    if headings:
        starts = [_first_word(words, block.start) for block in headings]
        titles = [text[block.start : block.end].strip().lstrip("#").strip() for block in headings]
        if starts[0] > 0:
            starts, titles = [0, *starts], ["Before the first heading", *titles]
    else:
        starts, titles = _even_parts(text, words, blocks)
    return _stretches(starts, titles, len(words))


def _even_parts(text: str, words: Words, blocks: Sequence[Block]) -> tuple[list[int], list[str]]:
    """Join lines, or the sentences of a single line, into parts of about equal numbers of tokens."""
    name, edges = "Paragraph", sorted({_first_word(words, block.start) for block in blocks})
    if len(edges) < 2:
        name, edges = "Sentence", [start for start, _ in find_sentences(text, words)]
    chosen = list(range(len(edges)))
    if len(edges) > MOST_PARTS:
        before = words.token[edges]  # tokens before each line
        goals = words.tokens * np.arange(MOST_PARTS) / MOST_PARTS
        chosen = sorted(set(np.searchsorted(before, goals).tolist()) - {len(edges)})
    spans = list(pairwise([*chosen, len(edges)]))
    titles = [f"{name} {a + 1}" if b == a + 1 else f"{name}s {a + 1} to {b}" for a, b in spans]
    return [edges[a] for a in chosen], titles


def find_sentences(text: str, words: Words) -> list[tuple[int, int]]:
    """Cut the words into sentences, lines being cut too; what stands for no character is left to itself."""
    edges, place = [], 0
    for sentence in by_rule(text):
        edges.append(_first_word(words, place))
        place += len(sentence)
    if words.start[-1] == words.end[-1]:
        edges.append(len(words) - 1)
    return [(start, end) for start, end in pairwise([*sorted({0, *edges} - {len(words)}), len(words)]) if start < end]


def _first_word(words: Words, place: int) -> int:
    return int(bisect_left(words.start, place))


def _stretches(starts: Sequence[int], titles: Sequence[str], count: int) -> list[Section]:
    cuts = zip(titles, pairwise([*starts, count]), strict=True)
    return [Section(title, start, end) for title, (start, end) in cuts if start < end]


__all__ = ["Block", "Section", "Words", "find_blocks", "find_sections", "find_sentences", "find_words"]
