"""Rows of a long benchmark: each is tried, timed and on disk before the next, so that a run may stop and go on."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from pyramidion.bench import measure, report
from pyramidion.generation.engine import out_of_memory

Row = dict[str, Any]
Tell = Callable[[int, int, str], None]

OUT_OF_MEMORY = "out of memory"
OVER_BUDGET = "one call took"
SLOW = 2.0  # seconds from which on a call is repeated least
OF_COMMIT = ("commit", "dirty")
SAME = ("device", "torch", "triton", "transformers", *OF_COMMIT)  # of the machine, for rows to be taken over
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
OURS, OTHERS = report.PALETTE[0], "0.62"
ABREAST = 4  # panels of a figure that stand in a row at most


class Skipped(Exception):
    """Say why a row is not measured."""


class Page(Protocol):
    """What a benchmark's module gives to be written: its title, its tables and text, its figures."""

    TITLE: str

    def sections(self, document: Mapping[str, Any]) -> Iterator[str]: ...

    def figures(self, document: Mapping[str, Any], folder: Path, stem: str) -> list[Path]: ...


# --------------------------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------------------------


def check(settings: Any, **least: float) -> None:
    """Refuse numbers, alone or in a tuple, below the least that is allowed, and an unknown type of number."""
    for name, lowest in least.items():
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number < lowest:
                raise ValueError(f"`{name}` must be at least {lowest:g}, got {number:g}.")
    for name in ("budget", "limit"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be a positive number of seconds, got {value:g}.")


def check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that are not known, and none at all."""
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"`{option}` must be among {', '.join(known)}, got {', '.join(unknown) or 'none'}.")


# --------------------------------------------------------------------------------------------------------------------
# One row
# --------------------------------------------------------------------------------------------------------------------


def attempt(work: Callable[[], Row]) -> Row:
    """Do the work, or say why it could not be done: nothing that one row runs into may end the others."""
    try:
        return work()
    except Skipped as reason:
        told = str(reason)
    except Exception as error:
        said = str(error).strip()
        first = said.partition("\n")[0]
        lacking = out_of_memory(error) or OUT_OF_MEMORY in said.lower()
        told = OUT_OF_MEMORY if lacking else f"{type(error).__name__}: {first[:200]}"
    return {"skipped": told}


def free(device: str) -> None:
    """Give back what a row has held: cycles, compiled code with its captured graphs, cached blocks."""
    gc.collect()
    with suppress(Exception):  # a device that is lost is noticed by `alive`
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


@contextmanager
def light_collection() -> Iterator[None]:
    """Leave what is there already out of every collection: what libraries hold would be looked through each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def listening() -> Iterator[list[str]]:
    """Hear what our library warns of meanwhile, as the engine does where it leaves the work to transformers."""
    told: list[str] = []
    ear = logging.Handler(logging.WARNING)
    ear.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("pyramidion")
    ours.addHandler(ear)
    try:
        yield told
    finally:
        ours.removeHandler(ear)


def alive(device: str) -> bool:
    """Tell whether the device still answers: some errors of a GPU stay until the process ends."""
    if torch.device(device).type != "cuda":
        return True
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def clock(
    fn: Callable[[], object],
    *,
    device: str,
    repeats: int,
    budget: float,
    held: int = 0,
    patient: bool = False,
    warmup: int = 0,
) -> Row:
    """Warm up, refuse what is over `budget`, then give times in milliseconds and the peak of memory in GiB.

    The first call may compile and load, so over budget a second one decides, unless on a CPU, where the first was
    hopeless, if it is not `patient` because it compiles. `held` are the bytes of weights and optimizer, where the
    device does not count them itself; `warmup` are further calls that are not timed.
    """
    gpu = torch.device(device).type == "cuda"
    seconds, peak = _watched(fn, device)
    if seconds > 4 * budget and not (gpu or patient):
        raise Skipped(_over(seconds, budget))
    if seconds < SLOW or seconds > budget:
        seconds, peak = _watched(fn, device)
    if seconds > budget:
        raise Skipped(_over(seconds, budget))
    calls = repeats if seconds < SLOW / 4 else min(repeats, 3 if seconds < SLOW else 2)
    timing = measure.timeit(fn, device=device, repeats=calls, warmup=warmup)
    if peak is None:
        peak = held + measure.peak_extra_memory(fn, device=device)
    return {
        "ms": timing.median * 1e3,
        "lower_ms": timing.lower * 1e3,
        "upper_ms": timing.upper * 1e3,
        "host_ms": timing.host * 1e3,
        "repeats": timing.count,
        "gib": peak / measure.GIBIBYTE,
    }


def _over(seconds: float, budget: float) -> str:
    return f"{OVER_BUDGET} {seconds:.2g} s, the budget is {budget:g} s"


def _watched(fn: Callable[[], object], device: str) -> tuple[float, int | None]:
    """Call once: seconds, and on a GPU the most bytes held meanwhile."""
    gpu = torch.device(device).type == "cuda"
    before = torch.cuda.memory_allocated(device) if gpu else 0
    began = perf_counter()
    if not gpu:
        fn()
        return perf_counter() - began, None
    extra = measure.peak_extra_memory(fn, device=device)  # waits for the device before and after
    return perf_counter() - began, before + extra


def best_of(ways: Mapping[str, Callable[[], Row]], device: str) -> Row:
    """Measure one thing in several ways: the fastest counts, all are recorded."""
    tried: list[Row] = []
    for way, work in ways.items():
        if tried:
            free(device)
        tried.append({"way": way} | attempt(work))
    measured = [row for row in tried if "skipped" not in row]
    if not measured:
        reasons = dict.fromkeys(str(row["skipped"]) for row in tried)
        return {"skipped": "; ".join(reasons), "ways": tried}
    return min(measured, key=lambda row: float(row["ms"])) | {"ways": tried}


# --------------------------------------------------------------------------------------------------------------------
# All rows
# --------------------------------------------------------------------------------------------------------------------


class Sheet:
    """The rows of a run, on disk after each one.

    Rows of an earlier run of the same name, machine, versions and commit are taken over, not measured again; where the
    commit cannot be known, none are. With `older` those of other commits are too, and each row says its own; with
    `fresh` none are. `limit` is the seconds after which no further row is begun.

    A run may ask for a part of what is on its sheet: settings that are lists, and lists of facts, are joined with the
    earlier ones, and what was asked for and never measured stays `open`.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        benchmark: str,
        settings: Mapping[str, Any],
        *,
        fresh: bool = False,
        older: bool = False,
    ) -> None:
        self.machine = measure.machine(settings["device"])
        self.folder, self.stem = folder, report.result_stem(name, self.machine)
        self.benchmark, self.settings = benchmark, dict(settings)
        self.facts: Row = {}
        same = [key for key in SAME if not (older and key in OF_COMMIT)]
        self.earlier: Row = {} if fresh else self._earlier(report.slug(name), same)
        self.rows: list[Row] = self.earlier.get("rows", [])
        self.open: list[Row] = self.earlier.get("open", [])
        self.taken, self.stopped = len(self.rows), ""
        self._began = perf_counter()

    @property
    def path(self) -> Path:
        """Give the place of the JSON file."""
        return self.folder / f"{self.stem}.json"

    @property
    def document(self) -> dict[str, Any]:
        """Give everything as it is written: the machine, what was asked for, the rows."""
        return {
            "machine": self.machine,
            "benchmark": self.benchmark,
            "settings": _joined(self.earlier.get("settings", {}), self.settings),
            "left": self.left,
            "stopped": self.stopped,
            **_joined({name: self.earlier.get(name) for name in self.facts}, self.facts),
            "open": self.open,
            "rows": self.rows,
        }

    @property
    def left(self) -> int:
        """Count what was asked for and is not measured."""
        return len(self.open)

    def fill(self, cases: Sequence[Row], work: Callable[[Row], Row], tell: Tell) -> None:
        """Measure every case that has no row yet, in order, until the time is over; a case is the key of its row."""
        with light_collection(), listening() as told:
            self._fill(cases, work, tell)
        self.facts["told"] = list(dict.fromkeys([*self.facts.get("told", ()), *told]))
        asked = [*self.open, *(case for case in cases if case not in self.open)]
        self.open = [case for case in asked if self.find(case) is None]
        tell(len(cases), len(cases), "")

    def _fill(self, cases: Sequence[Row], work: Callable[[Row], Row], tell: Tell) -> None:
        for done, case in enumerate(cases):
            tell(done, len(cases), " ".join(str(value) for value in list(case.values())[:5]))
            if self.find(case) is not None:
                continue
            if self._expired():
                break
            began = perf_counter()
            row = case | attempt(lambda case=case: work(case))  # type: ignore[misc]
            self.rows.append(row | {"seconds": round(perf_counter() - began, 2), "commit": self.machine["commit"]})
            free(self.settings["device"])
            self.save()
            if not alive(self.settings["device"]):
                self.stopped = "the GPU no longer answers: run again to go on"
                break

    def find(self, case: Row) -> Row | None:
        """Give the row of a case, if there is one."""
        return next((row for row in self.rows if all(row.get(key) == value for key, value in case.items())), None)

    def save(self) -> Path:
        """Write the JSON beside its place, then into it, so that it is whole at any moment."""
        document = self.document
        beside = self.path.with_suffix(".part")
        report.write_json(beside, document.pop("machine"), document)
        os.replace(beside, self.path)
        return self.path

    def _expired(self) -> bool:
        limit = self.settings.get("limit")
        if limit is not None and perf_counter() - self._began >= limit:
            self.stopped = f"the limit of {limit:g} s was reached: run again to go on"
        return bool(self.stopped)

    def _earlier(self, name: str, same: Sequence[str]) -> Row:
        """Read the latest run that agrees in what must be the same."""
        pattern = f"{name}_{report.slug(self.machine['device'])}_????-??-??.json"
        for path in sorted(self.folder.glob(pattern), reverse=True):
            found = json.loads(path.read_text())
            like = all(found["machine"].get(key) == self.machine[key] for key in same)
            if like and self.machine["commit"] != "unknown" and found.get("benchmark") == self.benchmark:
                rows = [{"commit": found["machine"]["commit"], **row} for row in found["rows"]]
                return {**found, "rows": rows}
        return {}


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> Row:
    """Join two descriptions: the second counts, but of a list, of models and of names nothing of the first is lost.

    Lists of anything else were computed from all rows, and are the second's alone.
    """
    found = dict(second)
    for name, value in second.items():
        before = first.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            found[name] = {**before, **value}
        elif isinstance(value, list | tuple) and isinstance(before, list | tuple) and all(map(_told, value)):
            kept = {_identity(one): one for one in before if _told(one)}
            found[name] = list((kept | {_identity(one): one for one in value}).values())
    return found


def _told(one: Any) -> bool:
    """Tell whether an entry says by itself what it is about."""
    return not isinstance(one, Mapping) or "model" in one


def _identity(one: Any) -> Any:
    return one["model"] if isinstance(one, Mapping) else one


# --------------------------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------------------------


def publish(page: Page, document: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Write the Markdown and, where matplotlib is there, the figures of what was measured."""
    drawn = page.figures(document, folder, stem) if can_draw() else []
    parts = list(page.sections(document))
    if document["stopped"] or document["left"]:
        why = document["stopped"] or "a run for a part of them was the last"
        parts.insert(0, f"**Not complete**: {document['left']} rows are left; {why}.")
    shown = "\n".join(f"![{path.stem.rpartition('_')[2]}]({path.name})" for path in drawn)
    note = f"Figures are not drawn, matplotlib is missing: `pyramidion bench draw {stem}.json` draws them."
    parts.insert(1, shown if can_draw() else note)
    commits = Counter(row.get("commit", document["machine"]["commit"]) for row in document["rows"])
    if len(commits) > 1:
        told = ", ".join(f"{count} at {commit[:10]}" for commit, count in commits.most_common())
        parts.append(f"## Commits\n\nRows were measured at more than one commit: {told}. The JSON says which.")
    if document.get("told"):
        parts.append("## What the library warned of\n\n" + "\n".join(f"- {line}" for line in document["told"]))
    sections = [part for part in parts if part]
    return [report.write_markdown(folder / f"{stem}.md", page.TITLE, document["machine"], sections), *drawn]


def can_draw() -> bool:
    """Tell whether figures can be drawn here."""
    return find_spec("matplotlib") is not None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from telling of every configuration it makes; errors are still told."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Multiply float32 matrices exactly, or by TF32 where that is asked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def milliseconds(value: float | None) -> str:
    """Write a time that may be anything from microseconds to minutes: 0.98 ms, 12.3 ms, 2.88 s."""
    if value is None:
        return ""
    return f"{report.three_digits(value)} ms" if value < 1000 else f"{report.three_digits(value / 1000)} s"


Bar = tuple[str, float | None, bool]  # its name, its length, whether it is ours


def write_bars_figure(
    path: Path, panels: Mapping[str, Sequence[Bar]], *, label: str, title: str, note: str, form: str = "ms"
) -> Path:
    """Draw panels of bars, few in a row, with the same names: ours in colour, the length behind each bar."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    most = max(len(bars) for bars in panels.values())
    high = -(-len(panels) // ABREAST)
    wide = -(-len(panels) // high)
    size = (2.2 + 2.9 * wide, 0.5 + (1.1 + 0.34 * most) * high)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.text(0.012, 1 - 0.36 / size[1], note, fontsize=9, color="0.35", va="top")
    axes = figure.subplots(high, wide, squeeze=False)
    for place, (name, bars) in zip(axes.flat, panels.items(), strict=False):
        _draw_bars(place, bars, form)
        place.set_title(name, fontsize=10)
        place.set_xlabel(label, fontsize=9)
    for place in axes[:, 1:].flat:
        place.set_yticklabels([])
    for place in axes.flat[len(panels) :]:
        place.remove()
    figure.savefig(path)
    return path


def _draw_bars(axes: Any, bars: Sequence[Bar], form: str) -> None:
    for height, (_, value, ours) in enumerate(bars):
        axes.barh(height, value or 0, color=OURS if ours else OTHERS, height=0.7)
        told = "not measured" if value is None else milliseconds(value) if form == "ms" else f"{value:{form}}"
        axes.text(value or 0, height, f" {told}", va="center", fontsize=8, color="0.2" if value else "0.5")
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=9)
    axes.set_xlim(0, 1.32 * max([value or 0 for _, value, _ in bars] + [1e-9]))
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=4)
    axes.spines[["top", "right"]].set_visible(False)


__all__ = ["Page", "Row", "Sheet", "Skipped", "Tell", "attempt", "best_of", "clock", "publish", "write_bars_figure"]
