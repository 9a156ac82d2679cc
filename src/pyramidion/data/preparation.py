"""From sources to a token store: read, check, tokenize, write, account.

One process reads and writes, in order; `workers` others check and tokenize. What is written does not depend on how many
there are. Memory holds a few batches, the words that are remembered, and 16 bytes for each document.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyramidion.data.formats import Batch, Source
from pyramidion.data.records import BadLine, Record, digest, read_row, share_of
from pyramidion.data.store import FORMAT, VERSION, TokenStore
from pyramidion.data.tokenizer import SMALLEST, Encoder, load_tokenizer, token_dtype, train_tokenizer
from pyramidion.data.writer import SHARD, Block, StoreWriter, staging

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SAMPLE = 100_000_000  # characters that a tokenizer is trained on, at most
SHOWN = 20  # bad lines on the screen; all are in a file
BAD_LINES = "bad_lines.txt"
ORDER = ("train", "val", "test")
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Settings:
    """What is asked of a preparation.

    validation   the share of the training split that is split off, by a hash of the document, where there is no `val`
    max_source   tokens, for the report alone: nothing is cut in the store
    workers      processes; a script that asks for more than one must be guarded by `if __name__ == "__main__"`
    sample       characters that the tokenizer is trained on, taken evenly from the beginnings of the training files
    """

    sources: Sequence[Source]
    output: Path
    validation: float = 0.05
    tokenizer: str | None = None
    vocab_size: int = 32768
    on_bad_line: str = "fail"
    max_source: int = 8192
    workers: int = 2
    force: bool = False
    shard_bytes: int = SHARD
    sample: int = SAMPLE

    def __post_init__(self) -> None:
        for name, least in {"workers": 1, "max_source": 1, "vocab_size": SMALLEST}.items():
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise ValueError(f"`--{option}` must be at least {least}, got {getattr(self, name)}.")
        if self.on_bad_line not in ("fail", "skip"):
            raise ValueError(f"`--on-bad-line` must be fail or skip, got {self.on_bad_line!r}.")
        if not 0 <= self.validation < 1:
            raise ValueError(f"`--validation` must be at least 0 and below 1, got {self.validation}.")
        if self.tokenizer is None and not any(source.split == "train" for source in self.sources):
            raise ValueError("`--tokenizer` must be given where there is no training split to train one on.")

    @property
    def split_off(self) -> float:
        """Say what share of the training split becomes validation."""
        return 0.0 if any(source.split == "val" for source in self.sources) else self.validation


class Result(NamedTuple):
    """What came of it."""

    store: TokenStore
    report: dict[str, Any]
    text_bytes: int
    seconds: float
    notes: list[str]


class BadLines(ValueError):
    """Lines that cannot be used: `shown` are the first of them, `path` the file that lists all."""

    def __init__(self, message: str, shown: list[str], path: Path) -> None:
        super().__init__(message)
        self.shown, self.path = shown, path


def prepare(settings: Settings, tell: Tell = lambda done, total, what: None) -> Result:
    """Build the store, or leave nothing."""
    output = settings.output.resolve()
    beside = output.with_name(f"{output.name}.{BAD_LINES}")
    with staging(output, settings.force) as folder:
        bad = BadLog(folder / BAD_LINES)
        try:
            tokenizer = _tokenizer(settings, tell)
            written = _write(settings, folder, tokenizer, bad, tell)
        except _Stopped:
            _check_records(settings.sources, _list_all(settings, bad, tell))
            if not bad.shown:
                raise ValueError("`--validation` must leave something to train on, but it took all there is.") from None
            bad.move(beside)
            raise bad.error(settings.on_bad_line) from None
        report, notes = _account(settings, folder, written, bad)
    beside.unlink(missing_ok=True)
    return Result(TokenStore.open(settings.output), report, written.text, written.seconds, notes)


# --------------------------------------------------------------------------------------------------------------------
# Bad lines
# --------------------------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """There are bad lines, and they may not be skipped, or nothing else is left."""


@dataclass
class BadLog:
    """Every bad line, in a file, as `file:line: reason`; the first of them also here."""

    path: Path
    shown: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)

    def add(self, split: str, lines: Sequence[tuple[str, str]]) -> None:
        """Note the lines of one batch, as place and reason."""
        if not lines:
            return
        written = [f"{place}: {reason}" for place, reason in lines]
        self.shown += written[: SHOWN - len(self.shown)]
        self.reasons.update(re.sub(r" at (byte|character) \d+", "", reason) for _, reason in lines)
        self.splits[split] += len(lines)
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{line}\n" for line in written)

    def clear(self) -> None:
        """Forget all: reading begins again."""
        self.path.unlink(missing_ok=True)
        for noted in (self.shown, self.reasons, self.splits):
            noted.clear()

    def move(self, path: Path) -> None:
        """Put the file where it stays."""
        path.write_bytes(self.path.read_bytes())
        self.path = path

    def error(self, on_bad_line: str) -> BadLines:
        """Say how many there are and what can be done."""
        count = self.splits.total()
        what = f"{count:,} bad line{'s' if count > 1 else ''}, listed in {self.path}"
        rule = "`SOURCES` must hold a good line" if on_bad_line == "skip" else "`SOURCES` must be free of bad lines"
        hint = "" if on_bad_line == "skip" else "; `--on-bad-line skip` goes on without them"
        return BadLines(f"{rule}, got {what}{hint}.", self.shown, self.path)


def _list_all(settings: Settings, bad: BadLog, tell: Tell) -> Counter[Source]:
    """Read everything once more without tokenizing it, so that all bad lines are known; count records."""
    bad.clear()
    worker = Worker(None, 0.0)
    counts: Counter[Source] = Counter()
    total, done = sum(source.size for source in settings.sources), 0
    for source in settings.sources:
        for batch in source.batches():
            groups, found = worker.check(batch)
            bad.add(source.split, found)
            counts[source] += len(found) + sum(map(len, groups.values()))
            done += batch.read
            tell(done >> 20, total >> 20, f"listing bad lines: {bad.splits.total():,}")
    return counts


# --------------------------------------------------------------------------------------------------------------------
# The tokenizer
# --------------------------------------------------------------------------------------------------------------------


def _tokenizer(settings: Settings, tell: Tell) -> PreTrainedTokenizerFast:
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    return train_tokenizer(_sample(settings, tell), settings.vocab_size)


def _sample(settings: Settings, tell: Tell) -> Iterator[str]:
    """Yield texts of the training split, from each file as many characters as the smaller ones leave to it."""
    sources = sorted((source for source in settings.sources if source.split == "train"), key=lambda s: s.size)
    taken = 0
    for index, source in enumerate(sources):
        end = taken + (settings.sample - taken) // (len(sources) - index)
        for text in _texts(source, settings):
            yield text[: end - taken]
            told, taken = taken >> 20, taken + min(len(text), end - taken)
            if taken >> 20 > told:
                tell(taken >> 20, settings.sample >> 20, "tokenizer: reading a sample")
            if taken == end:
                break
    if not taken:
        raise _Stopped
    tell(1, 1, "tokenizer: training")


def _texts(source: Source, settings: Settings) -> Iterator[str]:
    worker = Worker(None, settings.split_off)
    for batch in source.batches():
        groups, bad = worker.check(batch)
        if bad and settings.on_bad_line == "fail":
            raise _Stopped
        yield from (text for record in groups.get("train", []) for text in record[:2])


# --------------------------------------------------------------------------------------------------------------------
# Workers
# --------------------------------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """What a worker made of a batch."""

    blocks: dict[str, Block]
    bad: list[tuple[str, str]]
    text: int


class Worker:
    """Check and tokenize batches. Without a tokenizer it only checks."""

    def __init__(self, encoder: Encoder | None, split_off: float) -> None:
        self.encoder, self.split_off = encoder, split_off

    def check(self, batch: Batch) -> tuple[dict[str, list[Record]], list[tuple[str, str]]]:
        """Tell good records, by split, from bad lines."""
        groups: dict[str, list[Record]] = {}
        bad: list[tuple[str, str]] = []
        for row in batch.rows():
            try:
                record = read_row(row, batch.source.fields)
            except BadLine as reason:
                bad.append((row.place, str(reason)))
                continue
            groups.setdefault(self._split(batch.source.split, record), []).append(record)
        return groups, bad

    def _split(self, split: str, record: Record) -> str:
        if split != "train" or not self.split_off:
            return split
        return "val" if share_of(digest(record.document.encode())) < self.split_off else "train"

    def encode(self, batch: Batch) -> Encoded:
        """Make of a batch what is written."""
        groups, bad = self.check(batch)
        blocks = {split: self._block(records) for split, records in groups.items()}
        return Encoded(blocks, bad, sum(int(block.text_lengths[:, :2].sum()) for block in blocks.values()))

    def _block(self, records: Sequence[Record]) -> Block:
        assert self.encoder is not None
        texts = [text.encode() for record in records for text in record]
        tokens, counts = self.encoder.encode([text for i, text in enumerate(texts) if i % 3 < 2])
        lengths = np.fromiter(map(len, texts), np.int64, len(texts)).reshape(-1, 3)
        return Block(tokens, counts.reshape(-1, 2), b"".join(texts), lengths, b"".join(map(digest, texts[::3])))


_worker: Worker | None = None


def _start(tokenizer: str, dtype: str, split_off: float) -> None:
    """Begin a worker process: it is deaf to Ctrl-C, which its parent hears, and ends when its parent does."""
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _worker = Worker(Encoder(tokenizer, np.dtype(dtype)), split_off)


def _end_with(sentinel: Any) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _work(batch: Batch) -> Encoded:
    assert _worker is not None
    return _worker.encode(batch)


def _encoded(
    batches: Iterator[Batch], tokenizer: str, dtype: np.dtype[Any], settings: Settings
) -> Iterator[tuple[Batch, Encoded]]:
    """Encode batches, and give them back in the order they came."""
    if settings.workers == 1:
        worker = Worker(Encoder(tokenizer, dtype), settings.split_off)
        yield from ((batch, worker.encode(batch)) for batch in batches)
        return
    with _pool(settings, (tokenizer, dtype.str, settings.split_off)) as pool:
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in batches:
            waiting.append((batch._replace(content=[]), pool.submit(_work, batch)))
            if len(waiting) > 2 * settings.workers:
                done, future = waiting.popleft()
                yield done, future.result()
        yield from ((done, future.result()) for done, future in waiting)


@contextmanager
def _pool(settings: Settings, begin: tuple[Any, ...]) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")  # a fork would copy threads that hold locks
    pool = ProcessPoolExecutor(settings.workers, mp_context=context, initializer=_start, initargs=begin)
    try:
        yield pool
    except BrokenProcessPool:
        raise ValueError("`--workers` must fit into memory: a worker was ended from outside. Try fewer.") from None
    except BaseException:  # Ctrl-C among them: a worker that is just starting may never answer, so none is waited for
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


# --------------------------------------------------------------------------------------------------------------------
# Writing and accounting
# --------------------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A store that lacks its report and manifest."""

    writer: StoreWriter
    told: dict[str, Any]
    text: int
    seconds: float


def _write(settings: Settings, folder: Path, tokenizer: PreTrainedTokenizerFast, bad: BadLog, tell: Tell) -> Written:
    """Tokenize everything into shards."""
    tokenizer.save_pretrained(folder / "tokenizer")
    dtype = token_dtype(len(tokenizer))
    batches = (batch for source in settings.sources for batch in source.batches())
    counts: Counter[Source] = Counter()
    total, done, text, begun = sum(source.size for source in settings.sources), 0, 0, time.perf_counter()
    with StoreWriter(folder, settings.shard_bytes) as writer:
        for batch, encoded in _encoded(batches, tokenizer.backend_tokenizer.to_str(), dtype, settings):
            bad.add(batch.source.split, encoded.bad)
            if encoded.bad and settings.on_bad_line == "fail":
                raise _Stopped
            for split, block in encoded.blocks.items():
                writer.add(split, block)
            counts[batch.source] += len(encoded.bad) + sum(
                len(block.token_lengths) for block in encoded.blocks.values()
            )
            done, text = done + batch.read, text + encoded.text
            speed = text / 1e6 / (time.perf_counter() - begun)
            tell(done >> 20, total >> 20, f"{text / 1e6:,.0f} MB of text, {speed:.1f} MB/s")
        _check_records(settings.sources, counts)
        if not writer.writers:
            raise _Stopped
        writer.close_splits(sorted(writer.writers, key=_rank))
    return Written(writer, _told(settings, tokenizer, dtype, counts), text, time.perf_counter() - begun)


def _check_records(sources: Sequence[Source], counts: Counter[Source]) -> None:
    for source in sources:
        if not counts[source]:
            raise ValueError(f"`{source.path}` must hold something, but it has no records.")


def _rank(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def _told(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype[Any], counts: Counter[Source]
) -> dict[str, Any]:
    special = {role: getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos", "unk")}
    asked = ("validation", "tokenizer", "vocab_size", "on_bad_line", "max_source", "sample")
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype.name,
        "vocab_size": len(tokenizer),
        "special": special,
        "settings": {name: getattr(settings, name) for name in asked},
        "sources": [
            {
                "path": source.path,
                "part": source.part,
                "split": source.split,
                "format": source.format,
                "columns": list(source.fields[:3]),
                "bytes": source.size,
                "records": counts[source],
            }
            for source in settings.sources
        ],
    }


def _account(settings: Settings, folder: Path, written: Written, bad: BadLog) -> tuple[dict[str, Any], list[str]]:
    """Report what was written, and end the store with its manifest."""
    from pyramidion.data.report import write_report

    writer, told = written.writer, written.told
    store = TokenStore(folder, {**told, "splits": writer.splits, "files": writer.files})
    counts = {"splits": dict(bad.splits), "reasons": dict(bad.reasons.most_common())}
    report, notes = write_report(store, counts, settings.max_source)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".png", ".txt", ".jsonl"):
            writer.adopt(path.name)
    for path in sorted((folder / "tokenizer").iterdir()):
        writer.adopt(f"tokenizer/{path.name}")
    writer.close(told)
    return report, notes
