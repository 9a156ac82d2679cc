"""The command `pyramidion serve`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyramidion.cli.screen import refuse, screen

if TYPE_CHECKING:
    import socket

# What an error calls it, and what it is called here.
NAMES = {"path": "--model", "device": "--device", "batch_size": "--batch-size", "queue": "--queue"}
NAMES |= {"body_bytes": "--limit-mb", "timeout": "--timeout"}


def serve(
    model: Annotated[str, typer.Option(help="A folder of a model, or default: the bundled one.")] = "default",
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than this machine's own is told.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8000,
    batch_size: Annotated[int, typer.Option(help="Requests that are written together at most.")] = 8,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused.")] = 64,
    limit_mb: Annotated[float, typer.Option(help="Size of a request in MB at most; of a PDF 8 times that.")] = 2.0,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, waiting included.")] = 300.0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> None:
    """Serve a model: a page to summarise and to look at what was kept, and an API.

    Only this machine can reach it, unless --host says otherwise. Ctrl-C ends it: what runs is finished first.

    \b
      pyramidion serve --model runs/mine --open
      curl -d '{"text": "..."}' -H 'Content-Type: application/json' http://127.0.0.1:8000/api/summaries
    """
    _check_installed()
    from pyramidion.serve.limits import Limits

    if not 0 <= port <= 65535:
        refuse(f"`--port` must be from 0 to 65535, got {port}.")
    if not 0 < limit_mb <= 1000:
        refuse(f"`--limit-mb` must be more than 0 and at most 1000, got {limit_mb:g}.")
    limits = _named(lambda: Limits(batch_size, queue, round(1e6 * limit_mb), timeout))
    taken = _bind(host, port)
    with taken:
        _serve(_load(model, device), limits, host, taken, open_page)


def _check_installed() -> None:
    for name in ("fastapi", "uvicorn", "jinja2"):
        try:
            __import__(name)
        except ImportError:
            refuse(f"`pyramidion serve` must have {name}, which is not installed: pip install 'pyramidion[serve]'.")


def _named(make: Any) -> Any:
    """Make something, or refuse under the name of the option."""
    try:
        return make()
    except (ValueError, OSError) as error:
        refuse(re.sub("^`([a-z_]+)`", lambda name: f"`{NAMES.get(name[1], name[1])}`", str(error)))


def _bind(host: str, port: int) -> socket.socket:
    from pyramidion.serve.server import bind

    try:
        return bind(host, port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(f"`--host` and `--port` must be an address that is free, got {host!r} and {port}: {reason}.")


def _load(model: str, device: str) -> Any:
    from pyramidion.generation import Summarizer

    with screen() as (_, progress):
        progress(0, 1, "loading the model")
        return _named(lambda: Summarizer.from_pretrained(model, device))


def _serve(summarizer: Any, limits: Any, host: str, taken: socket.socket, open_page: bool) -> None:
    from pyramidion import __version__
    from pyramidion.serve.app import make_app
    from pyramidion.serve.desk import Desk
    from pyramidion.serve.gate import Hosts
    from pyramidion.serve.server import address_of, run

    hosts, address = Hosts(host), address_of(taken)
    desk = Desk(summarizer, limits)

    def ready() -> None:
        if not hosts.loopback:
            typer.echo(
                f"pyramidion: {host} can be reached from other machines, and asks nobody who they are.", err=True
            )
        typer.echo(f"{address}  (reference: {address}docs; Ctrl-C ends it)")
        if open_page:
            import webbrowser

            webbrowser.open(address)

    run(make_app(desk, hosts, version=__version__), desk, taken, ready)
