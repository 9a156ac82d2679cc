"""Bytes of a file, compressed or not, block by block. The content says how it is compressed; the name is not asked."""

from __future__ import annotations

import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 1 << 16  # compressed bytes at a time: a thousandfold compression still fits in memory
CHUNK = 1 << 22  # bytes of whole lines that travel together
BOM = b"\xef\xbb\xbf"
SUFFIXES = (".gz", ".xz", ".zst")


class Chunk(NamedTuple):
    """Whole lines of a file.

    first  the number of the first of them, counted from 1
    read   bytes taken from the file, as it lies on disk, since the chunk before
    """

    data: bytes
    first: int
    read: int


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


DECOMPRESSORS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"\xfd7zXZ\x00": lzma.LZMADecompressor,
    b"\x28\xb5\x2f\xfd": _zstd,
}


def beginning(path: Path, size: int = 4096) -> bytes:
    """Read the first bytes of a file, decompressed."""
    found = b""
    for data, _ in blocks(path):
        found += data
        if len(found) >= size:
            break
    return found[:size]


def blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield decompressed blocks, each with the bytes it took on disk; refuse a file that is cut off or broken."""
    with path.open("rb") as file:
        head = file.read(6)
        file.seek(0)
        make = next((make for magic, make in DECOMPRESSORS.items() if head.startswith(magic)), None)
        try:
            yield from _plain(file) if make is None else _decompressed(file, make)
        except _broken() as error:
            raise ValueError(f"`{path}` must be whole, but its compression is broken: {error}.") from error


def _broken() -> tuple[type[Exception], ...]:
    """Name what the decompressors raise; the one of zstandard can only have been raised where that is imported."""
    zstandard = sys.modules.get("zstandard")
    return (ValueError, zlib.error, lzma.LZMAError, *(() if zstandard is None else (zstandard.ZstdError,)))


def _plain(file: Any) -> Iterator[tuple[bytes, int]]:
    while block := file.read(BLOCK):
        yield block, len(block)


def _decompressed(file: Any, make: Callable[[], Any]) -> Iterator[tuple[bytes, int]]:
    """Decompress one stream after another: files that were appended to each other are one file."""
    stream = make()
    while compressed := file.read(BLOCK):
        read = len(compressed)
        while compressed:
            if stream.eof:
                compressed = compressed.lstrip(b"\0")  # padding behind a stream
                if not compressed:
                    break
                stream = make()
            yield stream.decompress(compressed), read
            compressed, read = stream.unused_data if stream.eof else b"", 0
    if not stream.eof:
        raise ValueError("the file is cut off")


def chunks(path: Path, size: int = CHUNK) -> Iterator[Chunk]:
    """Cut a file into runs of whole lines of at least `size` bytes. Where it is cut depends on its content alone."""
    held, first, read, started, scanned = bytearray(), 1, 0, False, 0
    for data, taken in blocks(path):
        held += data
        read += taken
        if not started and len(held) >= len(BOM):
            started = True
            if held.startswith(BOM):
                del held[: len(BOM)]
        while (cut := held.find(b"\n", max(size - 1, scanned))) >= 0:
            chunk = bytes(held[: cut + 1])
            del held[: cut + 1]
            yield Chunk(chunk, first, read)
            first, read, scanned = first + chunk.count(b"\n"), 0, 0
        scanned = len(held)
    if held and held != BOM:
        yield Chunk(bytes(held), first, read)
