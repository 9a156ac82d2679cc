"""Muon: against torch's own, one matrix at a time, and against the singular value decomposition."""

from typing import Any

import pytest
import torch
from torch import nn

from pyramidion import PyramidionConfig, PyramidionForConditionalGeneration
from pyramidion.training.muon import Muon, orthogonal, split

SHAPES = [(24, 24), (24, 40), (24, 24), (40, 24), (2, 7)]
ADAM: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8}


@pytest.mark.parametrize("shape", [(16, 16), (9, 33), (33, 9), (3, 16, 16), (4, 33, 9), (2, 5)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, ...]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    found = left.mT @ orthogonal(matrices if matrices.ndim == 3 else matrices[None]).float().reshape(shape) @ right.mT
    values = torch.diagonal(found, dim1=-2, dim2=-1)
    assert values.min() > 0.6
    assert values.max() < 1.3
    torch.testing.assert_close(found, torch.diag_embed(values), atol=0.06, rtol=0)


def test_steps_are_those_of_torch():
    """Matrices of several shapes, two of them alike, one without a gradient in one step; a vector and a table."""
    torch.manual_seed(1)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    rest = [nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(50, 24))]
    same, same_rest = ([nn.Parameter(weight.detach().clone()) for weight in group] for group in (ours, rest))
    groups = [{"params": rest[:1], "weight_decay": 0.0}, {"params": rest[1:], "weight_decay": 0.1}]
    optimizer = Muon(ours, groups, 0.01, weight_decay=0.1, **ADAM)
    others = [{"params": same_rest[:1], "weight_decay": 0.0}, {"params": same_rest[1:], "weight_decay": 0.1}]
    both = [
        torch.optim.Muon(same, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, **ADAM),
    ]
    before = [weight.detach().clone() for weight in ours]
    for step in range(4):
        for weight, twin in zip(ours + rest, same + same_rest, strict=True):
            missing = step == 2 and weight is ours[1]
            weight.grad = None if missing else torch.randn_like(weight)
            twin.grad = None if weight.grad is None else weight.grad.clone()
        optimizer.step()
        for one in both:
            one.step()
        assert all((weight.grad is None) == (step == 2 and weight is ours[1]) for weight in ours + rest)
    for old, weight, twin in zip(before, ours, same, strict=True):
        assert (weight - old).norm() > 0.01
        torch.testing.assert_close(weight, twin, atol=3e-4, rtol=1e-3)  # bf16 inside: batches round in another order
    torch.testing.assert_close(rest, same_rest)


def test_it_goes_on_from_its_state():
    """What it remembers travels through a state dict: momentum of matrices, moments of the rest."""
    torch.manual_seed(2)
    start = [torch.randn(6, 8), torch.randn(8)]
    gradients = [[torch.randn(6, 8), torch.randn(8)] for _ in range(4)]

    def fresh(values: list[torch.Tensor]) -> tuple[list[nn.Parameter], Muon]:
        weights = [nn.Parameter(value.clone()) for value in values]
        return weights, Muon(weights[:1], [{"params": weights[1:]}], 0.1)

    def walk(weights: list[nn.Parameter], optimizer: Muon, steps: list[list[torch.Tensor]]) -> None:
        for step in steps:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()

    whole, one = fresh(start)
    walk(whole, one, gradients)
    half, first = fresh(start)
    walk(half, first, gradients[:2])
    after, second = fresh([weight.detach() for weight in half])
    second.load_state_dict(first.state_dict())
    walk(after, second, gradients[2:])
    assert all(torch.equal(a, b) for a, b in zip(whole, after, strict=True))


def test_a_closure_is_called_once():
    weight = nn.Parameter(torch.eye(3))
    optimizer = Muon([weight], [{"params": [nn.Parameter(torch.zeros(1))]}], 0.1)
    calls = []

    def closure() -> float:
        calls.append(1)
        weight.grad = torch.ones(3, 3)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert len(calls) == 1
    assert not torch.equal(weight, torch.eye(3))


@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 1), (2, 3, 4)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="two dimensions of at least 2, got"):
        Muon([nn.Parameter(torch.zeros(shape))], [{"params": [nn.Parameter(torch.zeros(1))]}], 0.1)


def test_a_model_is_split_into_matrices_and_the_rest():
    config = PyramidionConfig(
        vocab_size=50, hidden_size=16, num_attention_heads=2, encoder_lengths=[32, 8], decoder_layers=1, copies=1
    )
    model = PyramidionForConditionalGeneration(config)
    matrices, rest = split(model)
    names = {weight: name for name, weight in model.named_parameters()}
    assert len(matrices) == len(set(matrices))
    assert set(matrices) | rest == set(names)
    assert not set(matrices) & rest
    found = {names[weight] for weight in matrices}
    assert model.get_input_embeddings().weight in rest
    assert {names[weight] for weight in rest if weight.ndim == 2 and min(weight.shape) > 1} == {"model.shared.weight"}
    assert "model.decoder.layers.0.cross_attention.key.weight" in found
    assert "copier.query.weight" in found
    assert not any("scorer" in name or "gate" in name or "bias" in name or "norm" in name for name in found)
