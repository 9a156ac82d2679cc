"""The files that a browser gets, all in memory: the page, the view of an explanation in it, and the reference."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from pyramidion.explain import page
from pyramidion.explain.browser import NO_MARKUP, asset
from pyramidion.serve.gate import NOTHING

TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "json": "application/json",
}
OWN = "style-src 'self'; img-src 'self'"
POLICY = f"{NOTHING}; {NO_MARKUP}; {OWN}; script-src 'self'; connect-src 'self'"
MARK = "the-place-of-what-is-shown"

File = tuple[bytes, dict[str, str]]


def static() -> dict[str, File]:
    """Give what is served at which path, with its headers."""
    own = {f"/{name}": _text(name) for name in ("serve.css", "serve.js", "icon.svg")}
    shared = {"/explain.css": asset("page.css"), "/explain.js": asset("page.js")}
    found = {path: _file(path, text) for path, text in {**own, **shared, "/page.json": _pieces()}.items()}
    return {"/": _file("/index.html", _text("index.html"), POLICY), **found}


def reference(schema: Mapping[str, Any]) -> File:
    """Write the reference of the API from its OpenAPI description: no script, nothing from elsewhere."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.from_string(_text("reference.html")).render(schema=schema)
    return _file("/docs.html", text, f"{NOTHING}; {OWN}")


def _text(name: str) -> str:
    return (files("pyramidion.serve") / name).read_text(encoding="utf-8")


def _file(path: str, text: str, policy: str = NOTHING) -> File:
    kind = TYPES[path.rpartition(".")[2]]
    headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return text.encode(), headers


def _pieces() -> str:
    """Cut an explanation's page where its title and its data go, for the browser to put its own in."""
    import json

    before, between, after = page({"title": MARK}).replace(json.dumps({"title": MARK}), MARK).split(MARK)
    return json.dumps({"before": before, "between": between, "after": after})


__all__ = ["reference", "static"]
