"""Transformers' Trainer with our guarantees: checkpoints that survive, data in an exact order, no silent NaN."""

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from pyramidion.data import Collator, LengthGroupedBatches, TokenStore
from pyramidion.training.checkpoint import STAGING, Checkpoints, seal, stage, write_atomically
from pyramidion.training.recipe import Recipe

PROGRESS = "progress.json"
PASSING = ("_runtime", "_per_second", "_flos")  # what differs from run to run: times, not results

Scoring = Callable[[nn.Module], dict[str, float]]


class TrainingStopped(RuntimeError):
    """Say why training cannot go on, in a line for the user."""


@dataclass
class Progress:
    """What a resumed run must know beside what the Trainer itself keeps.

    The loss that each process has summed since it was last logged, so that the next log is what it would have been; the
    best validation and how many have passed without a better one; steps skipped for gradients that were not finite.
    """

    summed_losses: list[float] = field(default_factory=list)
    last_logged: int = 0
    best: float | None = None
    best_step: int | None = None
    stale: int = 0
    skipped: int = 0


class EpochLoader(DataLoader[Any]):
    """A DataLoader whose batches are those of an epoch: the same in every run, whenever it is resumed."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class PyramidionTrainer(Trainer):
    """Train by a recipe, from a token store, into a folder.

    score  measures the model on the validation split; called every `evaluate_every` epochs
    bell   hears SIGTERM
    """

    control: TrainerControl

    def __init__(
        self, model: nn.Module, recipe: Recipe, store: TokenStore, folder: Path, score: Scoring | None, bell: "Bell"
    ) -> None:
        self.recipe, self.store, self.folder, self.score = recipe, store, folder, score
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.keep)
        self.progress = Progress()
        self.resumed: Path | None = None  # the checkpoint that training starts from
        self.stopped_by_signal = False
        config: Any = model.config
        source = recipe.max_source or config.entering[0]
        collator = Collator(
            pad=config.pad_token_id, eos=config.eos_token_id, max_source=source, max_target=recipe.max_target
        )
        arguments = training_arguments(recipe, folder)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=store["train"],
            data_collator=collator,
            processing_class=store.tokenizer(),
            callbacks=[Watch(self, bell)],
        )

    # Data ----------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> EpochLoader:
        """Give the batches of this process, a pure function of seed and epoch: resuming is skipping."""
        split: Any = self.store["train"]
        batches = LengthGroupedBatches(
            split.document_lengths,
            self.recipe.device_batch,
            seed=self.recipe.seed,
            rank=self.args.process_index,
            world=self.args.world_size,
        )
        pinned = self.args.device.type == "cuda"
        return EpochLoader(split, batch_sampler=batches, collate_fn=self.data_collator, pin_memory=pinned)

    # Not a number --------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip, and look before the optimizer moves: gradients are the same on every process, so all decide alike."""
        norm: Tensor = super()._clip_grad_norm(model)
        if math.isfinite(float(norm)):
            return norm
        step = self.state.global_step + 1
        if self.recipe.on_nan == "stop":
            raise TrainingStopped(
                f"The gradient of step {step} is not finite ({float(norm)}); weights are those of step {step - 1}, "
                f"which are. Lower `learning_rate`, or set `on_nan: skip` to leave such steps out."
            )
        self.progress.skipped += 1
        model.zero_grad(set_to_none=True)  # Adam leaves alone what has no gradient
        return torch.zeros_like(norm)

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Stage all that a resumed run needs, from all processes, and seal it."""
        step = self.state.global_step
        self.store_flos()
        staged = self.checkpoints.folder / f"{STAGING}{step}"
        if self.is_world_process_zero():
            self.checkpoints.stage(step)
        self._barrier()
        self._stage(staged)
        self._barrier()
        if self.is_world_process_zero():
            self.checkpoints.seal(step, world=self.args.world_size, data=self.store.fingerprint)
        self._barrier()

    def _stage(self, staged: Path) -> None:
        folder = str(staged)
        self.save_model(folder, _internal_call=True)
        self._save_optimizer_and_scheduler(folder)
        self._save_scaler(folder)
        self._save_rng_state(folder)
        self.progress.summed_losses = self.accelerator.gather(self._tr_loss.reshape(1)).tolist()
        self.progress.last_logged = self._globalstep_last_logged
        if self.args.should_save:
            self._remember_callbacks()
            self.state.save_to_json(str(staged / "trainer_state.json"))
            (staged / PROGRESS).write_text(json.dumps(asdict(self.progress)))

    def _remember_callbacks(self) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()

    def _barrier(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    # Validation and logs -------------------------------------------------------------------------------------------

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Score the model on the validation split, keep it if it is the best, count validations without progress."""
        assert self.score is not None
        with _same_random_numbers():
            self.model.eval()
            found = {f"eval_{name}": value for name, value in self.score(self.model).items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        value = found[f"eval_{self.recipe.metric}"]
        if self.progress.best is None or value > self.progress.best:
            self.progress.best, self.progress.best_step, self.progress.stale = value, self.state.global_step, 0
            self._keep("best")
        else:
            self.progress.stale += 1
            self.control.should_training_stop |= self.progress.stale >= self.recipe.patience
        return found

    def _keep(self, name: str) -> None:
        """Save the model, ready for use, as a sealed folder beside the checkpoints."""
        if self.is_world_process_zero():
            staged = stage(self.folder / f"{STAGING}{name}")
            self._save(str(staged))
            seal(staged, self.folder / name, step=self.state.global_step, data=self.store.fingerprint)
        self._barrier()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, and append results, but not times, to metrics.jsonl."""
        super().log(logs, start_time)
        if self.is_world_process_zero() and (line := _lasting(self.state.log_history[-1])):
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")

    def complete(self) -> bool:
        """Tell whether the checkpoint is that of the last step; if so, take everything up as the run left it.

        A run may be killed between its last step and its end. To train on from there would be one step too many.
        """
        if self.resumed is None:
            return False
        state = TrainerState.load_from_json(str(self.resumed / "trainer_state.json"))
        stale = json.loads((self.resumed / PROGRESS).read_text())["stale"]
        if state.global_step < state.max_steps and stale < self.recipe.patience:
            return False
        self._load_from_checkpoint(str(self.resumed))
        self.state = state
        self.restore()
        return True

    def restore(self) -> None:
        """Take up the sums where the checkpoint left them, and the log as it was then."""
        if self.resumed is not None:
            self.progress = Progress(**json.loads((self.resumed / PROGRESS).read_text()))
            own = self.progress.summed_losses[self.args.process_index]
            self._tr_loss = torch.tensor(own, device=self.args.device)
            self._globalstep_last_logged = self.progress.last_logged
        if self.is_world_process_zero():
            lasting = filter(None, map(_lasting, self.state.log_history))
            lines = (json.dumps(line, sort_keys=True) + "\n" for line in lasting)
            write_atomically(self.folder / "metrics.jsonl", "".join(lines))


class Bell:
    """Hear SIGTERM while it is open, and remember it, instead of ending at once."""

    def __init__(self) -> None:
        self.rang = False
        self.before: Any = None

    def __enter__(self) -> "Bell":
        if threading.current_thread() is threading.main_thread():  # only there may a process listen
            self.before = signal.signal(signal.SIGTERM, self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        self.rang = True


class Watch(TrainerCallback):
    """Ask for validation when an epoch is due, and for a checkpoint when the process is told to end."""

    def __init__(self, trainer: PyramidionTrainer, bell: Bell) -> None:
        self.trainer, self.bell = trainer, bell

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take up where a checkpoint left."""
        self.trainer.restore()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Look, at the end of each step, what is due."""
        each = self.trainer.recipe.evaluate_every * max(1, math.ceil(state.max_steps / max(state.num_train_epochs, 1)))
        last = state.global_step >= state.max_steps
        if self.trainer.score is not None and (state.global_step % each == 0 or last):
            control.should_evaluate = True
        if self._all_told(args):
            self.trainer.stopped_by_signal = True
            control.should_save = control.should_training_stop = True

    def _all_told(self, args: TrainingArguments) -> bool:
        """Tell whether any process was told to end: all of them then end after the same step."""
        if args.world_size == 1:
            return self.bell.rang
        told = torch.tensor(int(self.bell.rang), device=args.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told)


def training_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """Translate a recipe into the Trainer's own arguments."""
    import os

    world = int(os.environ.get("WORLD_SIZE", "1"))
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=recipe.device_batch,
        gradient_accumulation_steps=recipe.accumulation(world),
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.adam_beta2,
        max_grad_norm=recipe.max_grad_norm or math.inf,  # without a limit the norm is still looked at
        label_smoothing_factor=recipe.label_smoothing,
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.save_every,
        eval_strategy="no",
        seed=recipe.seed,
        bf16=recipe.bf16,
        torch_compile=recipe.compile,
        gradient_checkpointing=recipe.gradient_checkpointing,
        use_cpu=recipe.device == "cpu",
        fsdp="full_shard" if recipe.fsdp else None,
        fsdp_config={"version": 2} if recipe.fsdp else None,
        report_to="tensorboard" if recipe.tensorboard else "none",
        remove_unused_columns=False,
    )


def _lasting(record: dict[str, Any]) -> dict[str, Any]:
    """Take from a record of the log what does not change from run to run."""
    if "train_runtime" in record:  # the Trainer's own summary, of this call alone
        return {}
    return {name: value for name, value in record.items() if not name.endswith(PASSING)}


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leave torch's generators as they were, whatever is drawn inside."""
    with torch.random.fork_rng():
        yield
