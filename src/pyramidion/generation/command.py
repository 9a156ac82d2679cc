"""What `pyramidion summarize` does, once its line is parsed."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyramidion.generation.documents import LINES, STDIN, count_files, documents
from pyramidion.generation.output import FolderSink, JournalSink, LineSink, Sink, TextSink, summarize_documents
from pyramidion.generation.summarizer import Summarizer, model_folder
from pyramidion.kernels.launching import choose_device

FORMATS = ("text", "jsonl")
BROKEN_PIPE = 141  # what a shell reports of a program whose reader went away

Progress = Callable[[int, int | None, str], None]  # how many are done, of how many where that is known, and what


@dataclass(frozen=True)
class Call:
    """What was asked for; see the command's help.

    options  of `Summarizer.stream`
    """

    paths: tuple[str, ...]
    model: Path
    output: Path | None
    format: str | None
    field: str
    device: str
    resume: bool
    options: dict[str, Any]


def run(call: Call, tell: Callable[[str], None], progress: Progress = lambda done, total, what: None) -> int:
    """Summarise everything; 0 if all was done, 1 if some failed, 141 if nobody reads any more."""
    paths = call.paths or _standard_input()
    for path in paths:
        if path != STDIN and not Path(path).exists():
            raise ValueError(f"`PATHS` must be files and folders that exist, got {path!r}.")
    files = count_files(paths, call.output)
    if not files:
        raise ValueError(f"`PATHS` must hold at least one file, got none in {', '.join(map(repr, paths))}.")
    model_folder(call.model)
    choose_device(call.device)
    sink = make_sink(call, headers=files > 1)  # refuses what it cannot write before the model is loaded
    found = documents(paths, call.field, sys.stdin.buffer, call.output)
    total = files if all(Path(path).suffix.lower() not in LINES and path != STDIN for path in paths) else None
    progress(0, total, "loading the model")
    try:
        summarizer = Summarizer.from_pretrained(call.model, call.device)
        done = lambda count: progress(count, total, "summarising")  # noqa: E731
        return min(summarize_documents(summarizer, found, sink, tell, done=done, **call.options), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
        return BROKEN_PIPE
    finally:
        sink.close()


def _standard_input() -> tuple[str, ...]:
    if sys.stdin.isatty():
        raise ValueError("`PATHS` must name what to summarise, or a text must come from standard input, got neither.")
    return (STDIN,)


def make_sink(call: Call, *, headers: bool) -> Sink:
    """Choose where results go, by the format and by what the output is."""
    output, form = call.output, call.format
    if form is not None and form not in FORMATS:
        raise ValueError(f"`--format` must be {' or '.join(FORMATS)}, got {form!r}.")
    if output is None:
        if call.resume:
            raise ValueError("`--resume` must have an `--output` to go on with, got none.")
        return _to_stdout(form, headers)
    folder = output.is_dir() or (not output.suffix and not output.exists())
    if folder and form != "jsonl":
        return FolderSink(output, resume=call.resume)
    file = output / "summaries.jsonl" if folder else output
    if not call.resume and file.exists() and file.stat().st_size:
        raise ValueError(f"`--output` must be a new file, got {str(file)!r}; `--resume` goes on with JSON lines.")
    if form == "jsonl" or (form is None and file.suffix == ".jsonl"):
        return JournalSink(file)
    if call.resume:
        raise ValueError("`--resume` must have JSON lines or a folder to go on with: texts do not say where they end.")
    file.parent.mkdir(parents=True, exist_ok=True)
    return TextSink(file.open("w", encoding="utf-8", errors="replace"), headers=headers, own=True)


def _to_stdout(form: str | None, headers: bool) -> Sink:
    stream: Any = sys.stdout
    if hasattr(stream, "reconfigure"):  # JSON is UTF-8; a terminal that lacks a letter shows a question mark
        stream.reconfigure(errors="replace", **({"encoding": "utf-8"} if form == "jsonl" else {}))
    return LineSink(stream) if form == "jsonl" else TextSink(stream, headers=headers)


__all__ = ["Call", "make_sink", "run"]
