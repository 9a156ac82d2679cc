"""How the thread that writes tells a waiting response how far it is."""

import asyncio
import threading
from collections import deque
from contextlib import suppress
from typing import Any


class Mailbox:
    """Carry events from any thread to one reader in an event loop.

    An event takes the place of an unread one of the same stage, so that a slow reader finds the newest and nothing
    piles up.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[dict[str, Any]] = deque()
        self._lock = threading.Lock()
        self._filled = asyncio.Event()

    def put(self, event: dict[str, Any]) -> None:
        """Leave an event, from any thread."""
        with self._lock:
            if self._events and self._events[-1]["stage"] == event["stage"]:
                self._events.pop()
            self._events.append(event)
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._filled.set)

    async def get(self) -> dict[str, Any]:
        """Wait for the next event."""
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                self._filled.clear()
            await self._filled.wait()


__all__ = ["Mailbox"]
