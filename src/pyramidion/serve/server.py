"""Run the application: an address, signals, and an end that lets what runs finish."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from pyramidion.serve.desk import Desk
from pyramidion.serve.gate import Gate

GRACE = 8.0  # seconds for what runs when the server is told to end
LEAVING = 2  # seconds for clients to take their answers then
BACKLOG = 1024  # connections that the system keeps until they are accepted


def bind(host: str, port: int) -> socket.socket:
    """Take an address, or raise an OSError that says why not."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    taken = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError:
        taken.close()
        raise
    return taken


def address_of(taken: socket.socket) -> str:
    """Give the address for a browser on this machine."""
    host, port = taken.getsockname()[:2]
    named = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{named}]' if ':' in named else named}:{port}/"


class _Server(uvicorn.Server):
    """Leave signals to `run`: uvicorn's own end would refuse connections at once, and die of the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(app: Gate, desk: Desk, taken: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; then refuse what is new, finish what runs, and return.

    ready  called when connections are accepted
    """
    finished = asyncio.run(_run(app, desk, taken, ready))
    if not finished:  # a thread is in the middle of the model: to end the interpreter around it could crash
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _run(app: Gate, desk: Desk, taken: socket.socket, ready: Callable[[], None]) -> bool:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=LEAVING,
    )
    server, told = _Server(config), asyncio.Event()
    with _signals(told):
        serving = asyncio.create_task(server.serve(sockets=[taken]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if not serving.done():
            ready()
        await asyncio.wait({serving, asyncio.create_task(told.wait())}, return_when=asyncio.FIRST_COMPLETED)
        finished = await asyncio.to_thread(desk.close, GRACE)
        if not finished:
            desk.interrupt()
        server.should_exit = True
        await serving
        return finished or await asyncio.to_thread(desk.close, 0.5)


@contextmanager
def _signals(told: asyncio.Event) -> Iterator[None]:
    """Set an event for SIGTERM and SIGINT; the second signal ends the process as ever."""
    loop = asyncio.get_running_loop()

    def tell(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[signal.Signals(number)])
        loop.call_soon_threadsafe(told.set)

    before = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["address_of", "bind", "run"]
