"""The desk: orders wait in a bounded line, and one thread writes for them, those that ask alike in one batch."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pyramidion.explain import Explanation, explain
from pyramidion.generation import Summarizer, Summary
from pyramidion.serve.limits import Limits
from pyramidion.serve.watching import Stopped, watching

UNUSABLE = "no usable text"  # how the Summarizer begins to say that a text cannot be read
LONGEST_WAIT = 60  # seconds after which one may be told to come again, at most

Tell = Callable[[dict[str, Any]], None]


class Full(Exception):
    """Say that no more can wait, and after how many seconds to come again."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class Closed(Full):
    """Say that the desk takes nothing any more."""


class Unreadable(ValueError):
    """Say that there is nothing in a text to summarise."""


@dataclass(frozen=True)
class Order:
    """Say what is asked for.

    explain   whether to say what was kept
    streamed  whether somebody watches it being written
    options   of `generate`, in pairs
    """

    text: str
    title: str | None = None
    explain: bool = False
    streamed: bool = False
    options: tuple[tuple[str, int], ...] = ()

    @property
    def alone(self) -> bool:
        """Tell whether it is written by itself."""
        return self.explain or self.streamed


@dataclass(frozen=True)
class Result:
    """Hold what was written; `seconds` is what the writing took, without the waiting."""

    summary: str
    document_tokens: int
    cut: int
    note: str | None
    seconds: float
    explanation: dict[str, Any] | None = None


@dataclass(eq=False)
class Job:
    """Follow one order: its result to come, and whom to tell how far it is."""

    order: Order
    deadline: float = math.inf  # on the monotonic clock
    tell: Tell = lambda event: None
    result: Future[Result] = field(default_factory=Future)
    stop: threading.Event = field(default_factory=threading.Event)


class Desk:
    """Take orders until the line is full, and write them in one thread, first come, first served.

    Orders with equal options are written together, up to `batch_size` of those that wait; one that is streamed or
    explained is written by itself. Whatever fails, fails for its batch; the thread goes on.
    """

    def __init__(self, summarizer: Summarizer, limits: Limits | None = None) -> None:
        self.summarizer, self.limits = summarizer, limits or Limits()
        self.running = 0
        self.closing = False
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._pace = 1.0  # seconds for a batch, lately
        self._current: list[Job] = []
        self._thread = threading.Thread(target=self._work, name="pyramidion-desk", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------------------------------------
    # The line
    # ----------------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Count the orders that wait."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Put an order into the line, or raise `Full`."""
        with self._changed:
            if self.closing:
                raise Closed("The server is shutting down.", 5)
            if len(self._waiting) >= self.limits.queue:
                raise Full(f"{len(self._waiting)} requests are waiting, which is all that may.", self.patience())
            self._waiting.append(job)
            job.tell({"stage": "queued", "ahead": len(self._waiting) - 1 + self.running})
            self._changed.notify_all()

    def withdraw(self, job: Job) -> None:
        """Take an order back: out of the line, or, where it is streamed, out of the model's hands."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._tell_places()
            job.stop.set()
            job.result.cancel()

    def patience(self) -> int:
        """Guess the seconds until the line is shorter."""
        batches = len(self._waiting) / self.limits.batch_size
        return max(1, min(math.ceil(batches * self._pace), LONGEST_WAIT))

    def close(self, seconds: float | None = None) -> bool:
        """Refuse new orders and those that wait, and let what runs finish; tell whether it did in time.

        seconds  to wait for it; None: for ever
        """
        with self._changed:
            self.closing = True
            while self._waiting:
                job = self._waiting.popleft()
                if job.result.set_running_or_notify_cancel():
                    job.result.set_exception(Closed("The server is shutting down.", 5))
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def interrupt(self) -> None:
        """Stop what can be stopped: what is streamed."""
        for job in tuple(self._current):
            job.stop.set()

    def _tell_places(self) -> None:
        for place, job in enumerate(self._waiting):
            job.tell({"stage": "queued", "ahead": place + self.running})

    # ----------------------------------------------------------------------------------------------------------------
    # The thread
    # ----------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while batch := self._take():
            started = time.monotonic()
            try:
                results = self._write(batch)
            except BaseException as error:  # the thread serves the next ones, whatever befell these
                for job in batch:
                    job.result.set_exception(error)
            else:
                for job, result in zip(batch, results, strict=True):
                    _settle(job, result)
            self._pace += 0.3 * (time.monotonic() - started - self._pace)
            with self._changed:
                self.running, self._current = 0, []
                self._tell_places()

    def _take(self) -> list[Job]:
        """Take the first order that waits, and those like it; wait for one; none: it is over."""
        with self._changed:
            while True:
                while not self._waiting and not self.closing:
                    self._changed.wait()
                if not self._waiting:
                    return []
                chosen = self._alike()
                for job in chosen:
                    self._waiting.remove(job)
                batch = [job for job in chosen if _begins(job)]
                if batch:
                    self.running, self._current = len(batch), batch
                    self._tell_places()
                    return batch

    def _alike(self) -> list[Job]:
        first = self._waiting[0]
        if first.order.alone:
            return [first]
        like = (job for job in self._waiting if not job.order.alone and job.order.options == first.order.options)
        return [job for job, _ in zip(like, range(self.limits.batch_size), strict=False)]

    def _write(self, batch: list[Job]) -> list[Result | Exception]:
        if batch[0].order.alone:
            return [self._write_alone(batch[0])]
        started, options = time.monotonic(), dict(batch[0].order.options)
        for job in batch:
            job.tell({"stage": "reading"})
        summaries = self.summarizer([job.order.text for job in batch], batch_size=len(batch), **options)
        seconds = time.monotonic() - started
        return [_result(summary, seconds) for summary in summaries]

    def _write_alone(self, job: Job) -> Result | Exception:
        started, order, summarizer = time.monotonic(), job.order, self.summarizer
        job.tell({"stage": "reading"})
        if order.streamed:
            engine = watching(summarizer.tokenizer, job.tell, job.stop)
            summarizer = Summarizer(summarizer.model, summarizer.tokenizer, engine=engine)
        if not order.explain:
            [summary] = summarizer([order.text], batch_size=1, **dict(order.options))
            return _result(summary, time.monotonic() - started)
        step = lambda done, total, what: job.tell({"stage": "explaining"}) if done else None  # noqa: E731
        try:
            told = explain(summarizer, order.text, title=order.title, progress=step, **dict(order.options))
        except ValueError as error:
            _, found, reason = str(error).partition(UNUSABLE)
            return Unreadable(found + reason.rstrip(".")) if found else error
        return self._explained(told, started)

    def _explained(self, told: Explanation, started: float) -> Result:
        tokens = told.words.tokens - (self.summarizer.tokenizer.eos_token_id is not None)
        data = told.to_dict()
        return Result(told.summary, tokens, 0, told.note, time.monotonic() - started, data)


def _begins(job: Job) -> bool:
    """Mark an order as begun, unless it was taken back or nobody waits for it any more."""
    if time.monotonic() > job.deadline:
        job.result.cancel()
    return job.result.set_running_or_notify_cancel()


def _settle(job: Job, result: Result | Exception) -> None:
    if isinstance(result, Exception):
        job.result.set_exception(result)
    else:
        job.result.set_result(result)


def _result(summary: Summary, seconds: float) -> Result | Exception:
    if summary.error is None:
        return Result(summary.text, summary.document_tokens, summary.cut, summary.note, seconds)
    unreadable = summary.error.startswith(UNUSABLE)
    return Unreadable(summary.error) if unreadable else RuntimeError(summary.error)


__all__ = ["Closed", "Desk", "Full", "Job", "Order", "Result", "Stopped", "Unreadable"]
