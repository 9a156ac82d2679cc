"""The account of a run: what came of its steps in metrics.jsonl, how long they took in times.jsonl.

The first is the same, to the byte, however often a run was killed and resumed. The second is not: times never are.
"""

import json
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pyramidion.disk import write_whole

METRICS, TIMES = "metrics.jsonl", "times.jsonl"
PASSING = ("_runtime", "_per_second", "_flos")  # what differs from run to run

Record = dict[str, Any]


class Account:
    """Write the two files of the run in `folder`, and count the seconds that it trains."""

    def __init__(self, folder: Path) -> None:
        self.metrics, self.times = folder / METRICS, folder / TIMES
        self._before = 0.0  # seconds of the processes before this one
        self._last = (0.0, 0.0)  # seconds and documents at the line before
        self._paused = 0.0
        self._began = perf_counter()

    def take_up(self, step: int, history: Iterable[Record], machine: Mapping[str, Any] | None) -> None:
        """Begin, or go on, at a step: what was written beyond it is forgotten, since it is done again."""
        lasting = (json.dumps(line, sort_keys=True) + "\n" for line in filter(None, map(_lasting, history)))
        write_whole(self.metrics, "".join(lasting))
        times = [line for line in read_lines(self.times) if line["step"] <= step]
        measured = [line for line in times if "seconds" in line]
        self._before = measured[-1]["seconds"] if measured else 0.0
        self._last = (self._before, measured[-1]["documents"] if measured else 0.0)
        self._paused, self._began = 0.0, perf_counter()
        times.append({"step": step, "machine": dict(machine) if machine else None})
        write_whole(self.times, "".join(json.dumps(line) + "\n" for line in times))

    def add(self, record: Record) -> None:
        """Append a record of the Trainer's log."""
        if line := _lasting(record):
            _append(self.metrics, line)

    def lap(self, step: int, documents: float) -> float:
        """Append the time at a step; return the documents a second since the one before."""
        seconds = self._before + perf_counter() - self._began - self._paused
        _append(self.times, {"step": step, "seconds": seconds, "documents": documents, "peak_memory": peak_memory()})
        before, self._last = self._last, (seconds, documents)
        return (documents - before[1]) / max(seconds - before[0], 1e-9)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do something that is not training, and leave it out of the time."""
        began = perf_counter()
        try:
            yield
        finally:
            self._paused += perf_counter() - began


def read_lines(path: Path) -> list[Record]:
    """Read JSON lines as far as they are whole: a killed process may have left half of the last one."""
    found: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def peak_memory() -> int:
    """Return the most bytes held so far: of the GPU, or of this process where there is none."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _append(path: Path, line: Record) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")


def _lasting(record: Record) -> Record:
    """Take from a record of the log what does not change from run to run."""
    if "train_runtime" in record:  # the Trainer's own summary, of this call alone
        return {}
    return {name: value for name, value in record.items() if not name.endswith(PASSING)}
