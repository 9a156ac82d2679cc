"""Write what was measured: JSON for machines, Markdown for readers, figures for both.

Nothing here knows what was measured. A result is a list of rows, plain dictionaries, under the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

# Okabe and Ito: told apart with any colour vision, and by their lightness in print.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (7, 2, 1, 2, 1, 2)), (0, (1, 4)), (0, (10, 3)), (0, (3, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")


@dataclass(frozen=True)
class Column:
    """A column of a table: the key in a row, its heading, and how to write a value.

    `form` is a format, or "3": three digits that count. A value is multiplied by `factor` first.
    """

    key: str
    heading: str
    form: str = ""
    factor: float = 1.0

    def write(self, row: Record) -> str:
        """Write this column's cell of `row`; nothing where there is no value."""
        value = row.get(self.key)
        if value is None or isinstance(value, str):
            return value or ""
        value = value * self.factor if self.factor != 1.0 else value
        return three_digits(value) if self.form == "3" else format(value, self.form)


def three_digits(value: float) -> str:
    """Write three digits that count: 0.0123, 1.23, 12.3, 1,234."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 1e-4 else f"{value:.2e}"


def slug(text: str) -> str:
    """Make a name fit for a file: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def result_stem(what: str, machine: Record) -> str:
    """Name a result what_hardware_date."""
    return f"{slug(what)}_{slug(machine['device'])}_{machine['date']}"


def write_json(path: Path, machine: Record, result: Record) -> Path:
    """Write the machine first, then the rest in the order given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **result}, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    return path


def table_cells(rows: Sequence[Record], columns: Sequence[Column]) -> list[list[str]]:
    """Write each row as text; one with a `skipped` reason shows that in its first empty cell."""
    table = []
    for row in rows:
        cells = [column.write(row) for column in columns]
        if row.get("skipped") and "" in cells:
            cells[cells.index("")] = f"skipped: {row['skipped']}"
        table.append(cells)
    return table


def markdown_table(rows: Sequence[Record], columns: Sequence[Column]) -> str:
    """Write rows as a Markdown table, text to the left and figures to the right."""
    cells = table_cells(rows, columns)
    rule = ["---:" if any(isinstance(row.get(c.key), int | float) for row in rows) else "---" for c in columns]
    lines = [[column.heading for column in columns], rule, *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe(machine: Record) -> str:
    """Write the machine as one line of prose."""
    packages = [
        f"{name} {machine[name]}" for name in ("python", "torch", "triton", "transformers") if machine.get(name)
    ]
    commit = f"commit {machine['commit'][:12]}" + {True: " with changes"}.get(machine["dirty"], "")
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return "; ".join((f"{machine['device']} ({machine['processor']}, {threads})", *packages, commit, machine["date"]))


def write_markdown(path: Path, title: str, machine: Record, sections: Iterable[str]) -> Path:
    """Write a report: title, machine, then each section."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join((f"# {title}", f"Measured on {describe(machine)}.", *sections)) + "\n")
    return path


def write_lines_figure(
    path: Path,
    rows: Sequence[Record],
    *,
    x: str,
    y: str,
    styles: str,
    colours: str,
    labels: tuple[str, str],
    title: str,
    note: str = "",
    factor: float = 1.0,
    log_y: bool = False,
) -> Path:
    """Draw y over x: a line style for each value of `styles`, a colour for each value of `colours`.

    Numbers are told in order and with the name of what they are, names as they come; a single style needs no telling.
    """
    from matplotlib.lines import Line2D

    figure, axes = _canvas((8.6, 4.8), title, note, labels)
    kinds, groups = _values(rows, styles), _values(rows, colours)
    numbers = not any(isinstance(group, str) for group in groups)
    groups = sorted(groups) if numbers else groups
    for kind_index, kind in enumerate(kinds):
        for group_index, group in enumerate(groups):
            points = sorted(
                (row[x], row[y] * factor)
                for row in rows
                if row[styles] == kind and row[colours] == group and row.get(y) is not None
            )
            if points:
                axes.plot(*zip(*points, strict=True), color=_pick(PALETTE, group_index), **_style(kind_index))
    ticks = sorted(_values(rows, x))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [thousands(tick) for tick in ticks])
    axes.minorticks_off()
    if log_y:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    handles: list[Any] = []
    if len(kinds) > 1:
        handles = [Line2D([], [], color="0.25", label=kind, **_style(i)) for i, kind in enumerate(kinds)]
        handles.append(Line2D([], [], linestyle="", label=""))
    for i, group in enumerate(groups):
        label = f"{colours} = {group}" if numbers else group
        handles.append(Line2D([], [], color=_pick(PALETTE, i), linewidth=4, label=label))
    _legend(axes, handles)
    return _save(figure, path)


def write_scatter_figure(
    path: Path,
    rows: Sequence[Record],
    *,
    x: str,
    y: str,
    name: str,
    labels: tuple[str, str],
    title: str,
    note: str = "",
) -> Path:
    """Draw one point for each row, its name in a legend beside, so that near points never hide each other's label."""
    from matplotlib.lines import Line2D

    figure, axes = _canvas((8.6, 4.8), title, note, labels)
    for index, row in enumerate(row for row in rows if row.get(x) is not None and row.get(y) is not None):
        marker = MARKERS[(index + index // len(PALETTE)) % len(MARKERS)]
        point = {"color": _pick(PALETTE, index), "marker": marker, "markersize": 9, "markeredgecolor": "white"}
        axes.plot(row[x], row[y], linestyle="", label=row[name], zorder=3, **point)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    handles, _ = axes.get_legend_handles_labels()
    for row in rows:
        if row.get(x) is None or row.get(y) is None:
            handles.append(Line2D([], [], linestyle="", label=f"{row[name]} (not measured)"))
    _legend(axes, handles, 1.5)
    return _save(figure, path)


def thousands(n: int) -> str:
    """Write 2048 as 2k, 1048576 as 1M and 100 as 100."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= unit and n % unit == 0:
            return f"{n // unit}{letter}"
    return str(n)


def _values(rows: Sequence[Record], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _pick(choices: Sequence[Any], index: int) -> Any:
    return choices[index % len(choices)]


def _style(index: int) -> dict[str, Any]:
    return {"linestyle": _pick(LINES, index), "marker": _pick(MARKERS, index), "markersize": 5, "linewidth": 1.6}


def _canvas(size: tuple[float, float], title: str, note: str, labels: tuple[str, str]) -> tuple[Figure, Axes]:
    """Open a figure without pyplot, so that neither a display nor global state is touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=24 if note else 8)
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(note, (0, 1), (0, 8), fontsize=9, color="0.35", **place)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain_ticks(axis: Axis) -> None:
    """Mark a logarithmic axis with plain numbers: every decade, and 2 and 5 between them where there is room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _legend(axes: Axes, handles: list[Any], length: float = 3.6) -> None:
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "frameon": False, "fontsize": 9}
    axes.legend(handles=handles, handlelength=length, **place)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
