"""Evaluate a model on a split, or a file of predictions: what is killed goes on where it was.

A run's folder holds settings.json, written first; predictions.jsonl and a file for each baseline, a line for each
document, written as they come; scores.json and scores.md at the end.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from transformers import GenerationConfig, PreTrainedTokenizerFast

from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.disk import write_whole
from pyramidion.evaluation.baselines import BASELINES, WORDS
from pyramidion.evaluation.overlap import Tell
from pyramidion.generation.decoding import decoding_options, options_of
from pyramidion.generation.journal import Journal, Row, read_rows
from pyramidion.generation.summarizer import Summarizer, Text, model_folder
from pyramidion.kernels.launching import choose_device

PREDICTIONS, SETTINGS = "predictions.jsonl", "settings.json"


class Split(Protocol):
    """What a split of a token store offers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...
    def document_text(self, index: int) -> str: ...
    def summary_text(self, index: int) -> str: ...


@dataclass(frozen=True)
class Plan:
    """What to evaluate.

    options  of `generate`, over the folder's and the paper's
    """

    model: Path
    data: Path
    split: str
    output: Path
    limit: int | None = None
    baselines: tuple[str, ...] = ()
    batch_size: int = 8
    max_length: int | None = None
    device: str = "auto"
    dtype: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """What is to be scored: predictions beside references, and baselines on the same documents.

    document  gives a row's document, where there is one
    settings  how the predictions came about
    """

    name: str
    rows: list[Row]
    document: Callable[[int], str] | None = None
    baselines: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------------------
# A model on a split
# --------------------------------------------------------------------------------------------------------------------


def run(plan: Plan, tell: Tell) -> Evaluation:
    """Write the predictions that are missing, then the baselines, into the run's folder."""
    store, split = open_split(plan.data, plan.split)
    count = len(split) if plan.limit is None else min(plan.limit, len(split))
    if count < 1:
        raise ValueError(f"`--split` must hold at least one document, got {count} in {plan.split!r}.")
    choose_device(plan.device)
    folder = model_folder(plan.model)
    tokens = _same_tokenizer(folder, store)
    settings = _settings(plan, folder, store.fingerprint, count, tokens)
    _claim(plan.output, settings, {"model": str(plan.model), "data": str(plan.data), "device": plan.device})
    with Journal(plan.output / PREDICTIONS) as journal:
        rows = list(_resume(journal, count))
        tell(len(rows), count, "summarising")
        for row in _predict(plan, split, count, len(rows), tokens=tokens):
            journal.append(row)
            rows.append(row)
            tell(len(rows), count, "summarising")
    baselines = {name: run_baseline(name, plan.output, split.document_text, rows, tell) for name in plan.baselines}
    return Evaluation("model", rows, split.document_text, baselines, settings)


def _predict(plan: Plan, split: Split, count: int, done: int, *, tokens: bool) -> Iterator[Row]:
    """Summarise the documents from `done` on, in batches that do not depend on where that is."""
    if done == count:
        return
    summarizer = Summarizer.from_pretrained(plan.model, plan.device, plan.dtype)
    texts: Iterator[Text] = (split[i].document if tokens else split.document_text(i) for i in range(count))
    limits: dict[str, Any] = {"batch_size": plan.batch_size, "max_length": plan.max_length}
    for index, summary in enumerate(summarizer.stream(texts, skip=done, **limits, **plan.options), start=done):
        yield {
            "index": index,
            "id": _plain(split[index].id),
            "prediction": summary.text,
            "reference": split.summary_text(index),
            "document_tokens": summary.document_tokens,
            "note": summary.note,
            "error": summary.error,
        }


def run_baseline(
    name: str, output: Path | None, document: Callable[[int], str], rows: Sequence[Row], tell: Tell
) -> list[str]:
    """Write a baseline for the same documents, into a file of its own where there is a folder."""
    if output is None:
        return [_baseline(name, document, place, len(rows), tell) for place in range(len(rows))]
    with Journal(output / f"{name}.jsonl") as journal:
        texts = [row["prediction"] for row in _resume(journal, len(rows))]
        for place in range(len(texts), len(rows)):
            texts.append(_baseline(name, document, place, len(rows), tell))
            row = rows[place]
            known = {"index": place, "id": row.get("id"), "prediction": texts[-1], "reference": row["reference"]}
            journal.append(known)
    return texts


def _baseline(name: str, document: Callable[[int], str], place: int, count: int, tell: Tell) -> str:
    text = BASELINES[name](document(place))
    tell(place + 1, count, name)
    return text


def _resume(journal: Journal, count: int) -> Iterator[Row]:
    """Check that the lines that stand there are those of the first documents, in order."""
    if len(journal.rows) > count:
        raise ValueError(f"`{journal.path}` must have at most {count} lines, got {len(journal.rows)}.")
    for place, row in enumerate(journal.rows):
        if row.get("index") != place or not isinstance(row.get("prediction"), str):
            raise ValueError(
                f"`{journal.path}` must hold document {place} in line {place + 1}, got {row.get('index')!r}."
            )
        yield row


def write_scores(output: Path, scores: dict[str, Any], table: str) -> tuple[Path, Path]:
    """Write the scores beside the predictions, for programs and for readers."""
    paths = output / "scores.json", output / "scores.md"
    write_whole(paths[0], json.dumps(scores, indent=1, allow_nan=False) + "\n")
    write_whole(paths[1], table)
    return paths


# --------------------------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------------------------


def open_split(data: Path, split: str) -> tuple[Any, Split]:
    """Open a split of a token store."""
    from pyramidion.data import TokenStore

    store = TokenStore.open(data)
    if split not in store:
        raise ValueError(f"`--split` must be one of {', '.join(map(str, store.splits))}, got {split!r}.")
    return store, store[split]


def _same_tokenizer(folder: Path, store: Any) -> bool:
    """Tell whether the store's tokens are the model's; if not, the model has to read the texts."""
    mine = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    same: bool = mine.get_vocab() == store.tokenizer().get_vocab()
    return same


def _settings(plan: Plan, folder: Path, data: str, count: int, tokens: bool) -> dict[str, Any]:
    """Name everything that a prediction depends on."""
    config = PyramidionConfig.from_pretrained(folder, local_files_only=True)
    saved = (folder / "generation_config.json").is_file()
    own = GenerationConfig.from_pretrained(folder, local_files_only=True) if saved else None
    return {
        "model": fingerprint(folder),
        "data": data,
        "split": plan.split,
        "documents": count,
        "input": "tokens of the store" if tokens else "text, by the model's tokenizer",
        "batch_size": plan.batch_size,
        "max_length": plan.max_length,
        "dtype": plan.dtype,
        "baseline_words": WORDS,
        "decoding": options_of(decoding_options(config, own, **plan.options)),
    }


def fingerprint(folder: Path) -> str:
    """Hash what a model's folder holds: a model that was trained on is another model."""
    digest = hashlib.sha256()
    names = ("config.json", "generation_config.json", "tokenizer.json")
    for path in [*(folder / name for name in names), *sorted(folder.glob("*.safetensors"))]:
        if path.is_file():
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def fingerprint_of(rows: Sequence[Row]) -> str:
    """Hash predictions, so that the baselines beside them stay with them."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _claim(output: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the settings of a new run, or refuse to go on with one of other settings."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / SETTINGS
    if not path.exists():
        if (output / PREDICTIONS).exists():
            raise ValueError(f"`--output` must be a run's folder or a new one, got predictions without {SETTINGS}.")
        versions = {name: version(name) for name in ("pyramidion", "torch", "transformers")}
        write_whole(path, json.dumps({"settings": settings, "about": {**about, **versions}}, indent=1) + "\n")
        return
    try:
        before = json.loads(path.read_text())["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"`--output` must hold a readable {SETTINGS}, got {error}.") from error
    differing = list(_differences(before, json.loads(json.dumps(settings))))
    if differing:
        raise ValueError(f"`--output` must be a folder of its own for other settings: {'; '.join(differing)}.")


def _differences(before: dict[str, Any], now: dict[str, Any], under: str = "") -> Iterator[str]:
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{under}{name}.")
        elif old != new:
            yield f"{under}{name} was {_short(old)}, is {_short(new)}"


def _short(value: Any) -> str:
    return str(value)[:12] if isinstance(value, str) and len(value) == 64 else repr(value)


# --------------------------------------------------------------------------------------------------------------------
# A file of predictions
# --------------------------------------------------------------------------------------------------------------------


def read_predictions(path: Path) -> list[Row]:
    """Read a run's folder, or a file of JSON lines with `prediction`, `reference` and perhaps `id`."""
    file = path / PREDICTIONS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"`{path}` must be a run's folder or a file of predictions, and is neither.")
    rows = read_rows(file)
    for number, row in enumerate(rows, start=1):
        for name in ("prediction", "reference"):
            if not isinstance(row.get(name), str):
                raise ValueError(f"`{file}` must have a text as `{name}` in each line, got none in line {number}.")
    if not rows:
        raise ValueError(f"`{file}` must hold at least one prediction, got none.")
    return rows


def from_file(
    path: Path,
    tell: Tell,
    *,
    limit: int | None = None,
    baselines: Sequence[str] = (),
    split: Split | None = None,
    output: Path | None = None,
) -> Evaluation:
    """Take predictions from a file; the documents from its field `document`, or from a split by their `index`."""
    rows = read_predictions(path)[:limit]
    settings = {"predictions": fingerprint_of(rows), "documents": len(rows), "baseline_words": WORDS}
    if output is not None:
        _claim(output, settings, {"predictions": str(path)})
    document: Callable[[int], str] | None = None
    if all(isinstance(row.get("document"), str) for row in rows):
        document = lambda place: rows[place]["document"]  # noqa: E731
    elif split is not None:
        document = _by_index(rows, split)
    elif baselines:
        raise ValueError("`--baselines` must have documents: `--data` and `--split`, or a field `document`, got none.")
    assert document is not None or not baselines
    written = {name: run_baseline(name, output, document, rows, tell) for name in baselines if document is not None}
    return Evaluation(path.stem if path.is_file() else path.name, rows, document, written, settings)


def _by_index(rows: Sequence[Row], split: Split) -> Callable[[int], str]:
    """Look documents up by their place in the split, and see that the identifiers agree."""
    for number, row in enumerate(rows, start=1):
        index = row.get("index", number - 1)
        if not isinstance(index, int) or not 0 <= index < len(split):
            raise ValueError(f"`index` must be below {len(split)}, the documents of the split, got {index!r}.")
        if "id" in row and row["id"] != _plain(split[index].id):
            raise ValueError(f"`id` of line {number} must be {split[index].id!r}, as in the split, got {row['id']!r}.")
    return lambda place: split.document_text(rows[place].get("index", place))


def _plain(identifier: Any) -> Any:
    return identifier if isinstance(identifier, str | int | None) else str(identifier)


__all__ = ["Evaluation", "Plan", "Split", "from_file", "open_split", "read_predictions", "run", "write_scores"]
