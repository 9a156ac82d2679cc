"""A server to leave running: answers that are right, refusals that say why, no way to the disk, an end in order."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="needs fastapi")
pytest.importorskip("uvicorn", reason="needs uvicorn")

from starlette.testclient import TestClient

from pyramidion.cli import main
from pyramidion.explain import explain
from pyramidion.generation import Summarizer, Summary
from pyramidion.serve import pdf
from pyramidion.serve.app import make_app
from pyramidion.serve.desk import Closed, Desk, Full, Job, Order, Unreadable
from pyramidion.serve.gate import Gate, Hosts
from pyramidion.serve.limits import Limits
from pyramidion.serve.mailbox import Mailbox
from test_generation import ENVIRONMENT, make_text, write_model

HOST = (b"host", b"localhost")
JSON = (b"content-type", b"application/json")
TEXT = make_text(1, 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def summarizer(model: Path) -> Summarizer:
    return Summarizer.from_pretrained(model, device="cpu")


WITHOUT = {"odd": "no usable text: the tokenizer knows none of it", "large": "out of memory, even by itself"}


class Held(Summarizer):
    """A summarizer that notes its batches, and begins only when it is let."""

    def __init__(self, summarizer: Summarizer) -> None:
        super().__init__(summarizer.model, summarizer.tokenizer, engine=summarizer.engine)
        self.batches: list[list[str]] = []
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def __call__(self, texts: Any, **options: Any) -> list[Summary]:
        self.batches.append(list(texts))
        self.begun.release()
        assert self.go.wait(30)
        if "fail" in texts[0]:
            raise RuntimeError("the model is gone")
        if texts[0] in WITHOUT:
            return [Summary(error=WITHOUT[texts[0]])]
        return super().__call__(texts, **options)


@pytest.fixture
def held(summarizer: Summarizer) -> Iterator[Held]:
    made = Held(summarizer)
    yield made
    made.go.set()


@pytest.fixture(scope="module")
def client(summarizer: Summarizer) -> Iterator[TestClient]:
    desk = Desk(summarizer, Limits(body_bytes=20_000))
    with TestClient(make_app(desk), base_url="http://localhost", raise_server_exceptions=False) as opened:
        yield opened
    assert desk.close(10)


# --------------------------------------------------------------------------------------------------------------------
# The desk
# --------------------------------------------------------------------------------------------------------------------


def submit(desk: Desk, text: str, **order: Any) -> Job:
    job = Job(Order(text, **order))
    desk.submit(job)
    return job


def test_orders_that_ask_alike_are_written_together_and_in_order(held: Held, summarizer: Summarizer):
    desk = Desk(held, Limits(batch_size=3))
    texts = [make_text(seed, 20 + seed) for seed in range(7)]
    longer = (("max_new_tokens", 7),)
    jobs = [submit(desk, texts[0])]
    assert held.begun.acquire(timeout=10)
    jobs += [submit(desk, text, options=longer if place == 1 else ()) for place, text in enumerate(texts[1:])]
    held.go.set()
    results = [job.result.result(30) for job in jobs]
    assert held.batches == [texts[:1], [texts[1], texts[3], texts[4]], [texts[2]], texts[5:]]
    for text, job, result in zip(texts, jobs, results, strict=True):
        [expected] = summarizer([text], batch_size=1, **dict(job.order.options))
        assert (result.summary, result.document_tokens, result.note) == (expected.text, expected.document_tokens, None)
    assert desk.close(10)


def test_a_full_line_refuses_and_a_withdrawn_order_makes_room(held: Held):
    desk = Desk(held, Limits(queue=2))
    submit(desk, "first")
    assert held.begun.acquire(timeout=10)
    waiting = [submit(desk, "second"), submit(desk, "third")]
    with pytest.raises(Full, match="2 requests are waiting, which is all that may") as refused:
        submit(desk, "fourth")
    assert refused.value.seconds >= 1
    desk.withdraw(waiting[0])
    last = submit(desk, "fourth")
    held.go.set()
    assert last.result.result(10).summary
    assert waiting[0].result.cancelled()
    assert held.batches == [["first"], ["third", "fourth"]]
    assert desk.close(10)


def test_an_order_that_is_late_is_never_written(held: Held):
    desk = Desk(held)
    submit(desk, "first")
    assert held.begun.acquire(timeout=10)
    late = Job(Order("late"), deadline=time.monotonic() - 1)
    desk.submit(late)
    held.go.set()
    assert submit(desk, "next").result.result(10).summary
    assert late.result.cancelled()
    assert not [batch for batch in held.batches if "late" in batch]
    assert desk.close(10)


def test_a_failure_is_its_batchs_own(held: Held):
    held.go.set()
    desk = Desk(held)
    with pytest.raises(RuntimeError, match="the model is gone"):
        submit(desk, "fail").result.result(10)
    assert submit(desk, "go on").result.result(10).summary
    with pytest.raises(Unreadable, match="no usable text"):
        submit(desk, "odd").result.result(10)
    with pytest.raises(RuntimeError, match="out of memory"):
        submit(desk, "large").result.result(10)
    assert desk.close(10)


def test_closing_finishes_what_runs_and_refuses_the_rest(held: Held):
    desk = Desk(held)
    running = submit(desk, "running")
    assert held.begun.acquire(timeout=10)
    waiting = submit(desk, "waiting")
    assert not desk.close(0)
    with pytest.raises(Closed, match="shutting down"):
        waiting.result.result(1)
    with pytest.raises(Closed, match="shutting down"):
        submit(desk, "new")
    held.go.set()
    assert running.result.result(10).summary
    assert desk.close(10)


def test_places_in_the_line_are_told(held: Held):
    desk = Desk(held, Limits(batch_size=1))
    told: dict[str, list[int]] = {"first": [], "second": [], "third": []}
    jobs = []
    for name, places in told.items():
        jobs.append(Job(Order(name), tell=lambda event, to=places: to.append(event.get("ahead", -1))))
        desk.submit(jobs[-1])
        if name == "first":
            assert held.begun.acquire(timeout=10)
    held.go.set()
    assert all(job.result.result(10) for job in jobs)
    assert desk.close(10)
    assert told["first"] == [0, -1]
    assert told["second"][0] == 1
    assert told["third"][0] == 2
    assert sorted(told["third"], reverse=True) == told["third"]
    assert told["third"][-1] == -1  # it is read


def test_a_mailbox_keeps_the_newest_of_a_stage():
    async def read() -> list[dict[str, Any]]:
        box = Mailbox()
        threads = [threading.Thread(target=box.put, args=({"stage": "writing", "tokens": i},)) for i in range(50)]
        box.put({"stage": "reading"})
        for thread in threads:
            thread.start()
            thread.join()
        box.put({"stage": "done"})
        return [await box.get() for _ in range(3)]

    events = asyncio.run(read())
    assert events == [{"stage": "reading"}, {"stage": "writing", "tokens": 49}, {"stage": "done"}]


# --------------------------------------------------------------------------------------------------------------------
# Summaries
# --------------------------------------------------------------------------------------------------------------------


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_summary_is_the_summarizers(client: TestClient, summarizer: Summarizer):
    options = {"num_beams": 3, "max_new_tokens": 12, "min_new_tokens": 4}
    answer = client.post("/api/summaries", json={"text": TEXT, **options})
    [expected] = summarizer([TEXT], **options)
    told = answer.json()
    assert answer.status_code == 200
    assert told.pop("seconds") > 0
    assert told == {
        "summary": expected.text,
        "document_tokens": expected.document_tokens,
        "note": None,
        "explanation": None,
    }


def test_an_explanation_is_the_librarys(client: TestClient, summarizer: Summarizer):
    told = client.post("/api/summaries", json={"text": TEXT, "title": "A <title>", "explain": True}).json()
    expected = explain(summarizer, TEXT, title="A <title>")
    assert told["explanation"] == json.loads(json.dumps(expected.to_dict()))
    assert told["summary"] == expected.summary
    assert told["document_tokens"] == expected.words.tokens - 1


def test_a_text_that_cannot_be_explained_is_the_senders_mistake(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    def refuse(*given: Any, **options: Any) -> None:
        raise ValueError("`text` must be something to summarise: no usable text: the tokenizer knows none of it.")

    monkeypatch.setattr("pyramidion.serve.desk.explain", refuse)
    answer = client.post("/api/summaries", json={"text": TEXT, "explain": True})
    said = "`text` must be a text to summarise, got none: no usable text: the tokenizer knows none of it."
    assert (answer.status_code, answer.json()["error"]) == (422, said)


def test_a_text_longer_than_trained_on_is_noted(client: TestClient):
    told = client.post("/api/summaries", json={"text": make_text(3, 1500)}).json()
    assert "more than the 512 the model is for" in told["note"]


@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 3}, {"num_beams": 1, "explain": True}])
def test_a_stream_tells_its_stages_and_ends_in_the_same_result(client: TestClient, options: dict[str, Any]):
    asked = {"text": TEXT, "min_new_tokens": 40, "max_new_tokens": 40, **options}
    answer = client.post("/api/summaries/stream", json=asked)
    assert answer.headers["content-type"] == "application/x-ndjson"
    events = lines_of(answer.text)
    stages = list(dict.fromkeys(event["stage"] for event in events))
    assert stages == ["queued", "reading", "encoding", "writing", *["explaining"] * ("explain" in options), "done"]
    encoding = next(event for event in events if event["stage"] == "encoding")
    told, whole = events[-1]["result"], client.post("/api/summaries", json=asked).json()
    assert encoding["tokens"] == told["document_tokens"] + 1
    for name in ("summary", "document_tokens", "note", "explanation"):
        assert told[name] == whole[name]
    writing = [event for event in events if event["stage"] == "writing"]
    assert [event["tokens"] for event in writing] == sorted({event["tokens"] for event in writing})
    if options["num_beams"] == 1:
        assert all(told["summary"].startswith(event["text"]) for event in writing)


def test_a_stream_that_fails_says_so(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyramidion.serve.desk.watching", lambda *given: lambda *batch: {}["weights"])
    events = lines_of(client.post("/api/summaries/stream", json={"text": TEXT}).text)
    assert events[-1] == {"stage": "failed", "status": 500, "error": "The model failed: KeyError."}


def test_the_model_and_the_server_are_described(client: TestClient, model: Path):
    assert client.get("/api/health").json() == {"status": "ok", "waiting": 0, "running": 0}
    told = client.get("/api/model").json()
    assert (told["name"], told["trained_length"], told["encoder_lengths"]) == (model.name, 512, [512, 128, 32])
    assert told["decoding"] == {"num_beams": 2, "min_new_tokens": 3, "max_new_tokens": 9}
    assert told["limits"]["body_bytes"] == 20_000
    assert str(model.parent) not in json.dumps(told)


# --------------------------------------------------------------------------------------------------------------------
# What is wrong is said
# --------------------------------------------------------------------------------------------------------------------

WRONG: list[tuple[bytes, str]] = [
    (b"", "The body must be a JSON object"),
    (b"{", "The body must be JSON, got a mistake at character 1"),
    (b"[" * 15_000, "not nested too deeply"),
    (b'{"text": "\xff"}', "JSON in UTF-8"),
    (b'{"text": ' + b"1" * 5_000 + b"}", "numbers of some length"),
    (b"[1]", "must be a JSON object"),
    (b'"text"', "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b"{}", "`text` must be given."),
    (b'{"text": 1}', "`text` must be a valid string, got 1."),
    (b'{"text": null}', "`text` must be a valid string, got None."),
    (b'{"text": ["a"]}', "`text` must be a valid string, got ['a']."),
    (b'{"text": ""}', "got none: empty."),
    (b'{"text": " \\n\\u200b "}', "empty: no visible character"),
    (b'{"text": "\\u0000\\u0001\\u0002\\u0003\\u0004"}', "5 of 5 characters are control characters"),
    (b'{"text": "a \\ud800 b"}', "`text` must be without halves of surrogate pairs, got '\\ud800'."),
    (b'{"text": "a", "title": "\\udfff"}', "`title` must be without halves of surrogate pairs"),
    (b'{"text": "a", "\\ud800": 1}', "The body must be a JSON object"),
    (b'{"text": "a", "num_beam": 1}', "`num_beam` is not known; known are text, title, num_beams"),
    (b'{"text": "a", "num_beams": 0}', "`num_beams` must be greater than or equal to 1, got 0."),
    (b'{"text": "a", "num_beams": 17}', "`num_beams` must be less than or equal to 16, got 17."),
    (b'{"text": "a", "num_beams": true}', "`num_beams` must be a valid integer, got True."),
    (b'{"text": "a", "num_beams": "2"}', "`num_beams` must be a valid integer, got '2'."),
    (b'{"text": "a", "num_beams": 1.5}', "`num_beams` must be a valid integer, got 1.5."),
    (b'{"text": "a", "num_beams": NaN}', "`num_beams` must be a valid integer, got nan."),
    (b'{"text": "a", "max_new_tokens": 1e99}', "`max_new_tokens` must be a valid integer, got 1e+99."),
    (b'{"text": "a", "max_new_tokens": 2049}', "must be less than or equal to 2048"),
    (b'{"text": "a", "min_new_tokens": -1}', "must be greater than or equal to 0, got -1."),
    (b'{"text": "a", "min_new_tokens": 9, "max_new_tokens": 3}', "`max_new_tokens`, which is 3, got 9."),
    (b'{"text": "a", "explain": "yes"}', "`explain` must be a valid boolean, got 'yes'."),
    (b'{"text": "a", "title": "' + b"x" * 301 + b'"}', "`title` must have at most 300 characters"),
]


@pytest.mark.parametrize("path", ["/api/summaries", "/api/summaries/stream"])
@pytest.mark.parametrize(("body", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_a_wrong_body_is_refused_in_words(client: TestClient, path: str, body: bytes, said: str):
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert list(answer.json()) == ["error"]
    assert said in answer.json()["error"]
    assert len(answer.text) < 500


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_of_another_site_can_send_is_no_request(client: TestClient, kind: str | None):
    headers = {} if kind is None else {"Content-Type": kind}
    assert client.post("/api/summaries", content=b'{"text": "a"}', headers=headers).status_code == 422


def test_a_failure_of_the_model_is_not_spread_out(held: Held):
    held.go.set()
    with TestClient(make_app(Desk(held)), base_url="http://localhost", raise_server_exceptions=False) as opened:
        answer = opened.post("/api/summaries", json={"text": "fail"})
        assert (answer.status_code, answer.json()) == (500, {"error": "The model failed: RuntimeError."})
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert opened.post("/api/summaries", json={"text": "odd"}).status_code == 422
        assert opened.post("/api/summaries", json={"text": "go on"}).status_code == 200


def test_other_paths_and_methods_are_refused(client: TestClient):
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/api/summaries", 405),
        ("DELETE", "/api/summaries", 405),
        ("OPTIONS", "/api/summaries", 405),
        ("POST", "/", 405),
        ("GET", "/api/health/", 404),
    ):
        answer = client.request(method, path)
        assert (answer.status_code, list(answer.json())) == (status, ["error"]), path
        assert not [name for name in answer.headers if name.startswith("access-control")]


# --------------------------------------------------------------------------------------------------------------------
# The gate
# --------------------------------------------------------------------------------------------------------------------


def call(
    app: Any,
    raw: bytes,
    *,
    method: str = "GET",
    headers: tuple[tuple[bytes, bytes], ...] = (HOST,),
    body: tuple[bytes, ...] = (b"",),
    leave: float | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Call an application as a server does, with a path that no client would send, and leave after some seconds."""
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        over = asyncio.Event()
        chunks = list(body)

        async def receive() -> dict[str, Any]:
            if chunks:
                chunk = chunks.pop(0)
                return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}
            await (over.wait() if leave is None else asyncio.sleep(leave))
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        path = unquote(raw.partition(b"?")[0].decode("latin-1"))
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1"}
        scope |= {"method": method, "scheme": "http", "path": path, "raw_path": raw, "query_string": b""}
        scope |= {"root_path": "", "headers": list(headers), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
        await app(scope, receive, send)

    asyncio.run(run())
    if not sent:
        return 0, {}, b""
    start = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], start, b"".join(message.get("body", b"") for message in sent[1:])


PATHS = [
    b"/../../../../etc/passwd",
    b"/..%2f..%2f..%2fetc/passwd",
    b"/%2e%2e/%2e%2e/etc/passwd",
    b"/%252e%252e%252fetc%252fpasswd",
    b"/..%5c..%5cetc%5cpasswd",
    b"/..\\..\\etc\\passwd",
    b"//etc/passwd",
    b"/etc/passwd",
    b"/file:" + b"///etc/passwd",
    b"/explain.js/../../../../etc/passwd",
    b"/explain.js%00.html",
    b"/%00",
    b"/serve.js/",
    b"/./serve.js",
    b"//serve.js",
    b"/SERVE.JS",
    b"/serve.py",
    b"/app.py",
    b"/page.html",
    b"/index.html",
    b"/static/serve.js",
    b"/%c0%ae%c0%ae/%c0%ae%c0%ae/etc/passwd",
    b"/..;/etc/passwd",
    b"/api/texts/../../etc/passwd",
    b"/C:/Windows/win.ini",
    b"/" + b"a" * 60_000,
]


@pytest.mark.parametrize("raw", PATHS, ids=[repr(path[:30]) for path in PATHS])
def test_no_path_leads_to_the_disk(client: TestClient, raw: bytes):
    status, headers, body = call(client.app, raw)
    assert (status, headers["content-type"]) == (404, "application/json")
    assert b"root:" not in body
    assert len(body) < 100


@pytest.fixture(scope="module")
def gate(client: TestClient) -> Gate:
    assert isinstance(client.app, Gate)
    return client.app


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "a.localhost"]
)
def test_a_name_of_this_machine_is_let_in(gate: Gate, host: str):
    assert call(gate, b"/api/health", headers=((b"host", host.encode()),))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost"),
        *("192.168.1.5", "[::2]", "0.0.0.0", "localhost@evil.example", "localhost:80:80", "x\tlocalhost"),
    ],
)
def test_another_name_is_not(gate: Gate, host: str):
    for headers in (((b"host", host.encode()),), (HOST, (b"origin", f"http://{host}".encode()))):
        status, answer, body = call(gate, b"/", headers=headers)
        assert status == (421 if len(headers) == 1 else 403), host
        assert "must" in json.loads(body)["error"]
        assert "content-security-policy" in answer


def test_the_page_may_ask_its_own_server(gate: Gate):
    headers = (HOST, JSON, (b"origin", b"http://localhost:8000"))
    body = (json.dumps({"text": TEXT}).encode(),)
    assert call(gate, b"/api/summaries", method="POST", headers=headers, body=body)[0] == 200
    assert call(gate, b"/", headers=(HOST, (b"origin", b"null")))[0] == 403
    assert call(gate, b"/", headers=(HOST, (b"origin", b"http://[")))[0] == 403


def test_hosts_that_are_bound_elsewhere():
    assert Hosts("127.0.0.1").loopback
    assert Hosts("::1").loopback
    assert Hosts("localhost").loopback
    assert not Hosts("0.0.0.0").loopback
    named = Hosts("192.168.1.5")
    assert not named.loopback
    assert named.allow("192.168.1.5:8000")
    assert not named.allow("192.168.1.6")
    anywhere = Hosts("0.0.0.0")
    assert anywhere.allow("192.168.1.6")
    assert anywhere.allow(socket.gethostname())
    assert not anywhere.allow("evil.example")


def test_a_body_is_counted_while_it_comes(gate: Gate):
    big = b"x" * 20_001
    declared = (HOST, JSON, (b"content-length", b"20001"))
    huge = (HOST, JSON, (b"content-length", b"9" * 4400))
    for headers, body in (
        (declared, (big,)),
        (declared, (b"",)),
        (huge, (b"",)),
        ((HOST, JSON), (big,)),
        ((HOST, JSON), (b"x" * 9_000,) * 3),
        ((HOST, JSON, (b"content-length", b"3")), (b"x" * 9_000,) * 3),
        ((HOST, JSON), (b"x" * 9_000,) * 100),
    ):
        for path in (b"/api/summaries", b"/api/summaries/stream", b"/nothing"):
            status, answer, said = call(gate, path, method="POST", headers=headers, body=body)
            assert (status, answer["connection"]) == (413, "close")
            assert json.loads(said)["error"] == "A body must have at most 20,000 bytes, got more."
    fits = b'{"text": "' + b"a " * 900 + b" " * 18_000 + b'"}'
    assert len(fits) <= 20_000
    assert call(gate, b"/api/summaries", method="POST", headers=(HOST, JSON), body=(fits[:7], fits[7:]))[0] == 200


def test_a_body_that_does_not_come_is_not_waited_for(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyramidion.serve.gate.RECEIVING", 0.05)
    status, _, said = call(gate, b"/api/summaries", method="POST", headers=(HOST, JSON), body=(), leave=5)
    assert (status, json.loads(said)["error"]) == (408, "A body must come within 0.05 seconds.")
    monkeypatch.undo()
    assert call(gate, b"/api/summaries", method="POST", headers=(HOST, JSON), body=(), leave=0)[0] == 0


HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def test_every_answer_has_its_headers(client: TestClient):
    for method, path in (
        *(
            ("GET", path)
            for path in ("/", "/docs", "/serve.js", "/serve.css", "/explain.js", "/icon.svg", "/page.json")
        ),
        *(("GET", path) for path in ("/api/health", "/api/model", "/openapi.json", "/nothing")),
        ("HEAD", "/"),
        ("POST", "/api/summaries"),
        ("POST", "/api/texts"),
    ):
        answer = client.request(method, path)
        policy = answer.headers["content-security-policy"]
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
        assert not re.search(r"unsafe|\*|http|data:", policy)
        assert ("script-src 'self'" in policy) == (path == "/")
        assert "server" not in answer.headers


# --------------------------------------------------------------------------------------------------------------------
# Too much, too long, gone
# --------------------------------------------------------------------------------------------------------------------


def asked(text: str) -> dict[str, Any]:
    return {"method": "POST", "headers": (HOST, JSON), "body": (json.dumps({"text": text}).encode(),)}


def until(what: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_too_many_are_refused_and_later_served(held: Held):
    desk = Desk(held, Limits(batch_size=1, queue=2))
    app = make_app(desk)
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(call, app, b"/api/summaries", **asked("first"))
        until(lambda: desk.running == 1)
        rest = [pool.submit(call, app, b"/api/summaries", **asked(f"text {i}")) for i in range(11)]
        until(lambda: sum(answer.done() for answer in rest) == 9)
        held.go.set()
        answers = [answer.result(30) for answer in (first, *rest)]
    assert Counter(status for status, _, _ in answers) == {200: 3, 503: 9}
    for status, headers, body in answers:
        if status == 503:
            assert int(headers["retry-after"]) >= 1
            assert "which is all that may" in json.loads(body)["error"]
    assert call(app, b"/api/summaries", **asked("later"))[0] == 200
    assert desk.close(10)


def test_bodies_that_come_slowly_are_counted_too(summarizer: Summarizer):
    desk = Desk(summarizer, Limits(batch_size=1, queue=1))
    app = make_app(desk)
    slow: dict[str, Any] = {"method": "POST", "headers": (HOST, JSON), "body": (), "leave": 1.0}
    with ThreadPoolExecutor(3) as pool:
        inside = [pool.submit(call, app, b"/api/summaries", **slow) for _ in range(3)]
        until(lambda: app._inside["/api/summaries"] == 3)
        status, headers, body = call(app, b"/api/summaries", **asked("one more"))
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"] == "3 requests are being served, which is all that may."
        assert [one.result(10)[0] for one in inside] == [0, 0, 0]
    assert call(app, b"/api/summaries", **asked("later"))[0] == 200
    assert desk.close(10)


def test_one_that_takes_too_long_is_told_and_leaves_the_line(held: Held):
    desk = Desk(held, Limits(timeout=0.2))
    app = make_app(desk)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(call, app, b"/api/summaries", **asked("running"))
        until(lambda: desk.running == 1)
        waiting = pool.submit(call, app, b"/api/summaries", **asked("waiting"))
        streamed = pool.submit(call, app, b"/api/summaries/stream", **asked("streamed"))
        for answer in (running, waiting):
            status, _, body = answer.result(10)
            assert (status, json.loads(body)["error"][:42]) == (504, "A request must be done in 0.2 seconds, and")
        status, _, body = streamed.result(10)
        assert (status, lines_of(body.decode())[-1]["status"]) == (200, 504)
    assert desk.waiting == 0
    held.go.set()
    assert desk.close(10)
    assert held.batches == [["running"]]


def test_a_client_that_goes_takes_its_order_along(held: Held):
    desk = Desk(held)
    app = make_app(desk)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(call, app, b"/api/summaries", **asked("running"))
        until(lambda: desk.running == 1)
        for path in (b"/api/summaries", b"/api/summaries/stream"):
            pool.submit(call, app, path, leave=0.1, **asked("gone")).result(10)
        assert desk.waiting == 0
        held.go.set()
        assert running.result(10)[0] == 200
    assert desk.close(10)
    assert held.batches == [["running"]]


def test_a_stream_that_is_left_ends_the_writing(summarizer: Summarizer):
    desk = Desk(summarizer)
    body = json.dumps({"text": TEXT, "min_new_tokens": 2000, "max_new_tokens": 2000, "num_beams": 1}).encode()
    started = time.monotonic()
    request: dict[str, Any] = {"method": "POST", "headers": (HOST, JSON), "body": (body,), "leave": 0.3}
    call(make_app(desk), b"/api/summaries/stream", **request)
    assert desk.close(10)
    assert time.monotonic() - started < 5  # all of it would take longer


def test_a_server_that_closes_refuses_what_is_new(summarizer: Summarizer):
    desk = Desk(summarizer)
    app = make_app(desk)
    assert desk.close(10)
    status, headers, body = call(app, b"/api/summaries", **asked("new"))
    assert (status, headers["connection"], json.loads(body)["error"]) == (503, "close", "The server is shutting down.")
    status, _, body = call(app, b"/api/health")
    assert (status, json.loads(body)["status"]) == (503, "closing")


# --------------------------------------------------------------------------------------------------------------------
# The reference
# --------------------------------------------------------------------------------------------------------------------


def test_the_reference_describes_all_of_the_api(client: TestClient):
    schema, page = client.get("/openapi.json").json(), client.get("/docs").text
    paths = {"/api/summaries", "/api/summaries/stream", "/api/texts", "/api/health", "/api/model"}
    assert set(schema["paths"]) == paths
    for path in paths:
        assert f" {path}</code>" in page
    for name in (*schema["components"]["schemas"], *schema["components"]["schemas"]["SummaryRequest"]["properties"]):
        assert f"<code>{name}</code>" in page
    assert "HTTPValidationError" not in page
    stream = schema["paths"]["/api/summaries/stream"]["post"]
    assert "a search with beams may still change it" in " ".join(stream["description"].split())
    assert set(stream["responses"]) == {"200", "403", "408", "413", "421", "422", "503"}


def test_pages_ask_nobody_else(client: TestClient):
    for path in ("/", "/docs", "/serve.js", "/serve.css"):
        text = client.get(path).text
        assert not re.search(r"https?://|//cdn|@import|url\(|innerHTML|insertAdjacent|eval\(|localStorage|cookie", text)
        assert not re.search(r"<script(?! src=\"/)|<style| style=| on\w+=", text)


def test_the_pieces_of_a_page_make_the_page(client: TestClient, summarizer: Summarizer):
    from pyramidion.explain import page

    pieces = client.get("/page.json").json()
    told = explain(summarizer, TEXT, title="A & B").to_dict()
    whole = page(told)
    assert whole.startswith(pieces["before"] + "A &amp; B" + pieces["between"])
    assert whole.endswith(pieces["after"])


# --------------------------------------------------------------------------------------------------------------------
# PDFs
# --------------------------------------------------------------------------------------------------------------------


def make_pdf(lines: list[str]) -> bytes:
    """Write a PDF of one page by hand."""
    shown = b"".join(b"(" + line.encode("latin-1") + b") Tj T* " for line in lines)
    stream = b"BT /F1 12 Tf 14 TL 72 720 Td " + shown + b"ET"
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n" % len(stream) + stream + b"\nendstream",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    written, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, start=1):
        places.append(len(written))
        written += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % len(written)
    return written + b"xref\n0 6\n0000000000 65535 f \n" + table + end


PDF = {"Content-Type": "application/pdf"}


def test_lines_of_a_pdf_become_paragraphs():
    lines = [
        "A heading",
        "Pooling keeps the tokens that a task needs, and it blends the oth-",
        "ers into them, so that",
    ]
    text = "\n".join([*lines, "Short end.", "", "Pooling keeps the tokens that a task needs, and it blends the rest"])
    whole = "Pooling keeps the tokens that a task needs, and it blends the others into them, so that\nShort end."
    assert pdf.flow(text).startswith(f"A heading\n{whole[:60]}")
    assert "blends the others into them" in pdf.flow(text)
    assert pdf.flow("") == ""


def test_a_pdf_is_read(client: TestClient):
    pytest.importorskip("pypdf", reason="needs pypdf")
    line = "Pooling keeps the tokens that a task needs"
    answer = client.post("/api/texts", content=make_pdf([line, "of a text."]), headers=PDF)
    assert (answer.status_code, answer.json()) == (200, {"text": f"{line} of a text."})
    assert client.post("/api/texts", content=make_pdf([]), headers=PDF).json()["error"].endswith("as of a scan.")


def test_what_is_no_pdf_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    answer = client.post("/api/texts", content=b"PK\x03\x04 not one", headers=PDF)
    assert (answer.status_code, answer.json()["error"]) == (422, "A body must be a PDF, got b'PK\\x03\\x04 not'.")
    assert client.post("/api/texts", content=b"%PDF-" + b"x" * 160_000, headers=PDF).status_code == 413
    if pdf.available():
        answer = client.post("/api/texts", content=b"%PDF-1.4\n" + bytes(range(256)) * 20, headers=PDF)
        assert answer.status_code == 422
        assert answer.json()["error"].startswith("A PDF must have a text that can be read: ")
    monkeypatch.setattr(pdf, "available", lambda: False)
    answer = client.post("/api/texts", content=make_pdf(["a"]), headers=PDF)
    assert (answer.status_code, answer.json()["error"]) == (501, pdf.MISSING)


def test_a_pdf_that_takes_for_ever_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = tmp_path / "slow.py"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(pdf, "__file__", str(script))
    with pytest.raises(ValueError, match=r"took more than 0\.3 seconds"):
        asyncio.run(pdf.read_pdf(b"%PDF-", 0.3))


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def said_by(*arguments: Any) -> str:
    """Call the command, which must refuse in one line."""
    done = CliRunner().invoke(main, ["serve", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    assert done.output.count("\n") == 1
    return done.output


def test_a_wrong_call_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert "`--port` must be from 0 to 65535, got 70000." in said_by("--port", 70000)
    assert "`--limit-mb` must be more than 0 and at most 1000, got 0." in said_by("--limit-mb", 0)
    assert "`--queue` must be at least 1, got 0." in said_by("--queue", 0)
    assert "`--batch-size` must be at least 1, got -1." in said_by("--batch-size", -1)
    assert "`--timeout` must be more than 0 seconds, got nan." in said_by("--timeout", "nan")
    assert "`--model` must be a folder with a model's config.json" in said_by("--port", 0, "--model", tmp_path)
    assert "must be an address that is free, got 'no.such.host.invalid'" in said_by("--host", "no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"got '127.0.0.1' and {port}: Address already in use." in said_by("--port", port)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "must have fastapi, which is not installed: pip install 'pyramidion[serve]'." in said_by()


def test_the_address_is_printed_and_another_than_this_machines_is_told(
    summarizer: Summarizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("pyramidion.serve.server.run", lambda app, desk, taken, ready: (ready(), desk.close(5)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        for host, warned in (("127.0.0.1", ""), ("0.0.0.0", "pyramidion: 0.0.0.0 can be reached from other machines")):
            import_module("pyramidion.cli.serve")._serve(summarizer, Limits(), host, taken, False)
            said = capsys.readouterr()
            assert said.out.startswith(address)
            assert said.err.startswith(warned)
            assert bool(said.err) == bool(warned)


def test_help_needs_no_server():
    code = "import sys; from pyramidion.cli import main\ntry:\n main(['serve', '--help'])\nfinally:\n"
    code += " assert not {'fastapi', 'uvicorn', 'torch', 'pypdf'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--limit-mb" in done.stdout


# --------------------------------------------------------------------------------------------------------------------
# A real server
# --------------------------------------------------------------------------------------------------------------------


class Server:
    """A server in a process of its own."""

    def __init__(self, model: Path, *options: Any) -> None:
        arguments = [sys.executable, "-m", "pyramidion.cli", "serve", "--model", model, "--port", 0, "--device", "cpu"]
        pipe = subprocess.PIPE
        command = [str(argument) for argument in (*arguments, *options)]
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=ENVIRONMENT)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        found = re.match(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found, self.process.stderr.read().decode()  # type: ignore[union-attr]
        self.port = int(found[1])
        self.address = found[0]

    def ask(self, path: str, body: Any = None, **options: Any) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = json.dumps(body) if isinstance(body, dict) else body
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request("GET" if body is None else "POST", path, data, headers, **options)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def raw(self, request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def memory(self) -> float:
        """Give the resident memory in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def make(*options: Any) -> Server:
        started.append(Server(model, *options))
        return started[-1]

    yield make
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


def storm(server: Server, count: int) -> Counter[int]:
    """Ask so many times at once."""

    async def one(place: int) -> int:
        body = json.dumps({"text": make_text(place, 60)}).encode()
        head = "POST /api/summaries HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(f"{head}{kind}".encode() + body)
        answer = await reader.read()
        writer.close()
        status = int(answer.split()[1])
        assert status != 503 or b"\r\nretry-after: " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])
        return status

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(one, range(count)))

    return Counter(asyncio.run(all_of_them()))


def test_a_server_in_a_process(start: Callable[..., Server]):
    server = start("--queue", 16, "--batch-size", 8, "--limit-mb", 0.1)
    # Bodies: without a length, with a wrong one, and with one that is sent before the answer is read.
    chunked = (b"a" * 30_000 for _ in range(40))
    status, headers, body = server.ask("/api/summaries", chunked, encode_chunked=True)
    assert (status, json.loads(body)["error"]) == (413, "A body must have at most 100,000 bytes, got more.")
    assert server.ask("/api/summaries", b"a" * 1_000_000)[0] == 413
    assert headers["connection"] == "close"
    assert "server" not in headers
    # Paths, as they stand in a request.
    for path in (b"/../../../../etc/passwd", b"/%2e%2e/%2e%2e/etc/passwd", b"/\x00", b"http://localhost/etc/passwd"):
        answer = server.raw(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert re.match(rb"HTTP/1.1 (404|400) ", answer), path
        assert b"root:" not in answer
    assert server.raw(b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 421 ")
    # Many at once.
    assert storm(server, 8) == {200: 8}
    counts = storm(server, 60)
    assert set(counts) == {200, 503}
    assert counts[200] >= 16
    assert storm(server, 8) == {200: 8}
    end_while_it_writes(server, signal.SIGTERM)


def test_an_interrupt_ends_it_in_order_too(start: Callable[..., Server]):
    end_while_it_writes(start(), signal.SIGINT)


def end_while_it_writes(server: Server, number: int) -> None:
    """Send a signal, and see what runs finished and the rest refused."""
    long = {"text": TEXT, "num_beams": 1, "min_new_tokens": 800, "max_new_tokens": 800}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.ask, "/api/summaries", long)
        until(lambda: json.loads(server.ask("/api/health")[2])["running"] == 1)
        waiting = pool.submit(server.ask, "/api/summaries", {"text": TEXT})
        until(lambda: json.loads(server.ask("/api/health")[2])["waiting"] == 1)
        server.process.send_signal(number)
        status, _, body = waiting.result(30)
        assert (status, json.loads(body)["error"]) == (503, "The server is shutting down.")
        if not running.done():
            assert server.ask("/api/summaries", {"text": TEXT})[0] == 503
        assert running.result(30)[0] == 200
    _, said = server.process.communicate(timeout=30)
    assert server.process.returncode == 0
    assert b"Traceback" not in said


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_five_hundred_at_once_leave_no_trace(start: Callable[..., Server]):
    server = start()
    storm(server, 100)
    before = server.memory()
    for _ in range(4):
        counts = storm(server, 500)
        assert set(counts) == {200, 503}
        assert counts[200] >= 64
    assert storm(server, 20) == {200: 20}
    assert server.memory() - before < 32
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
