"""Write a token store so that it is there whole or not at all.

All is built in a folder beside the output, `.NAME.preparing`, written through to disk, and renamed at the end. The
folder is locked while somebody builds in it; one that nobody locks is left from a run that was killed, and goes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pyramidion.data.store import LENGTH, MANIFEST, OFFSET, PARTS, fingerprint, manifest_bytes
from pyramidion.disk import sync_folder

SHARD = 128 << 20  # bytes
LOCK = "lock"
DIGESTS = "digests"  # of documents, 16 bytes each; they do not stay


class Block(NamedTuple):
    """Examples of one split, ready to be written.

    tokens, text                 ids of document and summary, UTF-8 of document, summary and id, of one after the other
    token_lengths, text_lengths  [n 2] ids and [n 3] bytes of each
    digests                      hashes of the documents, 16 bytes each
    """

    tokens: bytes
    token_lengths: np.ndarray
    text: bytes
    text_lengths: np.ndarray
    digests: bytes


class HashedFile:
    """A file whose size and sha256 are known when it is closed, and which is then on disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.sha256, self.bytes = path.open("wb"), hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.bytes += len(data)

    def close(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"bytes": self.bytes, "sha256": self.sha256.hexdigest()}


class ShardedFile:
    """Files of about equal size, one after the other."""

    def __init__(self, folder: Path, name: str, shard_bytes: int, files: dict[str, Any]) -> None:
        self.folder, self.name, self.shard_bytes, self.files = folder, name, shard_bytes, files
        self.names: list[str] = []
        self.open: HashedFile | None = None

    def write(self, data: bytes) -> None:
        """Write examples that belong together into one shard."""
        if self.open is not None and self.open.bytes + len(data) > self.shard_bytes:
            self.close()
        if self.open is None:
            self.names.append(f"{self.name}-{len(self.names):05}.bin")
            self.open = HashedFile(self.folder / self.names[-1])
        self.open.write(data)

    def close(self) -> None:
        if self.open is not None:
            self.files[self.names[-1]] = self.open.close()
            self.open = None


class SplitWriter:
    """The files of one split."""

    def __init__(self, folder: Path, name: str, shard_bytes: int, files: dict[str, Any]) -> None:
        self.folder, self.name, self.files = folder, name, files
        self.tokens = ShardedFile(folder, f"{name}/tokens", shard_bytes, files)
        self.text = ShardedFile(folder, f"{name}/text", shard_bytes, files)
        self.parts = {part: HashedFile(folder / name / f"{part}.bin") for part in PARTS}
        self.digests = (folder / f"{DIGESTS}-{name}").open("wb")
        self.counts = {"examples": 0, "document_tokens": 0, "summary_tokens": 0, "text_bytes": 0}
        self.token_end, self.text_end = 0, 0

    def add(self, block: Block) -> None:
        """Append examples."""
        self.tokens.write(block.tokens)
        self.text.write(block.text)
        self.digests.write(block.digests)
        for column, part in enumerate(("document_lengths", "summary_lengths")):
            self.parts[part].write(block.token_lengths[:, column].astype(LENGTH).tobytes())
        self.token_end = self._offsets("token_offsets", block.token_lengths, self.token_end)
        self.text_end = self._offsets("text_offsets", block.text_lengths, self.text_end)
        self.counts["examples"] += len(block.token_lengths)
        self.counts["document_tokens"] += int(block.token_lengths[:, 0].sum())
        self.counts["summary_tokens"] += int(block.token_lengths[:, 1].sum())
        self.counts["text_bytes"] += int(block.text_lengths[:, :2].sum())

    def _offsets(self, part: str, lengths: np.ndarray, end: int) -> int:
        ends = np.cumsum(lengths.astype(OFFSET).ravel()) + OFFSET.type(end)
        self.parts[part].write(np.concatenate([np.array([end], OFFSET), ends[:-1]]).tobytes())
        return int(ends[-1])

    def abandon(self) -> None:
        """Let go of every file that is still open."""
        for file in (*self.parts.values(), self.tokens.open, self.text.open):
            if file is not None:
                file.file.close()
        self.digests.close()

    def close(self) -> dict[str, Any]:
        """Write the last offsets and say what is here."""
        for part, end in (("token_offsets", self.token_end), ("text_offsets", self.text_end)):
            self.parts[part].write(np.array([end], OFFSET).tobytes())
        for part, file in self.parts.items():
            self.files[f"{self.name}/{part}.bin"] = file.close()
        for sharded in (self.tokens, self.text):
            sharded.close()
        self.digests.close()
        return {**self.counts, "tokens": self.tokens.names, "text": self.text.names}


class StoreWriter:
    """A store that is being built in `folder`."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.files: dict[str, dict[str, Any]] = {}
        self.writers: dict[str, SplitWriter] = {}
        self.splits: dict[str, dict[str, Any]] = {}

    def add(self, split: str, block: Block) -> None:
        """Append examples to a split."""
        if split not in self.writers:
            self.writers[split] = SplitWriter(self.folder, split, self.shard_bytes, self.files)
        self.writers[split].add(block)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers.values():
            writer.abandon()

    def close_splits(self, order: list[str]) -> None:
        """End the files of all splits."""
        self.splits = {split: self.writers[split].close() for split in order if split in self.writers}

    def adopt(self, name: str) -> None:
        """Take a file that somebody else wrote into the folder."""
        path = self.folder / name
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            self.files[name] = {
                "bytes": path.stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }

    def close(self, told: dict[str, Any]) -> None:
        """Write the manifest, which makes the folder a store."""
        for leftover in self.folder.glob(f"{DIGESTS}-*"):
            leftover.unlink()
        files = dict(sorted(self.files.items()))
        manifest = {**told, "splits": self.splits, "files": files, "fingerprint": fingerprint(files)}
        file = HashedFile(self.folder / MANIFEST)
        file.write(manifest_bytes(manifest))
        file.close()
        for folder in [*filter(Path.is_dir, self.folder.iterdir()), self.folder]:
            sync_folder(folder)


# --------------------------------------------------------------------------------------------------------------------
# Whole or not at all
# --------------------------------------------------------------------------------------------------------------------


def check_output(output: Path, force: bool) -> None:
    """Refuse to write over something; with `force`, only over a store."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise ValueError(
            f"`--output` must be a folder that is new or empty, got {str(output)!r}, which is not a store."
        )
    if not force:
        raise ValueError(f"`--output` must be new, got {str(output)!r}, a finished store; `--force` replaces it.")


@contextmanager
def staging(output: Path, force: bool = False) -> Iterator[Path]:
    """Give a folder to build in; it takes the place of `output` at the end, and goes if something goes wrong."""
    check_output(output, force)
    output = output.resolve()
    folder = output.with_name(f".{output.name}.preparing")
    lock = _locked(folder)
    try:
        yield folder
        check_output(output, force)
        (folder / LOCK).unlink()
        _replace(folder, output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.close()


def _locked(folder: Path) -> Any:
    """Take the folder, emptied, for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(f"`--output` must not be in preparation already, but {str(folder)!r} is in use.") from None
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != LOCK:
            left.unlink()
    return lock


def _replace(folder: Path, output: Path) -> None:
    """Rename the folder to the output; a store that stood there goes once the new one stands."""
    old = output.with_name(f".{output.name}.replaced")
    if (output / MANIFEST).is_file():
        shutil.rmtree(old, ignore_errors=True)
        output.rename(old)
    folder.rename(output)
    sync_folder(output.parent)
    shutil.rmtree(old, ignore_errors=True)
