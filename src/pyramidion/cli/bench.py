"""The commands under `pyramidion bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyramidion.cli.screen import refuse, watch

if TYPE_CHECKING:
    from pyramidion.bench.topk import Settings

bench = typer.Typer(help="Measure what the library does, on this machine.", no_args_is_help=True)


@bench.command()
def topk(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    batch: Annotated[int | None, typer.Option(help="Documents at once. [2 on a CPU, 16 on a GPU]")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the vectors. [512]")] = None,
    sizes: Annotated[str | None, typer.Option(help="Pairs n:k, from n vectors to k: 2048:512,8192:512.")] = None,
    methods: Annotated[str | None, typer.Option(help="Names separated by commas. [all of them]")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of the vectors; scores stay float32.")] = "float32",
    output: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("benchmarks/results"),
    budget: Annotated[float | None, typer.Option(help="Seconds one call may take. [1 on a CPU, 0.15 on a GPU]")] = None,
    name: Annotated[str, typer.Option(help="What the result files are called, before hardware and date.")] = "topk",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, few repeats: seconds, to see it work.")] = False,
) -> None:
    """Compare the tournament with its rivals: time, memory, likeness to the true top k, gradient.

    Writes JSON, a Markdown table and three figures, named what_hardware_date. A method that does not fit in memory or
    in its budget is listed as skipped, with the reason.

    Example: pyramidion bench topk --sizes 8192:512 --methods halving,hard
    """
    given = {"batch": batch, "width": width, "sizes": sizes, "methods": methods, "budget": budget, "dtype": dtype}
    if output.exists() and not output.is_dir():
        refuse(f"`--output` must be a folder, got the file {str(output)!r}.")
    settings = _topk_settings(device, quick, {key: value for key, value in given.items() if value is not None})
    _measure_topk(settings, name, output)


def _topk_settings(device: str, quick: bool, given: dict[str, Any]) -> Settings:
    from pyramidion.bench.topk import default_settings, parse_methods, parse_sizes

    readers = {"sizes": parse_sizes, "methods": parse_methods}
    try:
        read = {key: readers[key](value) if key in readers else value for key, value in given.items()}
        return default_settings(device, quick=quick, **read)
    except ValueError as error:
        refuse(str(error))


def _measure_topk(settings: Settings, name: str, output: Path) -> None:
    from rich.console import Console

    from pyramidion.bench.measure import machine
    from pyramidion.bench.topk import run
    from pyramidion.bench.topk_report import rich_tables, write

    result = watch(lambda tell: run(settings, tell=tell))
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for table in rich_tables(result):
        console.print(table)
    for path in write(result, machine(settings.device), output, name):
        typer.echo(path)


@bench.command()
def torture(
    kills: Annotated[int, typer.Option(help="Runs that are killed, half of them inside saving.")] = 50,
    damages: Annotated[int, typer.Option(help="Files that are damaged: bits flipped, shortened, removed.")] = 1000,
    terms: Annotated[int, typer.Option(help="Runs that get SIGTERM, half of them with two processes.")] = 30,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 12,
    seed: Annotated[int, typer.Option(help="Of the moments and places.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("benchmarks/results"),
) -> None:
    """Kill training runs, damage their checkpoints, and see that nothing is lost.

    Every run is resumed and compared, to the bit, with one that nobody interrupted. Writes JSON and a Markdown table.

    Example: pyramidion bench torture --kills 4 --damages 100 --terms 4
    """
    import tempfile

    from pyramidion.bench.measure import machine
    from pyramidion.bench.torture import Settings, run, write

    for name, value in {"kills": kills, "damages": damages, "terms": terms, "steps": steps}.items():
        if value < 1:
            refuse(f"`--{name}` must be at least 1, got {value}.")
    settings = Settings(kills=kills, damages=damages, terms=terms, steps=steps, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        result = watch(lambda tell: run(settings, Path(folder), tell))
    written = write(result, machine("cpu"), output, "torture")
    typer.echo(written[1].read_text())
    for path in written:
        typer.echo(path)
    if any(row["survived"] != row["tried"] for row in result["rows"]):
        raise typer.Exit(1)


@bench.command()
def padding(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    presets: Annotated[str | None, typer.Option(help="Names separated by commas. [two that suit the device]")] = None,
    batch: Annotated[int | None, typer.Option(help="Documents at once. [4 on a CPU, 16 on a GPU]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16. [bfloat16 on a GPU]")] = None,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest document.")] = 512,
    longest: Annotated[int, typer.Option(help="Tokens of the longest document.")] = 8192,
    repeats: Annotated[int | None, typer.Option(help="Turns of each batch. [5 on a CPU, 9 on a GPU]")] = None,
    output: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("benchmarks/results"),
    name: Annotated[str, typer.Option(help="What the result files are called, before hardware and date.")] = "padding",
) -> None:
    """Measure what documents of mixed lengths cost in one batch, beside the same documents cut to equal length.

    Writes JSON and a Markdown table, named what_hardware_date.

    Example: pyramidion bench padding --presets row-5,row-24 --batch 2
    """
    from pyramidion.bench.measure import machine
    from pyramidion.bench.padding import default_settings, run, write

    if output.exists() and not output.is_dir():
        refuse(f"`--output` must be a folder, got the file {str(output)!r}.")
    named = None if presets is None else tuple(presets.split(","))
    given = {"presets": named, "batch": batch, "dtype": dtype, "repeats": repeats}
    kept = {key: value for key, value in given.items() if value is not None}
    try:
        settings = default_settings(device, shortest=shortest, longest=longest, **kept)
    except ValueError as error:
        refuse(str(error))
    result = watch(lambda tell: run(settings, tell=tell))
    written = write(result, machine(settings.device), output, name)
    typer.echo(written[1].read_text())
    for path in written:
        typer.echo(path)
