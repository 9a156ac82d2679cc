"""The house rules: import directions, public names, documents that run, a light start, pinned versions."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner

from pyramidion.cli import main

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "pyramidion"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that finds this checkout's package first and return what it printed."""
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


# --------------------------------------------------------------------------------------------------------------------
# Imports point one way
# --------------------------------------------------------------------------------------------------------------------

# From the ground floor up. "pyramidion" is the public door: the package itself.
ROOMS = (
    "disk",
    "kernels",
    "topk",
    "scoring",
    "pooling",
    "attention",
    "compact",
    "modeling",
    "generation",
    "data",
    "evaluation",
    "training",
    "explain",
    "serve",
    "pyramidion",
    "bench",
    "cli",
)
MODELING = {"configuration_pyramidion", "modeling_pyramidion", "presets", "complexity"}
NOT_ON_THE_GROUND_FLOOR = {"transformers", "matplotlib", "typer", "rich"}


def room_of(module: str) -> str:
    """Name the room of a dotted module name; a module that is in no room is refused."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "pyramidion"
    room = "modeling" if name in MODELING else name
    assert room in ROOMS, f"{module} is in no room: give it a place in ROOMS, or a name that says its room."
    return room


def is_room(name: str) -> bool:
    """Tell whether `name` in `from pyramidion import name` is a module and not something handed out at the door."""
    return name in MODELING or (name in ROOMS and name not in ("modeling", "pyramidion"))


def imported_modules(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Yield the absolute name of everything that `source` imports, at the top or inside functions."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:  # `from pyramidion import topk` names a room, `... import soft_topk` the door
                yield f"{base}.{alias.name}" if base == "pyramidion" and is_room(alias.name) else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield importlib.util.resolve_name(name.value, package)


def import_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """List the imports of `source` that go up the house, or bring onto the ground floor what does not belong there."""
    room, violations = room_of(module), []
    for target in imported_modules(source, module, is_package=is_package):
        top = target.partition(".")[0]
        if top == "pyramidion":
            if ROOMS.index(room_of(target)) > ROOMS.index(room):
                violations.append(f"{module} ({room}) imports {target} ({room_of(target)}), which stands above it.")
        elif room in ("disk", "kernels", "topk") and top in NOT_ON_THE_GROUND_FLOOR:
            violations.append(f"{module} ({room}) imports {target}; the ground floor does without it.")
    return violations


def modules() -> list[tuple[str, Path]]:
    """Pair the dotted name of every module of the package with its file."""
    pairs = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        pairs.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return pairs


def test_imports_point_one_way():
    found = modules()
    assert {"pyramidion", "pyramidion.topk"} <= {name for name, _ in found}
    violations = []
    for name, path in found:
        violations += import_violations(path.read_text(), name, is_package=path.name == "__init__.py")
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pyramidion.topk.selection", "from pyramidion.bench import topk"),
        ("pyramidion.topk.selection", "from ..pooling import Pooler"),
        ("pyramidion.topk.selection", "from .. import cli"),
        ("pyramidion.topk.selection", "from pyramidion import soft_topk"),
        ("pyramidion.topk.selection", "import pyramidion.modeling_pyramidion as modeling"),
        ("pyramidion.topk.selection", "def late():\n    from pyramidion import scoring"),
        ("pyramidion.topk.selection", "import importlib\nimportlib.import_module('pyramidion.serve.pages')"),
        ("pyramidion.topk.selection", "from transformers.utils import logging"),
        ("pyramidion.topk.selection", "if condition:\n    import matplotlib.pyplot as plt"),
        ("pyramidion.scoring", "from .pooling import Pooler"),
        ("pyramidion.presets", "from .generation import decode"),
        ("pyramidion.bench.topk", "from .. import cli"),
        ("pyramidion", "from .cli import main"),
    ],
)
def test_an_import_that_goes_up_is_found(module: str, source: str):
    assert len(import_violations(source, module, is_package=module == "pyramidion")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pyramidion.topk.fused", "import torch\nfrom .selection import Selection\nfrom . import tournament"),
        ("pyramidion.modeling_pyramidion", "from transformers import PreTrainedModel\nfrom .presets import PRESETS"),
        ("pyramidion.bench.topk", "from pyramidion import soft_topk\nfrom ..topk import rivals"),
        ("pyramidion.cli", "def bench():\n    from . import bench as bench_room\n    import rich"),
        ("pyramidion", "from .topk import soft_topk"),
    ],
)
def test_an_import_that_goes_down_is_allowed(module: str, source: str):
    assert import_violations(source, module, is_package=module == "pyramidion") == []


def test_a_module_without_a_room_is_refused():
    with pytest.raises(AssertionError, match="in no room"):
        room_of("pyramidion.utils")


# --------------------------------------------------------------------------------------------------------------------
# Public names
# --------------------------------------------------------------------------------------------------------------------

PUBLIC_NAMES = [
    "EmbeddingScorer",
    "Explanation",
    "IndexScorer",
    "LinearScorer",
    "NonlinearScorer",
    "Pooler",
    "PowerScorer",
    "PyramidionConfig",
    "PyramidionEncoderModel",
    "PyramidionForConditionalGeneration",
    "PyramidionForSequenceClassification",
    "PyramidionModel",
    "RandomScorer",
    "Selection",
    "StridedPooler",
    "Summarizer",
    "__version__",
    "hard_topk",
    "preset",
    "soft_topk",
    "straight_through_topk",
]


def test_public_names_are_these():
    import pyramidion

    assert sorted(pyramidion.__all__) == PUBLIC_NAMES
    assert all(hasattr(pyramidion, name) for name in PUBLIC_NAMES)


def is_imperative(line: str) -> bool:
    """Tell whether a docstring's first line commands: no article or pronoun in front, no verb in the third person."""
    first = line.split()[0]
    third_person = first.endswith("s") and not first.endswith("ss")
    return first not in {"A", "An", "It", "The", "This"} and first[0].isupper() and not third_person


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name != "__version__"])
def test_public_names_are_documented(name: str):
    import pyramidion

    value = getattr(pyramidion, name)
    first_line = (value.__doc__ or "").strip().partition("\n")[0]
    assert first_line.endswith("."), f"{name}: the first line of its docstring must be one sentence, got {first_line!r}"
    if inspect.isfunction(value):
        assert is_imperative(first_line), f"{name}: the docstring must start with a command, got {first_line!r}"


def test_imperative_is_told_from_description():
    assert is_imperative("Pool the tokens of each slot.")
    assert is_imperative("Compress a row.")
    assert not is_imperative("Returns the pooled tokens.")
    assert not is_imperative("The soft choice of k tokens.")


def test_the_version_is_the_same_everywhere():
    import pyramidion

    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation is not None
    assert pyramidion.__version__ == PROJECT["version"] == citation[1]


# --------------------------------------------------------------------------------------------------------------------
# Documents that run
# --------------------------------------------------------------------------------------------------------------------

WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PACKAGE.rglob("*.md"), *(ROOT / "docs").rglob("*.md")]
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in WRITTEN if "assets" not in path.parts)
# What a model's card shows is what the README shows, and loading the model twice takes long.


def python_of(markdown: str) -> str:
    """Keep the lines of the ```python blocks and blank the others: a traceback then counts the document's lines."""
    kept, indent, inside = [], 0, False
    for line in markdown.splitlines():
        fence = re.match(r"( *)```(\w*)", line)
        if fence and not inside and fence[2] == "python":
            indent, inside = len(fence[1]), True
            kept.append("")
        elif fence:
            inside = False
            kept.append("")
        else:
            kept.append(line[indent:] if inside else "")
    return "\n".join(kept).rstrip() + "\n"


def test_python_of_keeps_python_blocks_and_line_numbers():
    markdown = "text\n```python\nx = 1\n```\n```bash\nmake run\n```\n- item\n  ```python\n  y = x\n  ```\n"
    assert python_of(markdown) == "\n\nx = 1\n\n\n\n\n\n\ny = x\n"
    assert python_of("```bash\nmake run\n```\n").strip() == ""


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_document_shows_python(document: str):
    assert python_of((ROOT / document).read_text()).strip(), f"{document} must show Python that runs."


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_document_runs(document: str, tmp_path: Path):
    source = python_of((ROOT / document).read_text())
    if not source.strip():
        return
    script = tmp_path / f"{Path(document).stem}.py"
    script.write_text(source)
    done = run_python("-W", "error", str(script), cwd=tmp_path)
    assert done.returncode == 0, f"{document}:\n{done.stderr}"


# --------------------------------------------------------------------------------------------------------------------
# A light start
# --------------------------------------------------------------------------------------------------------------------


def imported_by(code: str, *arguments: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter imports while it runs `code`."""
    done = run_python("-X", "importtime", "-c", code, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_import_is_light():
    packages = imported_by("import pyramidion; pyramidion.soft_topk; pyramidion.Selection")
    assert {"pyramidion", "torch"} <= packages
    assert not packages & {"transformers", "triton", "matplotlib", "typer", "rich"}


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "a count", "a policy"],
)
def test_threads_that_wait_soon_sleep(given: dict[str, str], count: str | None, monkeypatch: pytest.MonkeyPatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test is over
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert CliRunner().invoke(main, ["presets", "row-8"]).exit_code == 0
    assert os.environ.get("GOMP_SPINCOUNT") == count


def test_help_starts_without_torch():
    assert PROJECT["scripts"] == {"pyramidion": "pyramidion.cli:main"}
    packages = imported_by("from pyramidion.cli import main; main()", "--help")
    assert "pyramidion" in packages
    assert not packages & {"torch", "transformers", "triton", "matplotlib"}


# --------------------------------------------------------------------------------------------------------------------
# The repository
# --------------------------------------------------------------------------------------------------------------------

# A place on somebody's machine, or a place where packages are fetched from. (Neither pattern matches its own text.)
FOREIGN = re.compile(
    r"(?<![\w.~})])/(?:home|Users|root|work|opt|mnt)/"
    r"|file:[/]{3}|pypi[.]org|pythonhosted[.]org|find[-_]links|index[-_]url",
    re.IGNORECASE,
)


def tracked_files() -> list[Path]:
    """List the files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_files_name_no_machine():
    files = tracked_files()
    assert ROOT / "pyproject.toml" in files
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_a_machine_is_recognised():
    for text in ("cd /" + "home/me", "'/" + "root/.cache'", "--find" + "-links x", "file:" + "///x", "INDEX" + "_URL"):
        assert FOREIGN.search(text), text
    for text in ("https://aclanthology.org/" + "work/1", "src/" + "work/x", "the work / the home"):
        assert not FOREIGN.search(text), text


def requirements(extra: str | None = None) -> list[Requirement]:
    """Return the core's requirements, or an extra's with the extras it refers to resolved."""
    listed = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    resolved: list[Requirement] = []
    for requirement in map(Requirement, listed):
        own = canonicalize_name(requirement.name) == PROJECT["name"]
        resolved += [r for e in requirement.extras for r in requirements(e)] if own else [requirement]
    return resolved


def test_constraints_pin_what_setup_installs():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        name, _, version = line.partition("==")
        assert version, f"constraints.txt must pin exactly, got {line!r}"
        assert Version(version).local is None, f"constraints.txt must pin a public version, got {line!r}"
        pins[canonicalize_name(name)] = version
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in [*requirements(), *requirements("dev"), *map(Requirement, build)]:
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt must pin {name}."
        assert requirement.specifier.contains(pins[name]), f"{name} is pinned to {pins[name]}, against {requirement}."
