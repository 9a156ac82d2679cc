"""Put summaries where they are wanted: a stream, a file of JSON lines, a folder; and know what stands there already."""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from pyramidion.disk import write_whole
from pyramidion.generation.documents import RESULTS, Document
from pyramidion.generation.journal import Journal, Row, to_line
from pyramidion.generation.summarizer import Summarizer, Summary, Text


class Sink(ABC):
    """Take results in order. `has` says whether an earlier run left one: None, or whether it was a failure."""

    def has(self, document: Document) -> bool | None:
        """Say None for a document without a result, else whether its result is a failure."""
        return None

    @abstractmethod
    def put(self, document: Document, summary: Summary) -> None:
        """Write one result."""

    def close(self) -> None:
        """End."""
        return


class TextSink(Sink):
    """Write texts one behind the other, each under its name where there are several."""

    def __init__(self, stream: TextIO, *, headers: bool, own: bool = False) -> None:
        self.stream, self.headers, self.own, self.begun = stream, headers, own, False

    def put(self, document: Document, summary: Summary) -> None:
        if self.headers or not document.single:
            self.stream.write(("\n" if self.begun else "") + f"==> {place(document)} <==\n")
        if not summary.error:
            self.stream.write(summary.text + "\n")
        self.stream.flush()
        self.begun = True

    def close(self) -> None:
        if self.own:
            self.stream.close()


class LineSink(Sink):
    """Write JSON lines to a stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def put(self, document: Document, summary: Summary) -> None:
        self.stream.write(to_line(row_of(document, summary)))
        self.stream.flush()


class JournalSink(Sink):
    """Write JSON lines to a file, and go on behind the lines that stand there."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path)
        self.seen = 0

    def has(self, document: Document) -> bool | None:
        if self.seen == len(self.journal.rows):
            return None
        row = self.journal.rows[self.seen]
        self.seen += 1
        if (row.get("source"), row.get("index")) != (document.source, document.index):
            raise ValueError(
                f"`--resume` must be given the documents of the first run: line {self.seen} of "
                f"{self.journal.path.name} is for {row.get('source')!r}, {row.get('index')}, "
                f"got {document.source!r}, {document.index}."
            )
        return bool(row.get("error"))

    def put(self, document: Document, summary: Summary) -> None:
        self.journal.append(row_of(document, summary))

    def close(self) -> None:
        self.journal.file.close()


class FolderSink(Sink):
    """Write a file for each document, whole or not at all; a failure leaves a file with its reason."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        standing = next((path for path in folder.rglob("*") if path.name.endswith(RESULTS)), None)
        if standing is not None and not resume:
            raise ValueError(f"`--output` must not hold results yet, got {standing.name}; `--resume` goes on.")
        self.folder, self.leading = folder, True
        self.names: Counter[str] = Counter()
        self.targets: deque[str] = deque()

    def has(self, document: Document) -> bool | None:
        target = self._target(document)
        for failed, ending in enumerate(RESULTS):
            if self.leading and (self.folder / (target + ending)).exists():
                return bool(failed)
        self.leading = False
        self.targets.append(target)
        return None

    def put(self, document: Document, summary: Summary) -> None:
        path = self.folder / (self.targets.popleft() + RESULTS[bool(summary.error)])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (summary.error or summary.text) + "\n")

    def _target(self, document: Document) -> str:
        """Name a document's file after it; of several with one name the later ones get a number."""
        name = document.name if document.single else f"{document.name}.{document.index:06}"
        self.names[name] += 1
        return name if self.names[name] == 1 else f"{name}-{self.names[name]}"


def row_of(document: Document, summary: Summary) -> Row:
    """Say everything about a result in one object."""
    return {
        "source": document.source,
        "index": document.index,
        "summary": summary.text,
        "document_tokens": summary.document_tokens,
        "note": summary.note,
        "error": summary.error,
    }


def place(document: Document) -> str:
    """Name a document: the file, and the line where it has several."""
    return document.source if document.single else f"{document.source}:{document.index + 1}"


def summarize_documents(
    summarizer: Summarizer,
    found: Iterator[Document],
    sink: Sink,
    tell: Callable[[str], None],
    *,
    done: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> int:
    """Summarise every document into the sink, tell of notes and failures, and count the failures.

    done  hears how many documents have a result
    """
    standing, skip, failed = _standing(found, sink)
    waiting: deque[Document] = deque()

    def texts() -> Iterator[Text]:
        for number, document in enumerate(chain(standing, found)):
            if number >= skip:
                waiting.append(document)
            if number >= len(standing):
                sink.has(document)
            yield document.text

    for count, summary in enumerate(summarizer.stream(texts(), skip=skip, **options), start=skip + 1):
        document = waiting.popleft()
        sink.put(document, summary)
        done(count)
        failed += bool(summary.error)
        for said in filter(None, (summary.error, summary.note)):
            tell(f"{place(document)}: {said}")
    return failed


def _standing(found: Iterator[Document], sink: Sink) -> tuple[list[Document], int, int]:
    """Read up to the first document without a result: the documents, how many have one, how many of those failed."""
    read: list[Document] = []
    failed = 0
    for document in found:
        read.append(document)
        known = sink.has(document)
        if known is None:
            return read, len(read) - 1, failed
        failed += known
    return read, len(read), failed


__all__ = ["FolderSink", "JournalSink", "LineSink", "Sink", "TextSink", "summarize_documents"]
