"""Keep results as they come: one JSON object a line, on disk before the next is begun, so that a kill loses nothing."""

import json
import os
from pathlib import Path
from typing import Any, Self

Row = dict[str, Any]


def to_line(row: Row) -> str:
    """Write a row as one line that any UTF-8 file can hold."""
    line = json.dumps(row, ensure_ascii=False)
    return line.encode("utf-8", "replace").decode() + "\n"


def read_rows(path: Path) -> list[Row]:
    """Read the complete lines of a file; a last line that a kill tore off is left out."""
    return _complete(path)[0]


def _complete(path: Path) -> tuple[list[Row], int]:
    """Read the complete lines, and say how many bytes they take."""
    rows, size = [], 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            if number < len(lines):
                raise ValueError(
                    f"`{path.name}` must hold one JSON object a line, got something else in line {number}."
                )
            break
        rows.append(row)
        size += len(line)
    return rows, size


class Journal:
    """Append rows to a file that one process at a time may write.

    rows  what stood there already, complete lines only
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab")
        try:
            _lock(self.file.fileno(), path)
            self.rows, size = _complete(path)
            self.file.truncate(size)
        except BaseException:
            self.file.close()
            raise

    def append(self, row: Row) -> None:
        """Write a row, and wait until it is on disk."""
        self.file.write(to_line(row).encode())
        self.file.flush()
        os.fsync(self.file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"`{path}` must be written by one process at a time, and another is at it.") from error


__all__ = ["Journal", "Row", "read_rows", "to_line"]
