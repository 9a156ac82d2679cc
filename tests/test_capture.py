"""A recorded step is the step: the same losses, gradients and chances, whatever the shapes; and who may not record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyramidion import PyramidionConfig, PyramidionForConditionalGeneration
from pyramidion.attention.layout import counted_on_device, shapes_decide
from pyramidion.bench import models, torture
from pyramidion.data import Collator
from pyramidion.data.store import Example
from pyramidion.training.capture import CapturedStep
from pyramidion.training.recipe import Recipe
from pyramidion.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.*:UserWarning", "ignore:.*fork.*:DeprecationWarning")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "decoder_layers": 2,
    "encoder_lengths": [64, 24, 10],
    "block_size": 16,
    "pre_norm": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}


def make(**changes: Any) -> PyramidionForConditionalGeneration:
    torch.manual_seed(1)
    return PyramidionForConditionalGeneration(PyramidionConfig(**{**SIZES, **changes})).train()


def batch(lengths: list[int], width: int, t: int, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Documents of these lengths in [b width], and targets [b t] that end in what is ignored; a mask where needed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (len(lengths), width), generator=generator)
    labels = torch.randint(3, 97, (len(lengths), t), generator=generator)
    labels[:, -2:] = -100
    given = {"input_ids": ids, "labels": labels}
    if min(lengths) < width:
        given["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {name: value.to(device) for name, value in given.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


BATCHES = {
    "full": ([64, 64, 64], 64),
    "padded": ([64, 1, 37], 64),
    "odd": ([50, 33, 49], 50),
    "below a block": ([7, 12, 3], 12),
    "left": ([40, 64, 16], 64),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"copies": 2},
        {"pooling": "straight-through"},
        {"pooling": "mean"},
        {"attention": "full"},
        {"pooling": "power"},
    ],
    ids=str,
)
def test_shapes_alone_decide_and_nothing_changes(kind: str, changes: dict[str, Any]):
    """Lengths counted on the device give the loss and the gradients of lengths that the host knows."""
    lengths, width = BATCHES[kind]
    given = batch(lengths, width, 9, seed=2)
    if kind == "left":
        given = {name: value.flip(1) if name == "attention_mask" else value for name, value in given.items()}
    found = []
    for fixed in (False, True):
        model = make(**changes)
        if fixed:
            with counted_on_device():
                loss = model(**given).loss
        else:
            loss = model(**given).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    (plain, expected), (loss, grads) = found
    torch.testing.assert_close(loss, plain)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_it_is_decided_only_meanwhile():
    def fail() -> None:
        with counted_on_device():
            assert shapes_decide()
            raise KeyError

    assert not shapes_decide()
    with pytest.raises(KeyError):
        fail()
    assert not shapes_decide()


# --------------------------------------------------------------------------------------------------------------------
# Batches of few shapes
# --------------------------------------------------------------------------------------------------------------------


def example(n: int, t: int) -> Example:
    return Example(id="x", document=np.arange(3, 3 + n), summary=np.arange(3, 3 + t))


def test_targets_fill_up_to_whole_parts_and_no_further_than_allowed():
    collate = Collator(max_source=64, max_target=20, whole=16, whole_target=8)
    for t, width in [(3, 8), (7, 8), (8, 16), (15, 16), (16, 20), (99, 20)]:
        made = collate([example(5, 2), example(30, t)])
        assert made["labels"].shape == (2, width)
        assert int((made["labels"][1] != -100).sum()) == min(t + 1, 20)
        assert made["input_ids"].shape == (2, 32)
    with pytest.raises(ValueError, match="`whole_target` must be at least 1, got 0"):
        Collator(whole_target=0)


def test_a_mask_that_marks_all_is_left_out_if_asked():
    full, short = [example(70, 3), example(64, 3)], [example(70, 3), example(40, 3)]
    assert "attention_mask" not in Collator(max_source=64, lean=True)(full)
    assert "attention_mask" in Collator(max_source=64, lean=True)(short)
    assert "attention_mask" in Collator(max_source=64)(full)


# --------------------------------------------------------------------------------------------------------------------
# Who may record
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["compile", "gradient_checkpointing", "fsdp"])
def test_what_cannot_be_recorded_is_refused(other: str):
    with pytest.raises(ValueError, match=f"`capture` must be off with `{other}`, got both"):
        Recipe(capture=True, **{other: True})


def test_on_a_cpu_nothing_is_recorded_and_the_run_says_so(tmp_path: Path):
    store = torture.make_store(tmp_path / "store")
    recipe = torture.recipe(torture.Settings(steps=2), 1)
    told: list[str] = []
    for name, capture in (("plain", False), ("captured", True)):
        changed = Recipe(**{**recipe.to_dict(), "capture": capture, "device": "cpu", "max_source": 64})
        train(changed, store, tmp_path / name, tell=told.append)
    assert sum("`capture` is for one process on a GPU, got 1 process on cpu" in line for line in told) == 1
    weights = [
        PyramidionForConditionalGeneration.from_pretrained(tmp_path / name / "model").state_dict()
        for name in ("plain", "captured")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_it_is_tried_on_a_gpu_alone():
    assert models.manners("cpu") == ("",)
    assert models.manners("cpu", compiled=True) == ("", "compiled")
    assert models.manners("cuda", compiled=True) == ("", "compiled", "captured")


# --------------------------------------------------------------------------------------------------------------------
# On a GPU
# --------------------------------------------------------------------------------------------------------------------


def learner(model: nn.Module, *, half: bool = False) -> Any:
    def learn(inputs: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss: Tensor = model(**inputs, use_cache=False).loss
        loss.backward()
        return loss

    return learn


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"copies": 3}, {"dropout": 0.2, "activation_dropout": 0.1}, {"pooling": "straight-through"}],
    ids=str,
)
def test_a_replay_is_the_step(changes: dict[str, Any], half: bool):
    """Six batches of three shapes, in turn: losses and gradients of a recorded step are those of one that is not."""
    plain, recorded = make(**changes).cuda(), make(**changes).cuda()
    step, expected = CapturedStep(learner(recorded, half=half), recorded.parameters()), learner(plain, half=half)
    kinds = [BATCHES["full"], BATCHES["padded"], ([48, 20, 33], 48)]
    batches = [batch(*kinds[turn % 3], 12, seed=turn, device="cuda") for turn in range(9)]
    found: list[list[tuple[Tensor, dict[str, Tensor]]]] = []
    for model, do, on_device in ((plain, expected, True), (recorded, step, False)):
        torch.manual_seed(5)
        found.append([])
        for given in batches:
            model.zero_grad(set_to_none=True)
            with counted_on_device() if on_device else torch.enable_grad():
                loss = do(dict(given)).detach().clone()
            found[-1].append((loss, gradients(model)))
    assert len(step.recordings) == 3
    for (wanted, grads), (loss, others) in zip(*found, strict=True):
        torch.testing.assert_close(loss, wanted, atol=1e-4, rtol=1e-3)
        whole = torch.stack([grad.norm() for grad in grads.values()]).norm()
        for name, grad in grads.items():  # some are 0 but for rounding, as that of a bias of keys
            error = (others[name] - grad).norm() / torch.maximum(grad.norm(), 0.02 * whole)
            assert float(error) < (0.05 if half else 1e-3), (name, float(error))


@pytest.mark.gpu
def test_gradients_of_parts_are_summed():
    model = make().cuda()
    step = CapturedStep(learner(model), model.parameters())
    given = batch([64, 64], 64, 8, seed=0, device="cuda")
    step(given)
    once = gradients(model)
    for _ in range(2):
        step(given)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, 3 * once[name], atol=1e-5, rtol=1e-3, msg=name)
    model.zero_grad(set_to_none=True)
    step(given)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, once[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.gpu
def test_a_step_that_waits_is_told_of_and_done_as_it_stands(caplog: pytest.LogCaptureFixture):
    model, plain = make().cuda(), make().cuda()

    def waits(inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = learner(model)(inputs)
        assert float(loss.detach()) > 0  # the host asks
        return loss

    step = CapturedStep(waits, model.parameters())
    for turn in range(4):
        given = batch([64, 64], 64, 8, seed=turn, device="cuda")
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
        with counted_on_device():
            wanted = learner(plain)(dict(given))
        torch.testing.assert_close(step(given), wanted.detach(), atol=1e-5, rtol=1e-4)
        for name, grad in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[name], grad, atol=1e-5, rtol=1e-3, msg=name)
    assert not step.recordings
    assert torch.rand(3, device="cuda").unique().numel() == 3  # chance goes on
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    held = torch.cuda.memory_allocated()
    lent = torch.empty(1 << 20, device="cuda")
    lent.record_stream(step.stream)
    del lent
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # who asks for memory takes back what others are done with
    assert torch.cuda.memory_allocated() == held
    assert sum("Steps are not recorded any more" in line for line in caplog.messages) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{"dropout": 0.3}, {"pooling": "hard", "scorer": "random"}], ids=str)
def test_chance_goes_on_from_replay_to_replay(changes: dict[str, Any]):
    model = make(**changes).cuda()
    step = CapturedStep(learner(model), model.parameters())
    given = batch([64, 64], 64, 8, seed=0, device="cuda")
    losses = [float(step(given)) for _ in range(6)]
    assert len(set(losses)) == 6


@pytest.mark.gpu
def test_a_recorded_training_learns_the_same(tmp_path: Path):
    """All of training, with accumulated parts and a checkpoint in between: losses are those of one not recorded."""
    store = torture.make_store(tmp_path / "store")
    recipe = torture.recipe(torture.Settings(steps=12), 1).to_dict() | {"device": "cuda", "max_source": 128}
    recipe |= {"batch_size": 4, "device_batch": 2, "evaluate_every": 99.0, "log_every": 1}
    losses = []
    for capture in (False, True):
        folder = tmp_path / str(capture)
        train(Recipe(**{**recipe, "capture": capture}), store, folder, tell=lambda line: None)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses.append([one["loss"] for one in map(json.loads, lines) if "loss" in one])
    assert len(losses[0]) == 12
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)
