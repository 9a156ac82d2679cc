"""Copying from the memory: probabilities that sum to 1, the loss of just these, and the same tokens by every loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig

from pyramidion import PyramidionConfig, PyramidionForConditionalGeneration, PyramidionForSequenceClassification
from pyramidion.compact import compact
from pyramidion.complexity.parameters import parameters
from pyramidion.generation import loop
from pyramidion.generation.engine import generate, generate_plainly
from test_engine import make_documents

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "block_size": 8},
    **{"encoder_lengths": [40, 17, 6], "decoder_layers": 2, "copies": 1, "dropout": 0.0},
    **{"attention_dropout": 0.0, "activation_dropout": 0.0, "pre_norm": True, "decoder_positions": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "soft": {},
    "hard": {"pooling": "hard"},
    "straight-through": {"pooling": "straight-through"},
    "mean": {"pooling": "mean"},
    "power": {"pooling": "power"},
    "funnel": {"pooling": "funnel"},
    "none": {"encoder_lengths": [40, 40]},
    "full": {"attention": "full"},
    "along": {"copies": 3},
    "along hard": {"copies": 4, "pooling": "hard"},
    "along all": {"copies": 2, "encoder_lengths": [40, 40]},
    "along funnel": {"copies": 2, "pooling": "funnel"},
    "before": {"copy_length": 17},
    "before all": {"copy_length": 40},
    "thin": {"copy_length": 6},
    "thin all": {"copy_length": 40, "encoder_lengths": [40, 40]},
    "before along": {"copy_length": 17, "copies": 3, "pooling": "straight-through"},
}
LENGTHS = [33, 5, 17, 1]


def make(seed: int = 0, **changes: Any) -> PyramidionForConditionalGeneration:
    """Make a model that copies often, and not always the same."""
    torch.manual_seed(seed)
    model = PyramidionForConditionalGeneration(PyramidionConfig(**{**SIZES, **changes})).eval()
    assert model.copier is not None
    with torch.no_grad():
        model.copier.query.weight.mul_(5)
        model.copier.gate.bias.add_(1)
        if model.copier.ahead is not None:
            model.copier.ahead.weight.mul_(9)
    return model


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PyramidionForConditionalGeneration:
    return make(**KINDS[request.param])


def labels_of(tokens: Tensor, seed: int = 0) -> Tensor:
    """Draw labels [b 7], some of them words of the document, some left out."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, 97, (len(tokens), 7), generator=drawn)
    labels[:, :3] = tokens[:, :1]
    labels[0, 5:] = -100
    return labels


def test_probabilities_sum_to_one_and_the_loss_is_theirs(model: PyramidionForConditionalGeneration):
    tokens, mask = make_documents(LENGTHS)
    labels = labels_of(tokens)
    out = model(input_ids=tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(out.logits.exp().sum(-1), torch.ones(4, 7))
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits.transpose(1, 2), labels))


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_copied_is_what_won(kind: str):
    """Layer by layer, the winner of the winners, and what follows it; in plain loops, from the Selections given out."""
    model = make(**KINDS[kind])
    tokens, mask = make_documents(LENGTHS)
    with torch.no_grad():
        kept = model.get_encoder()(tokens, mask, output_selections=True)
    w, stage = model.config.copies, model.config.copy_stage
    left = {None: kept.last_hidden_state.shape[1], 0: 33, 1: 17}[stage]  # the longest document has 33 tokens
    assert kept.copy_states.shape == (4, left, 24)
    assert kept.copy_tokens.shape == (4, left, w)
    assert kept.copy_shares.shape == (4, left)
    for i, length in enumerate(LENGTHS):
        k = kept.copy_tokens.shape[1]
        for slot in range(k):
            place, share = slot, 1.0
            layers = () if "funnel" in kind else reversed(kept.selections[:stage])
            for selection in layers:
                place = int(selection.winners[i, place]) if place < selection.winners.shape[1] and place >= 0 else -1
                share *= float(selection.weights[i, place]) if place >= 0 else 0.0
            real = 0 <= place < length
            assert float(kept.copy_shares[i, slot]) == pytest.approx(share if real else 0.0, abs=1e-6)
            if real:
                follow = [tokens[i, place + step if place + step < length else place] for step in range(w)]
                assert kept.copy_tokens[i, slot].tolist() == follow


def test_a_thin_head_looks_at_normed_slots():
    x = torch.randn(2, 5, 24)
    copier = make(copy_length=17).copier
    assert copier is not None
    assert copier.norm is not None
    assert copier.key is not None
    with torch.no_grad():
        copier.norm.weight.uniform_(0.5, 2)
        copier.norm.bias.normal_()
    normed = F.layer_norm(x, (24,), copier.norm.weight, copier.norm.bias)
    assert copier.keys(x).shape == (2, 5, 8)  # one of three heads
    torch.testing.assert_close(copier.keys(x), F.linear(normed, copier.key.weight, copier.key.bias))
    wide = make().copier
    assert wide is not None
    assert wide.keys(x) is x


def test_a_certain_copy_is_written():
    """With an open gate and a sharp query nothing but words of the document comes out."""
    model = make()
    with torch.no_grad():
        model.copier.gate.bias.fill_(30.0)
    tokens, mask = make_documents([33])
    logits = model(input_ids=tokens, attention_mask=mask, decoder_input_ids=torch.tensor([[1, 50, 60]])).logits
    kept = model.get_encoder()(tokens, mask)
    likely = torch.zeros(97, dtype=torch.bool)
    likely[kept.copy_tokens[0, :, 0]] = True
    held = float(kept.copy_shares.detach().min())
    assert float(logits.detach().exp()[..., likely].sum(-1).min()) >= held > 0


def test_padding_and_neighbours_change_nothing(model: PyramidionForConditionalGeneration):
    tokens, mask = make_documents(LENGTHS)
    written = torch.full((4, 3), 7)
    together = model(input_ids=tokens, attention_mask=mask, decoder_input_ids=written).logits
    for i, length in enumerate(LENGTHS):
        alone = model(input_ids=tokens[i : i + 1, :length], decoder_input_ids=written[:1]).logits
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-4, rtol=1e-4)
    n = tokens.shape[1]
    left = torch.stack([one.roll(n - length) for one, length in zip(tokens, LENGTHS, strict=True)])
    shifted = model(input_ids=left, attention_mask=mask.flip(1), decoder_input_ids=written).logits
    assert torch.equal(shifted, together)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "no_repeat_ngram_size": 2}], ids=str)
def test_every_loop_writes_the_same(model: PyramidionForConditionalGeneration, options: dict[str, Any]):
    tokens, mask = make_documents(LENGTHS)
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    search = GenerationConfig(max_new_tokens=9, do_sample=False, **ids, **options)
    assert torch.equal(generate(model, tokens, mask, search), generate_plainly(model, tokens, mask, search))


@pytest.fixture
def kept_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buffers be kept and filled up, as on a GPU."""
    monkeypatch.setitem(loop.PACES, "cpu", loop.Pace(grain=(4, 16), kept=2))


@pytest.mark.usefixtures("kept_buffers")
@pytest.mark.parametrize("kind", ["soft", "before"])
def test_nothing_is_left_of_the_batch_before(kind: str):
    model = make(**KINDS[kind])
    search = GenerationConfig(max_new_tokens=6, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1)
    for lengths in (LENGTHS, [3, 2, 1], [40, 40, 40, 40], [2, 1, 1]):
        tokens, mask = make_documents(lengths, seed=len(lengths))
        assert torch.equal(generate(model, tokens, mask, search), generate_plainly(model, tokens, mask, search))


@pytest.mark.usefixtures("kept_buffers")
@pytest.mark.parametrize("half", [False, True])
def test_weights_that_were_trained_since_are_used(half: bool):
    model = make()
    model = model.bfloat16() if half else model
    tokens, mask = make_documents(LENGTHS)
    search = GenerationConfig(max_new_tokens=6, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1)
    before = generate(model, tokens, mask, search)
    with torch.no_grad():
        model.copier.query.weight.neg_()
    after = generate(model, tokens, mask, search)
    assert torch.equal(after, generate_plainly(model, tokens, mask, search))
    assert not torch.equal(before, after)


def test_what_is_copied_teaches_the_scorer():
    """The gradient reaches it through the share that a winner holds, even where the memory's vectors say nothing."""
    model = make(encoder_lengths=[40, 6])
    tokens, mask = make_documents([33, 30])
    kept = model.get_encoder()(tokens, mask)
    assert model.copier is not None
    copying = model.copier(torch.randn(2, 1, 24), kept.copy_states.detach(), kept.copy_shares)
    found = copying.of_labels(kept.copy_tokens, kept.copy_tokens[:, :1, 0])[1]
    scorers = [p for name, p in model.named_parameters() if "scorer.linear.weight" in name]
    assert all(bool((grad != 0).any()) > 0 for grad in torch.autograd.grad(-found.sum(), scorers))


def learnt(draw: Callable[[], tuple[Tensor, Tensor]], copies: int, k: int) -> float:
    """Train a small model on documents and labels that are drawn anew in each step, and give the last loss."""
    torch.manual_seed(3)
    changes = {"vocab_size": 997, "copies": copies, "decoder_layers": 1, "encoder_lengths": [24, k]}
    model = PyramidionForConditionalGeneration(PyramidionConfig(**{**SIZES, **changes}))
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(100):
        tokens, labels = draw()
        loss = model(input_ids=tokens, labels=labels).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
    return float(loss.detach())


def test_copying_is_learnt_where_it_is_all_there_is_to_learn():
    """Write the one rare word of a document: with copies it takes few steps, without them it is not found."""

    def draw() -> tuple[Tensor, Tensor]:
        rare = torch.randint(20, 997, (32, 1))
        return torch.randint(3, 20, (32, 24)).scatter_(1, torch.randint(0, 24, (32, 1)), rare), rare

    assert learnt(draw, 1, k=6) < 2.0 < 5.0 < learnt(draw, 0, k=6)


def test_a_phrase_is_gone_along():
    """Write the three words behind a mark: three slots for 24 words can keep the mark, but hardly all of these."""

    def draw() -> tuple[Tensor, Tensor]:
        place = torch.randint(0, 20, (32, 1))
        tokens = torch.randint(4, 997, (32, 24)).scatter_(1, place, 3)
        return tokens, tokens.gather(1, place + torch.arange(1, 4))

    assert learnt(draw, 4, k=3) < 1.0 < 4.0 < learnt(draw, 1, k=3)


def test_a_folder_keeps_the_copier(tmp_path: Path):
    model = make()
    model.save_pretrained(tmp_path / "plain")
    compact(tmp_path / "plain", tmp_path / "small")
    tokens, mask = make_documents(LENGTHS)
    written = torch.full((4, 3), 7)
    want = model(input_ids=tokens, attention_mask=mask, decoder_input_ids=written).logits
    for name, tolerance in (("plain", 1e-5), ("small", 0.3)):
        again = PyramidionForConditionalGeneration.from_pretrained(tmp_path / name).eval()
        got = again(input_ids=tokens, attention_mask=mask, decoder_input_ids=written).logits
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["soft", "along", "none", "thin", "before", "before along"])
def test_parameters_are_counted(kind: str):
    model = make(**KINDS[kind])
    assert parameters(model.config) == sum(weight.numel() for weight in model.parameters())


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(ValueError, match="`copies` must be at least 0, got -1"):
        PyramidionConfig(copies=-1)
    for wrong in ({"copy_length": 5}, {"copy_length": 18}, {"copy_length": 17, "encoder_lengths": [40, 6]}):
        with pytest.raises(ValueError, match=f"`copy_length` must be None or 40.*, got {wrong['copy_length']}"):
            PyramidionConfig(**{**SIZES, **wrong})
    for wrong in ({"copies": 0}, {"pooling": "funnel"}):
        with pytest.raises(ValueError, match=r"`copy_length` must be None: .*, got 17"):
            PyramidionConfig(**{**SIZES, "copy_length": 17, **wrong})
    model = make()
    with pytest.raises(ValueError, match="`input_ids` must be given to a model that copies"):
        model(inputs_embeds=torch.randn(1, 9, 24), decoder_input_ids=torch.ones(1, 1, dtype=torch.long))
    kept = model.get_encoder()(torch.randint(3, 97, (1, 20)))
    kept.copy_tokens = None
    with pytest.raises(ValueError, match="or `encoder_outputs` that came of them: this memory holds no tokens"):
        model(encoder_outputs=kept, decoder_input_ids=torch.ones(1, 1, dtype=torch.long))


def test_what_does_not_write_does_not_ask_for_tokens():
    classify = PyramidionForSequenceClassification(PyramidionConfig(**{**SIZES, "num_labels": 3})).eval()
    assert classify(inputs_embeds=torch.randn(2, 9, 24)).logits.shape == (2, 3)


def test_a_training_step_compiles_whole():
    model = make(encoder_lengths=[40, 6], decoder_layers=1).train()
    tokens, mask = make_documents(LENGTHS)
    labels = labels_of(tokens)
    plain = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    graph = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(input_ids=tokens, attention_mask=mask, labels=labels).loss, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "no_repeat_ngram_size": 2}], ids=str)
@pytest.mark.parametrize("kind", ["soft", "none", "along", "before along"])
def test_every_loop_writes_the_same_on_a_gpu(kind: str, options: dict[str, Any]):
    """In double precision, where no choice is decided by rounding."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
    model = make(**{**sizes, **KINDS[kind]}).cuda().double()
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    search = GenerationConfig(max_new_tokens=19, do_sample=False, **ids, **options)
    for seed in range(2):
        tokens, mask = (one.cuda() for one in make_documents(LENGTHS, seed))
        assert torch.equal(generate(model, tokens, mask, search), generate_plainly(model, tokens, mask, search))


@pytest.mark.gpu
def test_half_precision_learns_what_single_does_on_a_gpu():
    model = make().cuda().train()
    tokens, mask = (one.cuda() for one in make_documents(LENGTHS))
    labels = labels_of(tokens.cpu()).cuda()
    plain = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    with torch.autocast("cuda", torch.bfloat16):
        half = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    half.backward()
    assert model.copier is not None
    assert bool(model.copier.query.weight.grad.isfinite().all())
    torch.testing.assert_close(half, plain, atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["soft", "straight-through", "mean", "none", "along", "before"])
def test_gradients_are_those_of_a_cpu_on_a_gpu(kind: str):
    tokens, mask = make_documents(LENGTHS)
    labels = labels_of(tokens)
    grads = []
    for device in ("cpu", "cuda"):
        model = make(**KINDS[kind]).to(device).train()
        given = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        model(**{name: value.to(device) for name, value in given.items()}).loss.backward()
        named = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}
        grads.append(named)
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=2e-4, rtol=2e-3, msg=name)
