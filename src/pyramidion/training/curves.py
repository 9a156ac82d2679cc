"""Runs beside each other: loss and validation against steps and minutes, speed and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyramidion.training.account import METRICS, TIMES, read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")  # Okabe and Ito
LINES = ("-", "--", "-.", ":")
SHOWN = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass(frozen=True)
class Run:
    """What a run's folder says of it."""

    name: str
    recipe: dict[str, Any]
    metrics: list[dict[str, Any]]
    times: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the folder of a run, finished or not."""
        try:
            recipe = json.loads((folder / "run.json").read_text())["recipe"]
        except (OSError, ValueError, KeyError):
            raise ValueError(f"`RUNS` must be folders of `pyramidion train`, got {str(folder)!r}.") from None
        return cls(folder.resolve().name, recipe, read_lines(folder / METRICS), read_lines(folder / TIMES))

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Give the steps at which something was logged, and its values."""
        found = [(line["step"], line[key]) for line in self.metrics if key in line]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def minutes(self, steps: np.ndarray) -> np.ndarray:
        """Give the minutes of training, without validations and checkpoints, that had passed at these steps."""
        laps = self._laps
        known = np.array([0.0, *(line["step"] for line in laps)])
        return np.interp(steps, known, np.array([0.0, *(line["seconds"] for line in laps)]) / 60)

    @property
    def _laps(self) -> list[dict[str, Any]]:
        return [line for line in self.times if "seconds" in line]

    def to_dict(self) -> dict[str, Any]:
        """Sum the run up: speed without its first tenth, which compiles and warms up."""
        laps, (steps, losses) = self._laps, self.curve("loss")
        warm = laps[len(laps) // 10 :]
        seconds = warm[-1]["seconds"] - warm[0]["seconds"] if len(warm) > 1 else 0.0
        metric = f"eval_{self.recipe['metric']}"
        at, values = self.curve(metric)
        best = None if not len(values) else int((np.argmin if metric == "eval_loss" else np.argmax)(values))
        chosen = [line for line in self.metrics if metric in line][best] if best is not None else {}
        return {
            "run": self.name,
            "preset": self.recipe["preset"],
            "steps": int(steps[-1]) if len(steps) else 0,
            "minutes": laps[-1]["seconds"] / 60 if laps else 0.0,
            "documents_a_second": (warm[-1]["documents"] - warm[0]["documents"]) / seconds if seconds else None,
            "peak_memory": max((line["peak_memory"] for line in laps), default=None),
            "loss": float(losses[-1]) if len(losses) else None,
            "best_step": None if best is None else int(at[best]),
            "validation": {name: chosen[f"eval_{name}"] for name in ("loss", *SHOWN) if f"eval_{name}" in chosen},
            "machine": next((line["machine"] for line in reversed(self.times) if line.get("machine")), None),
        }


def write_curves(path: Path, runs: Sequence[Run]) -> Path:
    """Draw the runs: rows are loss and validation, columns are steps and minutes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.4, 7.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for run, colour in zip(runs, COLOURS, strict=False):
        for axes, clock in zip(grid.T, (_steps, Run.minutes), strict=True):
            _draw_losses(axes[0], run, colour, clock)
            _draw_scores(axes[1], run, colour, clock)
    for row, name in zip(grid, ("Loss", "ROUGE of what is written in validation"), strict=True):
        for axes in row:
            _finish(axes, name if axes is row[0] else "")
    for axes, label in zip(grid[1], ("steps", "minutes of training"), strict=True):
        axes.set_xlabel(label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _steps(run: Run, steps: np.ndarray) -> np.ndarray:
    return steps


def _draw_losses(axes: Axes, run: Run, colour: str, clock: Any) -> None:
    steps, losses = run.curve("loss")
    axes.plot(clock(run, steps), losses, color=colour, linewidth=1.0, alpha=0.45)
    steps, losses = run.curve("eval_loss")
    axes.plot(clock(run, steps), losses, color=colour, linewidth=2, marker="o", markersize=4, label=run.name)


def _draw_scores(axes: Axes, run: Run, colour: str, clock: Any) -> None:
    for name, line in zip(SHOWN, LINES, strict=True):
        steps, values = run.curve(f"eval_{name}")
        axes.plot(clock(run, steps), values, line, color=colour, linewidth=1.8, marker="o", markersize=3)


def _finish(axes: Axes, name: str) -> None:
    from matplotlib.lines import Line2D

    axes.set_title(name, loc="left", fontsize=11, fontweight="bold")
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if name == "Loss":
        axes.set_title("a token, validation; thin: training", loc="right", fontsize=9, color="0.4")
        axes.legend(frameon=False, fontsize=9)
    elif name:
        handles = [Line2D([], [], color="0.3", linestyle=line) for line in LINES]
        axes.legend(handles, SHOWN, frameon=False, fontsize=9, ncols=4)
        axes.set_ylim(bottom=0)


def to_markdown(runs: Sequence[Run]) -> str:
    """Write a table with a line for each run."""
    heading = ("run", "steps", "minutes", "documents/s", "peak GiB", "loss", "best at", "validation loss", *SHOWN)
    lines = [heading, ("---", *["---:"] * (len(heading) - 1)), *(tuple(_cells(run.to_dict())) for run in runs)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield row["run"]
    yield f"{row['steps']:,}"
    yield f"{row['minutes']:.1f}"
    yield "" if row["documents_a_second"] is None else f"{row['documents_a_second']:.1f}"
    yield "" if row["peak_memory"] is None else f"{row['peak_memory'] / 2**30:.1f}"
    yield "" if row["loss"] is None else f"{row['loss']:.3f}"
    yield "" if row["best_step"] is None else f"{row['best_step']:,}"
    for name, digits in {"loss": 3, **dict.fromkeys(SHOWN, 2)}.items():
        yield f"{row['validation'][name]:.{digits}f}" if name in row["validation"] else ""
