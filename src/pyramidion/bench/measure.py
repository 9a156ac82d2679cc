"""The stopwatch that every benchmark shares: time, memory, bandwidth, and the machine they were measured on."""

from __future__ import annotations

import functools
import gc
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pyramidion import __version__

GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class Timing:
    """Seconds a call took: the median, the quartiles around it, and how many calls they rest on.

    `host` is the median time the CPU needed to hand the work to a GPU (on a CPU: the median itself). Where it exceeds
    `median`, the call on its own is bound by kernel launches, and only a busy queue will hide that.
    """

    median: float
    lower: float
    upper: float
    count: int
    host: float


def timeit(
    fn: Callable[[], object],
    *,
    device: str | torch.device,
    repeats: int | None = None,
    min_time: float = 0.2,
    max_time: float = 10.0,
    warmup: int = 2,
) -> Timing:
    """Time `fn` after a warm-up, each call by itself.

    Exactly `repeats` calls where that is given; otherwise at least three, and on until `min_time` seconds were
    measured, or a hundred calls, or `max_time` is over. On a GPU every call starts with a cold L2 cache, and the queue
    holds nothing but the flush before it: work that the host hands over slower than the GPU does it is seen as slow.
    """
    if repeats is not None and repeats < 1:
        raise ValueError(f"`repeats` must be at least 1, got {repeats}.")
    once = _cuda_call(torch.device(device)) if torch.device(device).type == "cuda" else _cpu_call
    for _ in range(warmup):
        once(fn)
    began = perf_counter()
    calls: list[tuple[float, float]] = []
    with _no_collection():
        while not _enough(calls, repeats, min_time, max_time, perf_counter() - began):
            calls.append(once(fn))
    return _summary(calls)


def race(fns: Mapping[str, Callable[[], object]], *, device: str | torch.device, repeats: int = 9) -> dict[str, Timing]:
    """Time several functions in turn, so that a busy moment of the machine falls on all of them alike."""
    once = _cuda_call(torch.device(device)) if torch.device(device).type == "cuda" else _cpu_call
    calls: dict[str, list[tuple[float, float]]] = {name: [] for name in fns}
    with _no_collection():
        for turn in range(repeats + 1):
            for name, fn in fns.items():
                call = once(fn)
                if turn:  # the first is the warm-up
                    calls[name].append(call)
    return {name: _summary(found) for name, found in calls.items()}


def _summary(calls: Sequence[tuple[float, float]]) -> Timing:
    seconds = [call[0] for call in calls]
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Timing(median, lower, upper, len(seconds), statistics.median(call[1] for call in calls))


def _enough(
    calls: list[tuple[float, float]], repeats: int | None, min_time: float, max_time: float, elapsed: float
) -> bool:
    if repeats is not None:
        return len(calls) >= repeats
    if len(calls) < 3:
        return False
    return len(calls) >= 100 or sum(call[0] for call in calls) >= min_time or elapsed >= max_time


def _cpu_call(fn: Callable[[], object]) -> tuple[float, float]:
    began = perf_counter()
    fn()
    seconds = perf_counter() - began
    return seconds, seconds


def _cuda_call(device: torch.device) -> Callable[[Callable[[], object]], tuple[float, float]]:
    """Return a function that times one call between two events, as (seconds on the device, seconds on the host)."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(4 * cache, 1 << 28), dtype=torch.int8, device=device)

    def once(fn: Callable[[], object]) -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        flush.zero_()
        began = perf_counter()
        start.record()
        fn()
        end.record()
        host = perf_counter() - began
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host

    return once


def captured(fn: Callable[[], object], *, device: str | torch.device) -> Callable[[], object] | None:
    """Capture the kernels of `fn` in a CUDA graph and return its replay, or None where it cannot be captured.

    A replay is what the GPU does, without the host between the kernels: what a call costs in a busy program.
    """
    if torch.device(device).type != "cuda":
        return None
    for _ in range(2):  # a first attempt may have to load what cannot be loaded during a capture
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        try:
            with torch.cuda.stream(side):  # as torch asks: warm up where nothing else runs
                fn()
            torch.cuda.synchronize(device)
            with torch.cuda.graph(graph):
                result = fn()
        except RuntimeError:  # it waits for the device, or draws from a generator that cannot be captured
            torch.cuda.synchronize(device)
        else:
            return functools.partial(_replay, graph, result)
    return None


def _replay(graph: torch.cuda.CUDAGraph, kept: object) -> None:
    """Replay a graph; `kept` holds the memory that it writes to."""
    graph.replay()


def peak_extra_memory(fn: Callable[[], object], *, device: str | torch.device) -> int:
    """Return the most bytes that torch's allocator held during `fn()`, above what it held before.

    What `fn` returns counts too. On a CPU the profiler reports every allocation, those inside kernels included.
    """
    device = torch.device(device)
    with _no_collection():
        return _peak_of_cuda(fn, device) if device.type == "cuda" else _peak_of_cpu(fn)


def _peak_of_cuda(fn: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _peak_of_cpu(fn: Callable[[], object]) -> int:
    with silent_stderr():
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            result = fn()
    del result
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    allocations = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, size in sorted(allocations, key=lambda allocation: allocation[0]):
        live += size
        peak = max(peak, live)
    return peak


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector out: it would cost time of its own, and free old memory in the midst of a measurement."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drop what the profiler's C++ side says about starting and stopping; Python cannot ask it not to."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def copy_bandwidth(device: str | torch.device, *, size: int | None = None) -> float:
    """Measure the bytes a second, read and written together, of one large copy within `device`."""
    device = torch.device(device)
    size = size or (GIBIBYTE if device.type == "cuda" else GIBIBYTE // 8)
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / timeit(lambda: target.copy_(source), device=device, repeats=15).median


def free_memory(device: str | torch.device) -> int:
    """Return the bytes that could still be allocated: free on the GPU, or available to this process on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    rooms = [_available_memory(), _container_memory()]
    return min((room for room in rooms if room is not None), default=4 * GIBIBYTE)


def _available_memory() -> int | None:
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def _container_memory() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None


def cpu_count() -> int:
    """Count the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: str | torch.device) -> str:
    """Name the hardware as a reader would: "NVIDIA H200", or "CPU, 2 cores"."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = cpu_count()
    return f"CPU, {cores} core{'s' if cores > 1 else ''}"


def machine(device: str | torch.device) -> dict[str, Any]:
    """Describe where a figure was measured: hardware, versions, commit and date; no host name, no path."""
    return {
        "device": device_name(device),
        "processor": _processor(),
        "cpu_count": cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "pyramidion": __version__,
        **{package: _version(package) for package in ("torch", "triton", "transformers")},
        **_commit(),
        "date": date.today().isoformat(),
    }


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """Return the commit of the source, and whether the package differs from it (None: cannot be known).

    A copy of the source may lie inside another repository, whose commit says nothing; PYRAMIDION_COMMIT then names it.
    """
    if named := os.environ.get("PYRAMIDION_COMMIT"):
        return {"commit": named, "dirty": None}
    package = Path(__file__).resolve().parents[1]
    top = _git(package, "rev-parse", "--show-toplevel")
    ours = top is not None and package == Path(top).resolve() / "src" / package.name
    commit = _git(package, "rev-parse", "HEAD") if ours else None
    if commit is None:
        return {"commit": "unknown", "dirty": None}
    return {"commit": commit, "dirty": bool(_git(package, "status", "--porcelain", "--", "."))}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
