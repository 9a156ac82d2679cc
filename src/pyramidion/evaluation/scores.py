"""From predictions to figures: means with intervals, paired differences, wording; as JSON and as tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyramidion.evaluation.overlap import KINDS, Tell, rouge, rouge_settings, script_warning
from pyramidion.evaluation.resampling import SAMPLES, bootstrap, paired_bootstrap
from pyramidion.evaluation.run import Evaluation, read_predictions
from pyramidion.evaluation.wording import Repetition, repetition, words_of
from pyramidion.generation.journal import Row

HEADINGS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
Scores = dict[str, np.ndarray]


def score(evaluation: Evaluation, compare: Path | None = None, *, workers: int = 1, tell: Tell) -> dict[str, Any]:
    """Score everything in an evaluation, and set it against another run or file."""
    rows = evaluation.rows
    references = [row["reference"] for row in rows]
    texts = {evaluation.name: [row["prediction"] for row in rows], **evaluation.baselines}
    scored = {name: rouge(written, references, workers=workers, tell=tell) for name, written in texts.items()}
    mine = scored[evaluation.name]
    differences = {name: _differences(mine, scored[name]) for name in evaluation.baselines}
    if compare is not None:
        differences[str(compare)] = _against(rows, mine, compare, workers, tell)
    sources = None if evaluation.document is None else [evaluation.document(place) for place in range(len(rows))]
    warning = script_warning([*references, *texts[evaluation.name]])
    return {
        "documents": len(rows),
        "failed": sum(bool(row.get("error")) for row in rows),
        "notes": [row["note"] for row in rows if row.get("note")],
        "settings": evaluation.settings,
        "rouge_settings": rouge_settings(),
        "intervals": f"95 %, bootstrap over documents, {SAMPLES} samples",
        "rouge": {name: {kind: _interval(values) for kind, values in of.items()} for name, of in scored.items()},
        "wording": {name: _wording(written, sources) for name, written in {**texts, "reference": references}.items()},
        "differences": differences,
        "warnings": [warning] if warning else [],
    }


def _interval(values: np.ndarray) -> dict[str, float]:
    low, high = bootstrap(values)
    return {"mean": 100 * float(values.mean()), "low": 100 * low, "high": 100 * high}


def _differences(a: Scores, b: Scores) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        difference, low, high, p = paired_bootstrap(a[kind], b[kind])
        found[kind] = {"difference": 100 * difference, "low": 100 * low, "high": 100 * high, "p": p}
    return {"documents": len(a[KINDS[0]]), **found}


def _against(rows: list[Row], mine: Scores, compare: Path, workers: int, tell: Tell) -> dict[str, Any]:
    """Score the other's predictions of the documents that both have."""
    others = read_predictions(compare)
    pairs = pair(rows, others)
    theirs = [others[place] for _, place in pairs]
    scored = rouge(
        [row["prediction"] for row in theirs], [row["reference"] for row in theirs], workers=workers, tell=tell
    )
    places = [place for place, _ in pairs]
    return _differences({kind: values[places] for kind, values in mine.items()}, scored)


def pair(rows: Sequence[Row], others: Sequence[Row]) -> list[tuple[int, int]]:
    """Find the documents that two runs share: by `id` where that names each, else by place; references must agree."""
    named = all(_unique([row.get("id") for row in side]) for side in (rows, others))
    keys = [
        [row["id"] if named else row.get("index", place) for place, row in enumerate(side)] for side in (rows, others)
    ]
    places = {key: place for place, key in enumerate(keys[1])}
    pairs = [(place, places[key]) for place, key in enumerate(keys[0]) if key in places]
    if not pairs:
        raise ValueError(f"`--compare` must share documents, got {len(rows)} and {len(others)} with none in common.")
    for mine, theirs in pairs:
        if rows[mine]["reference"].split() != others[theirs]["reference"].split():
            raise ValueError(f"`--compare` must have the same references, got another for document {keys[0][mine]!r}.")
    return pairs


def _unique(names: list[Any]) -> bool:
    return None not in names and len(set(map(str, names))) == len(names)


def _wording(texts: Sequence[str], sources: Sequence[str] | None) -> dict[str, Any]:
    """Average lengths and repetition over texts; None where no text has any."""
    lengths = [len(words_of(text)) for text in texts]
    of_sources: Sequence[str | None] = sources or [None] * len(texts)
    found = [repetition(text, source) for text, source in zip(texts, of_sources, strict=True)]
    shares = {name: _mean([getattr(one, name) for one in found]) for name in Repetition._fields}
    spread = dict(zip(("words_low", "words_high"), map(float, np.percentile(lengths, [10, 90])), strict=True))
    return {"words": float(np.mean(lengths)), **spread, "empty": lengths.count(0), **shares}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


# --------------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------------


def to_markdown(scores: dict[str, Any]) -> str:
    """Write figures and settings for a reader: Markdown whose columns stand below each other in a terminal too."""
    parts = [f"# Evaluation of {scores['documents']:,} documents", _table(_rouge_rows(scores))]
    if scores["differences"]:
        first = next(iter(scores["rouge"]))
        parts += [f"Differences, {first} minus the other, on the same documents:", _table(_difference_rows(scores))]
    parts += ["Wording:", _table(_wording_rows(scores))]
    if scores["failed"]:
        parts.append(f"{scores['failed']:,} documents failed; their summaries are empty, and count.")
    if notes := scores["notes"]:
        parts.append(f"{len(notes):,} documents have a note; the first: {notes[0]}.")
    parts += [f"Warning: {warning}" for warning in scores["warnings"]]
    said = {**scores["rouge_settings"], "intervals": scores["intervals"], **_flat(scores["settings"])}
    return "\n\n".join([*parts, "\n".join(f"- {name}: {value}" for name, value in said.items())]) + "\n"


def _rouge_rows(scores: dict[str, Any]) -> list[list[str]]:
    rows = [["", *HEADINGS.values()]]
    for name, of in scores["rouge"].items():
        cells = (of[kind] for kind in HEADINGS)
        rows.append([name, *(f"{one['mean']:.2f} ({one['low']:.2f} to {one['high']:.2f})" for one in cells)])
    return rows


def _difference_rows(scores: dict[str, Any]) -> list[list[str]]:
    rows = [["other", "documents", *HEADINGS.values()]]
    for name, of in scores["differences"].items():
        cells = (of[kind] for kind in HEADINGS)
        written = (
            f"{one['difference']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f}, p {one['p']:.3f})" for one in cells
        )
        rows.append([name, f"{of['documents']:,}", *written])
    return rows


def _wording_rows(scores: dict[str, Any]) -> list[list[str]]:
    rows = [["", "words", "80 % between", "empty", "4-grams repeated", "4-grams in the document", "words distinct"]]
    for name, of in scores["wording"].items():
        shares = ("" if of[key] is None else f"{of[key]:.1%}" for key in Repetition._fields)
        between = f"{of['words_low']:.0f} and {of['words_high']:.0f}"
        rows.append([name, f"{of['words']:.0f}", between, f"{of['empty']:,}", *shares])
    return rows


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width if place == 0 else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _flat(settings: dict[str, Any], under: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{under}{name}.") if isinstance(value, dict) else {f"{under}{name}": value}
    return flat


__all__ = ["pair", "score", "to_markdown"]
