"""The commands under `pyramidion bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyramidion.cli.screen import refuse, watch

if TYPE_CHECKING:
    from pyramidion.bench.rows import Sheet
    from pyramidion.bench.topk import Settings

# What the benchmarks of whole models share.
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, tf32 or bfloat16. [bfloat16 on a GPU]")]
Repeats = Annotated[int | None, typer.Option(help="Calls that are timed; fewer where one takes long.")]
Budget = Annotated[float | None, typer.Option(help="Seconds one call may take; what takes longer is skipped.")]
Limit = Annotated[float | None, typer.Option("--limit-seconds", help="Begin no row after so many seconds.")]
Output = Annotated[Path, typer.Option(help="Folder to write to.")]
Name = Annotated[str | None, typer.Option(help="What the result files are called, before hardware and date.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny shapes, two repeats: to see it work.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what an earlier run has measured.")]
Older = Annotated[bool, typer.Option("--older", help="Take over rows of other commits too; each says its own.")]
Caches = Annotated[str | None, typer.Option(help="Of transformers, to try: dynamic, static. [both]")]
Compile = Annotated[bool, typer.Option("--compile", help="Try torch.compile as well; the better counts.")]
RESULTS = Path("benchmarks/results")
PAGES = ("models", "table", "length", "generate", "profile")  # benchmarks of whole models, row by row

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


@bench.command()
def models(
    device: Device = "auto",
    models: Annotated[str | None, typer.Option(help="Names separated by commas. [ours and six peers]")] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens of a document. [2048,8192,16384 on a GPU]")] = None,
    batches: Annotated[str | None, typer.Option(help="Documents at once. [1,8 on a GPU]")] = None,
    measures: Annotated[str | None, typer.Option(help="Of train, encode, greedy and beam. [all]")] = None,
    target: Annotated[int | None, typer.Option(help="Tokens of a summary in training. [512 on a GPU]")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens that are written. [128 on a GPU]")] = None,
    caches: Caches = None,
    compile: Compile = False,
    dtype: Dtype = None,
    repeats: Repeats = None,
    budget: Budget = None,
    limit: Limit = None,
    output: Output = RESULTS,
    name: Name = None,
    quick: Quick = False,
    fresh: Fresh = False,
    older: Older = False,
) -> None:
    """Compare our models with their peers in transformers: training step, encoding, writing, memory.

    Same shapes, same precision, random weights, matched size; each model in its best way. Writes JSON, Markdown and
    figures, row by row: run it again to go on where it stopped.

    Example: pyramidion bench models --lengths 8192 --batches 8 --measures train --compile
    """
    given: dict[str, Any] = {"models": _split(models), "measures": _split(measures), "compile": compile}
    given |= {"caches": _split(caches)}
    given |= {"lengths": _numbers("lengths", lengths), "batches": _numbers("batches", batches), "target": target}
    given |= {"tokens": tokens, "dtype": dtype, "repeats": repeats, "budget": budget, "limit": limit}
    _measure("models", given, device, output, name, quick, fresh=fresh, older=older)


@bench.command()
def table(
    device: Device = "auto",
    presets: Annotated[str | None, typer.Option(help="Names separated by commas. [every row of the paper]")] = None,
    parts: Annotated[str | None, typer.Option(help="rows, depth, or both. [both]")] = None,
    dtypes: Annotated[str | None, typer.Option(help="Of float32, tf32 and bfloat16. [float32,bfloat16]")] = None,
    depths: Annotated[str | None, typer.Option(help="Encoder layers of the figure. [2,4,6,8,12,16]")] = None,
    train_batch: Annotated[int | None, typer.Option(help="Documents of a training step. [64 on a GPU]")] = None,
    write_batch: Annotated[int | None, typer.Option(help="Documents that are summarised at once. [8]")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens that are written. [256,512]")] = None,
    compile: Compile = False,
    repeats: Repeats = None,
    budget: Budget = None,
    limit: Limit = None,
    output: Output = RESULTS,
    name: Name = None,
    quick: Quick = False,
    fresh: Fresh = False,
    older: Older = False,
) -> None:
    """Measure every row of the paper's timing tables, and compute its speed-ups again.

    Writes JSON, Markdown and figures, row by row: run it again to go on where it stopped.

    Example: pyramidion bench table --limit-seconds 540
    """
    given: dict[str, Any] = {"presets": _split(presets), "parts": _split(parts), "compile": compile}
    given |= {"dtypes": _split(dtypes), "depths": _numbers("depths", depths), "tokens": _numbers("tokens", tokens)}
    given |= {"train_batch": train_batch, "write_batch": write_batch}
    given |= {"repeats": repeats, "budget": budget, "limit": limit}
    _measure("table", given, device, output, name, quick, fresh=fresh, older=older)


@bench.command()
def length(
    device: Device = "auto",
    models: Annotated[str | None, typer.Option(help="Of pyramidion, blockwise and full. [all]")] = None,
    shortest: Annotated[int | None, typer.Option(help="Tokens of the shortest document. [512]")] = None,
    most: Annotated[int | None, typer.Option(help="Tokens of the longest that is tried. [8388608 on a GPU]")] = None,
    target: Annotated[int | None, typer.Option(help="Tokens of a summary. [512 on a GPU]")] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Compute activations again in backward.")] = False,
    longest: Annotated[bool | None, typer.Option(help="Search the longest that fits. [on a GPU]")] = None,
    dtype: Dtype = None,
    repeats: Repeats = None,
    budget: Budget = None,
    limit: Limit = None,
    output: Output = RESULTS,
    name: Name = None,
    quick: Quick = False,
    fresh: Fresh = False,
    older: Older = False,
) -> None:
    """Measure a training step against the length of a document, up to the longest that fits.

    Says from which length on pooling pays against full attention. Writes JSON, Markdown and figures.

    Example: pyramidion bench length --recompute --models pyramidion
    """
    given: dict[str, Any] = {"forms": _split(models), "shortest": shortest, "most": most, "target": target}
    given |= {"recompute": recompute, "longest": longest, "dtype": dtype}
    given |= {"repeats": repeats, "budget": budget, "limit": limit}
    _measure("length", given, device, output, name, quick, fresh=fresh, older=older)


@bench.command()
def generate(
    device: Device = "auto",
    models: Annotated[str | None, typer.Option(help="Names separated by commas. [ours and led]")] = None,
    n: Annotated[int | None, typer.Option("--length", help="Tokens of a document. [8192 on a GPU]")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens that are written. [512 on a GPU]")] = None,
    batches: Annotated[str | None, typer.Option(help="Documents at once. [1,8,32 on a GPU]")] = None,
    beams: Annotated[str | None, typer.Option(help="Beams of the search; 1 is greedy. [1,2]")] = None,
    writers: Annotated[str | None, typer.Option(help="engine, transformers, or both. [both]")] = None,
    caches: Caches = None,
    dtype: Dtype = None,
    repeats: Repeats = None,
    budget: Budget = None,
    limit: Limit = None,
    output: Output = RESULTS,
    name: Name = None,
    quick: Quick = False,
    fresh: Fresh = False,
    older: Older = False,
) -> None:
    """Measure writing, with encoding and without, and how near to the limit of the memory's bandwidth it is.

    Writes JSON, Markdown and figures, row by row: run it again to go on where it stopped.

    Example: pyramidion bench generate --batches 8 --beams 1
    """
    given: dict[str, Any] = {"models": _split(models), "n": n, "tokens": tokens, "writers": _split(writers)}
    given |= {"caches": _split(caches)}
    given |= {"batches": _numbers("batches", batches), "beams": _numbers("beams", beams), "dtype": dtype}
    given |= {"repeats": repeats, "budget": budget, "limit": limit}
    _measure("generate", given, device, output, name, quick, fresh=fresh, older=older)


@bench.command()
def profile(
    device: Device = "auto",
    models: Annotated[str | None, typer.Option(help="Names separated by commas. [ours]")] = None,
    n: Annotated[int | None, typer.Option("--length", help="Tokens of a document. [8192 on a GPU]")] = None,
    measures: Annotated[str | None, typer.Option(help="Of train, greedy and beam. [all]")] = None,
    target: Annotated[int | None, typer.Option(help="Tokens of a summary in training. [512 on a GPU]")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens that are written. [512 on a GPU]")] = None,
    train_batches: Annotated[str | None, typer.Option(help="Documents of a training step. [64,8 on a GPU]")] = None,
    write_batches: Annotated[str | None, typer.Option(help="Documents summarised at once. [8 on a GPU]")] = None,
    dropouts: Annotated[str | None, typer.Option(help="In training, that of the paper, of the peers, or both.")] = None,
    dtype: Dtype = None,
    repeats: Repeats = None,
    budget: Budget = None,
    limit: Limit = None,
    output: Output = RESULTS,
    name: Name = None,
    quick: Quick = False,
    fresh: Fresh = False,
    older: Older = False,
) -> None:
    """Look where the time of a training step and of writing goes, kernel by kernel, by what the kernels are for.

    On a GPU the times of all kernels, and those in which none ran, add up to the whole; on a CPU those of torch's
    operators do. Writes JSON, Markdown and figures.

    Example: pyramidion bench profile --measures train --train-batches 64
    """
    given: dict[str, Any] = {"models": _split(models), "n": n, "measures": _split(measures), "target": target}
    given |= {"train_batches": _numbers("train-batches", train_batches), "tokens": tokens}
    given |= {"write_batches": _numbers("write-batches", write_batches), "dropouts": _split(dropouts)}
    given |= {"dtype": dtype, "repeats": repeats, "budget": budget, "limit": limit}
    _measure("profile", given, device, output, name, quick, fresh=fresh, older=older)


@bench.command()
def draw(
    file: Annotated[Path, typer.Argument(help="The JSON file of models, table, length, generate or profile.")],
) -> None:
    """Write the Markdown and the figures of a result again, beside it: where it was measured they may be missing.

    Example: pyramidion bench draw benchmarks/results/models_nvidia-h200_2026-11-15.json
    """
    import json

    from pyramidion.bench.rows import publish

    try:
        document = json.loads(file.read_text())
        page = _page(document["benchmark"])
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        refuse(f"`FILE` must be a result of bench models, table, length, generate or profile, got {str(file)!r}.")
    for path in publish(page, document, file.parent, file.stem):
        typer.echo(path)


def _page(benchmark: str) -> Any:
    """Give the module of a benchmark."""
    from importlib import import_module

    if benchmark not in PAGES:
        raise KeyError(benchmark)
    return import_module(f"pyramidion.bench.{benchmark}")


def _split(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Read "1,8" as numbers, or refuse it under the option's name."""
    parts = _split(text)
    if parts is not None and not (parts and all(part.isdecimal() for part in parts)):
        refuse(f"`--{option}` must be whole numbers separated by commas, got {text!r}.")
    return None if parts is None else tuple(int(part) for part in parts)


def _measure(
    benchmark: str, given: dict[str, Any], device: str, output: Path, name: str | None, quick: bool, **taken: bool
) -> None:
    """Run a benchmark of whole models, row by row, and write what it found."""
    if output.exists() and not output.is_dir():
        refuse(f"`--output` must be a folder, got the file {str(output)!r}.")
    from pyramidion.bench.models import settings_dict
    from pyramidion.bench.rows import Sheet, publish

    page = _page(benchmark)
    try:
        read = {key: value for key, value in given.items() if value is not None}
        settings = page.default_settings(device, quick=quick, **read)
    except ValueError as error:
        refuse(str(error))
    called = name or (f"{benchmark}-quick" if quick else benchmark)
    sheet = Sheet(output, called, benchmark, settings_dict(settings), **taken)
    watch(lambda tell: page.run(settings, sheet, tell))
    written = publish(page, sheet.document, output, sheet.stem)
    typer.echo(written[0].read_text())
    for path in (sheet.path, *written):
        typer.echo(path)
    _tell_rest(sheet)


def _tell_rest(sheet: Sheet) -> None:
    """Say on standard error what the tables do not: rows taken over, rows left, figures not drawn."""
    from pyramidion.bench.rows import can_draw

    if sheet.taken:
        typer.echo(f"pyramidion: {sheet.taken} rows of an earlier run were taken over.", err=True)
    if sheet.left and sheet.machine["commit"] == "unknown":
        typer.echo("pyramidion: the commit is unknown, set PYRAMIDION_COMMIT: rows are else not taken over.", err=True)
    if sheet.left:
        typer.echo(f"pyramidion: {sheet.left} rows are left; {sheet.stopped}.", err=True)
    if not can_draw():
        typer.echo(f"pyramidion: no matplotlib, no figures; `bench draw {sheet.path.name}` draws them.", err=True)
