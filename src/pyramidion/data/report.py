"""The account of a preparation: how much there is, how long it is, what is cut, and what is there twice."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyramidion.data.store import Split, TokenStore
from pyramidion.data.writer import DIGESTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # Okabe and Ito: told apart with any colour vision
SENTENCE = re.compile(r"(?<=[.!?])\s+")
WORDS, OFTEN, RARELY = 5, 5, 2000  # a sentence that counts; summaries that it is in, at least, and one of so many
ROOM = 1 << 18  # sentences that are counted at the same time
LISTED, TOLD = 20, 3  # sentences in the report; on the screen
EDGES = [0, *sorted({round(2 ** (i / 4)) for i in range(129)})]  # four to an octave, up to 2³²


def write_report(store: TokenStore, bad: dict[str, Any], max_source: int) -> tuple[dict[str, Any], list[str]]:
    """Write report.json, the figure and the list of duplicates into the store's folder; return the report and notes."""
    splits = {name: _describe(store[name], max_source) for name in store.splits}
    for name, count in bad["splits"].items():
        splits.setdefault(name, {"documents": 0})["bad_lines"] = count
    report = {
        "max_source": max_source,
        "vocab_size": store.vocab_size,
        "splits": splits,
        "bad_lines": {"total": sum(bad["splits"].values()), "reasons": bad["reasons"]},
        "duplicates": write_duplicates(store),
        "shared": {name: shared_sentences(store[name]) for name in store.splits},
    }
    (store.path / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    try:
        write_figure(store.path / "lengths.png", report)
    except ImportError:
        return report, ["No figure of lengths: pip install matplotlib."]
    return report, []


def _describe(split: Split, max_source: int) -> dict[str, Any]:
    documents, summaries = split.document_lengths, split.summary_lengths
    return {
        "documents": len(split),
        "document_tokens": int(documents.sum(dtype=np.int64)),
        "summary_tokens": int(summaries.sum(dtype=np.int64)),
        "document": _lengths(documents),
        "summary": _lengths(summaries),
        "truncated": float((documents >= max_source).mean()),  # an end token takes one place
        "bad_lines": 0,
    }


def _lengths(lengths: np.ndarray) -> dict[str, Any]:
    counts, _ = np.histogram(lengths, EDGES)
    used = np.flatnonzero(counts)
    first, last = int(used[0]), int(used[-1]) + 1
    return {
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "max": int(lengths.max()),
        "histogram": {"edges": EDGES[first : last + 1], "counts": counts[first:last].tolist()},
    }


# --------------------------------------------------------------------------------------------------------------------
# Duplicates
# --------------------------------------------------------------------------------------------------------------------


def write_duplicates(store: TokenStore) -> dict[str, Any]:
    """Count documents that are there more than once, but for white space and case, and list them in duplicates.jsonl.

    within  for each split, how many of its documents are copies of an earlier one of it
    across  for each two splits, how many texts stand in both
    """
    within: Counter[str] = Counter()
    across: Counter[str] = Counter()
    path = store.path / "duplicates.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for places in _copies(store):
            counts = Counter(split for split, _ in places)
            within.update({split: count - 1 for split, count in counts.items() if count > 1})
            across.update(f"{a}, {b}" for a, b in combinations(counts, 2))
            ids = [{"split": split, "index": i, "id": store[split][i].id} for split, i in places]
            file.write(json.dumps(ids, ensure_ascii=False) + "\n")
    if not within and not across:
        path.unlink()
    pairs = (f"{a}, {b}" for a, b in combinations(store.splits, 2))
    return {
        "within": {split: within[split] for split in store.splits},
        "across": {pair: across[pair] for pair in pairs},
    }


def _copies(store: TokenStore) -> Iterator[list[tuple[str, int]]]:
    """Yield the places of each text that has more than one."""
    parts = [np.fromfile(store.path / f"{DIGESTS}-{split}", ">u8").reshape(-1, 2) for split in store.splits]
    digests = np.concatenate(parts)
    starts = np.cumsum([0, *map(len, parts)])
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    new = np.concatenate([[True], (digests[order[1:]] != digests[order[:-1]]).any(1), [True]])
    begins = np.flatnonzero(new)
    for group in np.flatnonzero(np.diff(begins) > 1):
        places = np.sort(order[begins[group] : begins[group + 1]])
        which = np.searchsorted(starts, places, side="right") - 1
        yield [(store.splits[s], int(place - starts[s])) for s, place in zip(which, places, strict=True)]


# --------------------------------------------------------------------------------------------------------------------
# Sentences that many summaries share
# --------------------------------------------------------------------------------------------------------------------


def shared_sentences(split: Split) -> list[dict[str, Any]]:
    """List the sentences that stand in many summaries, the most frequent first: a model learns them by heart.

    Where there is no room to count all, every count is lowered by one, and what comes to nothing is forgotten. What is
    frequent outlasts that, and is counted once more.
    """
    least = max(OFTEN, len(split) // RARELY)
    counts: Counter[int] = Counter()
    lowered = 0
    for text in split.summary_texts():
        counts.update({hash(sentence.lower()) for sentence in _sentences(text)})
        if len(counts) > ROOM:
            counts = Counter({sentence: count - 1 for sentence, count in counts.items() if count > 1})
            lowered += 1
    frequent = {sentence for sentence, count in counts.items() if count + lowered >= least}
    if not frequent:
        return []
    found: dict[int, list[Any]] = {}
    for text in split.summary_texts():
        for key, sentence in {hash(one.lower()): one for one in _sentences(text)}.items():
            if key in frequent:
                found.setdefault(key, [0, sentence])[0] += 1
    listed = sorted(found.values(), key=lambda one: (-one[0], one[1]))
    return [{"summaries": count, "sentence": sentence} for count, sentence in listed if count >= least][:LISTED]


def _sentences(text: str) -> list[str]:
    """Split a text, roughly; what is too short to mean anything is left out."""
    parts = (" ".join(part.split()) for part in SENTENCE.split(text))
    return [part for part in parts if part.count(" ") >= WORDS - 1]


# --------------------------------------------------------------------------------------------------------------------
# On the screen and on paper
# --------------------------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], notes: list[str], path: Path, text: int, seconds: float) -> None:
    """Print the account of a preparation."""
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a sign shows a question mark
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    console.print(rich_table(report))
    speed = f"{text / 1e6:,.1f} MB of text in {seconds:,.1f} s, {text / 1e6 / seconds:.1f} MB/s."
    for line in [*remarks(report), *notes, speed, str(path)]:
        console.print(line, markup=False)


def rich_table(report: dict[str, Any]) -> Table:
    """Lay the splits out as a table."""
    from rich.table import Table

    table = Table(title=None, box=None, pad_edge=False)
    table.add_column("split")
    headings = ("documents", "tokens", "median", "95 %", "longest", "summary", "95 %", "longest")
    for heading in (*headings, f"over {report['max_source']:,}", "bad lines"):
        table.add_column(heading, justify="right")
    for name, split in report["splits"].items():
        if not split["documents"]:
            table.add_row(name, "0", *[""] * 8, f"{split['bad_lines']:,}")
            continue
        lengths = [f"{split[of][what]:,.0f}" for of in ("document", "summary") for what in ("median", "p95", "max")]
        tokens = split["document_tokens"] + split["summary_tokens"]
        shares = (f"{100 * split['truncated']:.1f} %", f"{split['bad_lines']:,}")
        table.add_row(name, f"{split['documents']:,}", f"{tokens:,}", *lengths, *shares)
    return table


def remarks(report: dict[str, Any]) -> list[str]:
    """Say what is there twice, what was left out, and what a model would say of anything."""
    lines = []
    duplicates = report["duplicates"]
    for split, count in duplicates["within"].items():
        if count:
            lines.append(f"Duplicates in {split}: {count:,} (duplicates.jsonl).")
    for pair, count in duplicates["across"].items():
        if count:
            lines.append(f"Duplicates across {pair.replace(', ', ' and ')}: {count:,} (duplicates.jsonl).")
    for reason, count in report["bad_lines"]["reasons"].items():
        lines.append(f"Left out: {count:,} × {reason} (bad_lines.txt).")
    lines = lines or ["No duplicates, no bad lines."]
    for split, found in report["shared"].items():
        for one in found[:TOLD]:
            shown = one["sentence"] if len(one["sentence"]) <= 80 else one["sentence"][:79] + "…"
            lines.append(f"One sentence in {one['summaries']:,} summaries of {split}, to be learnt by heart: {shown}")
    return lines


def write_figure(path: Path, report: dict[str, Any]) -> Path:
    """Draw how long documents and summaries are, split by split."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.4, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, of in ((left, "document"), (right, "summary")):
        for (name, split), colour in zip(report["splits"].items(), COLOURS, strict=False):
            if split["documents"]:
                _draw(axes, split[of]["histogram"], f"{name}: {split['documents']:,}", colour)
        _finish(axes, of)
    limit = report["max_source"]
    left.axvline(limit, color="0.5", linewidth=1, linestyle="--")
    left.annotate(
        f"{limit:,}", (limit, 1), (3, -10), xycoords=("data", "axes fraction"), textcoords="offset points", size=8
    )
    figure.savefig(path)
    return path


def _draw(axes: Axes, histogram: dict[str, list[int]], label: str, colour: str) -> None:
    counts = np.array(histogram["counts"])
    edges = [max(edge, 0.5) for edge in histogram["edges"]]  # a logarithmic axis has no 0
    axes.stairs(100 * counts / counts.sum(), edges, color=colour, linewidth=1.8, label=label)


def _finish(axes: Axes, of: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_title(f"Length of a {of}", loc="left", fontsize=11, fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens, without an end token")
    axes.set_ylabel("% of the split")
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
