"""The application: the API, the page, and what becomes of a request that is wrong."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pyramidion.explain.reading import model_name
from pyramidion.generation import Summarizer, decoding_options
from pyramidion.generation.texts import SURROGATE, Unusable, usable
from pyramidion.serve import pdf
from pyramidion.serve.desk import Desk, Full, Job, Order, Result, Stopped, Unreadable
from pyramidion.serve.gate import Allowance, Gate, Hosts
from pyramidion.serve.limits import MOST_BEAMS, MOST_TOKENS, PDFS, Limits
from pyramidion.serve.mailbox import Mailbox
from pyramidion.serve.pages import reference, static
from pyramidion.serve.schemas import (
    Bounds,
    Decoding,
    Event,
    Health,
    ModelCard,
    Problem,
    SummaryRequest,
    SummaryResponse,
    TextResponse,
)

ABOUT = 'Summaries of long documents, and what was kept of them. Whatever goes wrong is said as `{"error": ...}`.'
OPTIONS = ("num_beams", "min_new_tokens", "max_new_tokens")
REASONS = {
    403: "A request from a page of another site.",
    408: "A body that did not come in time.",
    413: "A body that is too large.",
    421: "A `Host` that is not this server.",
    422: "A body that is no JSON, an option that is wrong, a text that is none.",
    500: "The model failed.",
    501: "pypdf is not installed.",
    503: "Too many requests wait, or the server is shutting down; `Retry-After` says when to come again.",
    504: "The request took longer than the server allows.",
}


def make_app(desk: Desk, hosts: Hosts | None = None, *, version: str = "0") -> Gate:
    """Make the ASGI application that hands requests to a desk, gate and all; the desk closes when its lifespan ends."""
    limits = desk.limits

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(desk.close, 0)

    app = FastAPI(
        title="Pyramidion",
        description=ABOUT,
        version=version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    _add_writing(app, desk, limits)
    _add_facts(app, desk, _card(desk.summarizer, limits))
    _add_pages(app)
    _add_failures(app)
    writing = Allowance(limits.body_bytes, limits.queue + 2 * limits.batch_size)
    allowances = dict.fromkeys(("", "/api/summaries", "/api/summaries/stream"), writing)
    allowances["/api/texts"] = Allowance(limits.pdf_bytes, PDFS)
    return Gate(app, hosts or Hosts(), allowances, lambda: desk.closing, desk.patience)


# --------------------------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------------------------


class _Lines(Response):
    """Name what lines of JSON are."""

    media_type = "application/x-ndjson"


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Problem, "description": REASONS[status]} for status in sorted({*statuses, 403, 421})}


def _add_writing(app: FastAPI, desk: Desk, limits: Limits) -> None:
    @app.post(
        "/api/summaries",
        tags=["Summaries"],
        response_model=SummaryResponse,
        responses=_problems(408, 413, 422, 500, 503, 504),
    )
    async def summarise(asked: SummaryRequest, request: Request) -> Response:
        """Summarise a text, and answer in one piece.

        Requests that wait together and have equal options are written together; an explained one by itself. One whose
        client goes away, or that waits too long, leaves the line.
        """
        deadline = time.monotonic() + limits.timeout
        job = Job(await asyncio.to_thread(_order, desk, asked), deadline)
        desk.submit(job)
        try:
            result = await _answer(job, request, limits.timeout)
            return Response(await asyncio.to_thread(_encode, _told(result)), media_type="application/json")
        finally:
            desk.withdraw(job)

    @app.post(
        "/api/summaries/stream",
        tags=["Summaries"],
        response_model=Event,
        response_class=_Lines,
        responses=_problems(408, 413, 422, 503),
    )
    async def stream(asked: SummaryRequest) -> Response:
        """Summarise a text, and tell how far it is in lines of JSON, each an event.

        The stages are queued, reading, encoding, writing, explaining where that is asked for, and done or failed. The
        text of `writing` is the leading one after so many tokens, whole, told about ten times a second: a greedy search
        (`num_beams` 1) only adds to it, a search with beams may still change it. `done` has the text that counts.

        What is streamed is written by itself with the loop of transformers, which can be looked at and stopped; the
        text is the one that the other path gives, which is faster where many wait. Going away ends the writing.
        """
        events = Mailbox()
        deadline = time.monotonic() + limits.timeout
        job = Job(replace(await asyncio.to_thread(_order, desk, asked), streamed=True), deadline, events.put)
        desk.submit(job)
        return _Stream(_events(job, events, limits.timeout), desk, job)


def _order(desk: Desk, asked: SummaryRequest) -> Order:
    """Check what the types of a request do not say."""
    for name, value in (("text", asked.text), ("title", asked.title or "")):
        if half := SURROGATE.search(value):
            raise HTTPException(422, f"`{name}` must be without halves of surrogate pairs, got {half[0]!r}.")
    read = usable(asked.text)
    if isinstance(read, Unusable):
        raise Unreadable(read.reason)
    options = {name: value for name in OPTIONS if (value := getattr(asked, name)) is not None}
    model = desk.summarizer.model
    try:
        decoding_options(model.config, model.generation_config, **options)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    return Order(asked.text, asked.title, asked.explain, options=tuple(options.items()))


async def _answer(job: Job, request: Request, timeout: float) -> Result:
    """Wait for a result as long as somebody waits for it."""
    result = asyncio.wrap_future(job.result)
    gone = asyncio.ensure_future(_gone(request))
    both: set[asyncio.Future[Any]] = {result, gone}
    try:
        await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if result.done() and not result.cancelled():
            return result.result()
    finally:
        gone.cancel()
        result.cancel()
    if gone.done() and not gone.cancelled():
        raise HTTPException(499, "The client has gone.")
    raise TimeoutError(_late(timeout))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(job: Job, events: Mailbox, timeout: float) -> AsyncIterator[bytes]:
    """Pass on what is told of an order, and at last its result."""
    job.result.add_done_callback(lambda result: events.put({"stage": "end"}))
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        while True:
            async with asyncio.timeout_at(deadline):
                event = await events.get()
            if event["stage"] == "end":
                break
            yield _line(event)
        last: dict[str, Any] = {"stage": "done", "result": _told(job.result.result(0))}
    except Exception as error:
        late = isinstance(error, TimeoutError | CancelledError)  # the desk cancels what it finds too late
        status, said = _failure(TimeoutError(_late(timeout)) if late else error)
        last = {"stage": "failed", "status": status, "error": said}
    yield await asyncio.to_thread(_line, last)


class _Stream(StreamingResponse):
    """Stream events, and take the order back when that ends, however it does."""

    def __init__(self, events: AsyncIterator[bytes], desk: Desk, job: Job) -> None:
        super().__init__(events, media_type=_Lines.media_type)
        self.desk, self.job = desk, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.desk.withdraw(self.job)


def _told(result: Result) -> dict[str, Any]:
    told = {name: getattr(result, name) for name in SummaryResponse.model_fields}
    return told | {"seconds": round(result.seconds, 3)}


def _encode(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def _line(event: dict[str, Any]) -> bytes:
    return _encode(event) + b"\n"


def _late(timeout: float) -> str:
    return f"A request must be done in {timeout:g} seconds, and this one was not."


# --------------------------------------------------------------------------------------------------------------------
# Facts and pages
# --------------------------------------------------------------------------------------------------------------------


def _add_facts(app: FastAPI, desk: Desk, card: ModelCard) -> None:
    @app.post(
        "/api/texts",
        tags=["Texts"],
        responses=_problems(408, 413, 422, 501, 503),
        openapi_extra={"requestBody": {"required": True, "content": {"application/pdf": {}}}},
    )
    async def read(request: Request) -> TextResponse:
        """Read the text of a PDF, to look at and to summarise."""
        data = await request.body()
        if not data.startswith(b"%PDF-"):
            raise HTTPException(422, f"A body must be a PDF, got {data[:8]!r}.")
        if not pdf.available():
            raise HTTPException(501, pdf.MISSING)
        try:
            return TextResponse(text=await pdf.read_pdf(data))
        except ValueError as error:
            raise HTTPException(422, f"A PDF must have a text that can be read: {error}.") from error

    @app.get("/api/health", tags=["Server"], responses={503: {"model": Health, "description": "It is shutting down."}})
    async def health(response: Response) -> Health:
        """Say whether the server takes requests."""
        response.status_code = 503 if desk.closing else 200
        return Health(status="closing" if desk.closing else "ok", waiting=desk.waiting, running=desk.running)

    @app.get("/api/model", tags=["Server"])
    async def model() -> ModelCard:
        """Describe the model, and what a request must stay below."""
        return card


def _card(summarizer: Summarizer, limits: Limits) -> ModelCard:
    model = summarizer.model
    config, decoding = model.config, decoding_options(model.config, model.generation_config)
    return ModelCard(
        name=model_name(model),
        parameters=model.num_parameters(),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        hidden_size=config.hidden_size,
        encoder_lengths=list(config.encoder_lengths),
        decoder_layers=config.decoder_layers,
        vocabulary=config.vocab_size,
        trained_length=summarizer.trained_length,
        decoding=Decoding(**{name: getattr(decoding, name) for name in OPTIONS}),
        limits=Bounds(pdf_bytes=limits.pdf_bytes, num_beams=MOST_BEAMS, max_new_tokens=MOST_TOKENS, **asdict(limits)),
        pdf=pdf.available(),
    )


def _add_pages(app: FastAPI) -> None:
    """Serve files out of a table in memory, each at its own path: no path of the disk is ever asked for."""

    def add(path: str, content: bytes, headers: dict[str, str]) -> None:
        async def give() -> Response:
            return Response(content, headers=headers)

        app.add_api_route(path, give, methods=["GET", "HEAD"], include_in_schema=False)

    for path, (content, headers) in static().items():
        add(path, content, headers)
    add("/docs", *reference(app.openapi()))


# --------------------------------------------------------------------------------------------------------------------
# What goes wrong
# --------------------------------------------------------------------------------------------------------------------


def _add_failures(app: FastAPI) -> None:
    async def failed(_: Request, error: Exception) -> Response:
        status, said = _failure(error)
        headers = {"Retry-After": str(error.seconds)} if isinstance(error, Full) else None
        return JSONResponse({"error": said}, status, headers)

    for kind in (RequestValidationError, HTTPException, Full, Unreadable, Stopped, TimeoutError, Exception):
        app.add_exception_handler(kind, failed)


def _failure(error: BaseException) -> tuple[int, str]:
    """Find the status and the words for what went wrong."""
    match error:
        case RequestValidationError():
            return 422, _mistake(error.errors()[0])
        case HTTPException(status_code=400):  # FastAPI gives it where a body is no JSON, in a way it did not foresee
            return 422, "The body must be JSON in UTF-8, not nested too deeply, with numbers of some length."
        case HTTPException():
            return error.status_code, str(error.detail)
        case Full():
            return 503, str(error)
        case Unreadable():
            return 422, f"`text` must be a text to summarise, got none: {error}."
        case Stopped():
            return 503, "The server is shutting down."
        case TimeoutError():
            return 504, str(error)
    return 500, f"The model failed: {type(error).__name__}."


def _mistake(mistake: dict[str, Any]) -> str:
    """Say what is wrong with a body: the rule and the value."""
    kind, place, got = mistake["type"], mistake["loc"][1:], mistake.get("input")
    if kind == "json_invalid":
        return f"The body must be JSON, got a mistake at character {place[0]}: {mistake['ctx']['error']}."
    if not place:
        return "The body must be a JSON object, and be sent as application/json."
    name = ".".join(map(str, place))[:100].encode("ascii", "backslashreplace").decode()
    if kind == "missing":
        return f"`{name}` must be given."
    if kind == "extra_forbidden":
        return f"`{name}` is not known; known are {', '.join(SummaryRequest.model_fields)}."
    halves = "must be without halves of surrogate pairs"
    rule = halves if kind == "string_unicode" else re.sub(r"^\w+ should ", "must ", mistake["msg"])
    shown = repr(got[:40] if isinstance(got, str) else got)
    return f"`{name}` {rule}, got {shown[:60]}."


__all__ = ["make_app"]
