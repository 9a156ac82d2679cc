"""The token store: a folder that opens at once and is read from disk as it is needed.

    manifest.json               what is here: counts, sizes, sha256, settings, sources; its own checksum last
    tokenizer/                  as transformers saves it
    train/tokens-00000.bin      ids of document, summary, document, ...; uint16 or uint32, little-endian; about 128 MiB
    train/text-00000.bin        UTF-8 of document, summary, id, document, ...
    train/token_offsets.bin     uint64, where each begins in all of tokens-*, and the end: 2 n + 1
    train/text_offsets.bin      uint64, likewise in bytes of text-*: 3 n + 1
    train/document_lengths.bin  uint32, in tokens; summary_lengths.bin likewise
    report.json, lengths.png    what was found; bad_lines.txt and duplicates.jsonl where there are any

No example lies across two shards. Nothing is cut, and no special token is stored.
"""

from __future__ import annotations

import hashlib
import json
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT, VERSION = "pyramidion token store", 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer/tokenizer.json"
OFFSET, LENGTH = np.dtype("<u8"), np.dtype("<u4")
PARTS: dict[str, np.dtype[Any]] = {
    "token_offsets": OFFSET,
    "text_offsets": OFFSET,
    "document_lengths": LENGTH,
    "summary_lengths": LENGTH,
}
ALIASES = {"validation": "val", "valid": "val", "dev": "val"}


class Example(NamedTuple):
    """A document and its summary as ids, without special tokens."""

    document: np.ndarray
    summary: np.ndarray
    id: str


class TokenStore:
    """A prepared corpus: `store["train"][0]` is its first example.

    Opening reads the manifest and looks at the size of every file; what they hold is checked by `verify`.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self._splits = {name: Split(self, name) for name in manifest["splits"]}

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Open a folder made by `pyramidion prepare`."""
        folder = Path(path)
        store = cls(folder, read_manifest(folder))
        for name, told in store.manifest["files"].items():
            store._check_size(name, told["bytes"])
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore.open, (self.path,)  # maps are not copied to other processes, but opened there

    def __getitem__(self, split: str) -> Split:
        name = ALIASES.get(split, split)
        if name not in self._splits:
            raise KeyError(f"`split` must be one of {', '.join(self.splits)}, got {split!r}.")
        return self._splits[name]

    def __contains__(self, split: str) -> bool:
        return ALIASES.get(split, split) in self._splits

    @property
    def splits(self) -> list[str]:
        """Name the splits."""
        return list(self._splits)

    @property
    def vocab_size(self) -> int:
        """Count the tokens there are, special ones included."""
        return int(self.manifest["vocab_size"])

    @property
    def fingerprint(self) -> str:
        """Identify tokens, texts and tokenizer by one sha256."""
        return str(self.manifest["fingerprint"])

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Load the tokenizer that made the tokens."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.path / "tokenizer"))

    def verify(self) -> None:
        """Read every file and compare it with its checksum; raise ValueError that names the file and what is wrong."""
        read_manifest(self.path)
        for name, told in self.manifest["files"].items():
            self._check_size(name, told["bytes"])
            with (self.path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != told["sha256"]:
                raise ValueError(f"`{self.path / name}` must be as it was written, but its sha256 differs: {found}.")

    def _check_size(self, name: str, size: int) -> None:
        try:
            found = (self.path / name).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"`{self.path / name}` must be there, but it is missing.") from None
        if found != size:
            raise ValueError(f"`{self.path / name}` must have {size} bytes, got {found}.")


class Split(Sequence[Example]):
    """The examples of one split, each read from disk when it is asked for."""

    def __init__(self, store: TokenStore, name: str) -> None:
        self.store, self.name = store, name
        self._told = store.manifest["splits"][name]

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self.store, self.name)

    def __len__(self) -> int:
        return int(self._told["examples"])

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        i = self._place(index)
        document, summary = (self._tokens[a:b] for a, b in pairwise(self._token_offsets[2 * i : 2 * i + 3].tolist()))
        return Example(document.astype(np.int64), summary.astype(np.int64), self._text_at(3 * i + 2))

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def document_text(self, index: int) -> str:
        """Give a document as it was read."""
        return self._text_at(3 * self._place(index))

    def summary_text(self, index: int) -> str:
        """Give a summary as it was read."""
        return self._text_at(3 * self._place(index) + 1)

    def summary_texts(self) -> Iterator[str]:
        """Read all summaries, one after the other."""
        spans = (self._text_offsets[3 * i + 1 : 3 * i + 3].tolist() for i in range(len(self)))
        return (text.decode() for text in self._text.read(spans))

    @cached_property
    def document_lengths(self) -> np.ndarray:
        """Count the tokens of each document, mapped from disk."""
        return self._part("document_lengths")

    @cached_property
    def summary_lengths(self) -> np.ndarray:
        """Count the tokens of each summary, mapped from disk."""
        return self._part("summary_lengths")

    @cached_property
    def _token_offsets(self) -> np.ndarray:
        return self._part("token_offsets")

    @cached_property
    def _text_offsets(self) -> np.ndarray:
        return self._part("text_offsets")

    @cached_property
    def _tokens(self) -> Shards:
        return Shards(self.store, self._told["tokens"], np.dtype(self.store.manifest["dtype"]))

    @cached_property
    def _text(self) -> Shards:
        return Shards(self.store, self._told["text"], np.dtype("u1"))

    def _part(self, part: str) -> np.ndarray:
        return _map(self.store.path / self.name / f"{part}.bin", PARTS[part])

    def _text_at(self, place: int) -> str:
        begin, end = map(int, self._text_offsets[place : place + 2])
        return self._text[begin:end].tobytes().decode()

    def _place(self, index: int) -> int:
        i = operator.index(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"`index` must be below {len(self)}, got {i}.")
        return i % len(self)


class Shards:
    """One long array in several files, each mapped when it is first read."""

    def __init__(self, store: TokenStore, names: Sequence[str], dtype: np.dtype[Any]) -> None:
        self.paths, self.dtype = [store.path / name for name in names], dtype
        sizes = [store.manifest["files"][name]["bytes"] // dtype.itemsize for name in names]
        self.starts = [0, *accumulate(sizes)]
        self.maps: dict[int, np.ndarray] = {}

    def _shard(self, place: int) -> int:
        return min(bisect_right(self.starts, place), len(self.paths)) - 1

    def read(self, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Read spans, each within one shard, by seeking: a map would keep in memory all that lies between them."""
        with ExitStack() as files:
            opened: dict[int, BinaryIO] = {}
            for begin, end in spans:
                shard = self._shard(begin)
                if shard not in opened:
                    opened[shard] = files.enter_context(self.paths[shard].open("rb"))
                opened[shard].seek((begin - self.starts[shard]) * self.dtype.itemsize)
                yield opened[shard].read((end - begin) * self.dtype.itemsize)

    def __getitem__(self, span: slice) -> np.ndarray:
        """Take what lies within one shard."""
        shard = self._shard(span.start)
        if shard not in self.maps:
            self.maps[shard] = _map(self.paths[shard], self.dtype)
        start = self.starts[shard]
        return self.maps[shard][span.start - start : span.stop - start]


def _map(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)  # nothing cannot be mapped
    return np.asarray(np.memmap(path, dtype, mode="r"))


# --------------------------------------------------------------------------------------------------------------------
# The manifest
# --------------------------------------------------------------------------------------------------------------------


def fingerprint(files: dict[str, dict[str, Any]]) -> str:
    """Hash the names and hashes of what makes the data: the files of every split, and the tokenizer."""
    known = sorted(name for name in files if name.endswith(".bin") or name == TOKENIZER)
    lines = (f"{name} {files[name]['sha256']}\n" for name in known)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Write a manifest in one way only, its own checksum last."""
    told = {key: value for key, value in manifest.items() if key != "checksum"}
    checksum = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**told, "checksum": checksum}, indent=1, ensure_ascii=False) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a store, or say why there is none to rely on."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"`{folder}` must be a folder made by `pyramidion prepare`: it has no {MANIFEST}.") from None
    try:
        found = json.loads(data)
        whole = found["format"] == FORMAT and manifest_bytes(found) == data
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        raise ValueError(f"`{path}` must be as it was written, but its checksum differs.")
    if found["version"] != VERSION:
        raise ValueError(f"`{path}` must be of version {VERSION}, got {found['version']}: prepare the corpus again.")
    return dict(found)
