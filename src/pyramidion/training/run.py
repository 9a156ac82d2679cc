"""One run of training: started, resumed, finished, and never two different ones in the same folder."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from pyramidion.data import TokenStore
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration
from pyramidion.training.checkpoint import is_full, read_manifest, verify, write_atomically
from pyramidion.training.recipe import Recipe
from pyramidion.training.trainer import Bell, PyramidionTrainer, TrainingStopped

FINISHED = "finished.json"
RUN = "run.json"
FREE = {"log_every", "keep", "device", "compile", "tensorboard", "gradient_checkpointing"}  # may change when resumed

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `finished`, `stopped` by a signal with a checkpoint, or found finished `before`."""

    state: str
    step: int
    model: Path | None


def train(recipe: Recipe, data: Path, output: Path, *, tell: Tell = print) -> Outcome:
    """Train by a recipe into a folder, or go on where the folder's last run was killed.

    The folder holds the recipe, checkpoints, metrics and, in the end, `model`: the best by validation, or the last
    where there is no validation split. A finished run is left as it is.
    """
    world = _world()
    if (output / FINISHED).is_file():
        done = json.loads((output / FINISHED).read_text())
        tell(f"This run finished at step {done['step']}; its model is in {str(output / 'model')!r}. Nothing is done.")
        return Outcome("before", done["step"], output / "model")
    store = TokenStore.open(data)
    _same_run(recipe, store, output, world)
    parts = recipe.accumulation(world)
    tell(f"{world} process{'es' if world > 1 else ''}, each {parts} × {recipe.device_batch} documents a step.")
    with Bell() as bell:
        set_seed(recipe.seed)
        trainer = PyramidionTrainer(_model(recipe, store), recipe, store, output, _scoring(recipe, store), bell)
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
            write_atomically(path, json.dumps(now, indent=1))
        return
    before = json.loads(path.read_text())
    changed = [
        f"`{name}` was {before['recipe'].get(name)!r} and is {value!r}"
        for name, value in now["recipe"].items()
        if name not in FREE and before["recipe"].get(name) != value
    ]
    for name, meaning in {"data": "the data", "world": "the number of processes"}.items():
        if before[name] != now[name]:
            changed.append(f"{meaning} was {before[name]} and is {now[name]}")
    if changed:
        raise ValueError(f"{str(output)!r} holds another run: {'; '.join(changed)}. Choose another folder.")


def _model(recipe: Recipe, store: TokenStore) -> PyramidionForConditionalGeneration:
    if recipe.init_from is not None:
        return PyramidionForConditionalGeneration.from_pretrained(recipe.init_from, **(recipe.model or {}))
    return PyramidionForConditionalGeneration(recipe.config(store.vocab_size))


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
    best = trainer.folder / "best"
    if trainer.progress.best is not None and not verify(best):
        weights = PyramidionForConditionalGeneration.from_pretrained(best).state_dict()
        trainer.accelerator.unwrap_model(trainer.model).load_state_dict(weights)
    trainer._keep("model")
    if _first():
        facts = {"step": step, "best": trainer.progress.best, "best_step": trainer.progress.best_step}
        write_atomically(trainer.folder / FINISHED, json.dumps({**facts, "skipped": trainer.progress.skipped}))
    tell(f"Finished at step {step}; the model is in {str(trainer.folder / 'model')!r}.")
    return Outcome("finished", step, trainer.folder / "model")


def _scoring(recipe: Recipe, store: TokenStore) -> Callable[[nn.Module], dict[str, float]] | None:
    """Make the function that scores a model by what it writes on the validation split."""
    name = next((name for name in ("val", "validation", "valid", "dev") if name in store.splits), None)
    if name is None:
        return None
    from pyramidion.evaluation import rouge
    from pyramidion.generation import decoding_options

    split, tokenizer = store[name], store.tokenizer()
    count = len(split) if recipe.evaluate_limit is None else min(len(split), recipe.evaluate_limit)
    collate = _source_of(recipe)

    @torch.no_grad()
    def score(model: Any) -> dict[str, float]:
        search = decoding_options(model.config, **(recipe.generation or {}))
        rank, world = int(os.environ.get("RANK", "0")), _world()
        order = sorted(range(count), key=lambda i: int(split.document_lengths[i]))[rank::world]
        written: dict[int, str] = {}
        for begin in range(0, len(order), recipe.device_batch):
            chosen = order[begin : begin + recipe.device_batch]
            batch = {key: value.to(model.device) for key, value in collate(model, [split[i] for i in chosen]).items()}
            texts = tokenizer.batch_decode(model.generate(**batch, generation_config=search), skip_special_tokens=True)
            written.update(zip(chosen, texts, strict=True))
        written = _gathered(written, world)
        scores = rouge([written[i] for i in range(count)], [split.summary_text(i) for i in range(count)])
        return {key: 100 * float(values.mean()) for key, values in scores.items()}

    return score


def _source_of(recipe: Recipe) -> Callable[[Any, list[Any]], dict[str, torch.Tensor]]:
    from pyramidion.data import Collator

    def collate(model: Any, examples: list[Any]) -> dict[str, torch.Tensor]:
        config = model.config
        source = recipe.max_source or config.entering[0]
        collator = Collator(pad=config.pad_token_id, eos=config.eos_token_id, max_source=source, max_target=1)
        batch = collator(examples)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    return collate


def _gathered(mine: dict[int, str], world: int) -> dict[int, str]:
    if world == 1:
        return mine
    parts: list[Any] = [None] * world
    torch.distributed.all_gather_object(parts, mine)
    return {index: text for part in parts for index, text in part.items()}


__all__ = ["Outcome", "TrainingStopped", "train"]
