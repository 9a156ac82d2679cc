"""The command line: parsing only. Whatever a command needs is imported inside it, so that help comes at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


@main.command()
def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of them, to read all about it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for a program.")] = False,
) -> None:
    """List the models that have a name: every row of the paper with its figures, and small ones for a CPU.

    Example: pyramidion presets row-8
    """
    from pyramidion.presets import PRESETS, find, rich_table

    try:
        chosen = None if name is None else find(name)
    except ValueError as error:
        _refuse(str(error))
    if as_json:
        import json

        every = {preset.name: preset.to_dict() for preset in PRESETS.values()}
        typer.echo(json.dumps(every if chosen is None else chosen.to_dict(), indent=2))
    elif chosen is not None:
        typer.echo(chosen.description)
    else:
        from rich.console import Console

        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks an arrow shows a question mark
        console = Console(highlight=False) if sys.stdout.isatty() else Console(width=120, highlight=False)
        console.print(rich_table())


@main.command()
def complexity(
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="What to count. [deep-pyramidion]")] = None,
    compare: Annotated[str | None, typer.Option(metavar="NAME", help="What to set beside it.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a document. [those the preset is for]")] = None,
    target: Annotated[int, typer.Option(help="Tokens that are written.")] = 512,
    batch: Annotated[int, typer.Option(help="Documents at once.")] = 1,
    bytes: Annotated[int, typer.Option(help="Of a number in training: 2, bfloat16 autocast, or 4, float32.")] = 2,
    table: Annotated[bool, typer.Option("--table", help="The paper's Table 1, as formulas and numbers.")] = False,
    claims: Annotated[bool, typer.Option("--claims", help="What the paper says of its cost, counted again.")] = False,
    fit: Annotated[str | None, typer.Option(metavar="MEMORY", help="Lengths that fit into a GPU, like 80GiB.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw cost against length: a file, .png, .pdf or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for a program.")] = False,
) -> None:
    """Count multiplications and memory by part and layer, without running anything.

    \b
    What does pooling save, and where?
      pyramidion complexity --preset deep-pyramidion --compare deep-blockwise
    Which lengths can be trained on documents of 65536 tokens with 80 GiB?
      pyramidion complexity --preset deep-pyramidion --fit 80GiB --length 65536
    Is what the paper says of its cost so?
      pyramidion complexity --table --claims
    """
    for option, number in {"length": length, "target": target, "batch": batch}.items():
        if number is not None and number < 1:
            _refuse(f"`--{option}` must be at least 1, got {number}.")
    if bytes not in (2, 4):
        _refuse(f"`--bytes` must be 2 or 4, got {bytes}.")
    if preset is None and (compare or fit or not (table or claims or plot)):
        preset = "deep-pyramidion"
    named = {"--preset": preset, "--compare": compare}
    sizes = {"length": length, "target": target, "batch": batch, "bytes": bytes}
    if plot is not None:
        _draw_cost(plot)
    given = {option: name for option, name in named.items() if name is not None}
    _count(given, fit, as_json, table=table, claims=claims, **sizes)


def _count(named: dict[str, str], fit: str | None, as_json: bool, **asked: Any) -> None:
    from pyramidion.complexity.need import parse_memory
    from pyramidion.complexity.report import Question, answer, answer_data
    from pyramidion.presets import find

    for option, name in named.items():
        _read(option, find, name)
    memory = None if fit is None else _read("--fit", parse_memory, fit)
    question = Question(tuple(named.values()), memory=memory, **asked)
    if as_json:
        import json

        typer.echo(json.dumps(answer_data(question), indent=2))
        return
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks an arrow shows a question mark
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=100, highlight=False)
    for shown in answer(question):
        console.print(shown)


def _draw_cost(path: Path) -> None:
    from pyramidion.complexity.plot import write_plot

    try:
        typer.echo(_read("--plot", write_plot, path), err=True)
    except ImportError:
        _refuse("`--plot` must have matplotlib to draw with: pip install 'pyramidion[bench]'.")
    except OSError as error:
        _refuse(f"`--plot` must be a file that can be written, got {str(path)!r}: {error.strerror}.")


def _read(option: str, read: Callable[[Any], Any], value: Any) -> Any:
    """Read the value of an option, or refuse it under the option's name."""
    try:
        return read(value)
    except ValueError as error:
        _, quote, rule = str(error).partition("` ")
        _refuse(f"`{option}{quote}{rule}")


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

    from pyramidion.bench.measure import machine
    from pyramidion.bench.topk import run
    from pyramidion.bench.topk_report import rich_tables, write

    result = _watch(lambda tell: run(settings, tell=tell))
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for table in rich_tables(result):
        console.print(table)
    for path in write(result, machine(settings.device), output, name):
        typer.echo(path)


def _watch(run: Callable[[Callable[[int, int, str], None]], Any]) -> Any:
    """Run something that tells how far it is, with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        return run(lambda done, total, what: progress.update(task, completed=done, total=total, description=what))


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
        _refuse(f"`--output` must be a folder, got the file {str(output)!r}.")
    named = None if presets is None else tuple(presets.split(","))
    given = {"presets": named, "batch": batch, "dtype": dtype, "repeats": repeats}
    kept = {key: value for key, value in given.items() if value is not None}
    try:
        settings = default_settings(device, shortest=shortest, longest=longest, **kept)
    except ValueError as error:
        _refuse(str(error))
    result = _watch(lambda tell: run(settings, tell=tell))
    written = write(result, machine(settings.device), output, name)
    typer.echo(written[1].read_text())
    for path in written:
        typer.echo(path)


def _refuse(message: str) -> NoReturn:
    """End with one line that names the rule and the value, and the exit code of a wrong call."""
    typer.echo(f"pyramidion: {message}", err=True)
    raise typer.Exit(2)
