"""One record: two texts and an id, or the reason why it is bad."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyramidion.data.streams import BOM

MARKS = re.compile(r"\s*</?S>\s*")  # around each sentence of an abstract, as arXiv and PubMed are published
KINDS = {bool: "true or false", int: "a number", float: "a number", dict: "an object", list: "a list"}
SPACES = b" \t\n\v\f\r"
LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")


class Fields(NamedTuple):
    """Where the parts of a record are.

    id        None where the place of a record is its name
    demanded  whether a record without id is bad: so where the user named the column
    marked    whether the summary's sentences stand between <S> and </S>
    """

    document: str
    summary: str
    id: str | None = None
    demanded: bool = False
    marked: bool = False


class Row(NamedTuple):
    """A record as it was found: document, summary and id. `reason` says why there is nothing to read."""

    place: str
    name: str
    values: tuple[Any, ...] = (None, None, None)
    reason: str | None = None


class Record(NamedTuple):
    """A record that is good: UTF-8 of its texts, and of its id."""

    document: str
    summary: str
    id: str


class BadLine(ValueError):
    """Why a record cannot be used."""


def read_row(row: Row, fields: Fields) -> Record:
    """Check a record and join what came in sentences, or raise BadLine with the reason."""
    if row.reason is not None:
        raise BadLine(row.reason)
    document, summary = map(_text, row.values[:2], fields[:2])
    if fields.marked:
        summary = "\n".join(filter(None, MARKS.split(summary)))
    for name, text in ((fields.document, document), (fields.summary, summary)):
        if not text or text.isspace():
            raise BadLine(f"`{name}` is empty")
    return Record(document, summary, _id(row, fields))


def _text(value: Any, name: str) -> str:
    """Take a text as it is, sentences joined by newlines, bytes as UTF-8."""
    if isinstance(value, bytes):
        value = _decoded(value)
    if isinstance(value, list):
        odd = next((item for item in value if not isinstance(item, str)), None)
        if odd is not None or None in value:
            raise BadLine(f"`{name}` must be a list of texts, but {_kind(odd)} is in it")
        value = "\n".join(value)
    if value is _MISSING:
        raise BadLine(f"`{name}` is missing")
    if not isinstance(value, str):
        raise BadLine(f"`{name}` must be a text or a list of texts, got {_kind(value)}")
    return _unicode(value, name)


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadLine(f"bad UTF-8 at byte {error.start + 1}") from None


def _unicode(text: str, name: str) -> str:
    """Refuse half of a surrogate pair: it is in no Unicode text, and cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLine(f"`{name}` holds a lone surrogate at character {error.start + 1}") from None
    return text


def _id(row: Row, fields: Fields) -> str:
    found = row.values[2]
    if isinstance(found, bytes):
        found = _decoded(found)
    if isinstance(found, str | int) and not isinstance(found, bool) and found != "":
        return _unicode(str(found), str(fields.id))
    if fields.demanded:
        what = "nothing" if found is _MISSING else "an empty one" if found == "" else _kind(found)
        raise BadLine(f"`{fields.id}` must be a text or a number, got {what}")
    return row.name


def _kind(value: Any) -> str:
    return "null" if value is None else KINDS.get(type(value), f"a {type(value).__name__}")


# --------------------------------------------------------------------------------------------------------------------
# JSON lines
# --------------------------------------------------------------------------------------------------------------------

_MISSING = object()


def json_rows(data: bytes, first: int, path: str, name: str, fields: Fields) -> Iterator[Row]:
    """Read each line of `data` as a JSON object; a broken one becomes a row with the reason."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=first):
        place, own = f"{path}:{number}", f"{name}:{number}"
        try:
            found = json_object(line)
        except BadLine as bad:
            yield Row(place, own, reason=str(bad))
            continue
        values = tuple(_MISSING if key is None else found.get(key, _MISSING) for key in fields[:3])
        yield Row(place, own, values)


def json_object(line: bytes) -> dict[str, Any]:
    """Read one JSON object, or raise BadLine."""
    if not line.strip():
        raise BadLine("the line is empty")
    text = _decoded(line.removeprefix(BOM))
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadLine(f"broken JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"broken JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadLine(f"must be a JSON object, got {'a text' if isinstance(found, str) else _kind(found)}")
    return found


# --------------------------------------------------------------------------------------------------------------------
# Sameness
# --------------------------------------------------------------------------------------------------------------------


def digest(text: bytes) -> bytes:
    """Hash a text so that two are equal that differ in white space or in the case of ASCII letters only."""
    return hashlib.blake2b(text.translate(LOWER, SPACES), digest_size=16).digest()


def share_of(digest: bytes) -> float:
    """Turn a hash into a number from 0 to 1: whoever is below the share goes to validation, and copies go with it."""
    return int.from_bytes(digest[:8], "big") / 2**64
