"""Kernels compile for a GPU, also where there is none: the interpreter that runs them in tests checks no types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyramidion.bench.profile import own_kernels

pytest.importorskip("triton")


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path):
    """One that nobody launched would be missing, one that does not compile ends it all."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        env=settings | {"TRITON_CACHE_DIR": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["compiled"] == found["roots"]
    assert len(found["roots"]) > 20
    assert set(found["roots"]) <= set(own_kernels()), "a profile would not know what they are for"
