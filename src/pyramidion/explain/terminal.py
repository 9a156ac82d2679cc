"""An Explanation for the terminal: the summary, what each section holds, and the sentences that hold most."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pyramidion.explain.account import Explanation, Passage

MOST_ROWS = 12
SENTENCES = 5
CLIP = 600  # characters shown of a sentence
# From which survival on, what it is called, its style in colour and its mark without: dark on light, which reads on any
# background.
LEVELS = (
    (0.5, "half or more", "bold #000000 on #f5b700", "**"),
    (0.25, "a quarter", "#000000 on #f9d976", "*"),
    (0.1, "a tenth", "#000000 on #fcefc7", "*"),
    (0.02, "a fiftieth", "", ""),
    (0.0, "less", "dim", ""),
)
# What a terminal would obey is shown instead: C0 codes as their pictures, C1 codes and those that turn the direction of
# writing as the replacement character. One character for one character.
INERT = (
    {code: 0x2400 + code for code in range(32)}
    | {ord(blank): ord(" ") for blank in "\t\n\v\f\r"}
    | {0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F], 0xFFFD)
    | dict.fromkeys([*range(0x2028, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
)


def render(explanation: Explanation, width: int, *, colour: bool) -> str:
    """Write the whole of it in lines of at most `width` characters, with colours or with marks."""
    from rich.console import Console

    if width < 20:
        raise ValueError(f"`width` must be at least 20, got {width}.")
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    _print(explanation, console, width, colour)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _print(explanation: Explanation, console: Console, width: int, colour: bool) -> None:
    from rich.text import Text

    console.print(Text(inert(explanation.title), "bold"))
    console.print(Text(headline(explanation)))
    if explanation.note:
        console.print(Text(inert(explanation.note)))
    console.print(Text("\nSummary", "bold"))
    console.print(Text(inert(explanation.summary) or "(nothing was written)"))
    if explanation.copies is not None and explanation.summary:
        console.print(Text(copying(explanation), "dim"))
    console.print(Text("\nWhat each section holds of the memory", "bold"))
    console.print(bars(explanation.by_section(), width))
    console.print(Text("\nThe sentences that hold most", "bold"))
    console.print(legend(colour))
    for passage in explanation.top(SENTENCES):
        console.print(Text(f"\n{passage.share:.1%} of the memory, {passage.part:.1%} of the text", "italic"))
        console.print(sentence(explanation, passage, colour))


def headline(explanation: Explanation) -> str:
    """Say how many tokens came, how many slots each layer that pools left, and who read."""
    first, *rest = explanation.stages
    steps = "".join(f", {stage.k:,} after {stage.name}" for stage in rest)
    return f"{first.k:,} tokens{steps}; read by {inert(explanation.model)}"


def copying(explanation: Explanation) -> str:
    """Say how many words of the summary were copied rather than written."""
    written = explanation.written
    words = [i for i in range(len(written)) if explanation.summary[written.start[i] : written.end[i]].strip()]
    copied = sum(explanation.copied(i).sum() >= 0.5 for i in words)
    return f"{copied:,} of {len(words):,} words were copied from the text, the rest written."


def bars(sections: Sequence[Passage], width: int) -> Table:
    """Draw what each section holds; of many those that hold most, the others in one row."""
    from rich.table import Table
    from rich.text import Text

    rows = [(inert(one.text), one.share, one.part) for one in sections]
    if len(rows) > MOST_ROWS:
        shown = set(sorted(range(len(rows)), key=lambda i: -rows[i][1])[: MOST_ROWS - 1])
        rest = [row for i, row in enumerate(rows) if i not in shown]
        rows = [row for i, row in enumerate(rows) if i in shown]
        rows.append((f"({len(rest)} other sections)", sum(row[1] for row in rest), sum(row[2] for row in rest)))
    length, most = width // 3, max(share for _, share, _ in rows)
    table = Table(box=None, pad_edge=False)
    for heading, side in (("section", "left"), ("memory", "right"), ("text", "right"), ("", "left")):
        table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for title, share, part in rows:
        bar = Text("█" * round(length * share / most), "#d79a00")
        table.add_row(Text(_clip(title, max(width - length - 20, 6))), Text(f"{share:.1%}"), Text(f"{part:.1%}"), bar)
    return table


def legend(colour: bool) -> Text:
    """Explain the shades, or the marks that stand for them."""
    from rich.text import Text

    line = Text("What a word holds of its slot: ")
    if not colour:
        return line.append("**half or more**, *a tenth or more*, the rest less")
    for place, (_, name, style, _) in enumerate(LEVELS):
        line.append("  " * (place > 0)).append(name, style)
    return line


def sentence(explanation: Explanation, passage: Passage, colour: bool) -> Text:
    """Write a sentence with each word in the style of its survival."""
    from rich.text import Text

    line = Text()
    for word, style, mark in _styled(explanation, passage):
        if len(line) > CLIP:
            return line.append(" …")
        line.append(" " * (len(line) > 0)).append(word if colour else f"{mark}{word}{mark}", style if colour else "")
    return line


def _styled(explanation: Explanation, passage: Passage) -> Iterator[tuple[str, str, str]]:
    words, survival = explanation.words, explanation.survival()
    for i in range(passage.start, passage.end):
        word = explanation.source[words.start[i] : words.end[i]].strip()
        if word:
            _, _, style, mark = next(level for level in LEVELS if survival[i] >= level[0])
            yield _clip(inert(word), 40), style, mark


def inert(text: str) -> str:
    """Make a text harmless to a terminal, in one line."""
    return re.sub(" +", " ", text.translate(INERT)).strip()


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


__all__ = ["inert", "render"]
