"""Find the documents of a command: files, folders, JSON lines, standard input; one by one, in order, as they are."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pyramidion.generation.texts import Unusable, decode

LINES = {".jsonl", ".ndjson"}
RESULTS = (".summary.txt", ".error.txt")  # what a result is called behind its document's name, in a folder of results
STDIN = "-"


@dataclass(frozen=True)
class Document:
    """One document and where it stands.

    source  the file, "-" for standard input
    index   its line in a file of JSON lines, from 0; else 0
    name    the file's name below the path that was given
    single  whether it is all that its source holds
    """

    source: str
    index: int
    name: str
    single: bool
    text: str | bytes | Unusable


def documents(paths: Sequence[str], field: str, stdin: BinaryIO, leave: Path | None = None) -> Iterator[Document]:
    """Read the documents of all paths, those of a folder in the order of their names.

    field  of a JSON object, the one with the text
    leave  where results are written: that file, or the results in that folder, are not read
    """
    for path in paths:
        if path == STDIN:
            yield from _from_stdin(stdin, field)
        else:
            for file, name in _files(Path(path), leave):
                yield from _from_file(file, name, field)


def count_files(paths: Sequence[str], leave: Path | None = None) -> int:
    """Count the files that the paths hold, standard input as one."""
    return sum(1 if path == STDIN else sum(1 for _ in _files(Path(path), leave)) for path in paths)


def _files(path: Path, leave: Path | None) -> Iterator[tuple[Path, str]]:
    if not path.is_dir():
        yield path, path.name
        return
    left = None if leave is None else leave.resolve()
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            within = left is not None and left in file.resolve().parents
            ours = file.resolve() == left or (within and name.endswith(RESULTS))
            if file.is_file() and not name.startswith(".") and not ours:
                yield file, file.relative_to(path).as_posix()


def _from_file(file: Path, name: str, field: str) -> Iterator[Document]:
    source, name = _plain(str(file)), _plain(name)
    try:
        if file.suffix.lower() in LINES:
            with file.open("rb") as lines:
                yield from _from_lines(lines, source, name, field)
        else:
            yield Document(source, 0, name, True, file.read_bytes())
    except OSError as error:
        yield Document(source, 0, name, True, Unusable(f"cannot be read: {error.strerror}"))


def _from_stdin(stdin: BinaryIO, field: str) -> Iterator[Document]:
    """Take standard input as JSON lines where its first line is an object, else as one text."""
    first = stdin.readline()
    try:
        lines = first.lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        lines = False
    if lines:
        yield from _from_lines(_chain(first, stdin), STDIN, "stdin", field)
    else:
        yield Document(STDIN, 0, "stdin", True, first + stdin.read())


def _chain(first: bytes, rest: BinaryIO) -> Iterator[bytes]:
    yield first
    yield from iter(rest.readline, b"")


def _from_lines(lines: Iterable[bytes], source: str, name: str, field: str) -> Iterator[Document]:
    for index, line in enumerate(lines):
        if line.strip():
            yield Document(source, index, name, False, _field(line, field))


def _field(line: bytes, field: str) -> str | Unusable:
    """Take the text out of a JSON object; a list of texts, such as sentences, is joined by new lines."""
    decoded = decode(line)
    if isinstance(decoded, Unusable):
        return decoded
    try:
        row: Any = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return Unusable(f"not JSON: {str(error)[:100]}")
    if not isinstance(row, dict):
        return Unusable(f"not a JSON object, but {type(row).__name__}")
    text = row.get(field)
    if isinstance(text, list) and all(isinstance(part, str) for part in text):
        return "\n".join(text)
    if not isinstance(text, str):
        found = ", ".join(_plain(key) for key in list(row)[:8]) or "nothing"
        return Unusable(f"no text in the field {field!r}; there is {found}")
    return text


def _plain(name: str) -> str:
    """Make a name that the file system cannot spell fit for printing."""
    return name.encode("utf-8", "replace").decode()


__all__ = ["RESULTS", "STDIN", "Document", "count_files", "documents"]
