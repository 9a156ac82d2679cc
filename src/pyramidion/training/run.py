"""One run of training: started, resumed, finished, and never two different ones in the same folder."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import set_seed
from transformers.utils import logging

from pyramidion.data import TokenStore
from pyramidion.data.objectives import Objective, make_objective
from pyramidion.disk import write_whole
from pyramidion.kernels.launching import choose_device, unplanned
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration
from pyramidion.training.checkpoint import is_full, read_manifest
from pyramidion.training.recipe import DEFAULTS, Recipe
from pyramidion.training.trainer import Bell, PyramidionTrainer, Tell, TrainingStopped
from pyramidion.training.validation import Progress, validation

FINISHED = "finished.json"
RUN = "run.json"
FREE = {"log_every", "keep", "device", "tensorboard", "compile", "capture", "gradient_checkpointing"}  # may change


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `finished`, `stopped` by a signal with a checkpoint, or found finished `before`."""

    state: str
    step: int
    model: Path | None


def train(
    recipe: Recipe,
    data: Path,
    output: Path,
    *,
    tell: Tell = print,
    progress: Progress = lambda done, total, what: None,
    machine: Mapping[str, Any] | None = None,
) -> Outcome:
    """Train by a recipe into a folder, or go on where the folder's last run was killed.

    tell      takes each line for the user
    progress  takes how many steps are done, of how many, and what is being done
    machine   a description of it, for the account of times

    The folder holds the recipe, checkpoints, metrics and, in the end, `model`: the best by validation, or the last
    where there is no validation split. A finished run is left as it is.
    """
    world = _world()
    if (output / FINISHED).is_file():
        done = json.loads((output / FINISHED).read_text())
        tell(f"This run finished at step {done['step']}; its model is in {str(output / 'model')!r}. Nothing is done.")
        return Outcome("before", done["step"], output / "model")
    device = choose_device(recipe.device)
    if recipe.fsdp and (device.type == "cpu" or "WORLD_SIZE" not in os.environ):
        raise ValueError(
            "`fsdp` must be started by torchrun, on GPUs: parameters are shared out among processes there."
        )
    store = TokenStore.open(data)
    parts, at_once = recipe.split(world)
    logging.disable_progress_bar()  # of transformers, for every file it writes
    with Bell() as bell, unplanned(device):
        set_seed(recipe.seed)
        shown: dict[str, Any] = {"tell": tell, "progress": progress, "machine": machine}
        model = _model(recipe, store)
        objective = _objective(recipe, store, model.config)
        _same_run(recipe, store, output, world)  # only now: what is refused leaves nothing behind
        tell(f"{world} process{'es' if world > 1 else ''}, each {parts} × {at_once} documents a step. {objective}")
        if recipe.capture and (device.type == "cpu" or world > 1):
            where = f"{world} process{'es' if world > 1 else ''} on {device.type}"
            tell(f"Steps are not recorded: `capture` is for one process on a GPU, got {where}.")
        score = validation(recipe, store, output, progress, objective)
        trainer = PyramidionTrainer(model, recipe, store, output, objective, score, bell, **shown)
        assert trainer.args.world_size == world, f"{world} processes were started, {trainer.args.world_size} take part."
        trainer.resumed = _resume(trainer, world, tell)
        try:
            if not trainer.complete():
                trainer.train(resume_from_checkpoint=None if trainer.resumed is None else str(trainer.resumed))
            return _end(trainer, tell)
        except OSError as error:
            if is_full(error):
                raise TrainingStopped(_full(trainer)) from error
            raise
        finally:
            trainer.dismiss()


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _same_run(recipe: Recipe, store: TokenStore, output: Path, world: int) -> None:
    """Write down what this run is, or refuse to go on with another one in its folder."""
    path = output / RUN
    now: dict[str, Any] = {"recipe": recipe.to_dict(), "data": store.fingerprint, "world": world}
    if not path.is_file():
        output.mkdir(parents=True, exist_ok=True)
        if _first():
            write_whole(path, json.dumps(now, indent=1))
        return
    before = json.loads(path.read_text())
    told = {**DEFAULTS, **before["recipe"]}  # a run from before there was a setting had its default
    changed = [
        f"`{name}` was {told[name]!r} and is {value!r}"
        for name, value in now["recipe"].items()
        if name not in FREE and told[name] != value
    ]
    for name, meaning in {"data": "the data", "world": "the number of processes"}.items():
        if before[name] != now[name]:
            changed.append(f"{meaning} was {before[name]} and is {now[name]}")
    if changed:
        raise ValueError(f"{str(output)!r} holds another run: {'; '.join(changed)}. Choose another folder.")


def _model(recipe: Recipe, store: TokenStore) -> PyramidionForConditionalGeneration:
    if recipe.init_from is None:
        return PyramidionForConditionalGeneration(recipe.config(store.vocab_size))
    _check_origin(Path(recipe.init_from), store)
    return PyramidionForConditionalGeneration.from_pretrained(recipe.init_from, **(recipe.model or {}))


def _check_origin(folder: Path, store: TokenStore) -> None:
    """Refuse to go on from a model that means other words by the same ids."""
    if not (folder / "config.json").is_file():
        inside = folder / "model"
        hint = f" Did you mean {str(inside)!r}?" if (inside / "config.json").is_file() else ""
        raise ValueError(f"`init_from` must be a folder with a model, got {str(folder)!r}.{hint}")
    size = json.loads((folder / "config.json").read_text()).get("vocab_size", 0)
    if size < store.vocab_size:
        raise ValueError(f"`init_from` must know the {store.vocab_size} tokens of the data, got {size}.")
    told = folder / "tokenizer.json"
    if told.is_file() and _words(told) != _words(store.path / "tokenizer" / "tokenizer.json"):
        raise ValueError(
            f"`init_from` must have the tokenizer of the data, but {str(told)!r} is another one. Prepare the data with "
            f"`--tokenizer {folder}`."
        )


def _words(path: Path) -> dict[str, Any]:
    """Read what makes ids of a text, and leave out how many at once."""
    told = json.loads(path.read_text(encoding="utf-8"))
    return {name: told.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def _objective(recipe: Recipe, store: TokenStore, config: Any) -> Objective:
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return make_objective(
        recipe.objective,
        store.tokenizer(),
        recipe.corruption(),
        max_source=recipe.max_source or config.entering[0],
        max_target=recipe.max_target,
        reserved={config.pad_token_id, config.decoder_start_token_id, *ends},
    )


def _resume(trainer: PyramidionTrainer, world: int, tell: Tell) -> Path | None:
    """Find the newest checkpoint that is whole, and say which ones are not."""
    checkpoints = trainer.checkpoints
    if _first():
        checkpoints.clean()
    checkpoint, wrong = checkpoints.newest_valid()
    for fault in wrong:
        tell(f"{fault} It is not used.")
    if checkpoint is None:
        tell("Starting." if not wrong else "No checkpoint is whole: starting from the beginning.")
        return None
    manifest = read_manifest(checkpoint)
    if manifest["world"] != world:
        raise ValueError(f"{checkpoint.name} was written by {manifest['world']} processes, got {world}.")
    tell(f"Resuming from {checkpoint.name}.")
    return checkpoint


def _full(trainer: PyramidionTrainer) -> str:
    checkpoints = trainer.checkpoints
    checkpoints.clean()
    kept, _ = checkpoints.newest_valid()
    left = f"{kept.name} is whole, and the same command goes on from it" if kept else "there is no checkpoint yet"
    return f"No space is left in {str(trainer.folder)!r} to save step {trainer.state.global_step}; {left}."


def _end(trainer: PyramidionTrainer, tell: Tell) -> Outcome:
    step = trainer.state.global_step
    if trainer.stopped_by_signal:
        tell(f"Told to end: checkpoint-{step} is written. The same command goes on from there.")
        return Outcome("stopped", step, None)
    trainer.finish()
    if _first():
        facts = {"step": step, "best": trainer.progress.best, "best_step": trainer.progress.best_step}
        write_whole(trainer.folder / FINISHED, json.dumps({**facts, "skipped": trainer.progress.skipped}))
    tell(f"Finished at step {step}; the model is in {str(trainer.folder / 'model')!r}.")
    return Outcome("finished", step, trainer.folder / "model")


__all__ = ["Outcome", "TrainingStopped", "train"]
