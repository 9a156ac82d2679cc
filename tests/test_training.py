"""Training loses nothing: resumed runs, broken checkpoints, NaN, full disks, signals, two processes as one."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSeq2SeqLM, set_seed
from typer.testing import CliRunner

from pyramidion import PyramidionForConditionalGeneration, cli
from pyramidion.bench import torture
from pyramidion.compact import compact
from pyramidion.data import Collator, Exercises, LengthGroupedBatches, TokenStore
from pyramidion.data.objectives import Corruption, make_objective
from pyramidion.evaluation import rouge
from pyramidion.evaluation.run import read_predictions
from pyramidion.training import account as accounts
from pyramidion.training import run as runs
from pyramidion.training import trainer
from pyramidion.training.checkpoint import Checkpoints, verify
from pyramidion.training.muon import Muon
from pyramidion.training.recipe import Recipe, default_recipe, read_recipe
from pyramidion.training.run import train
from pyramidion.training.trainer import PyramidionTrainer, TrainingStopped

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*:UserWarning", "ignore:.*fork.*:DeprecationWarning", "ignore:.*lr_scheduler.*:UserWarning"
)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torture.make_store(tmp_path_factory.mktemp("corpus") / "store")


SOURCE = 160  # tokens that a document is cut to: tiny-pyramidion still pools in both of its layers that do


def small(**changes: Any) -> Recipe:
    return replace(torture.recipe(torture.Settings(steps=6), 1), **{"max_source": SOURCE, **changes})


def pretraining(objective: str = "spans", **changes: Any) -> Recipe:
    """A few steps into the second epoch, without summaries."""
    return small(objective=objective, metric="loss", generation=None, **{"max_steps": 12, "max_target": 32, **changes})


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def silent(text: str) -> None:
    """Say nothing."""


# --------------------------------------------------------------------------------------------------------------------
# Recipes
# --------------------------------------------------------------------------------------------------------------------


def test_the_paper_is_the_default_of_its_presets():
    deep, shallow, light = map(default_recipe, ("deep-pyramidion", "row-24", "small-pyramidion"))
    for recipe in (deep, shallow):
        assert (recipe.learning_rate, recipe.weight_decay, recipe.batch_size) == (5e-4, 0.1, 256)
        assert (recipe.evaluate_every, recipe.patience) == (3, 7)
        assert recipe.config(1000).dropout == 0.1
    assert (deep.warmup_steps, shallow.warmup_steps) == (5000, 0)
    assert light.batch_size == 16


def test_a_recipe_is_read_strictly(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: row-8\nlearning_rate: 3e-4\nbatch_size: 64\nmodel: {vocab_size: 99}\nmax_source: 100\n")
    recipe = read_recipe(path, {"batch_size": 32})
    assert (recipe.preset, recipe.learning_rate, recipe.batch_size, recipe.max_source) == ("row-8", 3e-4, 32, 100)
    assert recipe.config(1000).vocab_size == 99
    assert read_recipe(None, recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 1", "`learnin_rate` is not a setting of a recipe .* Did you mean `learning_rate`\\?"),
        ("batch_size: many", "`batch_size` must be of type int, got 'many'"),
        ("batch_size: true", "`batch_size` must be of type int, got True"),
        ("batch_size: 0", "`batch_size` must be at least 1, got 0"),
        ("bf16: 1", "`bf16` must be of type bool, got 1"),
        ("on_nan: hope", "`on_nan` must be one of stop, skip, got 'hope'"),
        ("learning_rate: -1", "`learning_rate` must be above 0, got -1.0"),
        ("optimizer: sgd", "`optimizer` must be one of adamw, muon, got 'sgd'"),
        ("{optimizer: muon, fsdp: true}", "`optimizer` must be adamw with `fsdp`, got 'muon'"),
        ("preset: row-99", "got 'row-99'"),
        (
            "objective: span",
            "`objective` must be one of summaries, spans, gap-sentences, got 'span'. Did you mean 'spans'",
        ),
        ("objective: [spans]", "`objective` must be of type str"),
        (
            "{objective: spans, metric: rouge2}",
            "`metric` must be loss with the objective 'spans', got 'rouge2': ROUGE is",
        ),
        ("{objective: spans, span_density: -0.1}", "`span_density` must be above 0 and below 1, got -0.1"),
        ("{objective: spans, span_length: 0.5}", "`span_length` must be at least 1, got 0.5"),
        (
            "{objective: gap-sentences, gap_choice: best}",
            "`gap_choice` must be one of principal, lead, random, got 'best'",
        ),
        ("{objective: spans, generation: {num_beams: 2}}", "`generation` must be left out with the objective 'spans'"),
        ("{objective: spans, gap_density: 0.5}", "`gap_density` must be left out with the objective 'spans'"),
        ("span_density: 0.3", "`span_density` must be left out with the objective 'summaries', .* got 0.3"),
        ("- a list", "must be settings with values, got list"),
        ("a: [b", "must be YAML"),
    ],
)
def test_a_wrong_recipe_is_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(path, {})


def test_pretraining_is_validated_by_its_loss():
    for objective in ("spans", "gap-sentences"):
        recipe = read_recipe(None, {"preset": "row-8", "objective": objective})
        assert (recipe.objective, recipe.metric) == (objective, "loss")
        assert read_recipe(None, recipe.to_dict()) == recipe
    assert read_recipe(None, {"preset": "row-8"}).metric == "rouge1"
    assert read_recipe(None, {"objective": "spans", "span_length": 5}).corruption() == Corruption(span_length=5)


@pytest.mark.parametrize(
    ("batch", "at_most", "world", "parts", "at_once"),
    [(24, 4, 2, 3, 4), (24, 5, 2, 3, 4), (4, 8, 1, 1, 4), (7, 3, 1, 7, 1), (1, 1, 1, 1, 1), (256, 4, 1, 64, 4)],
)
def test_a_batch_is_split_into_equal_parts(batch: int, at_most: int, world: int, parts: int, at_once: int):
    assert small(batch_size=batch, device_batch=at_most).split(world) == (parts, at_once)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_batch_is_shared_out_among_all_processes(batch: int):
    with pytest.raises(ValueError, match=f"`batch_size` must be a multiple .* got {batch} and 2"):
        small(batch_size=batch).split(2)


# --------------------------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_a_model_and_is_not_run_twice(store: Path, tmp_path: Path):
    told: list[str] = []
    outcome = train(small(), store, tmp_path / "run", tell=told.append)
    assert (outcome.state, outcome.step) == ("finished", 6)
    assert verify(tmp_path / "run" / "model") == []
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.model_type == "pyramidion"
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [2, 4, 6]
    assert any("eval_rouge1" in line for line in metrics(tmp_path / "run"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = train(small(), store, tmp_path / "run", tell=told.append)
    assert again.state == "before"
    assert "finished at step 6" in told[-1]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_another_run_in_the_same_folder_is_refused(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PyramidionTrainer, "train", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(small(), store, tmp_path, tell=silent)
    with pytest.raises(ValueError, match=r"holds another run: `learning_rate` was .* and is 0.1"):
        train(small(learning_rate=0.1), store, tmp_path, tell=silent)
    with pytest.raises(ZeroDivisionError):
        train(small(log_every=1), store, tmp_path, tell=silent)  # what does not change the result may change


def test_a_run_from_before_there_was_a_setting_goes_on(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(PyramidionTrainer, "train", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(small(), store, tmp_path, tell=silent)
    told = json.loads((tmp_path / "run.json").read_text())
    for name in ("objective", "span_length", "span_density", "gap_density", "gap_choice"):
        del told["recipe"][name]
    (tmp_path / "run.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"holds another run: `objective` was 'summaries' and is 'spans'"):
        train(small(objective="spans", metric="loss", generation=None), store, tmp_path, tell=silent)
    assert train(small(), store, tmp_path, tell=silent).state == "finished"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be chosen")
def test_half_precision_needs_no_gpu(store: Path, tmp_path: Path):
    """A recipe for a GPU can be tried on a CPU: both compute in bfloat16 under autocast."""
    losses = []
    for half in (False, True):
        folder = tmp_path / str(half)
        train(small(bf16=half, device="auto"), store, folder)
        losses.append([line["loss"] for line in metrics(folder) if "loss" in line])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_sharing_parameters_out_needs_gpus(store: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="`fsdp` must be started by torchrun, on GPUs"):
        train(small(fsdp=True), store, tmp_path, tell=silent)


@pytest.mark.slow
def test_a_little_torture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The quick form of `make torture`."""
    whole = torture.recipe
    monkeypatch.setattr(torture, "recipe", lambda *given: replace(whole(*given), max_source=SOURCE))
    result = torture.run(torture.Settings(kills=2, damages=60, terms=2, steps=6), tmp_path)
    for row in result["rows"]:
        assert row["survived"] == row["tried"], row
    assert [row["tried"] for row in result["rows"]] == [1, 1, 1, 1, 60]


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one_with_the_doubled_batch(store: Path, tmp_path: Path):
    still = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    found = []
    for world, part in ((1, 8), (2, 4)):
        folder = tmp_path / str(world)
        recipe = small(model=still, device_batch=part, batch_size=8, log_every=1)
        assert torture._join(torture.start(recipe, store, folder, world)) == [0] * world
        found.append(metrics(folder))
    for one, two in zip(*found, strict=True):
        assert one.keys() == two.keys()
        assert one == pytest.approx(two, rel=1e-2, abs=1e-5)  # a tie that rounding decides moves the gradient's norm
        if "loss" in one:
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-6 if one["step"] < 3 else 1e-4)


def poison(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Make the loss of one step not a number."""
    honest = PyramidionTrainer.compute_loss

    def compute_loss(self: PyramidionTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = honest(self, *args, **kwargs)
        return loss * torch.nan if self.state.global_step + 1 == at else loss

    monkeypatch.setattr(PyramidionTrainer, "compute_loss", compute_loss)


def test_not_a_number_stops_with_whole_weights(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, 5)
    with pytest.raises(TrainingStopped, match=r"The gradient of step 5 is not finite .* weights are those of step 4"):
        train(small(), store, tmp_path, tell=silent)
    newest, wrong = Checkpoints(tmp_path / "checkpoints").newest_valid()
    assert newest is not None
    assert newest.name == "checkpoint-3"
    assert wrong == []
    model = AutoModelForSeq2SeqLM.from_pretrained(newest)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_step_that_is_not_finite_may_be_skipped(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, 5)
    assert train(small(on_nan="skip"), store, tmp_path, tell=silent).state == "finished"
    assert json.loads((tmp_path / "finished.json").read_text())["skipped"] == 1
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_full_disk_leaves_the_old_checkpoint(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    honest, count = os.fsync, [0]

    def fsync(handle: int) -> None:
        count[0] += (tmp_path / "checkpoints" / "checkpoint-3").exists()
        if count[0] > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(TrainingStopped, match=r"No space is left in .* to save step 6; checkpoint-3 is whole"):
            train(small(), store, tmp_path, tell=silent)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint-3"]
    assert train(small(), store, tmp_path, tell=silent).state == "finished"


def test_a_broken_checkpoint_is_named_and_the_one_before_used(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    whole = tmp_path / "whole"
    train(small(), store, whole, tell=silent)
    broken = tmp_path / "broken"
    train(small(), store, broken, tell=silent)
    (broken / "finished.json").unlink()
    weights = broken / "checkpoints" / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"):
        assert train(small(), store, broken, tell=told.append).state == "finished"
    assert "missing keys" not in caplog.text
    assert any(line.startswith("checkpoint-6/model.safetensors has changed") for line in told)
    assert "Resuming from checkpoint-3." in told
    assert torture.digest(broken) == torture.digest(whole)


def test_the_best_is_kept_and_patience_ends_a_run(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scores = iter([1.0, 3.0, 2.0, 2.5, 9.0])
    seen: list[torch.Tensor] = []

    def score(model: torch.nn.Module) -> dict[str, float]:
        seen.append(next(model.parameters()).detach().clone())
        return {"rouge1": next(scores)}

    monkeypatch.setattr(runs, "validation", lambda *_: score)
    epoch = small(max_steps=None, epochs=5, patience=2, evaluate_every=1, save_every=100)
    outcome = train(epoch, store, tmp_path, tell=silent)
    done = json.loads((tmp_path / "finished.json").read_text())
    assert done["best"] == 3.0
    assert len(seen) == 4  # two without progress, and the end
    assert done["step"] == outcome.step == 2 * done["best_step"]
    kept = next(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").parameters())
    assert torch.equal(kept, seen[1])


def test_validation_measures_loss_and_rouge_as_one_would_by_hand(store: Path, tmp_path: Path):
    """Against a loop over single documents, with the losses of `forward` itself."""
    recipe = small(evaluate_first=True, evaluate_limit=5, device_batch=2, metric="loss")
    train(recipe, store, tmp_path, tell=silent)
    opened = TokenStore.open(store)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    collate = Collator(pad=0, eos=model.config.eos_token_id, max_source=SOURCE, max_target=recipe.max_target)
    summed = tokens = 0.0
    with torch.no_grad():
        for i in range(5):
            batch = collate([opened["val"][i]])
            count = batch["labels"].numel()
            summed, tokens = summed + count * float(model(**batch).loss), tokens + count
    validations = [line for line in metrics(tmp_path) if "eval_loss" in line]
    assert validations[0]["step"] == 0
    best = min(validations, key=lambda line: line["eval_loss"])
    assert best["step"] == json.loads((tmp_path / "finished.json").read_text())["best_step"] > 0
    assert best["eval_loss"] == pytest.approx(summed / tokens, rel=1e-5)
    last = read_predictions(tmp_path / "validation.jsonl")
    assert [row["reference"] for row in last] == [opened["val"].summary_text(i) for i in range(5)]
    scores = rouge([row["prediction"] for row in last], [row["reference"] for row in last])
    assert validations[-1]["eval_rouge1"] == pytest.approx(100 * scores["rouge1"].mean())
    assert {"eval_rouge2", "eval_rougeL", "eval_rougeLsum"} <= best.keys()


def test_labels_may_be_smoothed(store: Path, tmp_path: Path):
    """The first logged loss against torch's own, of the model before its first step."""
    still = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    recipe = small(label_smoothing=0.3, model=still, log_every=1, max_steps=1, evaluate_every=99.0)
    set_seed(recipe.seed)
    opened = TokenStore.open(store)
    model = PyramidionForConditionalGeneration(recipe.config(opened.vocab_size)).eval()
    train(recipe, store, tmp_path, tell=silent)
    chosen = LengthGroupedBatches(opened["train"].document_lengths, recipe.device_batch, seed=recipe.seed)[:2]
    collate = Collator(max_source=SOURCE, max_target=recipe.max_target)
    summed = tokens = 0.0
    for part in chosen:
        batch = collate([opened["train"][i] for i in part])
        with torch.no_grad():
            logits, labels = model(**batch).logits.flatten(0, 1), batch["labels"].flatten()
        summed += float(F.cross_entropy(logits, labels, label_smoothing=0.3, reduction="sum"))
        tokens += int((labels >= 0).sum())
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(summed / tokens, rel=1e-4)


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1.0), ("linear", 1 / 4), ("cosine", 0.1464)])
def test_the_rate_follows_its_schedule(schedule: str, last: float, store: Path, tmp_path: Path):
    recipe = small(schedule=schedule, log_every=1, warmup_steps=2, evaluate_every=99.0)
    train(recipe, store, tmp_path, tell=silent)
    rates = [line["learning_rate"] for line in metrics(tmp_path) if "learning_rate" in line]
    assert rates[:3] == pytest.approx([0, recipe.learning_rate / 2, recipe.learning_rate])
    assert rates[-1] == pytest.approx(last * recipe.learning_rate, rel=1e-3)


def test_muon_gets_what_the_recipe_says(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Matrices and the table of vectors shrink, norms and biases do not; what a model has is learnt once."""
    made: list[Muon] = []
    monkeypatch.setattr(trainer, "Muon", lambda *given, **named: made.append(Muon(*given, **named)) or made[-1])
    recipe = small(optimizer="muon", max_steps=1, weight_decay=0.07, adam_beta2=0.9, evaluate_every=99.0)
    train(recipe, store, tmp_path, tell=silent)
    matrices, table, rest = made[0].param_groups
    assert [group["weight_decay"] for group in (matrices, table, rest)] == [0.07, 0.07, 0.0]
    assert all(group["betas"] == (0.9, 0.9) for group in (matrices, table, rest))
    assert all(weight.ndim == 2 for weight in (*matrices["params"], *table["params"]))
    assert all(weight.ndim == 1 for weight in rest["params"])
    model = PyramidionForConditionalGeneration.from_pretrained(tmp_path / "model")
    counted = sum(weight.numel() for group in made[0].param_groups for weight in group["params"])
    assert counted == sum(weight.numel() for weight in model.parameters())


def test_a_part_of_an_epoch_may_pass_between_validations(store: Path, tmp_path: Path):
    documents = len(TokenStore.open(store)["train"])
    train(small(evaluate_every=0.5, max_steps=None, epochs=1), store, tmp_path, tell=silent)
    steps = -(-documents // 8)
    found = [line["step"] for line in metrics(tmp_path) if "eval_loss" in line]
    assert found == sorted({*range(round(steps / 2), steps + 1, round(steps / 2)), steps})


# --------------------------------------------------------------------------------------------------------------------
# Pretraining
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a corpus of made-up sentences, for whole ones to be missing."""
    folder, dice = tmp_path_factory.mktemp("sentences"), random.Random(1)
    words = ["".join(dice.choices("abcdefgh", k=dice.randint(2, 6))) for _ in range(99)]
    for split, count in {"train": 40, "val": 6}.items():
        texts = []
        for _ in range(count):
            lines = (
                " ".join(dice.choices(words, k=dice.randint(2, 9))).capitalize() for _ in range(dice.randint(1, 30))
            )
            texts.append(json.dumps({"document": ". ".join(lines) + ".", "summary": dice.choice(words)}) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(texts))
    done = CliRunner().invoke(
        cli.main, ["prepare", str(folder), "--output", str(folder / "store"), "--vocab-size", "512"]
    )
    assert done.exit_code == 0, done.output
    return folder / "store"


@pytest.mark.parametrize(("objective", "optimizer"), [("spans", "adamw"), ("gap-sentences", "muon")])
def test_pretraining_resumed_in_another_epoch_ends_bit_identical(
    objective: str, optimizer: str, sentences: Path, tmp_path: Path
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    recipe = pretraining(objective, optimizer=optimizer)
    train(recipe, sentences, whole, tell=silent)
    shutil.copytree(whole, broken)
    (broken / "finished.json").unlink()
    shutil.rmtree(broken / "checkpoints" / "checkpoint-12")
    told: list[str] = []
    assert train(recipe, sentences, broken, tell=told.append).state == "finished"
    assert "Resuming from checkpoint-9." in told  # of 5 steps in an epoch
    assert torture.digest(broken) == torture.digest(whole)
    losses = [line["loss"] for line in metrics(whole) if "loss" in line]
    assert losses[-1] < losses[0]
    assert "validation.jsonl" not in {path.name for path in whole.iterdir()}


def test_batches_laid_out_ahead_change_nothing(sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not the weights, nor what a resumed run ends with."""
    alone, ahead, broken = (tmp_path / name for name in ("alone", "ahead", "broken"))
    train(pretraining("spans"), sentences, alone, tell=silent)
    monkeypatch.setitem(trainer.LOADERS, "cpu", 2)
    train(pretraining("spans"), sentences, ahead, tell=silent)
    assert not multiprocessing.active_children()  # those who laid them out are gone with the run
    assert torture.digest(ahead) == torture.digest(alone)
    shutil.copytree(ahead, broken)
    (broken / "finished.json").unlink()
    shutil.rmtree(broken / "checkpoints" / "checkpoint-12")
    assert train(pretraining("spans"), sentences, broken, tell=silent).state == "finished"
    assert torture.digest(broken) == torture.digest(alone)


@pytest.mark.slow
def test_who_lays_out_batches_ends_with_the_training_alone(sentences: Path, tmp_path: Path):
    """As where a scheduler tells every process of a job to end."""
    code = (
        "import pickle, sys; from pathlib import Path; from pyramidion.training import trainer; "
        "from pyramidion.training.run import train; trainer.LOADERS['cpu'] = 2; "
        "print(train(pickle.load(open(sys.argv[1], 'rb')), Path(sys.argv[2]), Path(sys.argv[3]), "
        "tell=lambda line: print(line, flush=True)).state)"
    )
    recipe = tmp_path / "recipe.pickle"
    recipe.write_bytes(pickle.dumps(pretraining("spans", max_steps=100_000, log_every=1)))
    command = [sys.executable, "-c", code, str(recipe), str(sentences), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        try:
            assert any(line.startswith("step 2 ") for line in child.stdout)
            os.killpg(child.pid, signal.SIGTERM)
            rest, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 0
    assert "is written" in rest
    assert rest.endswith("stopped\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)  # nobody is left of them


@pytest.mark.slow
def test_pretraining_survives_kills(sentences: Path, tmp_path: Path):
    recipe = pretraining("gap-sentences", optimizer="muon")
    base = torture.Base.measure(recipe, sentences, tmp_path / "base", 1)
    killed = base.kill(tmp_path / "trial", random.Random(0), inside=True)
    assert killed["kills"] > 0
    assert killed["equal"]


@pytest.mark.slow
def test_two_processes_pretrain_as_one_with_the_doubled_batch(sentences: Path, tmp_path: Path):
    still = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    found = []
    for world, part in ((1, 8), (2, 4)):
        changes = {"optimizer": "muon", "device_batch": part, "log_every": 1, "max_steps": 7}
        recipe = pretraining("gap-sentences", model=still, **changes)
        assert torture._join(torture.start(recipe, sentences, tmp_path / str(world), world)) == [0] * world
        found.append([line["loss"] for line in metrics(tmp_path / str(world)) if "loss" in line])
    assert len(found[0]) == 7
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-6)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_the_first_loss_is_that_of_documents_corrupted_for_the_first_epoch(store: Path, tmp_path: Path):
    still = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    recipe = pretraining(model=still, log_every=1, max_steps=1, evaluate_every=99.0, seed=3, span_density=0.3)
    set_seed(recipe.seed)
    opened = TokenStore.open(store)
    model = PyramidionForConditionalGeneration(recipe.config(opened.vocab_size)).eval()
    train(recipe, store, tmp_path, tell=silent)
    spans = make_objective("spans", opened.tokenizer(), recipe.corruption(), max_source=SOURCE, max_target=32)
    exercises = Exercises(opened["train"], spans, recipe.seed)
    summed = tokens = 0.0
    for part in LengthGroupedBatches(opened["train"].document_lengths, recipe.device_batch, seed=recipe.seed)[:2]:
        batch = Collator(max_source=SOURCE, max_target=32)([exercises[0, i] for i in part])
        count = int((batch["labels"] >= 0).sum())
        with torch.no_grad():
            summed, tokens = summed + count * float(model(**batch).loss), tokens + count
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(summed / tokens, rel=1e-4)


def test_validation_of_pretraining_is_the_loss_on_the_same_documents_each_time(store: Path, tmp_path: Path):
    """A model that does not learn: every validation gives the same; the last one, what a loop by hand gives."""
    recipe = pretraining(evaluate_first=True, learning_rate=1e-30, weight_decay=0.0, max_steps=9, evaluate_every=0.5)
    train(recipe, store, tmp_path, tell=silent)
    found = [line for line in metrics(tmp_path) if "eval_loss" in line]
    assert [line["step"] for line in found] == [0, 4, 8, 9]
    assert len({line["eval_loss"] for line in found}) == 1
    assert not any("rouge" in name for line in found for name in line)
    opened = TokenStore.open(store)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    spans = make_objective("spans", opened.tokenizer(), Corruption(), max_source=SOURCE, max_target=32)
    exercises = Exercises(opened["val"], spans, recipe.seed)
    summed = tokens = 0.0
    with torch.no_grad():
        for i in range(2):
            batch = Collator(max_source=SOURCE, max_target=32)([exercises[0, i]])
            count = batch["labels"].numel()
            summed, tokens = summed + count * float(model(**batch).loss), tokens + count
    assert found[-1]["eval_loss"] == pytest.approx(summed / tokens, rel=1e-5)


def test_the_best_of_pretraining_is_that_of_the_lowest_loss(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scores = iter([3.0, 1.0, 2.0, 2.5, 0.1])
    monkeypatch.setattr(runs, "validation", lambda *_: lambda model: {"loss": next(scores)})
    train(pretraining(patience=2, evaluate_every=1 / 8), store, tmp_path, tell=silent)  # after every step
    done = json.loads((tmp_path / "finished.json").read_text())
    assert (done["best"], done["best_step"], done["step"]) == (1.0, 2, 4)


def test_spans_then_summaries_by_the_command(sentences: Path, tmp_path: Path):
    """Pretrain, go on from there, and write: with the same tokenizer throughout."""
    brief = ("--device", "cpu", "--set", "batch_size=8", "--set", "evaluate_limit=2", "--set", "max_target=32")
    first = ("--preset", "tiny-pyramidion", "--data", sentences, "--max-steps", 3, *brief)
    done = invoke("--objective", "spans", "--output", tmp_path / "spans", *first)
    assert done.exit_code == 0, done.output
    assert "spans that are missing from 511" in done.output
    origin = tmp_path / "spans" / "model"
    short = ("--set", "generation={num_beams: 1, min_new_tokens: 0, max_new_tokens: 3}")
    going_on = ("--output", tmp_path / "run", *first, *short, "--set", "learning_rate=1e-30")
    done = invoke(*going_on, "--set", f"init_from={origin}")
    assert done.exit_code == 0, done.output
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(path) for path in (origin, tmp_path / "run" / "model"))
    for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    words = [(path / "tokenizer.json").read_bytes() for path in (origin, tmp_path / "run" / "model")]
    assert words[0] == words[1]
    assert any("eval_rouge1" in line for line in metrics(tmp_path / "run"))


def test_a_model_with_other_words_is_refused(store: Path, sentences: Path, tmp_path: Path):
    train(pretraining(max_steps=1, evaluate_every=9.0), sentences, tmp_path / "spans", tell=silent)
    origin, run = tmp_path / "spans" / "model", tmp_path / "run"

    def refused(folder: Path, data: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            train(small(init_from=str(folder)), data, run, tell=silent)
        assert not run.exists()  # a mistake leaves nothing that a better call would be refused for

    refused(origin, store, r"`init_from` must have the tokenizer of the data, but .* `--tokenizer .*spans/model`")
    refused(origin.parent, sentences, r"`init_from` must be a folder with a model, got .*Did you mean '.*/spans/model'")
    refused(tmp_path / "nowhere", sentences, r"`init_from` must be a folder with a model, got '.*nowhere'\.$")
    config = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    refused(origin, sentences, r"`init_from` must know the \d+ tokens of the data, got 100")


def test_there_must_be_room_for_what_is_missing(store: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="`max_target` must be at least 2 to take something out, got 1"):
        train(pretraining(max_target=1), store, tmp_path / "run", tell=silent)
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------------------
# The account
# --------------------------------------------------------------------------------------------------------------------


def test_the_account_of_times_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(accounts, "perf_counter", lambda: now[0])
    account = accounts.Account(tmp_path)
    account.take_up(0, [], {"device": "abacus"})
    now[0] += 10
    assert account.lap(2, 20) == pytest.approx(2)
    now[0] += 5
    with account.pause():
        now[0] += 1000
    assert account.lap(4, 40) == pytest.approx(4)
    with (tmp_path / "times.jsonl").open("a") as file:
        file.write('{"step": 6, "sec')  # killed here
    again = accounts.Account(tmp_path)
    again.take_up(2, [{"step": 2, "loss": 1.0, "train_runtime": 3}, {"step": 2, "loss": 1.5, "x_runtime": 3}], None)
    now[0] += 20
    assert again.lap(4, 40) == pytest.approx(1)
    times = accounts.read_lines(tmp_path / "times.jsonl")
    assert [line["seconds"] for line in times if "seconds" in line] == [10, 30]
    assert [line.get("machine") for line in times] == [{"device": "abacus"}, None, None, None]
    assert all(line["peak_memory"] > 1e7 for line in times if "seconds" in line)
    assert metrics(tmp_path) == [{"step": 2, "loss": 1.5}]


def test_curves_sum_runs_up(store: Path, tmp_path: Path):
    for name, steps in (("a", 6), ("b", 4)):
        train(small(max_steps=steps, log_every=1), store, tmp_path / name, tell=silent, machine={"device": "abacus"})
    figure = tmp_path / "figures" / "curves.png"
    done = CliRunner().invoke(cli.main, ["curves", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(figure)])
    assert done.exit_code == 0
    assert [line.split(" | ")[:2] for line in done.stdout.splitlines()[2:]] == [["| a", "6"], ["| b", "4"]]
    assert figure.stat().st_size > 10_000
    done = CliRunner().invoke(cli.main, ["curves", str(tmp_path / "a"), "--json"])
    row = json.loads(done.stdout)[0]
    best = max((line for line in metrics(tmp_path / "a") if "eval_loss" in line), key=lambda line: line["eval_rouge1"])
    assert row["validation"]["loss"] == best["eval_loss"]
    assert row["machine"] == {"device": "abacus"}
    laps = [line for line in accounts.read_lines(tmp_path / "a" / "times.jsonl") if "seconds" in line]
    expected = (laps[-1]["documents"] - laps[0]["documents"]) / (laps[-1]["seconds"] - laps[0]["seconds"])
    assert row["documents_a_second"] == pytest.approx(expected)
    wrong = CliRunner().invoke(cli.main, ["curves", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "`RUNS` must be folders of `pyramidion train`" in wrong.stderr


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.main, ["train", *map(str, arguments)])


def test_the_command_shows_its_recipe():
    done = invoke("--data", "x", "--output", "y", "--preset", "row-8", "--set", "learning_rate=1e-3", "--show")
    assert done.exit_code == 0
    assert "learning_rate: 0.001\n" in done.stdout
    assert "preset: row-8\n" in done.stdout


def test_the_command_teaches_objectives():
    done = invoke("--help")
    for words in ("--objective", "summaries", "spans", "gap-sentences", "init_from"):
        assert words in done.stdout
    done = invoke("--data", "x", "--output", "y", "--objective", "gap-sentences", "--set", "gap_density=0.2", "--show")
    for line in ("objective: gap-sentences", "metric: loss", "gap_density: 0.2", "preset: small-pyramidion"):
        assert f"{line}\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objective", "gaps"], "`objective` must be one of summaries, spans, gap-sentences, got 'gaps'."),
        (["--objective", "spans", "--set", "metric=rouge1"], "`metric` must be loss with the objective 'spans'"),
        (["--set", "batchsize=3"], "Did you mean `batch_size`?"),
        (["--set", "batch_size"], "`--set` must be name=value, got 'batch_size'."),
        (["--preset", "row-99"], "got 'row-99'"),
        (["--recipe", "nowhere.yaml"], "The recipe must be a file that exists, got 'nowhere.yaml'."),
        ([], "nowhere"),
        pytest.param(
            ["--device", "cuda"],
            "there is no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], message: str, tmp_path: Path):
    done = invoke("--data", tmp_path / "nowhere", "--output", tmp_path / "run", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("pyramidion: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


# --------------------------------------------------------------------------------------------------------------------
# Compiled
# --------------------------------------------------------------------------------------------------------------------


def test_a_compiled_run_has_whole_blocks_and_one_graph(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a run asks of torch; the graph itself is tested with the model."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: asked.append(options))
    seen: list[int] = []

    def look(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if module.training:
            seen.append(options["input_ids"].shape[1])

    original = PyramidionForConditionalGeneration.__init__

    def watched(self: Any, config: Any) -> None:
        original(self, config)
        self.register_forward_pre_hook(look, with_kwargs=True)

    monkeypatch.setattr(PyramidionForConditionalGeneration, "__init__", watched)
    train(small(compile=True, max_steps=2, evaluate_every=99.0), store, tmp_path, tell=silent)
    assert asked == [{"dynamic": True, "fullgraph": True}]
    block = small().config(100).packing
    assert block > 1
    assert seen
    assert not any(length % block for length in seen)


# --------------------------------------------------------------------------------------------------------------------
# The recipes that come with the project
# --------------------------------------------------------------------------------------------------------------------

RECIPES = Path(__file__).parents[1] / "recipes"
ABLATIONS: dict[str, dict[str, Any]] = {  # as recipes/ablation/README.md has them
    "soft": {},
    "straight-through": {"model.pooling": "straight-through"},
    "mean": {"model.pooling": "mean"},
    "random": {"model.pooling": "hard", "model.scorer": "random"},
    "none": {"model.encoder_lengths": [4096, 4096, 4096, 4096]},
}
BUNDLE, TOKENIZER = 25_000_000, 1_200_000  # bytes: what the bundled folder may have, and what its tokenizer takes


def build(recipe: Recipe) -> PyramidionForConditionalGeneration:
    with torch.device("meta"):
        return PyramidionForConditionalGeneration(recipe.config(16384))


def compact_bytes(model: torch.nn.Module) -> int:
    """Count as `pyramidion.compact` writes: a matrix in bytes with a float32 a row, the others in float32."""
    return sum(p.numel() + 4 * len(p) if p.ndim == 2 else 4 * p.numel() for p in model.parameters())


def test_one_entry_of_a_setting_is_changed(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {pooling: soft, dropout: 0.3}\n")
    given = {"model.pooling": "mean", "model.scorer": None, "generation.num_beams": 3}
    recipe = read_recipe(path, given)
    assert recipe.model == {"pooling": "mean", "dropout": 0.3, "scorer": None}
    assert recipe.generation == {"num_beams": 3}
    with pytest.raises(ValueError, match=r"`batch_size` must be of type int, got {'most': 3}"):
        read_recipe(path, {"batch_size.most": 3})
    with pytest.raises(ValueError, match=r"`modle` is not a setting .* Did you mean `model`"):
        read_recipe(path, {"modle.pooling": "mean"})


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_of_the_project_makes_a_model(path: Path):
    recipe = read_recipe(path, {})
    assert recipe.split(1) == (1, recipe.batch_size)
    assert build(recipe).config.pre_norm


def test_the_two_parts_of_a_recipe_are_of_one_model():
    changeable = ("dropout", "attention_dropout", "activation_dropout")
    for folder in ("default", "ablation"):
        first, second = (read_recipe(RECIPES / folder / f"{part}.yaml", {}) for part in ("pretrain", "summaries"))
        assert first.objective != "summaries"
        assert first.init_from is None
        assert second.objective == "summaries"
        assert second.init_from is not None
        sizes = [{k: v for k, v in (one.model or {}).items() if k not in changeable} for one in (first, second)]
        assert sizes[0] == sizes[1]


def test_the_bundled_model_fits(tmp_path: Path):
    model = build(read_recipe(RECIPES / "default" / "pretrain.yaml", {}))
    assert compact_bytes(model) + TOKENIZER < BUNDLE
    tiny = PyramidionForConditionalGeneration(small().config(100))  # the count is that of what is written
    written = compact(tiny, tmp_path / "tiny").after
    assert 0 < written - compact_bytes(tiny) < 200 * len(tiny.state_dict())  # the header


def test_ablations_differ_in_pooling_alone():
    sizes = {}
    for name, given in ABLATIONS.items():
        for part in ("pretrain", "summaries"):
            recipe = read_recipe(RECIPES / "ablation" / f"{part}.yaml", given)
            model = build(recipe)
            sizes[name] = sum(p.numel() for n, p in model.named_parameters() if "scorer" not in n)
            assert [p.kind for p in model.config.poolings.values()] == {"soft": ["soft"] * 2, "none": []}.get(
                name, [given.get("model.pooling")] * 2
            )
        shown = (RECIPES / "ablation" / "README.md").read_text()
        assert all(f"{key}={value}" in shown for key, value in given.items())
    assert len(set(sizes.values())) == 1
