"""The command line: parsing only. Whatever a command needs is imported inside it, so that help comes at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from pyramidion.bench.topk import Settings

main = typer.Typer(
    name="pyramidion",
    help="Transformers for long documents that keep only the representations the task needs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure what the library does, on this machine.", no_args_is_help=True)
main.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        from pyramidion import __version__

        typer.echo(__version__)
        raise typer.Exit


@main.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None: ...


@main.command()
def demo(
    file: Annotated[Path | None, typer.Argument(help="A text to shorten; without one, a text of our own.")] = None,
    keep: Annotated[int, typer.Option(help="How many representations to keep.")] = 64,
) -> None:
    """Show the operator at work on one text.

    Example: pyramidion demo report.txt --keep 32
    """
    if keep < 1:
        _refuse(f"`--keep` must be at least 1, got {keep}.")
    if file is not None and not file.is_file():
        _refuse(f"`FILE` must be a text file that exists, got {str(file)!r}.")
    from pyramidion.demo import run

    try:
        run(file, keep)
    except ValueError as error:
        _refuse(str(error))


@bench.command()
def topk(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    batch: Annotated[int | None, typer.Option(help="Documents at once. [2 on a CPU, 16 on a GPU]")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the vectors. [512]")] = None,
    sizes: Annotated[str | None, typer.Option(help="Pairs n:k, from n vectors to k: 2048:512,8192:512.")] = None,
    methods: Annotated[str | None, typer.Option(help="Names separated by commas. [all of them]")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of the vectors; scores stay float32.")] = "float32",
    output: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("benchmarks/results"),
    budget: Annotated[float | None, typer.Option(help="Seconds one call may take. [1 on a CPU, 0.25 on a GPU]")] = None,
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
        _refuse(f"`--output` must be a folder, got the file {str(output)!r}.")
    settings = _topk_settings(device, quick, {key: value for key, value in given.items() if value is not None})
    _measure_topk(settings, name, output)


def _topk_settings(device: str, quick: bool, given: dict[str, Any]) -> Settings:
    from pyramidion.bench.topk import default_settings, parse_methods, parse_sizes

    readers = {"sizes": parse_sizes, "methods": parse_methods}
    try:
        read = {key: readers[key](value) if key in readers else value for key, value in given.items()}
        return default_settings(device, quick=quick, **read)
    except ValueError as error:
        _refuse(str(error))


def _measure_topk(settings: Settings, name: str, output: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pyramidion.bench.measure import machine
    from pyramidion.bench.topk import run
    from pyramidion.bench.topk_report import rich_tables, write

    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        result = run(
            settings,
            tell=lambda done, total, what: progress.update(task, completed=done, total=total, description=what),
        )
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for table in rich_tables(result):
        console.print(table)
    for path in write(result, machine(settings.device), output, name):
        typer.echo(path)


def _refuse(message: str) -> NoReturn:
    """End with one line that names the rule and the value, and the exit code of a wrong call."""
    typer.echo(f"pyramidion: {message}", err=True)
    raise typer.Exit(2)
