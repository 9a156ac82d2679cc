"""What a run survives: kills at any moment, flipped bits, shortened files, SIGTERM, in one process and in two.

Children are forked from a parent that has everything imported, so that a run takes seconds; each ends as a run of the
command line does.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from pyramidion.bench import report
from pyramidion.bench.report import Column
from pyramidion.training.checkpoint import MANIFEST, Checkpoints, verify
from pyramidion.training.recipe import Recipe, read_recipe
from pyramidion.training.run import train

Tell = Callable[[int, int, str], None]
COLUMNS = (
    Column("what", "what"),
    Column("tried", "tried"),
    Column("survived", "survived"),
    Column("detail", "in detail"),
)
WRITES = ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (torch, "save"))


@dataclass(frozen=True)
class Settings:
    """How often: kills (half of them inside saving), damaged files, SIGTERMs (half of them with two processes)."""

    kills: int = 50
    damages: int = 1000
    terms: int = 30
    steps: int = 12
    seed: int = 0


def run(settings: Settings, folder: Path, tell: Tell = lambda *_: None) -> dict[str, Any]:
    """Try everything in `folder`, against runs that nobody interrupted."""
    torch.set_num_threads(1)
    total = settings.kills + settings.terms + 2
    dice = random.Random(settings.seed)
    store = make_store(folder / "store")
    tell(0, total, "undisturbed runs")
    bases = {world: Base.measure(recipe(settings, world), store, folder / f"base-{world}", world) for world in (1, 2)}
    rows = []
    killed = []
    for trial in range(settings.kills):
        tell(1 + trial, total, f"kill {trial + 1}")
        killed.append(bases[1].kill(folder / "trial", dice, inside=trial % 2 == 0))
    inside = [one for trial, one in enumerate(killed) if trial % 2 == 0]
    rows.append(_row("kill -9 at a random moment", [one for t, one in enumerate(killed) if t % 2], "kills"))
    rows.append(_row("kill -9 inside saving", inside, "kills"))
    for world in (1, 2):
        ended = []
        for trial in range(settings.terms // 2):
            tell(1 + settings.kills + (world - 1) * (settings.terms // 2) + trial, total, f"SIGTERM, {world} processes")
            ended.append(bases[world].term(folder / "trial", dice))
        rows.append(_row(f"SIGTERM, {world} process{'es' if world > 1 else ''}", ended, "stops"))
    tell(total - 1, total, "damaged files")
    rows.append(damage(bases[1].folder, dice, settings.damages))
    tell(total, total, "done")
    return {"settings": asdict(settings), "rows": rows}


def recipe(settings: Settings, world: int) -> Recipe:
    """Make a run of a few seconds that logs, validates and saves often."""
    return read_recipe(
        None,
        {
            "preset": "tiny-pyramidion",
            "batch_size": 8,
            "device_batch": 4,
            "max_steps": settings.steps,
            "warmup_steps": 3,
            "log_every": 2,
            "save_every": 3,
            "evaluate_every": 1,
            "evaluate_limit": 2,
            "generation": {"num_beams": 1, "min_new_tokens": 0, "max_new_tokens": 4},
            "device": "cpu",
        },
    )


@dataclass(frozen=True)
class Base:
    """A run that nobody interrupted: what it took, and what it ended as."""

    recipe: Recipe
    store: Path
    folder: Path
    world: int
    seconds: float
    writes: int
    digest: str

    @classmethod
    def measure(cls, recipe: Recipe, store: Path, folder: Path, world: int) -> Base:
        """Run it once, counting its writes to the disk."""
        began = time.perf_counter()
        counter = multiprocessing.get_context("fork").Value("i", 0)
        children = start(recipe, store, folder, world, count=counter)
        codes = _join(children)
        if any(codes):
            raise RuntimeError(f"The undisturbed run must end with 0, got {codes}.")
        return cls(recipe, store, folder, world, time.perf_counter() - began, counter.value, digest(folder))

    def kill(self, folder: Path, dice: random.Random, *, inside: bool) -> dict[str, Any]:
        """Kill a run up to three times, then let it finish, and compare."""
        shutil.rmtree(folder, ignore_errors=True)
        kills, wanted = 0, dice.randint(1, 3)
        while kills < wanted:
            moment = dice.randrange(self.writes) if inside else None
            children = start(self.recipe, self.store, folder, self.world, die_at=moment)
            if not inside:
                _wait(children, dice.uniform(0, self.seconds))
                for child in children:
                    child.kill()
            killed = any(code == -signal.SIGKILL for code in _join(children))
            kills += killed
            if not killed and kills:
                break  # it finished first
            if not killed:
                shutil.rmtree(folder, ignore_errors=True)
        codes = _join(start(self.recipe, self.store, folder, self.world))
        return {"kills": kills, "equal": not any(codes) and digest(folder) == self.digest}

    def term(self, folder: Path, dice: random.Random) -> dict[str, Any]:
        """Tell a run to end, see it end with 0, then let it finish, and compare."""
        shutil.rmtree(folder, ignore_errors=True)
        children = start(self.recipe, self.store, folder, self.world)
        _wait(children, dice.uniform(0.2, 0.9) * self.seconds)
        for child in children:
            child.terminate()
        codes = _join(children)
        stopped = not (folder / "finished.json").is_file()
        again = _join(start(self.recipe, self.store, folder, self.world))
        equal = not any(codes) and not any(again) and digest(folder) == self.digest
        return {"stops": int(stopped), "equal": equal, "codes": codes}


def start(
    recipe: Recipe,
    store: Path,
    folder: Path,
    world: int,
    *,
    die_at: int | None = None,
    count: Any = None,
) -> list[BaseProcess]:
    """Fork the processes of a run; one may kill itself before its n-th write to the disk."""
    context = multiprocessing.get_context("fork")
    port = _free_port()
    children = [
        context.Process(target=_child, args=(recipe, store, folder, rank, world, port, die_at, count))
        for rank in range(world)
    ]
    for child in children:
        child.start()
    return list(children)


def _child(
    recipe: Recipe, store: Path, folder: Path, rank: int, world: int, port: int, die_at: int | None, count: Any
) -> None:
    AcceleratorState._reset_state(True)  # a parent that has trained itself leaves its one process there
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if rank == 0 and (die_at is not None or count is not None):
        _count_writes(die_at, count)
    train(recipe, store, folder, tell=lambda _: None)
    sys.exit(0)


def _count_writes(die_at: int | None, count: Any) -> None:
    seen = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            if seen == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            if count is not None:
                count.value = seen
            return function(*args, **kwargs)

        return call

    for owner, name in WRITES:
        setattr(owner, name, counted(getattr(owner, name)))


def _wait(children: list[BaseProcess], seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until and any(child.is_alive() for child in children):
        time.sleep(0.01)


def _join(children: list[BaseProcess], seconds: float = 120) -> list[int | None]:
    for child in children:
        child.join(seconds)
        if child.is_alive():
            child.kill()
            child.join()
    return [child.exitcode for child in children]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def digest(folder: Path) -> str:
    """Hash all that a finished run ended with: weights, optimizer, random numbers, metrics, the kept model."""
    newest, wrong = Checkpoints(folder / "checkpoints").newest_valid()
    if newest is None or wrong or verify(folder / "model"):
        return f"not whole: {wrong}"
    seen = hashlib.sha256()
    for part in (load_file(newest / "model.safetensors"), load_file(folder / "model" / "model.safetensors")):
        _feed(seen, part)
    _feed(seen, torch.load(newest / "optimizer.pt", weights_only=True))
    for dice in sorted(newest.glob("rng_state*.pth")):
        _feed(seen, torch.load(dice, weights_only=False)["cpu"])
    seen.update((folder / "metrics.jsonl").read_bytes())
    return seen.hexdigest()


def _feed(seen: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        seen.update(value.contiguous().numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            seen.update(str(key).encode())
            _feed(seen, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(seen, item)
    else:
        seen.update(repr(value).encode())


def damage(folder: Path, dice: random.Random, times: int) -> dict[str, Any]:
    """Flip a bit of, shorten or remove a file of the newest checkpoint: it must be seen, and the one before used."""
    checkpoints = Checkpoints(folder / "checkpoints")
    (_, newest), (_, before) = checkpoints.listed()[:2]
    files = [path for path in newest.rglob("*") if path.is_file()]
    kinds = {"flipped": 0, "shortened": 0, "removed": 0}
    seen = 0
    for _ in range(times):
        file, kind = (
            dice.choice([*files, newest / MANIFEST]),
            dice.choice(["flipped"] * 3 + ["shortened"] * 2 + ["removed"]),
        )
        whole = file.read_bytes()
        place = dice.randrange(len(whole))
        file.unlink()
        if kind == "flipped":
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << dice.randrange(8)]) + whole[place + 1 :])
        elif kind == "shortened":
            file.write_bytes(whole[:place])
        kinds[kind] += 1
        found, wrong = checkpoints.newest_valid()
        named = f"{newest.name}/{file.relative_to(newest).as_posix()}"
        seen += found == before and len(wrong) == 1 and wrong[0].startswith(named)
        file.write_bytes(whole)
    assert not verify(newest)
    detail = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return {
        "what": "damaged files seen and named, the checkpoint before used",
        "tried": times,
        "survived": seen,
        "detail": detail,
    }


def _row(what: str, trials: list[dict[str, Any]], counted: str) -> dict[str, Any]:
    total = sum(trial[counted] for trial in trials)
    return {
        "what": f"{what}: the resumed run ends bit-identical",
        "tried": len(trials),
        "survived": sum(trial["equal"] for trial in trials),
        "detail": f"{total} {counted} in all",
    }


def make_store(folder: Path) -> Path:
    """Prepare a small corpus of made-up words, with a validation split."""
    from pyramidion.data.preparation import Settings as Preparation
    from pyramidion.data.preparation import prepare
    from pyramidion.data.sources import find_sources

    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnop", k=dice.randint(2, 7))) for _ in range(300)]
    for split, count in {"train": 64, "val": 6}.items():
        lines = []
        for number in range(count):
            document = dice.choices(words, k=dice.randint(20, 300))
            record = {"id": f"{split}-{number}", "document": " ".join(document), "summary": " ".join(document[:8])}
            lines.append(json.dumps(record) + "\n")
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.with_name(f"{split}.jsonl").write_text("".join(lines))
    sources, _ = find_sources([str(folder.with_name(f"{split}.jsonl")) for split in ("train", "val")], [])
    prepare(Preparation(sources, folder, vocab_size=512, workers=1))
    return folder


def write(result: Mapping[str, Any], machine: Mapping[str, Any], folder: Path, what: str) -> list[Path]:
    """Write the run as JSON and Markdown into `folder`."""
    stem = report.result_stem(what, machine)
    text = (
        f"Runs of {result['settings']['steps']} steps of tiny-pyramidion that log, validate and save every few steps, "
        "against runs that nobody interrupted. Equal to the bit are weights, the optimizer's moments, random numbers, "
        "metrics and the model that is kept."
    )
    page = report.write_markdown(
        folder / f"{stem}.md", "Torture", machine, (text, report.markdown_table(result["rows"], COLUMNS))
    )
    return [report.write_json(folder / f"{stem}.json", machine, json.loads(json.dumps(result))), page]
