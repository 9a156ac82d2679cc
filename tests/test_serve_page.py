"""The page of the server in a browser: from a text to its explanation, by mouse, by keys, at any width."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs fastapi")
pytest.importorskip("uvicorn", reason="needs uvicorn")

import uvicorn

from conftest import WATCH
from pyramidion.generation import Summarizer
from pyramidion.serve import pdf
from pyramidion.serve.app import make_app
from pyramidion.serve.desk import Desk
from pyramidion.serve.limits import Limits
from pyramidion.serve.server import address_of, bind
from test_generation import make_text, write_model
from test_serve import make_pdf

pytestmark = pytest.mark.slow
HOSTILE = "</script><script>window.__pwned=1</script><img src=x onerror=window.__pwned=1> \u202e & 'quoted' \u2028 end"
ARTICLE = "\n\n".join(f"Part {part}\n\n{make_text(part, 90)}" for part in range(4))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    model = write_model(tmp_path_factory.mktemp("served"))
    return Desk(Summarizer.from_pretrained(model, device="cpu"), Limits(body_bytes=50_000))


@pytest.fixture(scope="module")
def address(desk: Desk) -> Iterator[str]:
    """Serve in a thread."""
    taken = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(desk), log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, args=([taken],))
    thread.start()
    yield address_of(taken)
    server.should_exit = True
    thread.join(30)
    assert desk.close(30)


class Tab:
    """The page, and what it did besides showing."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.address = address
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.wait("#model", "Model ")

    def summarise(self, text: str, **options: Any) -> Any:
        """Paste a text, set options, and wait for the result."""
        self.page.locator("#text").fill(text)
        if options:
            self.page.locator(".options summary").click()
        for name, value in options.items():
            field = self.page.locator(f"#{name}")
            field.set_checked(value) if isinstance(value, bool) else field.fill(str(value))
        self.page.locator("#start").click()
        self.page.wait_for_selector("#result:not([hidden])", timeout=60_000)
        return self.page

    def wait(self, place: str, beginning: str) -> str:
        """Wait for what an element says, or what stands in a field, by its beginning, and give all of it."""
        deadline = time.monotonic() + 30
        read = "(one) => one.value ?? one.textContent"  # asked from here: the page's policy lets nobody evaluate there
        while not (found := str(self.page.locator(place).evaluate(read))).startswith(beginning):
            assert time.monotonic() < deadline, found[:200]
            time.sleep(0.02)
        return found

    def check(self, *, refused: bool = False) -> None:
        """See that nothing ran, nobody else was asked, and nothing had to be stopped."""
        errors = [error for error in self.errors if not (refused and "Failed to load resource" in error)]
        assert errors == []
        assert [url for url in self.requests if not url.startswith((self.address, "blob:"))] == []
        assert self.page.evaluate("[window.__pwned ?? null, window.__violations]") == [None, []]


@pytest.fixture
def open_tab(browser: Any, address: str) -> Iterator[Callable[..., Tab]]:
    opened: list[Tab] = []

    def make(**options: Any) -> Tab:
        opened.append(Tab(browser, address, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.context.close()


def test_from_a_text_to_its_explanation(open_tab: Callable[..., Tab], tmp_path: Path):
    tab = open_tab(accept_downloads=True)
    page = tab.summarise(ARTICLE, title="A & <b>", num_beams=1, max_new_tokens=120, min_new_tokens=120)
    assert page.locator("h1:visible").inner_text() == "A & <b>"
    assert page.title() == "A & <b> · Pyramidion"
    assert page.locator(".source .reading").evaluate("(one) => one.textContent") == ARTICLE
    assert page.locator("#live").inner_text() == "Done."
    # What was kept, as on the page of `pyramidion explain`.
    page.locator(".summary .w").nth(2).hover()
    assert "gave" in page.locator(".detail").inner_text()
    assert page.locator(".source :is(.m1, .m2, .m3)").count() > 0
    before = page.locator(".source .s4").count()
    page.locator("#stage").fill("0")
    assert "none yet" in page.locator("output").inner_text()
    assert page.locator(".source .s4").count() == 0 < before
    # The same, as a file that needs no server.
    with page.expect_download() as found:
        page.locator("#download").click()
    assert found.value.suggested_filename == "A-b.explained.html"
    saved = tmp_path / "saved.html"
    found.value.save_as(saved)
    tab.check()
    alone = tab.context.new_page()
    alone.goto(saved.as_uri())
    assert alone.title() == "A & <b>"
    assert alone.locator(".source .reading").evaluate("(one) => one.textContent") == ARTICLE
    alone.locator(".summary .w").nth(2).hover()
    assert "gave" in alone.locator(".detail").inner_text()
    assert alone.evaluate("window.__violations") == []
    # And once more.
    page.locator("#again").click()
    assert page.locator("#text").input_value() == ARTICLE
    assert page.evaluate("document.activeElement.id") == "text"
    tab.page.locator("#start").click()
    page.wait_for_selector("#result:not([hidden])", timeout=60_000)
    tab.check()


def test_the_summary_is_read_as_it_is_written(open_tab: Callable[..., Tab]):
    tab = open_tab()
    tab.page.evaluate("""() => {
      const seen = (window.__seen = { states: [], drafts: [], spoken: [] });
      const watch = (id, list) => new MutationObserver(() => list.push(document.getElementById(id).textContent))
        .observe(document.getElementById(id), { childList: true, characterData: true, subtree: true });
      watch("state", seen.states); watch("written", seen.drafts); watch("live", seen.spoken);
    }""")
    page = tab.summarise(ARTICLE, num_beams=1, max_new_tokens=300, min_new_tokens=300)
    seen = page.evaluate("window.__seen")
    assert any(re.fullmatch(r"Writing · \d+ tokens? of at most 300", state) for state in seen["states"])
    assert len(set(seen["drafts"])) > 2
    assert sorted(seen["drafts"], key=len) == seen["drafts"]
    assert seen["spoken"].count("Writing") == 1  # said once, not with every token
    assert seen["spoken"][-1] == "Done."
    tab.check()


def test_cancelling_ends_the_writing(open_tab: Callable[..., Tab], desk: Desk):
    tab = open_tab()
    page = tab.page
    page.locator("#text").fill(ARTICLE)
    page.locator(".options summary").click()
    for name, value in {"num_beams": 1, "min_new_tokens": 2000, "max_new_tokens": 2000}.items():
        page.locator(f"#{name}").fill(str(value))
    for way in ("button", "key"):
        page.locator("#start").click()
        page.wait_for_selector("#draft:not([hidden])", timeout=60_000)
        assert page.locator("#text").is_disabled()
        page.locator("#cancel").click() if way == "button" else page.keyboard.press("Escape")
        tab.wait("#state", "Cancelled.")
        deadline = time.monotonic() + 5
        while desk.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert desk.running == 0
        assert page.locator("#text").input_value() == ARTICLE
        assert page.locator("#start").is_enabled()
        assert page.locator("#draft").is_hidden()
    tab.check()


def test_files_are_read(open_tab: Callable[..., Tab], tmp_path: Path):
    tab = open_tab()
    page, file = tab.page, tab.page.locator("#file")

    def give(name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        file.set_input_files(tmp_path / name)

    give("a.txt", "\ufeffWörter für 😀 alle".encode())
    assert tab.wait("#text", "Wörter für 😀 alle") == "Wörter für 😀 alle"
    assert page.locator("#count").inner_text() == "4 words"
    assert page.locator("#title").input_value() == "a.txt"
    page.locator("#text").fill("Other words")
    assert page.locator("#title").input_value() == ""
    give("b.txt", "sixteen bits".encode("utf-16"))
    assert tab.wait("#text", "sixteen bits") == "sixteen bits"
    give("c.png", b"\x89PNG\r\n\x1a\n\xff")
    assert tab.wait("#problem", "c") == "c.png must be a text in UTF-8, or a PDF."
    give("d.txt", b"x" * 50_001)
    assert tab.wait("#problem", "d.txt") == "d.txt must have at most 0.1 MB, got 0.1 MB."
    give("e.pdf", b"no PDF")
    tab.wait("#problem", "A body")
    if pdf.available():
        give("f.pdf", make_pdf(["Pooling keeps the tokens"]))
        assert tab.wait("#text", "Pooling keeps the tokens") == "Pooling keeps the tokens"
    page.evaluate("""() => {
      const data = new DataTransfer();
      data.items.add(new File(["dropped here"], "g.md"));
      const send = (kind) => document.getElementById("text").dispatchEvent(
        new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
      send("dragover");
      window.__over = document.getElementById("drop").className;
      send("drop");
    }""")
    assert tab.wait("#text", "dropped here") == "dropped here"
    assert page.evaluate("[window.__over, document.getElementById('drop').className]") == ["drop over", "drop"]
    tab.check(refused=True)


def test_what_is_wrong_is_said_beside_it(open_tab: Callable[..., Tab]):
    tab = open_tab()
    page = tab.page
    page.locator("#start").click()
    assert tab.wait("#problem", "There") == "There must be a text to summarise."
    page.locator("#text").fill("a " * 30_000)
    page.locator("#start").click()
    tab.wait("#problem", "A text must")
    page.locator("#text").fill(ARTICLE)
    page.locator(".options summary").click()
    page.locator("#num_beams").fill("99")
    page.locator("#start").click()
    assert tab.wait("#problem", "“Beams”") == "“Beams” must be less than or equal to 16, got 99."
    page.locator("#num_beams").fill("")
    page.context.set_offline(True)
    page.locator("#start").click()
    tab.wait("#problem", "The server cannot")
    page.context.set_offline(False)
    assert page.locator("#text").input_value() == ARTICLE
    page.locator("#start").click()
    page.wait_for_selector("#result:not([hidden])", timeout=60_000)
    assert page.locator("#problem").text_content() == ""
    tab.check(refused=True)


def test_a_summary_without_an_explanation(open_tab: Callable[..., Tab]):
    tab = open_tab()
    page = tab.summarise(ARTICLE * 2, explain=False)
    assert page.locator(".only .reading").inner_text()
    assert "more than the 512 the model is for" in page.locator("#explanation").inner_text()
    assert page.locator("#download").is_hidden()
    assert page.locator("#copy").is_visible()
    tab.check()


def test_keys_are_enough(open_tab: Callable[..., Tab]):
    tab = open_tab()
    page = tab.page
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName.toLowerCase()"))
    assert reached == ["text", "file", "summary", "start", "a"]
    page.locator("#text").focus()
    page.keyboard.insert_text(ARTICLE)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#result:not([hidden])", timeout=60_000)
    assert page.evaluate("document.activeElement.tagName") == "H1"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == "download"
    tab.check()


def test_a_hostile_text_is_shown_and_not_run(open_tab: Callable[..., Tab], tmp_path: Path):
    tab = open_tab(accept_downloads=True)
    page = tab.summarise(HOSTILE, title=HOSTILE.replace("\u2028", ""), num_beams=1)
    assert page.locator(".source .reading").evaluate("(one) => one.textContent") == HOSTILE
    with page.expect_download() as found:
        page.locator("#download").click()
    saved = tmp_path / "saved.html"
    found.value.save_as(saved)
    alone = tab.context.new_page()
    alone.goto(saved.as_uri())
    assert alone.locator(".source .reading").evaluate("(one) => one.textContent") == HOSTILE
    assert alone.evaluate("[window.__pwned ?? null, document.scripts.length, document.images.length]") == [None, 2, 0]
    tab.check()


@pytest.mark.parametrize("width", [320, 390, 768])
def test_no_width_is_too_narrow(open_tab: Callable[..., Tab], width: int):
    tab = open_tab(viewport={"width": width, "height": 800})
    overflow = "document.documentElement.scrollWidth - innerWidth"
    assert tab.page.evaluate(overflow) <= 0
    page = tab.summarise("x" * 300 + ARTICLE, title="A_title_without_any_space_in_it" * 8)
    assert page.evaluate(overflow) <= 0
    for name in ("again", "copy", "download"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    page.goto(f"{tab.address}docs")
    assert page.evaluate(overflow) <= 0
    tab.check()


def test_dark_and_light(open_tab: Callable[..., Tab]):
    shades = {}
    for scheme in ("light", "dark"):
        tab = open_tab(color_scheme=scheme)
        shades[scheme] = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert shades["light"] != shades["dark"]
