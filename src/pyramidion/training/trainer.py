"""Transformers' Trainer with our guarantees: checkpoints that survive, data in an exact order, no silent NaN."""

import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
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
from transformers.trainer_callback import ExportableState, PrinterCallback

from pyramidion.data import Collator, Exercises, LengthGroupedBatches, TokenStore
from pyramidion.data.objectives import Objective
from pyramidion.kernels.launching import choose_device
from pyramidion.training.account import Account
from pyramidion.training.capture import CapturedStep
from pyramidion.training.checkpoint import MANIFEST, STAGING, Checkpoints, discard, seal, stage, verify
from pyramidion.training.muon import Muon, split
from pyramidion.training.recipe import Recipe

PROGRESS = "progress.json"
COUNT = "num_items_in_batch"
LOWER_IS_BETTER = {"loss"}
WHOLE_TARGET = 128  # where steps are recorded, targets are filled up to a multiple of it: few shapes, little padding
LOADERS = {"cuda": 4}  # processes that lay out the next batches while a device computes; a CPU has other things to do

Scoring = Callable[[nn.Module], dict[str, float]]
Tell = Callable[[str], None]


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


class EpochBatches:
    """Give the batches of an epoch as pairs (epoch, index), so that an example can be made from its pair alone."""

    def __init__(self, batches: LengthGroupedBatches) -> None:
        self.batches = batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(self.batches.epoch, index) for index in batch] for batch in self.batches)


class EpochLoader(DataLoader[Any]):
    """A DataLoader whose batches are those of an epoch: the same in every run, whenever it is resumed."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class PyramidionTrainer(Trainer):
    """Train by a recipe, from a token store, into a folder.

    objective what is made of an example
    score     measures the model on the validation split; called every `evaluate_every` epochs
    bell      hears SIGTERM
    tell      takes a line for the user
    progress  takes how many steps are done, of how many
    machine   what this runs on, for the account of times
    """

    control: TrainerControl
    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        store: TokenStore,
        folder: Path,
        objective: Objective,
        score: Scoring | None,
        bell: "Bell",
        *,
        tell: Tell = lambda line: None,
        progress: Callable[[int, int, str], None] = lambda done, total, what: None,
        machine: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe, self.store, self.folder, self.score = recipe, store, folder, score
        self.tell, self.show_progress, self.machine = tell, progress, machine
        self.exercises = Exercises(store["train"], objective, recipe.seed)
        self.account = Account(folder)
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.keep)
        self.progress = Progress()
        self.resumed: Path | None = None  # the checkpoint that training starts from
        self.loader: EpochLoader | None = None
        self.stopped_by_signal = False
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.recorded = recipe.capture and alone and choose_device(recipe.device).type == "cuda"
        self.captured: CapturedStep | None = None
        config: Any = model.config
        source = recipe.max_source or config.entering[0]
        collator = Collator(
            pad=config.pad_token_id,
            eos=config.eos_token_id,
            max_source=source,
            max_target=recipe.max_target,
            whole=config.packing if recipe.compile or self.recorded else 1,  # a graph for all numbers of whole blocks
            whole_target=WHOLE_TARGET if self.recorded else 1,
            lean=self.recorded,
        )
        if recipe.compile:
            model.compile(dynamic=True, fullgraph=True)
        arguments = training_arguments(recipe, folder)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=store["train"],
            data_collator=collator,
            processing_class=store.tokenizer(),
            callbacks=[Watch(self, bell)],
        )
        self.remove_callback(PrinterCallback)

    # Data ----------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> EpochLoader:
        """Give the batches of this process, a pure function of seed and epoch: resuming is skipping."""
        batches = LengthGroupedBatches(
            self.store["train"].document_lengths,
            self.args.per_device_train_batch_size,
            seed=self.recipe.seed,
            rank=self.args.process_index,
            world=self.args.world_size,
        )
        kind = self.args.device.type
        keys: Any = EpochBatches(batches)
        data: Any = self.exercises
        workers = min(LOADERS.get(kind, 0), os.cpu_count() or 1)
        self.loader = EpochLoader(
            data,
            batch_sampler=keys,
            collate_fn=self.data_collator,
            pin_memory=kind == "cuda",
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=_deafen,
            generator=torch.Generator(),  # not the one of dropout: how batches are laid out changes nothing
        )
        return self.loader

    def dismiss(self) -> None:
        """Let those who lay out batches go: left to the garbage collector, each is waited for 5 s long."""
        if self.loader is not None and self.loader._iterator is not None:  # kept only where there is somebody
            busy: Any = self.loader._iterator
            busy._shutdown_workers()
            self.loader._iterator = None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Let the model itself smooth the labels: it never has all logits for the Trainer to do so."""
        if self.recipe.label_smoothing:
            inputs = {**inputs, "label_smoothing": self.recipe.label_smoothing}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Do forward and backward as the Trainer does, or replay what it did for a batch of the same shape."""
        step = super().training_step
        if not self.recorded:
            found: Tensor = step(model, inputs, num_items_in_batch)
            return found
        if self.captured is None:
            self.captured = CapturedStep(lambda given: step(model, given, given.pop(COUNT)), model.parameters())
        return self.captured({**self._prepare_inputs(inputs), COUNT: num_items_in_batch})

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer that the recipe names."""
        chosen = self.model if model is None else model
        if self.optimizer is None and self.recipe.optimizer == "muon":
            matrices, rest = split(chosen)
            decaying = set(self.get_decay_parameter_names(chosen))
            groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
            for name, weight in chosen.named_parameters():
                if weight in rest:
                    groups[name in decaying].append(weight)
            decay = self.args.weight_decay
            self.optimizer = Muon(
                matrices,
                [{"params": groups[True], "weight_decay": decay}, {"params": groups[False], "weight_decay": 0.0}],
                self.args.learning_rate,
                weight_decay=decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                fused=self.args.device.type == "cuda",
            )
        made: torch.optim.Optimizer = super().create_optimizer(model)
        return made

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
        with self.account.pause():
            self._write_checkpoint(self.state.global_step)

    def _write_checkpoint(self, step: int) -> None:
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

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of weights that a checkpoint lacks, but not of other names of one that it has."""
        shared = self.model.get_input_embeddings().weight
        tied = {name for name, weight in self.model.named_parameters(remove_duplicate=False) if weight is shared}
        if load_result.unexpected_keys or not set(load_result.missing_keys) <= tied:
            super()._issue_warnings_after_load(load_result)

    def _barrier(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    # Validation and logs -------------------------------------------------------------------------------------------

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Score the model on the validation split, keep it if it is the best, count validations without progress."""
        assert self.score is not None
        with self.account.pause(), _same_random_numbers():
            self.model.eval()
            found = {f"eval_{name}": value for name, value in self.score(self.model).items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        value, best = found[f"eval_{self.recipe.metric}"], self.progress.best
        sign = -1 if self.recipe.metric in LOWER_IS_BETTER else 1
        if best is None or sign * value > sign * best:
            self.progress.best, self.progress.best_step, self.progress.stale = value, self.state.global_step, 0
            self._keep("best")
        else:
            self.progress.stale += 1
            self.control.should_training_stop |= self.progress.stale >= self.recipe.patience
        return found

    def _keep(self, name: str) -> None:
        """Save the model, ready for use, as a sealed folder beside the checkpoints."""
        weights = self.accelerator.get_state_dict(self.model) if self.is_fsdp_enabled else None  # from all processes
        if self.is_world_process_zero():
            staged = stage(self.folder / f"{STAGING}{name}")
            self._save(str(staged), state_dict=weights)
            seal(staged, self.folder / name, step=self.state.global_step, data=self.store.fingerprint)
        self._barrier()

    def finish(self) -> None:
        """Keep as `model` the best by validation, or the last where none was kept."""
        best = self.folder / "best"
        if self.progress.best is None or verify(best):
            self._keep("model")
        elif self.is_world_process_zero():
            staged = self.folder / f"{STAGING}model"
            discard(staged)
            shutil.copytree(best, staged, ignore=shutil.ignore_patterns(MANIFEST))
            seal(staged, self.folder / "model", step=self.progress.best_step, data=self.store.fingerprint)
        self._barrier()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, and write it into the account and on the screen."""
        super().log(logs, start_time)
        if self.is_world_process_zero():
            self.account.add(self.state.log_history[-1])
            self._say(logs)

    def _say(self, logs: dict[str, float]) -> None:
        step, epoch = self.state.global_step, self.state.epoch or 0.0
        if "loss" in logs:
            rate = self.account.lap(step, epoch * len(self.store["train"]))
            place = f"step {step:,} of {self.state.max_steps:,} · epoch {epoch:.2f}"
            self.tell(f"{place} · loss {logs['loss']:.3f} · {rate:.1f} documents/s")
        scores = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        if scores:
            written = ", ".join(f"{name} {value:.{3 if name == 'loss' else 2}f}" for name, value in scores.items())
            self.tell(f"step {step:,} · validation: {written}")

    def epoch_steps(self) -> int:
        """Count the steps of the optimizer in one epoch."""
        batches = math.ceil(len(self.store["train"]) / (self.args.per_device_train_batch_size * self.args.world_size))
        return math.ceil(batches / self.args.gradient_accumulation_steps)

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
        weights = type(self.model).from_pretrained(self.resumed).state_dict()
        self.model.load_state_dict(weights)
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
            self.account.take_up(self.state.global_step, self.state.log_history, self.machine)


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
        if state.global_step == 0 and self.trainer.recipe.evaluate_first and self.trainer.score is not None:
            self.trainer.evaluate()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Look, at the end of each step, what is due."""
        self.trainer.show_progress(state.global_step, state.max_steps, "training")
        each = max(1, round(self.trainer.recipe.evaluate_every * self.trainer.epoch_steps()))
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

    parts, at_once = recipe.split(int(os.environ.get("WORLD_SIZE", "1")))
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=parts,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(recipe.schedule, recipe.schedule),
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.adam_beta2,
        max_grad_norm=recipe.max_grad_norm or math.inf,  # without a limit the norm is still looked at
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.save_every,
        eval_strategy="no",
        seed=recipe.seed,
        bf16=recipe.bf16,
        gradient_checkpointing=recipe.gradient_checkpointing,
        use_cpu=choose_device(recipe.device).type == "cpu",
        fsdp=recipe.fsdp or None,
        fsdp_config={"version": 2} if recipe.fsdp else None,
        report_to="tensorboard" if recipe.tensorboard else "none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )


def _deafen(worker: int) -> None:
    """Let whoever lays out batches end when the training says so, and not when all processes are told to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leave torch's generators as they were, whatever is drawn inside."""
    with torch.random.fork_rng():
        yield
