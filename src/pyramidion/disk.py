"""Files that are there whole or not at all, whenever a process is killed: written beside, synced, renamed."""

import os
from pathlib import Path


def write_synced(path: Path, text: str) -> None:
    """Write a text and wait until it is on the disk; what UTF-8 cannot hold is replaced."""
    with path.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, text: str) -> None:
    """Replace a file so that nobody ever sees half of it."""
    beside = path.with_name(f".{path.name}.partial")
    write_synced(beside, text)
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
