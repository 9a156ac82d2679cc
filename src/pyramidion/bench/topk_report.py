"""Tell a run of `bench.topk`: its tables, its text and its three figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyramidion.bench import report
from pyramidion.bench.report import Column

if TYPE_CHECKING:
    from rich.table import Table

Result = Mapping[str, Any]

COLUMNS = (
    Column("method", "method"),
    Column("forward_ms", "forward, ms", "3"),
    Column("both_ms", "forward + backward, ms", "3"),
    Column("extra_memory", "extra memory, MiB", ".1f", 2**-20),
    Column("nccs", "nCCS", ".3f"),
    Column("gradient_share", "tokens with gradient, %", ".1f", 100),
    Column("gradient_variance", "gradient variance", "3"),
)
CAPTURED = (
    Column("forward_captured_ms", "forward, kernels alone", "3"),
    Column("both_captured_ms", "forward + backward, kernels alone", "3"),
)
LIMITS = (
    Column("n", "n"),
    Column("k", "k"),
    Column("forward_limit_ms", "forward limit, ms", "3"),
    Column("forward_ratio", "forward / limit", ".1f"),
    Column("backward_limit_ms", "backward limit, ms", "3"),
    Column("backward_ratio", "backward / limit", ".1f"),
    Column("times", "faster than vector-rounds, times", ".1f"),
)
QUOTED = (8192, 512)
# The paper draws the operator, the operator without sorting and the iterative softmax; these are added to them.
DRAWN = ("halving", "halving-unsorted", "halving-sharp", "iterative-softmax", "vector-rounds", "hard")


def write(result: Result, machine: Mapping[str, Any], folder: Path, what: str) -> list[Path]:
    """Write the run into `folder` and return the files written."""
    stem = report.result_stem(what, machine)
    figures = _figures(result, machine, folder, stem)
    text = report.write_markdown(folder / f"{stem}.md", "Soft top-k", machine, _sections(result, figures))
    return [report.write_json(folder / f"{stem}.json", machine, result), text, *figures]


def _columns(result: Result) -> tuple[Column, ...]:
    """Leave the times of captured kernels out where nothing was captured."""
    seen = any(row["both_captured_ms"] is not None for row in result["rows"])
    return (*COLUMNS[:3], *CAPTURED, *COLUMNS[3:]) if seen else COLUMNS


def _setting(result: Result) -> str:
    settings = result["settings"]
    return f"batch {settings['batch']}, width {settings['width']}, {settings['dtype']}"


def _sections(result: Result, figures: list[Path]) -> Iterator[str]:
    yield (
        f"{_setting(result).capitalize()}; scores U[0, 1], vectors U[-1, 1], the same for every method; medians. "
        f"Copy bandwidth in the same run: {result['copy_bandwidth'] / 1e9:.3g} GB/s. "
        f"nCCS is the likeness to the true top k, 1 at best. Extra memory is the peak beyond inputs, outputs and "
        f'gradients. "Kernels alone" are replayed from a CUDA graph, without the host between them. '
        f"Quartiles and counts are in the JSON file."
    )
    yield "\n".join(f"![{path.stem.rpartition('_')[2]}]({path.name})" for path in figures)
    for size, rows in _by_size(result):
        yield f"## {size}\n\n{report.markdown_table(rows, _columns(result))}"
    if result["limits"]:
        yield f"## What bounds it\n\n{_limits_text()}\n\n{report.markdown_table(_bounds(result), LIMITS)}"
    if result["sorting_ablation"]:
        yield "## Sorting\n\n" + "\n".join(_sorting_text(entry) for entry in result["sorting_ablation"])
    if result["growth"]:
        yield f"## Growth\n\n{_growth_text(result['growth'])}"


def _by_size(result: Result) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for (n, k), rows in groupby(result["rows"], key=lambda row: (row["n"], row["k"])):
        yield f"{n} → {k}", list(rows)


def _limits_text() -> str:
    return (
        "The limit is the bytes that must move, over the copy bandwidth: forward reads vectors and scores and writes "
        "the pooled; backward reads vectors and the arriving gradient and writes that of the vectors."
    )


def _bounds(result: Result) -> list[dict[str, Any]]:
    times = {(entry["n"], entry["k"]): entry["times"] for entry in result["speedup_over_vector_rounds"]}
    return [entry | {"times": times.get((entry["n"], entry["k"]))} for entry in result["limits"]]


def _sorting_text(entry: Mapping[str, Any]) -> str:
    paper = entry["paper"]
    return (
        f"- `{entry['method']}`: sorting takes {entry['time_overhead_percent']:.1f} % more time forward and makes the "
        f"error 1 - nCCS {entry['error_reduction_percent']:.1f} % smaller, on average over {entry['sizes']} sizes "
        f"(the paper: {paper['time_overhead_percent']} % and {paper['error_reduction_percent']} %)."
    )


def _growth_text(growth: Mapping[str, Any]) -> str:
    rows = [{"n": n, "both_ms": ms} for n, ms in zip(growth["n"], growth["both_ms"], strict=True)]
    table = report.markdown_table(rows, (Column("n", "n"), Column("both_ms", "forward + backward, ms", "3")))
    return (
        f"`halving`, one document, k = {growth['k']}. Time grows as (n log n) to the power {growth['exponent']:.2f}; "
        f"from the first size to the last {growth['first_to_last']:.2f} times as much as n log n, "
        f"in the last step {growth['last_doubling']:.2f} times.\n\n{table}"
    )


def _clock(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Choose the time to draw: of the kernels alone where all were captured, since it does not depend on the host."""
    measured = [row for row in rows if row["skipped"] is None]
    alone = bool(measured) and all(row["both_captured_ms"] is not None for row in measured)
    return ("both_captured_ms", "; kernels alone") if alone else ("both_ms", "")


def _figures(result: Result, machine: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    drawn = [row for name in DRAWN for row in result["rows"] if row["method"] == name] or list(result["rows"])
    clock, how = _clock(drawn)
    note = f"{machine['device']}; {_setting(result)}{how}"
    shared: dict[str, Any] = {"x": "n", "styles": "method", "colours": "k", "note": note}
    n, k = max({(row["n"], row["k"]) for row in result["rows"]}, key=lambda size: _shown(result, *size))
    return [
        report.write_lines_figure(
            folder / f"{stem}_time.png",
            drawn,
            y=clock,
            factor=1e-3,
            log_y=True,
            labels=("n, vectors given", "seconds a batch, forward and backward"),
            title="Time to choose k of n vectors",
            **shared,
        ),
        report.write_lines_figure(
            folder / f"{stem}_quality.png",
            [row for row in drawn if row["method"] != "vector-rounds"] or drawn,  # by definition that of `halving`
            y="nccs",
            labels=("n, vectors given", "nCCS, likeness to the true top k"),
            title="How close the choice is to the true top k",
            **shared,
        ),
        report.write_scatter_figure(
            folder / f"{stem}_tradeoff.png",
            [row for row in result["rows"] if (row["n"], row["k"]) == (n, k)],
            x=clock,
            y="nccs",
            name="method",
            labels=("milliseconds a batch, forward and backward", "nCCS, likeness to the true top k"),
            title=f"Quality against time, {n} → {k}",
            note=note,
        ),
    ]


def _shown(result: Result, n: int, k: int) -> tuple[bool, bool, int]:
    """Order sizes by how telling one figure is: something was measured, it is the size that is quoted, it is large."""
    measured = any((row["n"], row["k"]) == (n, k) and row["skipped"] is None for row in result["rows"])
    return measured, (n, k) == QUOTED, n * k


def rich_tables(result: Result) -> Iterator[Table]:
    """Write one table for each size, for a terminal."""
    from rich.table import Table

    for size, rows in _by_size(result):
        table = Table(title=f"{size}, {_setting(result)}", title_justify="left")
        for column in _columns(result):
            table.add_column(column.heading, justify="right" if column.form else "left")
        measured = [row for row in rows if row["skipped"] is None]
        for cells in report.table_cells(measured, _columns(result)):
            table.add_row(*cells)
        table.caption = (
            "\n".join(f"{row['method']} skipped: {row['skipped']}" for row in rows if row["skipped"]) or None
        )
        table.caption_justify = "left"
        yield table
