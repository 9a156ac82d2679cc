"""The operator at work on one text: score its words, select twice, show what was kept.

There is no trained scorer yet, so the scores are word statistics (`score`). Everything after them is the library's own:
the tournament, the composition of two layers by `then`, and the account of which word is in which slot.
"""

from __future__ import annotations

import codecs
import math
import re
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyramidion.topk import Selection, soft_topk
from pyramidion.topk.backends import resolve
from pyramidion.topk.tournament import count_rounds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

HONESTY = (
    "No model is trained yet: the scores come from word statistics; the tournament, the pooling and the account of "
    "what was kept are the real ones."
)


def run(path: Path | None, keep: int) -> None:
    """Show on stdout what two layers of the operator keep of a text; without a path, of the one that is built in."""
    from rich.console import Console

    if keep < 1:
        raise ValueError(f"`--keep` must be at least 1, got {keep}.")
    document = parse(*(built_in() if path is None else read(path)))
    pyramid = select(score(document), keep)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    show(document, pyramid, keep, Console(highlight=False, markup=False, emoji=False))


# --------------------------------------------------------------------------------------------------------------------
# The text
# --------------------------------------------------------------------------------------------------------------------

LIMIT = 4 * 2**20  # bytes: beyond, Python objects for every word become a burden
UNREADABLE = 0.1  # the share of characters beyond which a file is no text
WORD = re.compile(r"\w+(?:['’-]\w+)*")
BLANK_LINE = re.compile(r"\n[^\S\n]*\n\s*")
SENTENCE_END = re.compile(r"[.!?…]\S*\s|[。！？]")
# One character for one character, so that offsets hold: C0 codes become their pictures, C1 codes and those that turn
# the direction of writing the replacement character. What a terminal would obey is then only shown.
INERT = (
    {code: 0x2400 + code for code in range(32)}
    | {ord(blank): ord(" ") for blank in "\t\v\f"}
    | {ord("\n"): ord("\n"), 0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
)


class Word(NamedTuple):
    """Place a word in its text: characters, paragraph, sentence."""

    start: int
    end: int
    paragraph: int
    sentence: int


class Paragraph(NamedTuple):
    """Place a paragraph in its text; `number` counts those that are not headings, from 1, and is 0 for a heading."""

    start: int
    end: int
    number: int


class Section(NamedTuple):
    """Name a stretch of words."""

    title: str
    start: int
    end: int


@dataclass(frozen=True)
class Document:
    """Hold a text and its parts."""

    name: str
    text: str
    words: Sequence[Word]
    paragraphs: Sequence[Paragraph]
    replaced: int  # bytes that were not UTF-8

    def word(self, i: int) -> str:
        """Return the i-th word."""
        return self.text[self.words[i].start : self.words[i].end]


def built_in() -> tuple[str, bytes]:
    """Return the text that comes with the package."""
    return "built-in article", (files("pyramidion") / "assets" / "document.txt").read_bytes()


def read(path: Path) -> tuple[str, bytes]:
    """Return a file's name and bytes, or say in one line why not."""
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
    except OSError as error:
        raise ValueError(f"`FILE` must be a file that can be read, got {str(path)!r}: {error.strerror}.") from error
    if len(raw) > LIMIT:
        raise ValueError(f"`FILE` must be at most {LIMIT // 2**20} MiB for this demonstration, got {str(path)!r}.")
    return path.name.encode(errors="replace").decode().translate(INERT), raw


def parse(name: str, raw: bytes) -> Document:
    """Turn bytes into words, sentences and paragraphs. Nothing is left out: what is no word stands between words."""
    text, replaced = decode(raw)
    paragraphs = find_paragraphs(text)
    words = list(find_words(text, paragraphs))
    if not words:
        got = f"{len(text)} characters without one" if text else "an empty file"
        raise ValueError(f"`FILE` must hold at least one word, got {got}.")
    return Document(name, text, words, paragraphs, replaced)


def decode(raw: bytes) -> tuple[str, int]:
    """Read bytes as UTF-8, or UTF-16 where they say so, and make control characters inert: the text, bytes replaced."""
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not wide and (zero := raw.find(0)) >= 0:
        raise ValueError(f"`FILE` must be text, got a zero byte at position {zero}.")
    text = raw.decode("utf-16" if wide else "utf-8-sig", errors="replace")
    replaced = text.count("\ufffd") - raw.count("\ufffd".encode())
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    inert = text.translate(INERT)
    unreadable = replaced + sum(old != new and old not in "\t\v\f" for old, new in zip(text, inert, strict=True))
    if unreadable > UNREADABLE * len(text):
        raise ValueError(f"`FILE` must be UTF-8 text, got {unreadable / len(text):.0%} unreadable characters.")
    return inert.strip(), replaced


def find_paragraphs(text: str) -> list[Paragraph]:
    """Split at blank lines. A heading is one short line without a full stop, above a paragraph or marked with #."""
    breaks = [(0, 0), *(match.span() for match in BLANK_LINE.finditer(text)), (len(text), len(text))]
    spans = [(before[1], after[0]) for before, after in pairwise(breaks)]
    alone = [_stands_alone(text[start:end]) for start, end in spans]
    paragraphs, number = [], 0
    for i, (start, end) in enumerate(spans):
        above = i + 1 < len(spans) and not alone[i + 1]
        heading = alone[i] and (above or text.startswith("#", start))
        number += not heading
        paragraphs.append(Paragraph(start, end, 0 if heading else number))
    return paragraphs


def _stands_alone(paragraph: str) -> bool:
    return len(paragraph) <= 72 and "\n" not in paragraph and not paragraph.endswith(tuple(".!?…:;,。"))


def find_words(text: str, paragraphs: Sequence[Paragraph]) -> Iterator[Word]:
    """Yield the words in order; a sentence ends at a full stop or with its paragraph."""
    sentence = -1
    for index, paragraph in enumerate(paragraphs):
        last, sentence = paragraph.start, sentence + 1
        for match in WORD.finditer(text, paragraph.start, paragraph.end):
            if SENTENCE_END.search(text, last, match.start()) and last > paragraph.start:
                sentence += 1
            last = match.end()
            yield Word(match.start(), last, index, sentence)


def find_sections(document: Document, parts: int = 8) -> list[Section]:
    """Cut the words at the headings, or, in a text without any, into equal parts."""
    words, n = document.words, len(document.words)
    headed = [i for i, paragraph in enumerate(document.paragraphs) if not paragraph.number]
    starts = [bisect_right(words, i - 1, key=lambda word: word.paragraph) for i in headed]
    pieces = [document.text[document.paragraphs[i].start : document.paragraphs[i].end] for i in headed]
    titles = [piece.strip("# ") for piece in pieces]
    if not headed:
        starts = sorted({n * part // parts for part in range(parts)})
        titles = [f"words {a + 1:,} to {b:,}" for a, b in pairwise([*starts, n])]
    elif starts[0] > 0:
        starts, titles = [0, *starts], ["(before the first heading)", *titles]
    cuts = zip(titles, pairwise([*starts, n]), strict=True)
    return [Section(title, start, end) for title, (start, end) in cuts if start < end]


# --------------------------------------------------------------------------------------------------------------------
# Scores, and what the operator makes of them
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pyramid:
    """Hold two layers of selection, their composition, and the seconds they took."""

    first: Selection
    second: Selection
    whole: Selection
    seconds: float

    @property
    def shares(self) -> Tensor:
        """Give each word's share of its final slot, [n]."""
        return self.whole.weights[0]


def score(document: Document) -> Tensor:
    """Score each word by statistics of this text alone, standardised: [1 n], mean 0, deviation 1.

    log(1 + occurrences) × log(1 + sentences / sentences with it) × letters, at most 16; divided by 1 + log r at the
    r-th occurrence. Frequent here, in few sentences, long, and new: what stop lists do by hand, without a list.
    """
    keys = [document.word(i).casefold() for i in range(len(document.words))]
    counts = Counter(keys)
    spread = Counter(key for key, _ in {(key, word.sentence) for key, word in zip(keys, document.words, strict=True)})
    sentences = document.words[-1].sentence + 1
    seen: Counter[str] = Counter()
    scores = []
    for key in keys:
        seen[key] += 1
        value = math.log1p(counts[key]) * math.log1p(sentences / spread[key]) * min(len(key), 16)
        scores.append(value / (1 + math.log(seen[key])))
    raw = torch.tensor([scores], dtype=torch.float64)
    return ((raw - raw.mean()) / raw.std(correction=0).clamp(min=1e-9)).float()


def select(scores: Tensor, keep: int) -> Pyramid:
    """Select a quarter of the words, then `keep` of those by their blended scores: a pyramid of two layers."""
    n = scores.shape[1]
    start = time.perf_counter()
    first = soft_topk(scores, max(-(-n // 4), min(keep, n)))
    second = soft_topk(first.scores, min(keep, n))
    whole = first.then(second)
    return Pyramid(first, second, whole, time.perf_counter() - start)


def kept_by_section(shares: Tensor, sections: Sequence[Section]) -> list[float]:
    """Say which part of all slots each section holds; the parts sum to 1."""
    total = float(shares.double().sum())
    return [float(shares[start:end].double().sum()) / total for _, start, end in sections]


def check(pyramid: Pyramid, width: int = 16) -> tuple[float, float]:
    """Measure how far any slot's weights are from summing to 1, and pooling once from pooling twice."""
    whole = pyramid.whole
    sums = torch.zeros(whole.k, dtype=torch.float64).index_add_(0, whole.slots[0], whole.weights[0].double())
    x = torch.randn(1, whole.n, width, generator=torch.Generator().manual_seed(0))
    twice = pyramid.second.pool(pyramid.first.pool(x))
    return float((sums - 1).abs().max()), float((whole.pool(x) - twice).abs().max())


def members(selection: Selection, slot: int) -> list[tuple[int, float]]:
    """List the words of a slot with their weights: the winner, then the others from the heaviest down."""
    inside = (selection.slots[0] == slot).nonzero()[:, 0]
    order = selection.weights[0, inside].argsort(descending=True, stable=True)
    winner = int(selection.winners[0, slot])
    pairs = [(int(i), float(selection.weights[0, i])) for i in inside[order]]
    return sorted(pairs, key=lambda pair: pair[0] != winner)


def heaviest(selection: Selection, count: int) -> list[int]:
    """Name the slots whose winner holds the most, from the heaviest down; equals in order of position."""
    weights = selection.weights[0].gather(0, selection.winners[0])
    return [int(slot) for slot in weights.argsort(descending=True, stable=True)[:count]]


def densest(document: Document, shares: Tensor, room: int, line: int) -> tuple[int, int]:
    """Find the stretch of whole sentences that holds most and fits in `room` characters: its first word, its end.

    A new paragraph costs a `line` more. A sentence that does not fit is cut.
    """
    words, n = document.words, len(document.words)
    costs = [min(b.start - a.start, CLIP) + (b.paragraph > a.paragraph) * line for a, b in pairwise(words)]
    used = list(accumulate(costs, initial=0))  # [n] characters before each word
    held = [0.0, *shares.double().cumsum(0).tolist()]
    starts = list(_sentence_starts(words))
    best = (-1.0, 0, 0)
    for start in starts:
        end = bisect_right(used, used[start] + room)
        whole = starts[bisect_right(starts, end) - 1] if end < n else n
        while whole > start and not document.paragraphs[words[whole - 1].paragraph].number:
            whole -= 1  # a heading at the end would announce what is not shown
        end = whole if whole > start else max(end, start + 1)
        if held[end] - held[start] > best[0] + 1e-9:
            best = (held[end] - held[start], start, end)
    return best[1], best[2]


def _sentence_starts(words: Sequence[Word], longest: int = 80) -> Iterator[int]:
    """Yield where sentences begin; a very long one, such as a list, counts as several."""
    last = 0
    for i, word in enumerate(words):
        if i == 0 or word.sentence > words[i - 1].sentence or i - last >= longest:
            last = i
            yield i


# --------------------------------------------------------------------------------------------------------------------
# The terminal
# --------------------------------------------------------------------------------------------------------------------

CLIP = 40  # characters shown of one word, or of what stands between two
LINES = 13
# From which share on, what it is called, its style in colour and its mark without: whole words, dark on light, so that
# it reads on any background.
LEVELS = (
    (0.5, "half or more", "bold #000000 on #f5b700", "**"),
    (0.25, "a quarter", "#000000 on #f9d976", "*"),
    (0.1, "a tenth", "#000000 on #fcefc7", "*"),
    (0.02, "a fiftieth", "", ""),
    (0.0, "less", "dim", ""),
)


def show(document: Document, pyramid: Pyramid, keep: int, console: Console) -> None:
    """Print the whole demonstration."""
    width = min(console.width, 120)
    colour = console.color_system is not None and not console.no_color
    sections = find_sections(document)
    for line in headline(document, pyramid, keep):
        console.print(line, width=width, style="bold" if line.startswith("Pyramidion") else "")
    console.print()
    for block in passage(document, pyramid.shares, width, colour):
        console.print(block, width=width)
    console.print()
    console.print(slots_table(document, pyramid.whole, width), width=width)
    console.print(bars(sections, kept_by_section(pyramid.shares, sections), console, width), width=width)
    console.print()
    for line in closing(pyramid):
        console.print(line, width=width)


def headline(document: Document, pyramid: Pyramid, keep: int) -> Iterator[str]:
    """Say what was done to what, and what is not to be believed."""
    n, middle, k = pyramid.first.n, pyramid.first.k, pyramid.second.k
    rounds = f"{count_rounds(n, middle)}+{count_rounds(middle, k)} rounds"
    backend = resolve("auto", pyramid.first.weights)
    counts = f"{n:,} word{'s' * (n > 1)} to {k:,} slot{'s' * (k > 1)}"
    yield f"Pyramidion, {_clip(document.name)}: {counts}, {rounds}, {backend} backend"
    yield HONESTY
    if keep >= n:
        yield f"No more words than the {keep:,} slots asked for: each has one to itself, and nothing is blended."
    if document.replaced:
        yield f"Bytes that are not UTF-8 are shown as \ufffd: {document.replaced}."


def passage(document: Document, shares: Tensor, width: int, colour: bool) -> Iterator[Text]:
    """Yield the densest passage, each word in the style of its share, under a line that says what it is."""
    from rich.text import Text

    start, end = densest(document, shares, LINES * (width - 4), width)
    numbers = [document.paragraphs[word.paragraph].number for word in document.words[start:end]]
    count = document.paragraphs[-1].number
    named = sorted(set(numbers) - {0}) or [count]
    many = f"s {named[0]}-{named[-1]}" if len(named) > 1 else f" {named[0]}"
    yield Text(
        f"Where most was kept: paragraph{many} of {count}, {end - start:,} of {len(document.words):,} words", "bold"
    )
    yield legend(colour)
    block = Text()
    for i, share in zip(range(start, end), shares[start:end].tolist(), strict=True):
        if i > start and _opens(document, i):
            yield block.append(_tail(document, i - 1))
            block = Text("\n", "" if numbers[i - start] else "bold")
        block.append(_before(document, i, shown=i > start))
        _, _, style, mark = LEVELS[_level(share)]
        word = _clip(document.word(i))
        block.append(word if colour else f"{mark}{word}{mark}", style if colour else "")
    yield block.append(_tail(document, end - 1) if _opens(document, end) else _gap(document, end).rstrip() + " …")


def legend(colour: bool) -> Text:
    """Explain the shades, or the marks that stand for them."""
    from rich.text import Text

    line = Text("A word's share of its slot: ")
    if not colour:
        return line.append("**half or more**, *a tenth or more*, the rest less")
    for i, (_, name, style, _) in enumerate(LEVELS):
        line.append("  " * (i > 0)).append(name, style)
    return line


def _level(share: float) -> int:
    return next(i for i, (least, *_) in enumerate(LEVELS) if share >= least)


def _before(document: Document, i: int, *, shown: bool) -> str:
    """Return what stands before a word in its paragraph; dots where the passage opens in the middle of one."""
    word = document.words[i]
    if _opens(document, i):
        return _squeeze(document.text[document.paragraphs[word.paragraph].start : word.start])
    return _gap(document, i) if shown else "… "


def _opens(document: Document, i: int) -> bool:
    """Tell whether a paragraph begins at word i, or the text has ended there."""
    words = document.words
    return i in (0, len(words)) or words[i - 1].paragraph < words[i].paragraph


def _gap(document: Document, i: int) -> str:
    return _squeeze(document.text[document.words[i - 1].end : document.words[i].start])


def _tail(document: Document, i: int) -> str:
    return _squeeze(document.text[document.words[i].end : document.paragraphs[document.words[i].paragraph].end])


def _squeeze(between: str) -> str:
    """Shorten what stands between words, and every stretch of blanks in it to one."""
    return _clip(re.sub(r"\s+", " ", between))


def _clip(text: str, most: int = CLIP) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def slots_table(document: Document, selection: Selection, width: int, rows: int = 8) -> Table:
    """Tabulate the slots whose winner holds the most, and who else is in them."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(f"Slots whose winner holds the most: {min(rows, selection.k)} of {selection.k:,}", "bold"),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in ("slot", "weight", "word"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("winner", no_wrap=True)
    table.add_column("next in the slot: weight @ word")
    others = width // 40  # what fits
    for slot in heaviest(selection, rows):
        (winner, weight), *rest = members(selection, slot)
        listed = ", ".join(f"{_clip(document.word(i), 11)} {share:.1%} @{i + 1}" for i, share in rest[:others])
        cells = (f"{slot}", f"{weight:.1%}", f"{winner + 1:,}", _clip(document.word(winner), 14), listed or "(none)")
        table.add_row(*map(Text, cells))
    return table


def bars(sections: Sequence[Section], kept: Sequence[float], console: Console, width: int, most: int = 10) -> Table:
    """Draw what each section holds of the slots; of many sections those that hold most, the others in one row."""
    from rich.table import Table
    from rich.text import Text

    n = sections[-1].end
    rows = [(title, share, (end - start) / n) for (title, start, end), share in zip(sections, kept, strict=True)]
    if len(rows) > most:
        shown = set(sorted(range(len(rows)), key=lambda i: -rows[i][1])[: most - 1])
        rest = [row for i, row in enumerate(rows) if i not in shown]
        rows = [row for i, row in enumerate(rows) if i in shown]
        rows.append((f"({len(rest)} other sections)", sum(row[1] for row in rest), sum(row[2] for row in rest)))
    length = width // 3
    top = max(share for _, share, _ in rows)
    block = "█" if console.encoding.startswith("utf") else "#"
    table = Table(title=Text("\nShare kept per section", "bold"), title_justify="left", box=None, pad_edge=False)
    table.add_column("section", no_wrap=True)
    table.add_column("slots", justify="right")
    table.add_column("words", justify="right")
    table.add_column("", no_wrap=True)
    for title, share, part in rows:
        bar = Text(block * round(length * share / top), "#d79a00")
        table.add_row(
            Text(_clip(title, max(min(34, width - length - 20), 6))), Text(f"{share:.1%}"), Text(f"{part:.1%}"), bar
        )
    return table


def closing(pyramid: Pyramid) -> Iterator[str]:
    """Report what was measured, and how to go on."""
    from_one, from_twice = check(pyramid)
    yield (
        f"Measured: a slot's weights sum to 1 within {from_one:.1e}; pooling once through both layers and pooling "
        f"twice differ by at most {from_twice:.1e}; selecting took {1e3 * pyramid.seconds:.1f} ms."
    )
    yield "Your text: pyramidion demo FILE --keep 128. In eight lines of Python: README.md."
