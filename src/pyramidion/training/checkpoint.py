"""Checkpoints that survive: staged, hashed, synced, renamed; the newest valid one is found.

A checkpoint is a folder `checkpoint-STEP` with a `manifest.json` that lists its files with sizes and hashes. It appears
under that name only when all of it is on the disk, by one rename, so a process killed at any moment leaves either the
whole of it or a staging folder that nobody reads. What has been written is checked again before it is used: a flipped
bit, a missing or a shortened file makes a checkpoint invalid, and the one before it is used.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyramidion.disk import sync_folder, write_synced

MANIFEST = "manifest.json"
STAGING = ".staging-"
TRASH = ".trash-"
NAME = re.compile(r"checkpoint-(\d+)")


class Checkpoints:
    """Keep the checkpoints of one run in a folder.

    keep  how many of the newest stay; older ones go when a new one is sealed
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, got {keep}.")
        self.folder, self.keep = Path(folder), keep

    def stage(self, step: int) -> Path:
        """Make an empty folder to write the checkpoint of `step` into."""
        return stage(self.folder / f"{STAGING}{step}")

    def seal(self, step: int, **facts: Any) -> Path:
        """Turn what was staged into the checkpoint of `step`: hash, sync, rename. Then let older ones go."""
        sealed = seal(self.folder / f"{STAGING}{step}", self.folder / f"checkpoint-{step}", step=step, **facts)
        for _, old in self.listed()[self.keep :]:
            discard(old)
        return sealed

    def listed(self) -> list[tuple[int, Path]]:
        """List the checkpoints, newest first, valid or not."""
        if not self.folder.is_dir():
            return []
        found = ((NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir())
        return sorted(((int(name[1]), path) for name, path in found if name), reverse=True)

    def newest_valid(self) -> tuple[Path | None, list[str]]:
        """Find the newest checkpoint that is whole, and say what is wrong with newer ones."""
        wrong: list[str] = []
        for _, path in self.listed():
            faults = verify(path)
            if not faults:
                return path, wrong
            wrong += faults
        return None, wrong

    def clean(self) -> None:
        """Remove what a killed process left: half-written checkpoints and half-removed ones."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((STAGING, TRASH)):
                    shutil.rmtree(path, ignore_errors=True)


def stage(folder: Path) -> Path:
    """Make an empty folder, whatever a killed process left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def seal(staged: Path, target: Path, **facts: Any) -> Path:
    """Make a staged folder appear under its name, whole or not at all.

    Every file is hashed and synced, the manifest written last, and the folder renamed; what stood there before is moved
    aside first. `facts` go into the manifest.
    """
    files = {}
    for path in _files(staged):
        files[path.relative_to(staged).as_posix()] = {"size": path.stat().st_size, "sha256": _hash(path, sync=True)}
    body = json.dumps({**facts, "files": files}, indent=1, sort_keys=True)
    write_synced(staged / MANIFEST, f"{body}\n{_digest(body)}")  # its own hash last: nothing in it can change unseen
    for folder in sorted({path.parent for path in _files(staged)}):
        sync_folder(folder)
    if target.exists():
        discard(target)
    staged.rename(target)
    sync_folder(target.parent)
    return target


def verify(path: Path) -> list[str]:
    """Say what is wrong with a sealed folder, file by file; nothing if it is whole."""
    try:
        listed = {name: (fact["size"], fact["sha256"]) for name, fact in read_manifest(path)["files"].items()}
    except FileNotFoundError:
        return [f"{path.name}/{MANIFEST} is missing."]
    except (OSError, ValueError) as error:
        return [f"{path.name}/{MANIFEST} cannot be read: {error}."]
    return [f"{path.name}/{name} {fault}." for name, fact in listed.items() if (fault := _fault(path / name, *fact))]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the facts of a sealed folder; ValueError if the manifest is not what was written."""
    body, _, digest = (path / MANIFEST).read_bytes().decode(errors="replace").rpartition("\n")
    if digest != _digest(body):
        raise ValueError("its hash is not the one it was written with")
    manifest: dict[str, Any] = json.loads(body)
    return manifest


def discard(path: Path) -> None:
    """Remove a folder so that a kill in the midst leaves nothing under its name."""
    trash = path.with_name(f"{TRASH}{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    with suppress(FileNotFoundError):
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def is_full(error: BaseException) -> bool:
    """Tell whether an error means that the disk, or what may be used of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _fault(path: Path, size: int, digest: str) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found} bytes, not {size}"
        return None if _hash(path) == digest else "has changed: its hash is not the one it was written with"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(path: Path, *, sync: bool = False) -> str:
    with path.open("rb+" if sync else "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
