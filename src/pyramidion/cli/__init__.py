"""The command line: parsing only. Whatever a command needs is imported inside it, so that help comes at once."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pyramidion.cli.bench import bench
from pyramidion.cli.compact import compact
from pyramidion.cli.explain import explain
from pyramidion.cli.screen import read, refuse, screen, watch
from pyramidion.cli.serve import serve

main = typer.Typer(
    name="pyramidion",
    help="Transformers for long documents that keep only the representations the task needs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
main.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        from pyramidion import __version__

        typer.echo(__version__)
        raise typer.Exit


@main.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    _let_threads_sleep()


def _let_threads_sleep() -> None:
    """Keep threads that wait for their next share from looking for it a millisecond long, before torch starts them.

    Where others compute too, two of them may sit on one processor. One looks busily while the other cannot run, and
    each of a summary's many small products takes a time slice: a summary took 100 s instead of 10.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # some 20 us; without others it costs 10 % of writing


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
        refuse(str(error))
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
            refuse(f"`--{option}` must be at least 1, got {number}.")
    if bytes not in (2, 4):
        refuse(f"`--bytes` must be 2 or 4, got {bytes}.")
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
        read(option, find, name)
    memory = None if fit is None else read("--fit", parse_memory, fit)
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
        typer.echo(read("--plot", write_plot, path), err=True)
    except ImportError:
        refuse("`--plot` must have matplotlib to draw with: pip install 'pyramidion[bench]'.")
    except OSError as error:
        refuse(f"`--plot` must be a file that can be written, got {str(path)!r}: {error.strerror}.")


@main.command()
def prepare(
    sources: Annotated[list[str] | None, typer.Argument(help="Files, folders, or datasets.")] = None,
    output: Annotated[Path, typer.Option(help="Folder to make.")] = ...,  # type: ignore[assignment]
    format: Annotated[str, typer.Option(help="auto, cohan, jsonl, csv, parquet, text or hf.")] = "auto",
    document: Annotated[str | None, typer.Option(metavar="COLUMN", help="With the documents. [a usual name]")] = None,
    summary: Annotated[str | None, typer.Option(metavar="COLUMN", help="With the summaries. [a usual name]")] = None,
    id: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="With their names. [a usual name, or the line]")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="What a path is for; repeatable.")
    ] = None,
    validation: Annotated[float, typer.Option(help="Share to split off where there is no validation split.")] = 0.05,
    tokenizer: Annotated[str | None, typer.Option(metavar="PATH", help="One to use. [train one]")] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the one that is trained.")] = 32768,
    on_bad_line: Annotated[
        str, typer.Option(metavar="fail|skip", help="What to do; either way all are listed.")
    ] = "fail",
    max_source: Annotated[int, typer.Option(help="Count documents above so many tokens; nothing is cut.")] = 8192,
    workers: Annotated[int, typer.Option(help="Processes that tokenize.")] = 2,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished store.")] = False,
) -> None:
    """Turn documents and summaries into tokens on disk, ready for training: any size, in constant memory.

    Reads JSON lines, arXiv and PubMed as published (cohan), CSV, Parquet, folders with NAME.txt and NAME.summary.txt
    (or `documents` and `summaries`), gz, xz or zst, and what `datasets` loads. Files named for train, val or test are
    these splits. A bad line is listed as file:line with the reason.

    \b
    Examples:
      pyramidion prepare train.jsonl.zst val.jsonl.zst --output corpus
      pyramidion prepare arxiv-dataset --output arxiv --on-bad-line skip
      pyramidion prepare table.csv --document body --summary tldr --output corpus
    """
    named = [pair.partition("=") for pair in split or []]
    for name, equals, path in named:
        if not (name and equals and path):
            refuse(f"`--split` must be NAME=PATH, got {name + equals + path!r}.")
    asked: dict[str, Any] = {"validation": validation, "tokenizer": tokenizer, "vocab_size": vocab_size}
    asked |= {"on_bad_line": on_bad_line, "max_source": max_source, "workers": workers, "force": force}
    pairs = [(name, path) for name, _, path in named]
    _prepare(sources or [], pairs, format, (document, summary, id), output, asked)


def _prepare(
    paths: list[str], named: list[tuple[str, str]], format: str, columns: Any, output: Path, asked: dict[str, Any]
) -> None:
    from pyramidion.data.preparation import BadLines, Settings, prepare
    from pyramidion.data.report import show
    from pyramidion.data.sources import Columns, describe, find_sources
    from pyramidion.data.writer import check_output

    try:
        check_output(output, asked["force"])
        found, unread = find_sources(paths, named, format, Columns(*columns))
        settings = Settings(found, output, **asked)
        for line in describe(found, unread):
            typer.echo(line, err=True)
        result = watch(lambda tell: prepare(settings, tell))
    except BadLines as error:
        for line in error.shown:
            typer.echo(line, err=True)
        refuse(str(error))
    except ValueError as error:
        refuse(str(error))
    except ImportError as error:
        refuse(f"`prepare` needs {error.name} for this: pip install 'pyramidion[train]'.")
    except OSError as error:
        refuse(f"`prepare` must be able to read and write its files: {error}.")
    show(result.report, result.notes, result.store.path, result.text_bytes, result.seconds)


@main.command()
def train(
    data: Annotated[Path, typer.Option(help="The token store that `pyramidion prepare` wrote.")],
    output: Annotated[Path, typer.Option(help="Folder of this run; the same command goes on where it was killed.")],
    preset: Annotated[str | None, typer.Option(help="The model, by name. [small-pyramidion]")] = None,
    objective: Annotated[str | None, typer.Option(help="summaries, spans or gap-sentences. [summaries]")] = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML file with settings of the recipe.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the documents.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps of the optimizer; they win over epochs.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting: name=value or model.name=value, repeatedly.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe as YAML and do nothing.")] = False,
) -> None:
    """Train a model to write summaries, or first on the documents alone, from a token store into a folder.

    The objective is what it learns to write: summaries; or what was taken out of the documents, to be pretrained: short
    spans, or the sentences that say most (gap-sentences). From there a run on summaries goes on by init_from.

    The recipe of a preset is the paper's; a YAML file and --set change single settings. Killed at any moment, the run
    goes on from its newest whole checkpoint and ends as if nothing had happened. SIGTERM writes a checkpoint first.
    Several processes: torchrun --nproc-per-node 2 -m pyramidion.cli train ...

    \b
    Examples:
      pyramidion train --preset small-pyramidion --data store --output runs/one --set batch_size=32
      pyramidion train --objective spans --data store --output runs/spans --epochs 5
      pyramidion train --data store --output runs/two --set init_from=runs/spans/model
    """
    from pyramidion.training.recipe import read_recipe

    given = {"preset": preset, "objective": objective, "epochs": epochs, "max_steps": max_steps, "device": device}
    if preset is None and recipe is None:
        given["preset"] = "small-pyramidion"
    named = {key: value for key, value in given.items() if value is not None}
    try:
        chosen = read_recipe(recipe, {**named, **_assignments(settings or [])})
    except ValueError as error:
        refuse(str(error))
    if show:
        import yaml

        typer.echo(yaml.safe_dump(chosen.to_dict(), sort_keys=False), nl=False)
        return
    import os

    from pyramidion.bench.measure import machine
    from pyramidion.kernels.launching import choose_device
    from pyramidion.training.run import TrainingStopped, train

    first = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    try:
        with screen(first, several=True) as (tell, progress):
            train(chosen, data, output, tell=tell, progress=progress, machine=machine(choose_device(chosen.device)))
    except ValueError as error:
        refuse(str(error))
    except TrainingStopped as error:
        typer.echo(f"pyramidion: {error}", err=True)
        raise typer.Exit(1) from None


@main.command()
def curves(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `pyramidion train`, finished or not.")],
    output: Annotated[Path | None, typer.Option(help="Figure to write: .png, .pdf or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for a program.")] = False,
) -> None:
    """Set runs beside each other: loss and ROUGE against steps and minutes, documents a second, memory.

    Example: pyramidion curves runs/pyramidion runs/blockwise --output curves.png
    """
    import json

    from pyramidion.training.curves import Run, to_markdown, write_curves

    try:
        found = [Run.read(folder) for folder in runs]
        typer.echo(
            json.dumps([run.to_dict() for run in found], indent=1) if as_json else to_markdown(found), nl=as_json
        )
        if output is not None:
            typer.echo(write_curves(output, found), err=True)
    except ValueError as error:
        refuse(str(error))
    except ImportError:
        refuse("`--output` must have matplotlib to draw with: pip install 'pyramidion[bench]'.")
    except OSError as error:
        refuse(f"`--output` must be a file that can be written, got {str(output)!r}: {error.strerror}.")


def _assignments(texts: list[str]) -> dict[str, Any]:
    import yaml

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            refuse(f"`--set` must be name=value, got {text!r}.")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            found[name] = value
    return found


@main.command()
def evaluate(
    model: Annotated[Path | None, typer.Option(help="Folder of the model to write with.")] = None,
    data: Annotated[Path | None, typer.Option(help="Token store, from `pyramidion prepare`.")] = None,
    split: Annotated[str, typer.Option(help="The part of the store to summarise.")] = "val",
    predictions: Annotated[Path | None, typer.Option(help="Instead of a model: JSON lines to score.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Another run's folder, or file, to test against.")] = None,
    baselines: Annotated[str, typer.Option(help="lead, lexrank, both by a comma, or nothing.")] = "",
    limit: Annotated[int | None, typer.Option(help="Only the first so many documents.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write to. [evaluation-SPLIT in the model's]")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut documents to so many tokens. [whole]")] = None,
    num_beams: Annotated[int | None, typer.Option(help="Beams. [the model folder's; 2 deep, 8 shallow]")] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Tokens to write at least. [so; 72]")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to write at most. [so; 966]")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Above 0 favours long summaries. [so; 1]")] = None,
    no_repeat_ngram_size: Annotated[int | None, typer.Option(help="Never write so many words twice. [so; off]")] = None,
    batch_size: Annotated[int, typer.Option(help="Documents at once.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16, of the weights. [as saved]")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that score. [one for each core, at most 8]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON, for a program.")] = False,
) -> None:
    """Summarise a split and score it: ROUGE with intervals, baselines, differences, repetition.

    A run that was killed goes on where it was when it is started again.

    \b
    How good is a model, and is it better than what costs nothing?
      pyramidion evaluate --model runs/mine --data stores/elife --baselines lead,lexrank
    Is the difference between two runs chance?
      pyramidion evaluate --predictions runs/a/evaluation-val --compare runs/b/evaluation-val
    """
    if (model is None) == (predictions is None):
        refuse(f"Exactly one of `--model` and `--predictions` must be given, got {'both' if model else 'neither'}.")
    if model is not None and data is None:
        refuse("`--data` must name a token store for the model to read, got none.")
    for option, number in {"limit": limit, "batch-size": batch_size, "workers": workers}.items():
        if number is not None and number < 1:
            refuse(f"`--{option}` must be at least 1, got {number}.")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        refuse(f"`--dtype` must be float32, bfloat16 or float16, got {dtype!r}.")
    given = {"num_beams": num_beams, "min_new_tokens": min_new_tokens, "max_new_tokens": max_new_tokens}
    options = {**given, "length_penalty": length_penalty, "no_repeat_ngram_size": no_repeat_ngram_size}
    named = tuple(filter(None, baselines.split(",")))
    source: dict[str, Any] = {"data": data, "split": split, "limit": limit, "baselines": named, "output": output}
    if model is not None:
        source |= {"model": model, "device": device, "dtype": dtype, "batch_size": batch_size, "max_length": max_length}
        source |= {"options": options, "output": output or model / f"evaluation-{split}"}
    try:
        _evaluate(source, predictions, compare, workers, as_json)
    except (ValueError, OSError) as error:
        refuse(str(error))


def _evaluate(
    source: dict[str, Any], file: Path | None, compare: Path | None, workers: int | None, as_json: bool
) -> None:
    import json
    import os

    from pyramidion.evaluation.baselines import check_baselines
    from pyramidion.evaluation.run import Plan, from_file, open_split, read_predictions, run, write_scores
    from pyramidion.evaluation.scores import score, to_markdown

    check_baselines(source["baselines"])
    if compare is not None:
        read_predictions(compare)  # a wrong name is said before the work, not after it
    output = source["output"]
    if file is None:
        evaluation = watch(lambda tell: run(Plan(**source), tell))
    else:
        data, split = source.pop("data"), source.pop("split")
        opened = None if data is None else open_split(data, split)[1]
        evaluation = watch(lambda tell: from_file(file, tell, split=opened, **source))
    processes = min(os.cpu_count() or 1, 8) if workers is None else workers
    scores = watch(lambda tell: score(evaluation, compare, workers=processes, tell=tell))
    table = to_markdown(scores)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows a question mark
    typer.echo(json.dumps(scores, indent=1) if as_json else table)
    for warning in scores["warnings"]:
        typer.echo(f"pyramidion: {warning}", err=True)
    for path in write_scores(output, scores, table) if output is not None else ():
        typer.echo(path, err=True)


@main.command()
def summarize(
    paths: Annotated[list[str] | None, typer.Argument(help="Texts, folders, .jsonl files; -: standard input.")] = None,
    model: Annotated[str, typer.Option(help="A folder of a model, or default: the bundled one.")] = "default",
    output: Annotated[Path | None, typer.Option(help="A file, or a folder with a file for each document.")] = None,
    format: Annotated[str | None, typer.Option(help="text or jsonl. [jsonl for a file called so, else text]")] = None,
    field: Annotated[str, typer.Option(help="Of a JSON object, the field with the text.")] = "document",
    max_length: Annotated[int | None, typer.Option(help="Cut documents to so many tokens, and say so. [whole]")] = None,
    num_beams: Annotated[int | None, typer.Option(help="Beams. [the model folder's; 2 deep, 8 shallow]")] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Tokens to write at least. [so; 72]")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to write at most. [so; 966]")] = None,
    batch_size: Annotated[int, typer.Option(help="Documents at once; 1 writes each before the next is read.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the output of a run that was ended.")] = False,
) -> None:
    """Summarise texts of any length: in order, written as they come.

    A document that cannot be summarised is reported, the others go on. Exit code 1: some failed; 2: a wrong call.

    \b
      pyramidion summarize report.txt
      pyramidion summarize articles/ --output summaries.jsonl --resume
      cat articles.jsonl | pyramidion summarize - --field article --format jsonl --model runs/mine
    """
    from pyramidion.generation.command import Call, run

    given = {"num_beams": num_beams, "min_new_tokens": min_new_tokens, "max_new_tokens": max_new_tokens}
    options = {"batch_size": batch_size, "max_length": max_length, **given}
    call = Call(tuple(paths or ()), Path(model), output, format, field, device, resume, options)
    try:
        with screen(output is not None) as (tell, progress):  # a bar would run into summaries on the same terminal
            say = tell if output is not None else partial(typer.echo, err=True)
            failed = run(call, lambda said: say(f"pyramidion: {said}"), progress)
    except (ValueError, OSError) as error:
        refuse(str(error))
    if failed:
        raise typer.Exit(failed)


main.command()(compact)
main.command()(explain)
main.command()(serve)
