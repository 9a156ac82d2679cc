"""An Explanation as one page that needs no network: what it says is data, and what runs is named by its hash."""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'"
NO_MARKUP = "require-trusted-types-for 'script'; trusted-types 'none'"  # a script cannot turn text into elements


def page(explanation: Mapping[str, Any] | None) -> str:
    """Write the page of `Explanation.to_dict()`; without one, a page whose `pyramidion.mount(data)` shows one later.

    The text of a document is only ever data: JSON with every < escaped, which the script puts into text nodes. The
    policy of the page lets that script and that style run, by their hashes, and nothing else, whatever a text holds.
    """
    style, script = asset("page.css"), asset("page.js")
    title = "Pyramidion" if explanation is None else _plain(str(explanation["title"]))
    policy = f"{NOTHING}; {NO_MARKUP}; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return str(_template().render(policy=policy, title=title, style=style, script=script, data=explanation))


@cache
def asset(name: str) -> str:
    """Read a file of the page: page.html, page.css or page.js."""
    return (files("pyramidion.explain") / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        message = "a page must have jinja2 to be written with: pip install 'pyramidion[serve]'."
        raise ImportError(message, name="jinja2") from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(asset("page.html"))


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _plain(title: str) -> str:
    """Put one blank for what has no place in the title of a window: control characters, halves of surrogate pairs."""
    return "".join(letter if letter.isprintable() else " " for letter in title)


__all__ = ["asset", "page"]
