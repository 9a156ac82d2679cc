"""Checkpoints survive: a kill at any moment, a flipped bit, a missing or shortened file, a full disk."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyramidion.disk import write_whole
from pyramidion.training.checkpoint import (
    MANIFEST,
    Checkpoints,
    discard,
    is_full,
    read_manifest,
    seal,
    verify,
)

FILES = {"model.safetensors": b"\x00weights" * 500, "optimizer.pt": b"moments" * 300, "deep/rng_state.pth": b"dice"}


def fill(folder: Path, text: bytes = b"") -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content + text)


def write(checkpoints: Checkpoints, step: int) -> Path:
    fill(checkpoints.stage(step), str(step).encode())
    return checkpoints.seal(step, world=1)


class Killed(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


@contextmanager
def killed_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Stop the process, so to speak, before its `moment`-th write to the disk."""
    count = [0]

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if count[0] == moment:
                raise Killed
            count[0] += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (shutil, "rmtree")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(Path, "write_bytes", counted(Path.write_bytes))
        patch.setattr(Path, "open", counted(Path.open))
        yield count


def test_a_sealed_folder_is_whole_and_says_what_it_is(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "run")
    path = write(checkpoints, 7)
    assert path.name == "checkpoint-7"
    assert verify(path) == []
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["world"]) == (7, 1)
    assert set(manifest["files"]) == set(FILES)
    assert checkpoints.newest_valid() == (path, [])
    assert [child.name for child in (tmp_path / "run").iterdir()] == ["checkpoint-7"]


def test_the_newest_stay(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 100, 20):
        write(checkpoints, step)
    assert [step for step, _ in checkpoints.listed()] == [100, 20]
    with pytest.raises(ValueError, match="`keep` must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def test_nothing_is_found_where_nothing_is(tmp_path: Path):
    assert Checkpoints(tmp_path / "no").newest_valid() == (None, [])
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-5").write_text("a file")
    assert Checkpoints(tmp_path).newest_valid() == (None, ["checkpoint-3/manifest.json is missing."])


def test_a_kill_at_every_moment_leaves_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = set()
    for moment in range(200):
        run = tmp_path / str(moment)
        checkpoints = Checkpoints(run, keep=1)
        write(checkpoints, 1)
        with killed_at(moment, monkeypatch) as count:
            try:
                write(checkpoints, 2)
                finished = True
            except Killed:
                finished = False
        newest, wrong = checkpoints.newest_valid()
        assert newest is not None
        assert wrong == []
        seen.add(newest.name)
        if finished:
            assert newest.name == "checkpoint-2"
            assert count[0] == moment
            break
        checkpoints.clean()
        assert all(child.name.startswith("checkpoint-") for child in run.iterdir())
        assert write(checkpoints, 2).name == "checkpoint-2"  # and the run goes on
        assert checkpoints.newest_valid()[0] == run / "checkpoint-2"
    assert finished
    assert moment > 10
    assert seen == {"checkpoint-1", "checkpoint-2"}


def test_a_kill_while_one_is_replaced_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A broken checkpoint is written again at the same step; the one before it stays until then."""
    for moment in range(200):
        checkpoints = Checkpoints(tmp_path / str(moment), keep=2)
        write(checkpoints, 1)
        (write(checkpoints, 2) / "optimizer.pt").write_bytes(b"broken")
        finished = False
        with killed_at(moment, monkeypatch):
            try:
                write(checkpoints, 2)
                finished = True
            except Killed:
                pass
        newest, _ = checkpoints.newest_valid()
        assert newest is not None
        if finished:
            break
    assert finished
    assert newest.name == "checkpoint-2"


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_what_is_wrong_is_named_and_the_one_before_is_used(name: str, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    write(checkpoints, 1)
    path = write(checkpoints, 2)
    whole = (path / name).read_bytes()
    flipped = bytes([whole[0] ^ 1]) + whole[1:]
    for content in (flipped, whole[:-1], whole + b"\0", b"", None):
        (path / name).unlink()
        if content is not None:
            (path / name).write_bytes(content)
        newest, wrong = checkpoints.newest_valid()
        assert newest is not None
        assert newest.name == "checkpoint-1"
        assert len(wrong) == 1
        assert wrong[0].startswith(f"checkpoint-2/{name} ")
        (path / name).write_bytes(whole)
    assert checkpoints.newest_valid() == (path, [])


def test_every_flip_and_every_cut_is_seen(tmp_path: Path):
    path = write(Checkpoints(tmp_path), 3)
    dice = random.Random(0)
    for _ in range(200):
        file = path / dice.choice([*FILES, MANIFEST])
        whole = file.read_bytes()
        if dice.random() < 0.7:
            place, bit = dice.randrange(len(whole)), dice.randrange(8)
            file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        else:
            file.write_bytes(whole[: dice.randrange(len(whole))])
        assert verify(path), file
        file.write_bytes(whole)
    assert verify(path) == []


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = Checkpoints(tmp_path)
    old = write(checkpoints, 1)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space") as error:
            write(checkpoints, 2)
    assert is_full(error.value)
    assert not is_full(OSError(errno.EACCES, ""))
    assert checkpoints.newest_valid() == (old, [])
    checkpoints.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_small_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "finished.json"
    write_whole(path, "old")
    finished = False
    for moment in range(20):
        with killed_at(moment, monkeypatch):
            try:
                write_whole(path, "new")
                finished = True
            except Killed:
                pass
        assert path.read_text() in ("old", "new")
        if finished:
            break
    assert finished
    assert path.read_text() == "new"


def test_a_discarded_folder_is_gone_and_twice_is_no_error(tmp_path: Path):
    folder = tmp_path / "best"
    fill(folder)
    discard(folder)
    discard(folder)
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path / "staged")
    assert verify(seal(tmp_path / "staged", folder, step=1)) == []
