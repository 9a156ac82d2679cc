"""What a model learns from a document: to write its summary, or first, from its own text, to write what was taken out.

    summaries      the document as it is, the summary as it is
    spans          short spans all over the document are missing; the target lists them (after T5)
    gap-sentences  whole sentences are missing, the important ones; the target is these sentences (after PEGASUS)

One token stands in the source for each piece that is missing: a mask. No text may hold it. A tokenizer that `pyramidion
prepare` trained has 14 such tokens, the unknown one and the 13 bytes that are in no UTF-8, so that nothing is added to
a vocabulary; of another tokenizer it is the mask, or the unknown token. The masks of spans take turns and begin again
when all were used, so that neighbours differ: on a toy task with 14 spans a small model found them in half the steps
that it took with one mask for all.

What is taken out is a function of seed, epoch and the example's index alone: of no batch, no process, no history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from pyramidion.data.store import Example, Split
from pyramidion.data.tokenizer import is_byte_level

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OBJECTIVES = ("summaries", "spans", "gap-sentences")
CHOICES = ("principal", "lead", "random")
BETTER = 0.5  # the share of a document in which sentences are chosen by lot: the first in rank
UNWRITTEN = "ÀÁõö÷øùúûüýþÿ"  # as byte-level BPE writes C0, C1 and F5 to FF, which are in no UTF-8
STREAM = 1  # beside seed, epoch and index: these random numbers are used for nothing else


class Objective(Protocol):
    """Make of an example the one that is trained on: `document` is read, `summary` is to be written."""

    def __call__(self, example: Example, random: np.random.Generator) -> Example: ...


class Exercises:
    """Hold the examples of a split as an objective sets them: `exercises[epoch, index]`, the same whenever asked."""

    def __init__(self, split: Split, objective: Objective, seed: int) -> None:
        self.split, self.objective, self.seed = split, objective, seed

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, key: tuple[int, int]) -> Example:
        epoch, index = key
        return self.objective(self.split[index], np.random.default_rng([self.seed, epoch, index, STREAM]))


@dataclass(frozen=True)
class Corruption:
    """Say how much is taken out of a document, and what.

    span_length, span_density  the mean length of a span in tokens, and the share of the tokens that are in one
    gap_density                the share of the tokens that are in a sentence that is taken out
    gap_choice                 `principal`: sentences that share most with the rest of the document; `lead`: the first;
                               `random`: any. They are drawn from the better ones by lot, so that epochs differ

    Shares are what is aimed at: the target holds at most `max_target` tokens, and of a long document less is taken out.
    """

    span_length: float = 3.0
    span_density: float = 0.15
    gap_density: float = 0.3
    gap_choice: str = "principal"

    def __post_init__(self) -> None:
        if not self.span_length >= 1:
            raise ValueError(f"`span_length` must be at least 1, got {self.span_length}.")
        for name in ("span_density", "gap_density"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be above 0 and below 1, got {getattr(self, name)}.")
        if self.gap_choice not in CHOICES:
            raise ValueError(f"`gap_choice` must be one of {', '.join(CHOICES)}, got {self.gap_choice!r}.")


class Summaries:
    """Leave the example as it is."""

    def __str__(self) -> str:
        return "Learning to write summaries."

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        """Give the example."""
        return example


@dataclass(frozen=True)
class Spans:
    """Take short spans out: "a b c d e f g" may become "a M d e N g", to be answered with "b c N f".

    Of a document longer than `max_source` a part is read that begins anywhere, so that in some epoch its end is read
    too. Room is left for the end that the collator adds. `masks` take turns. Spans do not touch, and every way to place
    them is as likely, so they lie all over the part. Each costs the target its tokens and one more, the mask or the end
    behind it: where all of them cost more than `max_target`, there are fewer, no shorter ones. With 8192 and 512 tokens
    and the usual settings these are 128 spans with 384 tokens in all, one for 64 tokens read.

    A document of one token is one span. A document of none becomes one mask, with nothing to write but the end.
    """

    masks: tuple[int, ...]
    max_source: int = 8192
    max_target: int = 512
    settings: Corruption = field(default_factory=Corruption)

    def __post_init__(self) -> None:
        for name in ("max_source", "max_target"):
            if getattr(self, name) < 2:
                raise ValueError(f"`{name}` must be at least 2 to take something out, got {getattr(self, name)}.")

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        """Take spans out of the document."""
        tokens = self.part(example.document, random)
        if not len(tokens):
            return Example(np.array(self.masks[:1]), tokens, example.id)
        masked, spans = self.amount(len(tokens))
        lengths = _parts(masked, spans, random)
        gaps = _parts(len(tokens) - masked + 2, spans + 1, random)  # [spans + 1] the outer two may be empty
        starts = np.cumsum(gaps[:-1]) - 1 + np.cumsum(lengths) - lengths
        masks = np.resize(self.masks, spans)  # as often as needed
        source, missing = take_out(tokens, starts, lengths, masks)
        return Example(source, np.insert(missing, np.cumsum(lengths)[:-1], masks[1:]), example.id)

    def __str__(self) -> str:
        masked, spans = self.amount(self.max_source - 1)
        return f"Learning to write {masked} tokens in {spans} spans that are missing from {self.max_source - 1}."

    def part(self, document: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Give as much of the document as can be read, from anywhere."""
        latest = max(0, len(document) - self.max_source + 1)
        return self.cut(document, int(random.integers(latest + 1)))

    def cut(self, document: np.ndarray, start: int = 0) -> np.ndarray:
        """Give the tokens that are worked on; a mask among them, an unknown sign, would be taken for a span."""
        tokens = document[start : start + self.max_source - 1]
        return tokens[~np.isin(tokens, self.masks)]

    def amount(self, n: int) -> tuple[int, int]:
        """Say how many of n tokens are taken out, and in how many spans."""
        masked = min(max(1, round(self.settings.span_density * n)), max(1, n - 1))
        spans = max(1, round(masked / self.settings.span_length))
        if masked + spans > self.max_target:
            spans = max(1, round(self.max_target / (self.settings.span_length + 1)))
            masked = self.max_target - spans
        return masked, min(spans, masked, n - masked + 1)


@dataclass(frozen=True, eq=False)
class GapSentences:
    """Take whole sentences out, a mask for each, to be written one behind the other as they stood, like a summary.

    The mask is the same for all, and not in the target: it is the text that a reader would write.

    Of a long document a part is read, as with `spans`; for the `lead` it is the first. Sentences are ranked by
    `gap_choice`; of the first, which are half of what is read, some are drawn by lot until `gap_density` of it or
    `max_target` is reached, and at least one. A document with no sentence that can be taken out, because it is one
    sentence or all are longer than the target, is left to `spans`.
    """

    spans: Spans
    marks: SentenceMarks

    def __call__(self, example: Example, random: np.random.Generator) -> Example:
        """Take sentences out of the document."""
        lead = self.spans.settings.gap_choice == "lead"
        tokens = self.spans.cut(example.document) if lead else self.spans.part(example.document, random)
        ends = self.marks.ends(tokens)  # [sentences]
        lengths = np.diff(ends, prepend=0)
        chosen = self.choose(tokens, lengths, random)
        if not len(chosen):
            return self.spans(example, random)
        source, missing = take_out(tokens, (ends - lengths)[chosen], lengths[chosen], self.spans.masks[0])
        return Example(source, missing, example.id)

    def __str__(self) -> str:
        return f"Learning to write sentences that are missing ({self.spans.settings.gap_choice})."

    def choose(self, tokens: np.ndarray, lengths: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Choose sentences, in any order; none where none can be taken out."""
        most = self.spans.max_target - 1
        ranked = self.rank(tokens, lengths, random)
        ranked = ranked[lengths[ranked] <= most]
        if len(lengths) < 2 or not len(ranked):
            return ranked[:0]
        budget = min(most, self.spans.settings.gap_density * len(tokens))
        pool = ranked[: 1 + np.searchsorted(np.cumsum(lengths[ranked]), max(budget, BETTER * len(tokens)))]
        taken: list[int] = []
        total = 0
        for sentence in random.permutation(pool).tolist():
            if not taken or total + lengths[sentence] <= budget:
                taken.append(sentence)
                total += lengths[sentence]
        return np.array(taken)

    def rank(self, tokens: np.ndarray, lengths: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Order sentences, best first."""
        match self.spans.settings.gap_choice:
            case "principal":
                return np.argsort(-importance(tokens, lengths), kind="stable")
            case "lead":
                return np.arange(len(lengths))
            case _:
                return random.permutation(len(lengths))


def make_objective(
    name: str,
    tokenizer: PreTrainedTokenizerFast,
    settings: Corruption,
    *,
    max_source: int,
    max_target: int,
    reserved: Collection[int] = (),
) -> Objective:
    """Make an objective for what a tokenizer wrote; `reserved` are ids that mean something else to the model."""
    if name == "summaries":
        return Summaries()
    spans = Spans(find_masks(tokenizer, reserved), max_source, max_target, settings)
    return spans if name == "spans" else GapSentences(spans, SentenceMarks.of(tokenizer))


def find_masks(tokenizer: PreTrainedTokenizerFast, reserved: Collection[int] = ()) -> tuple[int, ...]:
    """Find the tokens that may stand for what is missing: the mask, or else the unknown one, and what no text holds."""
    first = (tokenizer.mask_token_id, tokenizer.unk_token_id)
    found = [id for id in first if id is not None and id not in reserved][:1]
    if not found:
        raise ValueError(
            "`objective` must have a token that stands for what is missing, but the store's tokenizer has neither a "
            "mask nor an unknown token that is not also padding, start or end. Prepare again with one that has."
        )
    if is_byte_level(json.loads(tokenizer.backend_tokenizer.to_str())):
        vocabulary = tokenizer.get_vocab()
        found += [vocabulary[byte] for byte in UNWRITTEN if vocabulary.get(byte) not in (None, *reserved)]
    return tuple(found)


# --------------------------------------------------------------------------------------------------------------------
# Taking out
# --------------------------------------------------------------------------------------------------------------------


def take_out(
    tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, masks: np.ndarray | int
) -> tuple[np.ndarray, np.ndarray]:
    """Split tokens [n] into those that stay, with a mask for each piece, and those that are missing, in order."""
    steps = np.zeros(len(tokens) + 1, dtype=np.int8)
    steps[starts] += 1
    steps[starts + lengths] -= 1  # where pieces touch, both happen
    missing = np.cumsum(steps[:-1], dtype=np.int8) > 0  # [n]
    stays = ~missing
    stays[starts] = True
    source = tokens.copy()
    source[starts] = masks
    return source[stays], tokens[missing]


def _parts(total: int, count: int, random: np.random.Generator) -> np.ndarray:
    """Cut `total` into `count` parts of at least 1, every way as likely."""
    cuts = random.choice(total - 1, count - 1, replace=False, shuffle=False) + 1
    return np.diff(np.sort(cuts), prepend=0, append=total)


def importance(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Score each sentence by ROUGE-1 F1 against the rest of the document, on ids: [sentences].

    Precision is the overlap by the sentence's length, recall by that of the rest. Both lengths add up to n for every
    sentence, so F1 is twice the overlap by n: long sentences whose words are used elsewhere too come first.
    """
    n = len(tokens)
    sentence = np.repeat(np.arange(len(lengths)), lengths)  # [n]
    width = int(tokens.max(initial=0)) + 1
    pairs, here = np.unique(sentence * width + tokens, return_counts=True)  # each token of a sentence, how often there
    elsewhere = np.bincount(tokens, minlength=width)[pairs % width] - here
    return 2 * np.bincount(pairs // width, np.minimum(here, elsewhere), len(lengths)) / n


# --------------------------------------------------------------------------------------------------------------------
# Sentences
# --------------------------------------------------------------------------------------------------------------------

CLOSING, OPENING = "\"'”’)\\]", "\"'“‘(\\[@"
SHORT = "al|approx|ca|cf|dr|eqs?|etc|figs?|mrs?|ms|nos?|prof|refs?|resp|sec|st|vs|viz"


class Kind(NamedTuple):
    """One thing that a token may be, by its text."""

    bit: int
    pattern: re.Pattern[str]


END = Kind(1, re.compile(rf"(?!\s*(?:[^\W\d_]|{SHORT})\.$).*[.!?][{CLOSING}\s]*", re.IGNORECASE | re.DOTALL))
CLOSER = Kind(2, re.compile(rf"[{CLOSING}]+\s*|\s+"))
STARTER = Kind(4, re.compile(rf"\s+[{OPENING}]*[^\W_a-z].*", re.DOTALL))
OPENER = Kind(8, re.compile(rf"\s+[{OPENING}]*"))
CAPITAL = Kind(16, re.compile(r"[^\W_a-z].*", re.DOTALL))
ABBREVIATION = Kind(32, re.compile(rf"\s+(?:[^\W\d_]|{SHORT})|(?:eq|fig|ref)s?", re.IGNORECASE))
STOP = Kind(64, re.compile(r"\..*", re.DOTALL))
BREAK = Kind(128, re.compile(rf".*[\n。！？][{CLOSING}\s]*", re.DOTALL))
KINDS = (END, CLOSER, STARTER, OPENER, CAPITAL, ABBREVIATION, STOP, BREAK)


@dataclass(frozen=True, eq=False)
class SentenceMarks:
    """Find the sentences of a text in its ids, by a table of what each id may be: [vocabulary], bits of `KINDS`.

    A sentence ends behind a line, or behind an end mark before a word that is not in lower case. It goes on behind the
    usual abbreviations and single letters. Others, and names like "Yahoo! Inc", are taken for an end.
    """

    table: np.ndarray

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> SentenceMarks:
        """Read every token as it reads behind another one, with the space in front of it if it has one."""
        decoder = tokenizer.backend_tokenizer.decoder
        tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
        texts = [decoder.decode(["x", token])[1:] if decoder else f" {token}" for token in tokens]
        return cls(np.array([sum(k.bit for k in KINDS if k.pattern.fullmatch(text)) for text in texts], dtype=np.uint8))

    def ends(self, tokens: np.ndarray) -> np.ndarray:
        """Say where each sentence ends: [sentences], the last of them n; none where there is no token."""
        if not len(tokens):
            return np.empty(0, dtype=np.int64)
        found = self.table[tokens]  # [n]
        before, behind = _shifted(found, 1), _shifted(found, -1)
        closes, breaks = _is(found, CLOSER), _is(found, BREAK)
        closed = np.maximum.accumulate(np.where(closes & ~breaks, 0, np.arange(len(found))))  # [n] what each closes
        ends = _is(found, END) & ~(_is(found, STOP) & _is(before, ABBREVIATION))
        opened = _is(found, OPENER) & _is(behind, CAPITAL)
        starts = _shifted(_is(found, STARTER) | opened, -1) | opened & closes  # white space both opens and closes
        last = (breaks[closed] | ends[closed] & starts) & ~_is(behind, CLOSER)
        last[-1] = True
        return np.flatnonzero(last) + 1


def _is(found: np.ndarray, kind: Kind) -> np.ndarray:
    return (found & kind.bit) != 0


def _shifted(values: np.ndarray, by: int) -> np.ndarray:
    """Give what stands one place before (1) or behind (-1) each, 0 where nothing does."""
    moved = np.roll(values, by)
    moved[0 if by > 0 else -1] = 0
    return moved


__all__ = ["CHOICES", "OBJECTIVES", "Corruption", "Exercises", "GapSentences", "Objective", "Spans", "Summaries"]
