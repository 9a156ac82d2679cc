"""What every command shares: a bar and lines on the screen, and a refusal in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer


def watch(run: Callable[[Callable[[int, int | None, str], None]], Any]) -> Any:
    """Run something that tells how far it is, with a progress bar."""
    with screen() as (_, progress):
        return run(progress)


@contextmanager
def screen(
    shown: bool = True, *, several: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[[int, int | None, str], None]]]:
    """Give two functions, for lines and for how far something is: a bar below the lines, all on standard error.

    several  each thing that is being done has a bar of its own, which goes when it is done
    """
    if not shown:
        yield lambda line: None, lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    counts = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description:<36}"), *counts)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def progress(done: int, total: int | None, what: str) -> None:
            key = what if several else ""
            if key not in tasks:
                tasks[key] = bar.add_task(what)
            bar.update(tasks[key], completed=done, total=total, description=what)
            if several and done == total:
                bar.remove_task(tasks.pop(key))

        yield console.print, progress


def refuse(message: str) -> NoReturn:
    """End with one line that names the rule and the value, and the exit code of a wrong call."""
    typer.echo(f"pyramidion: {message}", err=True)
    raise typer.Exit(2)


def read(option: str, read: Callable[[Any], Any], value: Any) -> Any:
    """Read the value of an option, or refuse it under the option's name."""
    try:
        return read(value)
    except ValueError as error:
        _, quote, rule = str(error).partition("` ")
        refuse(f"`{option}{quote}{rule}")
