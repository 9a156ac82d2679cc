"""Formats: which columns a file has, and its records in batches. A new one is two functions and one entry in FORMATS.

cohan    one JSON object a line: `article_text` and `abstract_text` are lists of sentences, the latter between <S> and
         </S>, as the arXiv and PubMed sets are published
jsonl    one JSON object a line; a column holds a text or a list of texts, which are joined by newlines
csv      a header, then rows; the separator is what the header has most of: comma, semicolon, tab or bar
parquet  a row is a record
text     a folder with NAME.txt and NAME.summary.txt side by side, or with two folders, `documents` and `summaries`,
         that hold the same names
hf       a dataset that `datasets` saved to disk, or a name that it can load, NAME:CONFIGURATION where there are several
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from pyramidion.data.records import BadLine, Fields, Row, json_object, json_rows
from pyramidion.data.streams import BOM, CHUNK, Chunk, beginning, blocks, chunks

LOOKED_AT = 100  # lines whose keys are the columns of a file of JSON lines
AT_ONCE = 64  # rows that are taken from a table together
TOGETHER = 4096  # rows of a batch, at most
CELL = 1 << 28  # bytes of a CSV cell, at most: a quote that is never closed ends here
TEXT = re.compile(r"(?P<name>.+?)(?P<summary>\.summary)?\.txt(\.(gz|xz|zst))?")
DOCUMENT_FOLDERS = ("documents", "articles", "texts")
SUMMARY_FOLDERS = ("summaries", "abstracts", "highlights")
PLAIN = Fields("document", "summary")


@dataclass(frozen=True)
class Source:
    """One file, folder or dataset, and what is to be taken from it.

    part  the split inside a dataset
    size  bytes, to tell how far we are
    """

    path: str
    split: str
    format: str
    fields: Fields = PLAIN
    part: str | None = None
    size: int = 0

    def batches(self) -> Iterator[Batch]:
        """Read it from beginning to end, in constant memory."""
        return FORMATS[self.format].batches(self)

    def columns(self) -> list[str]:
        """List its columns; none where no record could be read."""
        return FORMATS[self.format].columns(self)


class Batch(NamedTuple):
    """Records that travel together: lines that nobody has looked at yet, or rows."""

    source: Source
    content: Chunk | list[Row]
    read: int

    def rows(self) -> Iterator[Row]:
        """Find the records."""
        if not isinstance(self.content, Chunk):
            return iter(self.content)
        path = self.source.path
        return json_rows(self.content.data, self.content.first, path, Path(path).name, self.source.fields)


class Format(NamedTuple):
    """How a source of one kind is read."""

    columns: Callable[[Source], list[str]]
    batches: Callable[[Source], Iterator[Batch]]


def _batched(source: Source, rows: Iterable[tuple[Row, float]]) -> Iterator[Batch]:
    """Gather rows until they are as long as a chunk of lines; each comes with the bytes it took on disk."""
    held: list[Row] = []
    size, read = 0, 0.0
    for row, taken in rows:
        held.append(row)
        read += taken
        size += sum(map(_size, row.values[:2]))
        if size >= CHUNK or len(held) >= TOGETHER:
            yield Batch(source, held, int(read))
            held, size, read = [], 0, 0.0
    if held:
        yield Batch(source, held, int(read))


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 0


# --------------------------------------------------------------------------------------------------------------------
# JSON lines, handed on as they are: whoever tokenizes them reads them first
# --------------------------------------------------------------------------------------------------------------------


def _json_columns(source: Source) -> list[str]:
    found: dict[str, None] = {}
    lines = (line for chunk in chunks(Path(source.path), 1) for line in io.BytesIO(chunk.data))
    for line in islice(lines, LOOKED_AT):
        try:
            found |= dict.fromkeys(json_object(line))
        except BadLine:
            continue  # it is listed when it is read
    return list(found)


def _json_batches(source: Source) -> Iterator[Batch]:
    return (Batch(source, chunk, chunk.read) for chunk in chunks(Path(source.path)))


# --------------------------------------------------------------------------------------------------------------------
# CSV
# --------------------------------------------------------------------------------------------------------------------


class _TextLines:
    """Lines as text, bytes that are not UTF-8 marked by surrogates; `read` counts bytes on disk."""

    def __init__(self, path: str) -> None:
        self.path, self.read = Path(path), 0

    def __iter__(self) -> Iterator[str]:
        for chunk in chunks(self.path, 1 << 16):
            self.read += chunk.read
            for line in io.BytesIO(chunk.data):
                yield line.decode(errors="surrogateescape")


def _csv_table(lines: _TextLines) -> Iterator[tuple[int, list[str], str | None]]:
    """Yield the line on which a row begins, its cells, and what is wrong with it."""
    csv.field_size_limit(CELL)
    text = iter(lines)
    first = next(text, "")
    reader = csv.reader(chain([first], text), delimiter=max(",;\t|", key=first.count), strict=True)
    while True:
        begun = reader.line_num + 1
        try:
            yield begun, next(reader), None
        except StopIteration:
            return
        except csv.Error as error:
            yield begun, [], f"broken CSV: {error}"


def _csv_columns(source: Source) -> list[str]:
    _, header, reason = next(_csv_table(_TextLines(source.path)))
    if reason or not header:
        raise ValueError(f"`{source.path}` must begin with a header, but line 1 is {reason or 'empty'}.")
    return header


def _csv_rows(source: Source) -> Iterator[tuple[Row, float]]:
    lines = _TextLines(source.path)
    table = _csv_table(lines)
    header = next(table)[1]
    wanted = [None if name is None else header.index(name) for name in source.fields[:3]]
    read = 0
    for begun, cells, reason in table:
        if reason is None and len(cells) != len(header):
            reason = f"the row has {len(cells)} columns, the header {len(header)}" if cells else "the line is empty"
        values = tuple(None if i is None or reason else cells[i] for i in wanted)
        reason = reason or next(filter(None, map(_bad_utf8, values, source.fields[:3])), None)
        yield Row(f"{source.path}:{begun}", f"{Path(source.path).name}:{begun}", values, reason), lines.read - read
        read = lines.read


def _bad_utf8(value: str | None, name: str | None) -> str | None:
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        return f"bad UTF-8 in `{name}`"
    return None


def _csv_batches(source: Source) -> Iterator[Batch]:
    return _batched(source, _csv_rows(source))


# --------------------------------------------------------------------------------------------------------------------
# Parquet and datasets
# --------------------------------------------------------------------------------------------------------------------


@contextmanager
def _parquet(source: Source) -> Iterator[Any]:
    """Open a file without reading ahead: memory is that of a page, not of a row group."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source.path, pre_buffer=False, memory_map=True) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"`{source.path}` must be a whole Parquet file: {reason}.") from error


def _parquet_columns(source: Source) -> list[str]:
    with _parquet(source) as file:
        return list(file.schema_arrow.names)


def _parquet_batches(source: Source) -> Iterator[Batch]:
    names = list(dict.fromkeys(filter(None, source.fields[:3])))
    with _parquet(source) as file:
        parts = file.iter_batches(AT_ONCE, columns=names, use_threads=False)
        tables = ({name: _undecoded(part[name]) for name in names} for part in parts)
        yield from _batched(source, _table_rows(source, tables, file.metadata.num_rows))


def _undecoded(column: Any) -> list[Any]:
    """Take texts as bytes, so that one that is not UTF-8 is a bad line and not the end."""
    import pyarrow

    text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    return list((column.cast(pyarrow.large_binary()) if text else column).to_pylist())


def _table_rows(source: Source, tables: Iterable[dict[str, list[Any]]], count: int) -> Iterator[tuple[Row, float]]:
    number, name = 0, Path(source.path).name + (f"/{source.part}" if source.part else "")
    path = source.path + (f"/{source.part}" if source.part else "")
    for table in tables:
        columns = (table[key] if key else [None] * AT_ONCE for key in source.fields[:3])
        for values in zip(*columns, strict=False):
            number += 1
            yield Row(f"{path}:{number}", f"{name}:{number}", values), source.size / count


@lru_cache(maxsize=4)
def dataset_parts(path: str) -> dict[str, Any]:
    """Open a dataset, from disk or by name, as its splits; a dataset without any is one for training."""
    try:
        from datasets import Dataset, load_dataset, load_from_disk
    except ImportError as error:
        raise ValueError("`--format hf` needs a package: pip install datasets.") from error
    name, _, configuration = path.partition(":")
    try:
        found = load_from_disk(path) if Path(path).is_dir() else load_dataset(name, configuration or None)
    except Exception as error:  # whatever a hub, a loading script or a broken folder may raise
        reason = str(error).partition("\n")[0]
        raise ValueError(f"`{path}` must be a dataset that can be loaded: {reason}") from error
    parts = {"": found} if isinstance(found, Dataset) else dict(found)
    return {part: dataset.with_format(None) for part, dataset in parts.items()}


def _dataset_columns(source: Source) -> list[str]:
    return list(dataset_parts(source.path)[source.part or ""].column_names)


def _dataset_batches(source: Source) -> Iterator[Batch]:
    names = list(dict.fromkeys(filter(None, source.fields[:3])))
    dataset = dataset_parts(source.path)[source.part or ""].select_columns(names)
    tables = (dataset[start : start + AT_ONCE] for start in range(0, len(dataset), AT_ONCE))
    return _batched(source, _table_rows(source, tables, len(dataset)))


# --------------------------------------------------------------------------------------------------------------------
# Folders of text
# --------------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A document and its summary; either may be missing."""

    name: str
    document: Path | None
    summary: Path | None


def text_pairs(folder: Path) -> list[Pair]:
    """Pair documents with summaries by name, in alphabetical order."""
    documents: dict[str, Path] = {}
    summaries: dict[str, Path] = {}
    two = [next((folder / name for name in names if (folder / name).is_dir()), None) for names in TEXT_FOLDERS]
    if two[0] and two[1]:
        for sub, found in ((two[0], documents), (two[1], summaries)):
            found.update({match["name"]: path for path, match in _texts(sub)})
    else:
        for path, match in _texts(folder):
            (summaries if match["summary"] else documents)[match["name"]] = path
    names = sorted(documents.keys() | summaries.keys())
    return [Pair(name, documents.get(name), summaries.get(name)) for name in names]


TEXT_FOLDERS = (DOCUMENT_FOLDERS, SUMMARY_FOLDERS)


def _texts(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.iterdir()):
        match = TEXT.fullmatch(path.name)
        if match and path.is_file() and not path.name.startswith("."):
            yield path, match


def _text_rows(source: Source) -> Iterator[tuple[Row, float]]:
    for name, document, summary in text_pairs(Path(source.path)):
        if document is None or summary is None:
            lacking = (
                "no document to this summary" if document is None else f"no summary: {name}.summary.txt is missing"
            )
            yield Row(f"{document or summary}:1", name, reason=lacking), 0
            continue
        values = [b"".join(data for data, _ in blocks(path)).removeprefix(BOM) for path in (document, summary)]
        yield Row(f"{document}:1", name, (*values, None)), document.stat().st_size + summary.stat().st_size


def _text_batches(source: Source) -> Iterator[Batch]:
    return _batched(source, _text_rows(source))


FORMATS = {
    "cohan": Format(_json_columns, _json_batches),
    "jsonl": Format(_json_columns, _json_batches),
    "csv": Format(_csv_columns, _csv_batches),
    "parquet": Format(_parquet_columns, _parquet_batches),
    "text": Format(lambda source: ["document", "summary"], _text_batches),
    "hf": Format(_dataset_columns, _dataset_batches),
}


def is_empty(path: Path) -> bool:
    """Tell whether a file holds nothing, decompressed and without a byte order mark."""
    return beginning(path, len(BOM) + 1) in (b"", BOM)
