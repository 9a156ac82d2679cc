"""The command `pyramidion explain`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyramidion.cli.screen import refuse, screen

if TYPE_CHECKING:
    from pyramidion.explain import Explanation

STDIN = "-"
# What an error calls it, and what it is called here.
NAMES = {"text": "FILE", "path": "--model", "device": "--device", "max_length": "--max-length"}
NAMES |= {name: f"--{name.replace('_', '-')}" for name in ("num_beams", "min_new_tokens", "max_new_tokens")}


def explain(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A text; -: standard input. [an article that is built in]")
    ] = None,
    model: Annotated[str, typer.Option(help="A folder of a model, or default: the bundled one.")] = "default",
    output: Annotated[Path | None, typer.Option(help="Page to write. [NAME.explained.html, here]")] = None,
    json: Annotated[Path | None, typer.Option(help="File for all numbers, for a program.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print it, for a terminal.")] = False,
    title: Annotated[str | None, typer.Option(help="What stands above it. [the file's name]")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut the text to so many tokens, and say so. [whole]")] = None,
    num_beams: Annotated[int | None, typer.Option(help="Beams. [the model folder's; 2 deep, 8 shallow]")] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Tokens to write at least. [so; 72]")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to write at most. [so; 966]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> None:
    """Summarise a text, and show which of its words were kept and what each word of the summary drew on.

    Writes one page that needs no network, unless only --json or --text is asked for.

    \b
      pyramidion explain
      pyramidion explain report.txt --model runs/mine
      pyramidion explain report.txt --model runs/mine --text
      cat report.txt | pyramidion explain - --model runs/mine --output report.html --open
    """
    own = file is None
    file = str(files("pyramidion") / "assets" / "document.txt") if file is None else file
    data = _read(file)
    if output is None and (open_page or not (json or text)):
        output = Path("explained.html" if file == STDIN else f"{Path(file).stem}.explained.html")
    _check_outputs(file, {"--output": output, "--json": json})
    given = {"num_beams": num_beams, "min_new_tokens": min_new_tokens, "max_new_tokens": max_new_tokens}
    named = None if own or file == STDIN else Path(file).name
    options = {"title": title or named, "max_length": max_length, **given}
    explanation = _explain(data, file, model, device, options)
    if text:
        _print(explanation)
    for option, path, save in (("--output", output, explanation.save_html), ("--json", json, explanation.save_json)):
        if path is not None:
            _write(option, path, save)
    if own:
        from pyramidion.generation.summarizer import BUNDLED

        which = "" if model == BUNDLED else f" --model {_shown(model)}"
        typer.echo(f"Any other text: pyramidion serve{which}", err=True)
    if open_page and output is not None:
        import webbrowser

        webbrowser.open(output.resolve().as_uri())


def _read(file: str) -> bytes:
    if file == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(f"`FILE` must be a text file that can be read, got {_shown(file)}: {reason}.")


def _check_outputs(file: str, outputs: dict[str, Path | None]) -> None:
    """Refuse what cannot be written, or would be written over something else, before there is anything to write."""
    taken = {} if file == STDIN else {Path(file).resolve(): "FILE"}
    for option, path in outputs.items():
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            what = "a folder" if path.is_dir() else "one in a folder that does not exist"
            refuse(f"`{option}` must be a file that can be written, got {what}: {_shown(path)}.")
        if path.resolve() in taken:
            refuse(f"`{option}` must be another file than `{taken[path.resolve()]}`, got {_shown(path)}.")
        taken[path.resolve()] = option
    if outputs["--output"] is not None:
        try:
            import jinja2  # noqa: F401
        except ImportError:
            refuse("`--output` must have jinja2 to write a page with: pip install 'pyramidion[serve]'.")


def _explain(data: bytes, file: str, model: str, device: str, options: dict[str, Any]) -> Explanation:
    from pyramidion.generation.texts import Unusable, usable

    read = usable(data)
    if isinstance(read, Unusable):  # said before the model is loaded
        refuse(f"`FILE` must be a text to summarise, got {_shown(file)}: {read.reason}.")
    from pyramidion.explain import explain
    from pyramidion.generation import Summarizer

    try:
        with screen() as (_, progress):
            progress(0, 3, "loading the model")
            summarizer = Summarizer.from_pretrained(model, device)
            step = lambda done, total, what: progress(done + 1, 3, what)  # noqa: E731
            return explain(summarizer, data, progress=step, **options)
    except (ValueError, OSError) as error:
        refuse(re.sub("^`([a-z_]+)`", lambda name: f"`{NAMES.get(name[1], name[1])}`", str(error)))


def _print(explanation: Explanation) -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows a question mark
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = max(20, min(shutil.get_terminal_size().columns, 120))
    typer.echo(explanation.text(width, colour=colour), nl=False, color=colour)


def _write(option: str, path: Path, save: Any) -> None:
    try:
        save(path)
    except OSError as error:
        refuse(f"`{option}` must be a file that can be written, got {_shown(path)}: {error.strerror}.")
    typer.echo(_shown(path).strip("'"), err=True)


def _shown(path: str | Path) -> str:
    return repr(str(path).encode("utf-8", "replace").decode())
