"""What every test may rely on: kernels run somewhere, seeds are fixed, arithmetic is not shared with other workers."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU

import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests that need a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays to the end: modules and tests, a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --------------------------------------------------------------------------------------------------------------------
# Pages
# --------------------------------------------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
WATCH = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.__violations.push(event.violatedDirective));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a browser, or skip."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync_api.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, BROWSERS)), playwright.chromium.executable_path)
        if not Path(path).exists():
            pytest.skip("needs a Chromium")
        started = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield started
        started.close()
