"""The gate in front of the application: who may come in, with how much, and what every answer carries.

It is the outermost part, so that no answer leaves without its headers, and a body is counted while it comes, before
anything reads it. A page of another site can reach a server on this machine: by a name of its own that leads to it
(DNS rebinding), which the check of `Host` ends, or by a request that is sent blindly, which that of `Origin` ends.
"""

import asyncio
import ipaddress
import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# Set where an answer does not set its own.
HEADERS = {
    "Content-Security-Policy": NOTHING,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
RECEIVING = 30.0  # seconds for a body to come
DRAINED = 16  # times the limit that is read and thrown away, so that a client that sends first reads the answer


@dataclass(frozen=True)
class Allowance:
    """Say how large a body may be, and how many requests may be inside at the same time."""

    body_bytes: int
    most: int


@dataclass(frozen=True)
class Refusal:
    """Say why a request goes no further."""

    status: int
    error: str
    retry: int | None = None
    closes: bool = False


class Hosts:
    """Know by which names a server may be called: this machine's own, and the one that it was given."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host.strip("[]").lower()
        address = _address(self.host)
        self.anywhere = address is not None and address.is_unspecified
        self.names = {"localhost", self.host} | ({socket.gethostname().lower()} if self.anywhere else set())

    @property
    def loopback(self) -> bool:
        """Tell whether only this machine can reach the server."""
        address = _address(self.host)
        return _local(self.host) if address is None else address.is_loopback

    def allow(self, header: str) -> bool:
        """Tell whether a Host header names this server; the port does not matter.

        Where every address is listened on, any address is right: it is names that somebody else can lead here.
        """
        found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(:\d{1,5})?", header.strip().lower())
        if found is None:
            return False
        name = found[1].strip("[]").removesuffix(".")
        address = _address(name)
        if address is not None:
            return address.is_loopback or self.anywhere or name == self.host
        return name in self.names or _local(name)


def _local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class Gate:
    """Let requests into an application, or answer them here.

    allowances  by path; "" for every other
    closing     tells whether new work is refused
    patience    gives the seconds after which one that is refused may come again
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Hosts,
        allowances: Mapping[str, Allowance],
        closing: Callable[[], bool],
        patience: Callable[[], int],
    ) -> None:
        self.app, self.hosts, self.allowances = app, hosts, allowances
        self.closing, self.patience = closing, patience
        self._inside: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, _dressed(send))

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refusal = self._stranger(headers)
        if refusal is None and scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.allowances else ""
        refusal = refusal or self._crowded(path)
        if refusal is not None:
            await _refuse(send, refusal)
            return
        self._inside[path] += 1
        try:
            await self._with_body(scope, receive, send, headers, self.allowances[path].body_bytes)
        finally:
            self._inside[path] -= 1

    async def _with_body(self, scope: Scope, receive: Receive, send: Send, headers: Headers, limit: int) -> None:
        body = await _receive(receive, headers, limit)
        if isinstance(body, Refusal):
            await _refuse(send, body)
        elif body is not None:
            await self.app(scope, _again(body, receive), send)

    def _stranger(self, headers: Headers) -> Refusal | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.hosts.allow(host):
            return Refusal(421, f"`Host` must name this server, got {_shown(host)}.")
        if origin is not None and not self._own(origin):
            return Refusal(403, f"`Origin` must be this server's own, got {_shown(origin)}.")
        return None

    def _own(self, origin: str) -> bool:
        try:
            return self.hosts.allow(urlsplit(origin).netloc)
        except ValueError:
            return False

    def _crowded(self, path: str) -> Refusal | None:
        if self.closing():
            return Refusal(503, "The server is shutting down.", 5, closes=True)
        if self._inside[path] >= self.allowances[path].most:
            return Refusal(
                503, f"{self._inside[path]} requests are being served, which is all that may.", self.patience()
            )
        return None


async def _receive(receive: Receive, headers: Headers, limit: int) -> bytes | Refusal | None:
    """Receive a body up to a limit; None: the client has gone."""
    large = Refusal(413, f"A body must have at most {limit:,} bytes, got more.", closes=True)
    length = headers.get("content-length", "")
    if length.isdigit() and int(length[:19]) > limit:
        if headers.get("expect", "").lower() != "100-continue":
            await _drain(receive, DRAINED * limit)
        return large
    parts, count, more = [], 0, True
    try:
        async with asyncio.timeout(RECEIVING):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                count, more = count + len(parts[-1]), message.get("more_body", False)
                if count > limit:
                    await _drain(receive if more else None, DRAINED * limit)
                    return large
    except TimeoutError:
        return Refusal(408, f"A body must come within {RECEIVING:g} seconds.", closes=True)
    return b"".join(parts)


async def _drain(receive: Receive | None, most: int) -> None:
    """Read on for a while and keep nothing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(2):
            while receive is not None and most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _again(body: bytes, receive: Receive) -> Receive:
    """Give a body that was received to the application, and then what comes behind it: that the client has gone."""
    given = False

    async def once() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return once


def _dressed(send: Send) -> Send:
    """Put the headers on every answer."""

    async def dressed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return dressed


async def _refuse(send: Send, refusal: Refusal) -> None:
    body = json.dumps({"error": refusal.error}).encode()
    headers: dict[str, Any] = {"content-type": "application/json", "content-length": str(len(body))}
    if refusal.retry is not None:
        headers["retry-after"] = str(refusal.retry)
    if refusal.closes:
        headers["connection"] = "close"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _shown(value: str) -> str:
    return repr(value[:100])


__all__ = ["NOTHING", "Allowance", "Gate", "Hosts"]
