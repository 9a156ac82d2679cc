"""The Explanation: where every source token went, and what every summary token drew on, as numbers that add up."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pyramidion.disk import write_whole
from pyramidion.explain.passages import Block, Section, Words, find_blocks, find_sections, find_sentences

DECIMALS = 7  # of the numbers that are written out
ROUNDING = 1e-5  # how far a sum of float32 may be from 1
ORDERS = ("share", "density")


@dataclass(frozen=True, eq=False)
class Stage:
    """Say where the n source tokens are behind one encoder layer that pools; before the first, each is by itself.

    name     what a reader calls it: "tokens", "layer 3", and "memory" where vectors are spread again (Funnel)
    k        slots that are filled
    slots    [n]  the slot of each token, -1: dropped
    weights  [n]  the share of that slot that it holds: its survival, from 0 (dropped) to 1 (the slot is its own)
    """

    name: str
    k: int
    slots: np.ndarray
    weights: np.ndarray

    @cached_property
    def filling(self) -> np.ndarray:
        """Add up the weights of each slot: [k], all 1."""
        inside = self.slots >= 0
        return np.bincount(self.slots[inside], self.weights[inside], minlength=self.k)

    def check(self, n: int) -> None:
        """Refuse a stage whose slots do not each hold weights that sum to 1."""
        if self.slots.shape != (n,) or self.weights.shape != (n,):
            raise ValueError(f"Each of the {n:,} tokens must have a slot and a weight in {self.name!r}.")
        if not -1 <= self.slots.min() <= self.slots.max() < self.k:
            raise ValueError(f"Slots must be below {self.k:,} in {self.name!r}, got {self.slots.max():,}.")
        if not self.weights.min() >= 0 or self.weights[self.slots < 0].any():
            raise ValueError(f"Weights must be at least 0, and 0 where a token is dropped, in {self.name!r}.")
        wrong = np.abs(self.filling - 1)
        if not wrong.max() <= ROUNDING:
            slot = int(wrong.argmax())
            raise ValueError(
                f"The weights of a slot must sum to 1, got {self.filling[slot]:.6g} in slot {slot} of {self.name!r}."
            )


@dataclass(frozen=True, eq=False)
class Copies:
    """Say where summary tokens were copied from, by a model that copies.

    origins  [c]    source tokens that can be copied: winners of slots and those behind them, one for each way to copy
    shares   [t c]  how much of the probability of summary token t came of each way; what is left of 1 came of the
                    vocabulary
    """

    origins: np.ndarray
    shares: np.ndarray

    def check(self, n: int, t: int, rounding: float) -> None:
        """Refuse shares of what is not there, or that make more than 1."""
        if self.origins.ndim != 1 or self.shares.shape != (t, len(self.origins)):
            got = f"{list(self.origins.shape)} and {list(self.shares.shape)}"
            raise ValueError(f"`copies` must have origins [c] and shares [t c] with t = {t}, got {got}.")
        if not 0 <= self.origins.min() <= self.origins.max() < n:
            raise ValueError(f"Origins must be source tokens, from 0 to {n - 1:,}, got {self.origins.max():,}.")
        if not self.shares.min() >= 0 or not self.shares.sum(1).max() <= 1 + rounding:
            raise ValueError("What was copied of a summary token must be at least 0 and at most 1.")


class Passage(NamedTuple):
    """Say how much of the memory a stretch of words holds.

    text        the words, as they stand in the source
    start, end  the first word, and the one behind the last
    share       the weights of its tokens over k: its part of the memory
    part        its tokens over n: its part of the text
    """

    text: str
    start: int
    end: int
    share: float
    part: float

    @property
    def density(self) -> float:
        """Compare what it holds with what it would if all tokens held the same: 1 is that."""
        return self.share / self.part


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Hold what became of each source token, and what each token of the summary drew on.

    All of it comes from the composed Selections and the decoder's attention. The sums are checked here, so that what
    is shown is what the decoder saw: the weights of a slot sum to 1 after each layer that pools, and what a summary
    token drew on its source tokens sums to the attention that it paid.

    source    the text that was read: all of it, unless it was cut
    note      what a reader should know, as in `Summary`
    words     of the source, with their tokens, the end token being the last
    written   the words of the summary, likewise
    stages    the source tokens before any layer, then behind each that pools; the last is the decoder's memory
    layers    [l t k]  the attention of each decoder layer, the mean of its heads, at the step that wrote token t
    copies    where tokens were copied from, of a model that copies
    rounding  how far the attention of a token may be from summing to 1, by the precision it was computed in
    """

    title: str
    model: str
    source: str
    summary: str
    note: str | None
    words: Words
    written: Words
    stages: tuple[Stage, ...]
    layers: np.ndarray
    copies: Copies | None = None
    rounding: float = ROUNDING

    def __post_init__(self) -> None:
        self.words.check(self.source)
        self.written.check(self.summary)
        if not self.stages:
            raise ValueError("`stages` must begin with the source tokens themselves, got none.")
        for stage in self.stages:
            stage.check(self.words.tokens)
        self._check_attention()
        if self.copies is not None:
            self.copies.check(self.words.tokens, self.written.tokens, self.rounding)

    def _check_attention(self) -> None:
        t, k = self.written.tokens, self.memory.k
        if self.layers.ndim != 3 or self.layers.shape[1:] != (t, k):
            raise ValueError(f"`layers` must be [l t k] with t = {t} and k = {k}, got {list(self.layers.shape)}.")
        paid = self.attention.sum(1)  # [t]
        drawn = self.attention @ self.memory.filling  # [t] the sum of its shares over all source tokens
        for what, wrong in (("Attention", paid - 1), ("The shares of the source tokens", drawn - paid)):
            if not np.abs(wrong).max() <= self.rounding:
                token = int(np.abs(wrong).argmax())
                got = f"got {1 + wrong[token]:.6g} at summary token {token}"
                raise ValueError(f"{what} must sum to 1 for every summary token, within {self.rounding:.1g}, {got}.")

    def __repr__(self) -> str:
        steps = " -> ".join(str(stage.k) for stage in self.stages)
        return f"Explanation({self.title!r}, {steps}, {self.written.tokens} written)"

    # ----------------------------------------------------------------------------------------------------------------
    # What was kept
    # ----------------------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Stage:
        """Give the last stage: what the decoder attends to."""
        return self.stages[-1]

    def survival(self, stage: int = -1) -> np.ndarray:
        """Say how much of each word survives, [w]: the largest share of a slot that one of its tokens holds."""
        return self.words.largest(self.stages[stage].weights)

    def held(self, stage: int = -1) -> np.ndarray:
        """Say how much of all slots each word holds, [w]: the weights of its tokens over k. They sum to 1."""
        return self.words.sums(self.stages[stage].weights) / self.stages[stage].k

    @cached_property
    def blocks(self) -> list[Block]:
        """Cut the text into lines, and find its headings."""
        return find_blocks(self.source)

    @cached_property
    def sections(self) -> list[Section]:
        """Cut the words at the headings, or into even parts where there is none."""
        return find_sections(self.source, self.words, self.blocks)

    def by_section(self, stage: int = -1) -> list[Passage]:
        """Say how much each section holds; their shares sum to 1."""
        held = self.held(stage)
        return [self._passage(start, end, held)._replace(text=title) for title, start, end in self.sections]

    def top(self, count: int = 10, *, by: str = "share", stage: int = -1) -> list[Passage]:
        """Find the sentences that hold most of the memory, in total (`share`), or for their length (`density`).

        The first holds most. A share is the weights of a sentence's tokens over k; those of all sentences sum to 1.
        """
        if by not in ORDERS:
            raise ValueError(f"`by` must be {' or '.join(ORDERS)}, got {by!r}.")
        held = self.held(stage)
        passages = [self._passage(start, end, held) for start, end in find_sentences(self.source, self.words)]
        return sorted((one for one in passages if one.text), key=lambda one: -getattr(one, by))[: max(count, 0)]

    def _passage(self, start: int, end: int, held: np.ndarray) -> Passage:
        text = self.source[self.words.start[start] : self.words.end[end - 1]].strip()
        tokens = int(self.words.token[end] - self.words.token[start])
        return Passage(text, start, end, float(held[start:end].sum()), tokens / self.words.tokens)

    # ----------------------------------------------------------------------------------------------------------------
    # What was drawn on
    # ----------------------------------------------------------------------------------------------------------------

    @cached_property
    def attention(self) -> np.ndarray:
        """Give what each summary token paid to each slot, [t k]: the mean over all layers and heads."""
        mean: np.ndarray = self.layers.mean(0)
        return mean

    def shares(self, token: int) -> np.ndarray:
        """Say what a summary token drew on each source token, [n]: attention to its slot times its weight in it."""
        inside = self.memory.slots.clip(min=0)
        shares: np.ndarray = self.attention[token, inside] * self.memory.weights
        return shares

    def drawn(self, word: int) -> np.ndarray:
        """Say what a summary word drew on each source word, [w]: the mean of its tokens. They sum to 1."""
        first, last = self.written.token[word : word + 2]
        return self.words.sums(np.mean([self.shares(token) for token in range(first, last)], axis=0))

    def copied(self, word: int) -> np.ndarray:
        """Say how much of a summary word was copied from each source word, [w]: the mean of its tokens.

        Their sum is from 0, all of it was written by the vocabulary, to 1. It is 0 where a model does not copy.
        """
        found = np.zeros(self.words.tokens)
        if self.copies is not None:
            first, last = self.written.token[word : word + 2]
            np.add.at(found, self.copies.origins, self.copies.shares[first:last].mean(0))
        return self.words.sums(found)

    # ----------------------------------------------------------------------------------------------------------------
    # Forms
    # ----------------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Give everything that the page shows, ready for JSON; positions count characters, numbers have 7 decimals."""
        return {
            "title": self.title,
            "model": self.model,
            "note": self.note,
            "source": self.source,
            "words": _words(self.words),
            "blocks": [block._asdict() for block in self.blocks],
            "sections": [section._asdict() for section in self.sections],
            "stages": [_stage(stage) for stage in self.stages],
            "passages": [_rounded(passage) for passage in self.top()],
            "summary": self.summary,
            "written": _words(self.written),
            "attention": self.attention.round(DECIMALS).tolist(),
            "copied": None if self.copies is None else _copied(self.copies),
        }

    def save_json(self, path: str | Path) -> None:
        """Write `to_dict` to a file."""
        write_whole(Path(path), json.dumps(self.to_dict()) + "\n")

    def save_html(self, path: str | Path) -> None:
        """Write one page that needs nothing else: no network, no other file."""
        from pyramidion.explain.browser import page

        write_whole(Path(path), page(self.to_dict()))

    def text(self, width: int = 80, *, colour: bool = False) -> str:
        """Write it for a terminal: the summary, what each section holds, the sentences that hold most."""
        from pyramidion.explain.terminal import render

        return render(self, width, colour=colour)


def _words(words: Words) -> dict[str, list[int]]:
    return {"start": words.start.tolist(), "end": words.end.tolist(), "token": words.token.tolist()}


def _stage(stage: Stage) -> dict[str, Any]:
    weights = stage.weights.round(DECIMALS).tolist()
    return {"name": stage.name, "k": stage.k, "slots": stage.slots.tolist(), "weights": weights}


def _copied(copies: Copies) -> list[list[tuple[int, float]]]:
    """List, for each summary token, the source tokens it was copied from, with what came of each."""
    found: list[list[tuple[int, float]]] = [[] for _ in copies.shares]
    shares = copies.shares.round(DECIMALS)
    for token, way in zip(*(places.tolist() for places in shares.nonzero()), strict=True):
        found[token].append((int(copies.origins[way]), float(shares[token, way])))
    return found


def _rounded(passage: Passage) -> dict[str, Any]:
    return {**passage._asdict(), "share": round(passage.share, DECIMALS), "part": round(passage.part, DECIMALS)}


__all__ = ["Copies", "Explanation", "Passage", "Stage"]
