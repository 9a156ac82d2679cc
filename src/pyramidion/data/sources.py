"""What is read: from paths and names to sources, each with its format, its split and its columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pyramidion.data.formats import FORMATS, Source, dataset_parts, is_empty, text_pairs
from pyramidion.data.records import Fields
from pyramidion.data.streams import SUFFIXES, beginning

SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
DOCUMENTS = ("article_text", "article", "document", "text", "source", "body", "content")
SUMMARIES = ("abstract_text", "abstract", "summary", "highlights", "target")
MOST = 30  # columns that are named where none fits
IDS = ("id", "article_id", "doc_id", "document_id", "guid", "key")
COHAN = Fields("article_text", "abstract_text")
SUFFIX_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv"}
SUFFIX_FORMATS |= {".parquet": "parquet"}


class Columns(NamedTuple):
    """The columns that were asked for; None where they are to be guessed."""

    document: str | None = None
    summary: str | None = None
    id: str | None = None


GUESSED = Columns()


def split_name(name: str) -> str:
    """Give a split its usual name: "validation" and "dev" are "val"."""
    return SPLITS.get(name.lower(), name)


def find_sources(
    paths: Sequence[str], named: Sequence[tuple[str, str]], format: str = "auto", columns: Columns = GUESSED
) -> tuple[list[Source], list[str]]:
    """Find what is to be read, `paths` by the names of their files and `named` as split and path; and what is not."""
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"`--format` must be auto or one of {', '.join(FORMATS)}, got {format!r}.")
    unread: list[str] = []
    told = [source for path in paths for source in _expand(path, format, unread)]
    unknown = [source.path for source in told if not source.split]
    if unknown and len(unknown) < len(told):
        raise ValueError(f"`--split` must say what {unknown[0]!r} is for: others are named for a split, it is not.")
    told = [replace(source, split=source.split or "train") for source in told]
    for split, path in named:
        if not re.fullmatch(r"[\w-]+", split):
            raise ValueError(f"`--split` must name a split by letters, got {split!r}.")
        told += [replace(source, split=split_name(split)) for source in _expand(path, format, unread)]
    if not told:
        raise ValueError("`SOURCES` must hold something to read, got nothing.")
    _refuse_twice(told)
    return [_with_columns(source, columns) for source in told], unread


def describe(sources: Sequence[Source], unread: Sequence[str]) -> list[str]:
    """Say what is read as what, one line for all files that are alike, and what is left alone."""
    kinds: dict[tuple[str, str, Fields], list[str]] = {}
    for source in sources:
        name = source.path + (f"/{source.part}" if source.part else "")
        kinds.setdefault((source.split, source.format, source.fields), []).append(name)
    lines = []
    for (split, format, fields), paths in kinds.items():
        files = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        named = f", id `{fields.id}`" if fields.id else ""
        lines.append(f"{split}: {files} ({format}; document `{fields.document}`, summary `{fields.summary}`{named})")
    return lines + [f"not read: {path}" for path in unread]


def _refuse_twice(sources: Sequence[Source]) -> None:
    seen: set[tuple[str, str | None]] = set()
    for source in sources:
        key = (str(Path(source.path).resolve()), source.part)
        if key in seen:
            raise ValueError(f"`SOURCES` must be given once each, got {source.path!r} twice.")
        seen.add(key)


# --------------------------------------------------------------------------------------------------------------------
# Paths
# --------------------------------------------------------------------------------------------------------------------


def _expand(path: str, format: str, unread: list[str]) -> Iterator[Source]:
    """Turn one path into sources; a folder holds files of data, or a saved dataset, or texts."""
    place = Path(path)
    saved = place.is_dir() and any((place / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if format == "hf" or (format == "auto" and saved):
        return _datasets(path)
    if not place.exists():
        raise ValueError(f"`SOURCES` must exist, got {path!r}; the name of a dataset needs `--format hf`.")
    if place.is_file():
        return iter([_file(place, place.name, format)])
    if format == "text":
        return _folders(place)
    files = sorted(file for file in place.rglob("*") if file.is_file() and not _hidden(file, place))
    data = [file for file in files if _is_data(file)]
    if not data:
        return _folders(place)
    unread += [str(file) for file in files if file not in set(data)]
    return (_file(file, file.relative_to(place).as_posix(), format) for file in data)


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _is_data(file: Path) -> bool:
    suffix = _suffix(file)
    return suffix in SUFFIX_FORMATS or (suffix == ".txt" and beginning(file, 1) == b"{")


def _suffix(file: Path) -> str:
    name = file.name.lower()
    for compressed in SUFFIXES:
        name = name.removesuffix(compressed)
    return Path(name).suffix


def _file(file: Path, name: str, format: str) -> Source:
    if is_empty(file):
        raise ValueError(f"`{file}` must hold something, but it is empty.")
    if format == "text":
        raise ValueError(f"`--format text` must be given a folder of texts, got the file {str(file)!r}.")
    found = _sniff(file) if format == "auto" else format
    return Source(str(file), _split_of(name), found, size=file.stat().st_size)


def _split_of(name: str) -> str:
    """Find the name of a split in the name of a file, or else of the folders above it."""
    for part in reversed(name.split("/")):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return ""


def _sniff(file: Path) -> str:
    """Tell a format by its content, then by its name."""
    head = beginning(file)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        source = Source(str(file), "", "jsonl")
        return "cohan" if {COHAN.document, COHAN.summary} <= set(source.columns()) else "jsonl"
    if _suffix(file) not in SUFFIX_FORMATS:
        raise ValueError(f"`--format` must say what {str(file)!r} is: neither its name nor its content does.")
    return SUFFIX_FORMATS[_suffix(file)]


def _datasets(path: str) -> Iterator[Source]:
    for part, dataset in dataset_parts(path).items():
        if not len(dataset):
            raise ValueError(f"`{path}` must hold something, but its split {part!r} is empty.")
        yield Source(path, split_name(part), "hf", part=part or None, size=dataset.data.nbytes)


def _folders(folder: Path) -> Iterator[Source]:
    """Take a folder of texts, or the folders in it that are named for a split."""
    inside = [sub for sub in sorted(folder.iterdir()) if sub.is_dir() and sub.name.lower() in SPLITS]
    for found in inside or [folder]:
        files = [path for pair in text_pairs(found) for path in (pair.document, pair.summary) if path]
        if not files:
            raise ValueError(f"`{found}` must hold files to read, such as NAME.txt and NAME.summary.txt; it has none.")
        split = SPLITS[found.name.lower()] if inside else ""
        yield Source(str(found), split, "text", size=sum(file.stat().st_size for file in files))


# --------------------------------------------------------------------------------------------------------------------
# Columns
# --------------------------------------------------------------------------------------------------------------------


def _with_columns(source: Source, asked: Columns) -> Source:
    """Choose the columns of a source, or refuse with those it has."""
    if source.format == "text":
        return replace(source, fields=Fields("document", "summary"))
    known = source.columns()
    document = _choose(source, known, "document", asked.document, DOCUMENTS)
    summary = _choose(source, known, "summary", asked.summary, SUMMARIES)
    own = asked.id if asked.id is None else _choose(source, known, "id", asked.id, ())
    found = own or next((name for name in IDS if name in known), None)
    fields = Fields(document, summary, found, demanded=own is not None, marked=source.format == "cohan")
    return replace(source, fields=fields)


def _choose(source: Source, known: Sequence[str], option: str, asked: str | None, usual: Iterable[str]) -> str:
    names = [asked] if asked is not None else list(usual)
    if not known:
        return names[0]  # no record could be read: each is listed with its reason later
    chosen = next((name for name in names if name in known), None)
    if chosen is None:
        what = f"got {asked!r}" if asked is not None else f"and none has a usual name ({', '.join(names)})"
        which = ", ".join(map(_shown, known[:MOST])) + (f" and {len(known) - MOST} more" if len(known) > MOST else "")
        raise ValueError(f"`--{option}` must be a column of {source.path!r}, which are {which}; {what}.")
    return chosen


def _shown(name: str) -> str:
    """Write the name of a column on one line, whatever it is."""
    plain = name if name.isprintable() and name.strip() else ascii(name)
    return plain if len(plain) <= 40 else f"{plain[:37]}..."
