"""The fast decode loop: token for token what transformers' generate writes, whatever the settings, or left to it."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.generation import engine, loop
from pyramidion.generation.search import Beam, Greedy, Rules
from pyramidion.generation.step import Decoder
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration

VOCABULARY = 61
FAMILIES: dict[str, dict[str, Any]] = {
    "blockwise": {"encoder_lengths": [64, 64]},
    "transpooler": {"encoder_lengths": [64, 64, 16]},
    "pyramidion": {"encoder_lengths": [64, 32, 8], "decoder_layers": 3},
    "full": {"encoder_lengths": [64, 64], "attention": "full"},
    "pre_norm": {"encoder_lengths": [64, 64, 16], "pre_norm": True},
    "positions": {"encoder_lengths": [64, 64, 16], "decoder_positions": True},
    "both": {"encoder_lengths": [64, 16], "decoder_positions": True, "pre_norm": True, "activation_function": "gelu"},
}


def make_model(family: str = "transpooler", seed: int = 0, end: float = 1.0, **changes: Any) -> Any:
    """Make a model that minds what it reads, and that ends texts the sooner, the larger `end` is."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3}
    config = PyramidionConfig(**{**sizes, "block_size": 16, "decoder_layers": 2, **FAMILIES[family], **changes})
    model = PyramidionForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "attention" in name and weight.ndim == 2:
                weight.mul_(3)
            if name.endswith("bias"):
                weight.normal_(std=0.3)
        model.lm_head.weight[2] *= end
    return model


def make_documents(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw documents of these lengths: tokens and mask [b n]."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=drawn)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return tokens * mask, mask


LENGTHS = [33, 5, 17, 1]


def lively_model() -> Any:
    """Make a model whose texts end, or do not, at very different steps."""
    return make_model("both", seed=2, end=2.5)


def both(model: Any, documents: tuple[Tensor, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Write with transformers' loop and with ours."""
    generation = GenerationConfig(**{"max_new_tokens": 24, **options})
    expected = engine.generate_plainly(model, *documents, generation)
    return expected, loop.decode(model, *documents, generation)


def assert_equal(model: Any, documents: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    expected, written = both(model, documents, **options)
    assert written.tolist() == expected.tolist()
    assert written.dtype == expected.dtype
    return written


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Make a test fail where transformers' loop writes unasked."""
    if request.node.get_closest_marker("parametrize") is None or "reason" not in request.fixturenames:

        def refuse(reason: str) -> None:
            raise AssertionError(f"left to transformers: {reason}")

        monkeypatch.setattr(loop, "tell", refuse)
    paces = dict(loop.PACES)
    yield
    loop.PACES.clear()
    loop.PACES.update(paces)


AS_ON_A_GPU = replace(loop.PACES["cuda"], fused=False)  # test_decoding is for these kernels


@pytest.fixture(params=["plain", "as on a GPU", "odd"])
def pace(request: pytest.FixtureRequest) -> str:
    """Drive the CPU in its own way, in that of a GPU (but for graphs), and with buckets that change all the time."""
    loop.PACES["cpu"] = {
        "plain": loop.Pace(),
        "as on a GPU": AS_ON_A_GPU,
        "odd": loop.Pace(grain=(3, 5), bucket=3, doubles=True, check=5, kept=2),
    }[request.param]
    return str(request.param)


# --------------------------------------------------------------------------------------------------------------------
# The same tokens
# --------------------------------------------------------------------------------------------------------------------


def named(value: object) -> str:
    """Name a case in the same way in every process."""
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize("beams", [1, 2, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_the_same(family: str, beams: int):
    assert_equal(make_model(family), make_documents(LENGTHS), num_beams=beams)


@pytest.mark.parametrize("beams", [1, 2, 3, 8])
def test_texts_that_end_at_different_steps(pace: str, beams: int):
    model, ends = lively_model(), set()
    for seed in range(2):
        written = assert_equal(model, make_documents([33, 9, 64, 4, 17], seed), num_beams=beams)
        ends |= {row.index(2) if 2 in row else -1 for row in written.tolist()}
    assert len(ends) > 2, "otherwise nothing ends early"
    several = {"eos_token_id": list(range(2, 9)), "min_new_tokens": 1}
    assert_equal(make_model("pyramidion"), make_documents([33, 9, 64, 4, 17], 1), num_beams=beams, **several)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_length_penalty_and_early_stopping(pace: str, penalty: float, early_stopping: bool | str):
    model, settings = lively_model(), {"length_penalty": penalty, "early_stopping": early_stopping}
    assert_equal(model, make_documents([40, 3, 12, 64]), num_beams=3, **settings)


def test_ways_to_stop_are_seen_to_matter():
    model, seen = lively_model(), []
    for early_stopping in (True, False, "never"):
        settings = {"early_stopping": early_stopping, "length_penalty": 2.0, "eos_token_id": [*range(2, 30)]}
        seen.append([assert_equal(model, make_documents([40, 9], seed), num_beams=3, **settings) for seed in range(3)])
    assert len({str(texts) for texts in seen}) == 3


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3},
        {"no_repeat_ngram_size": 40},
        {"bad_words_ids": [[token] for token in range(3, 40)]},
        {"bad_words_ids": [[7], [9, 11], [5, 5, 5], [*range(3, 40)]], "min_new_tokens": 8},
        {
            "bad_words_ids": [[first, second] for first in range(20) for second in range(3, 30)],
            "no_repeat_ngram_size": 2,
        },
        {"bad_words_ids": [[1, token] for token in range(60)]},  # behind the start token alone
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 8},
        {"min_new_tokens": 10},
        {"min_new_tokens": 24},
        {"min_length": 7, "max_length": 12, "max_new_tokens": None},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"eos_token_id": [2, 7, 11, 12], "min_new_tokens": 3},
        {"pad_token_id": 5, "min_new_tokens": 3},
        {"forced_bos_token_id": 9},
        {"forced_bos_token_id": 2},
        {"forced_eos_token_id": 2, "max_new_tokens": 9},
        {"forced_eos_token_id": [2, 4], "max_new_tokens": 9},
        {"max_new_tokens": 40, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_options_mean_the_same(options: dict[str, Any], beams: int):
    assert_equal(lively_model(), make_documents([33, 5, 17, 1, 64]), num_beams=beams, **options)


def test_n_grams_bans_and_repetitions_are_seen_to_matter():
    model, documents = make_model("positions"), make_documents(LENGTHS)
    free = assert_equal(model, documents)
    for size in range(1, 5):  # what was written, from its second token on, may not be written
        start = (free[0, 1:] != 0).int().argmax().item() + 1
        banned = free[0, start : start + size].tolist()
        assert not torch.equal(free, assert_equal(model, documents, bad_words_ids=[[*range(30, 55)], banned]))
    assert not torch.equal(free, assert_equal(model, documents, no_repeat_ngram_size=2))
    assert not torch.equal(free, assert_equal(model, documents, repetition_penalty=1.7))


@pytest.mark.parametrize("reason", ["a token that the model does not have"])
def test_bans_of_unknown_tokens_are_refused_as_transformers_does(reason: str, caplog: pytest.LogCaptureFixture):
    loop.tell.cache_clear()
    generation = GenerationConfig(max_new_tokens=3, bad_words_ids=[[4, VOCABULARY]])
    with pytest.raises(ValueError, match="vocabulary size is 61"), caplog.at_level(logging.WARNING):
        loop.decode(make_model(), *make_documents(LENGTHS), generation)
    assert reason in caplog.text


@pytest.mark.parametrize("beams", [1, 2])
def test_all_end_at_the_first_step(pace: str, beams: int):
    written = assert_equal(make_model(), make_documents([9, 30]), num_beams=beams, eos_token_id=[*range(2, VOCABULARY)])
    assert written.shape[1] == 2


@pytest.mark.parametrize("beams", [1, 2])
def test_one_document_and_no_padding(pace: str, beams: int):
    model = lively_model()
    for seed in range(3):
        assert_equal(model, make_documents([50], seed), num_beams=beams)
        assert_equal(model, make_documents([20, 20], seed), num_beams=beams)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_text_may_hold_padding_tokens(beams: int):
    model, documents = lively_model(), make_documents([33, 9, 64, 4, 17])
    token = assert_equal(model, documents, num_beams=beams)[0, 2].item()
    assert (assert_equal(model, documents, num_beams=beams, pad_token_id=token)[0, 1:-1] == token).any()


def test_without_an_end_all_is_written():
    model = make_model(eos_token_id=None)
    for beams in (1, 2):
        assert assert_equal(model, make_documents(LENGTHS), num_beams=beams).shape == (4, 25)


def draw(chance: random.Random) -> dict[str, Any]:
    """Draw settings."""
    options: dict[str, Any] = {"max_new_tokens": chance.choice([3, 11, 30]), "num_beams": chance.choice([1, 2, 5])}
    options["min_new_tokens"] = chance.choice([0, 2, options["max_new_tokens"]])
    options["no_repeat_ngram_size"] = chance.choice([0, 0, 2, 3])
    options["repetition_penalty"] = chance.choice([1.0, 1.0, 1.4])
    if chance.random() < 0.5:
        drawn = [[chance.randrange(3, VOCABULARY) for _ in range(chance.randint(1, 3))] for _ in range(200)]
        options["bad_words_ids"] = drawn
    options["eos_token_id"] = chance.choice([2, [2, 5, 6]])
    if options["num_beams"] > 1:
        options["length_penalty"] = chance.choice([-1.0, 0.0, 1.0, 2.0])
        options["early_stopping"] = chance.choice([True, False, "never"])
    return options


@pytest.mark.parametrize("seed", range(8))
def test_random_models_documents_and_settings(pace: str, seed: int):
    chance = random.Random(seed)
    model = make_model(chance.choice(list(FAMILIES)), seed, end=chance.choice([1.0, 1.5, 2.5]))
    for turn in range(3):
        lengths = [chance.randint(1, 60) for _ in range(chance.randint(1, 6))]
        assert_equal(model, make_documents(lengths, turn), **draw(chance))


# --------------------------------------------------------------------------------------------------------------------
# Precision
# --------------------------------------------------------------------------------------------------------------------


def teacher_forced(model: Any, documents: tuple[Tensor, Tensor], written: Tensor) -> Tensor:
    """Sum the log-probability [b] of what follows the start token, by the model's own forward."""
    with torch.inference_mode():
        logits = model(*documents, decoder_input_ids=written[:, :-1]).logits.float().log_softmax(-1)
    return logits.gather(-1, written[:, 1:].unsqueeze(-1)).squeeze(-1).sum(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beams", [1, 3])
def test_half_precision_is_as_good(dtype: torch.dtype, beams: int):
    """Near-ties may fall otherwise, so texts may differ; their score, by the float32 model, must not be lower by more
    than transformers' own loop in half precision is off."""
    exact, documents = make_model("pyramidion"), make_documents(LENGTHS)
    options = {"num_beams": beams, "min_new_tokens": 24}
    best = teacher_forced(exact, documents, both(exact, documents, **options)[0])
    theirs, ours = both(make_model("pyramidion").to(dtype), documents, **options)
    assert ours.shape == theirs.shape
    loss = [(best - teacher_forced(exact, documents, one)).abs().max().item() for one in (theirs, ours)]
    assert loss[1] <= max(2 * loss[0], 1.0), loss


@pytest.mark.parametrize("beams", [1, 2])
def test_half_precision_logits_are_close(beams: int):
    """Every step's logits in bfloat16 are within twice the error that the model's forward has in bfloat16."""
    exact, documents = make_model("pre_norm"), make_documents([30, 7])
    half = make_model("pre_norm").bfloat16()
    with torch.inference_mode():
        written = engine.generate_plainly(exact, *documents, GenerationConfig(max_new_tokens=9, min_new_tokens=9))
        reference = exact(*documents, decoder_input_ids=written).logits[:, -1]
        theirs = half(*documents, decoder_input_ids=written).logits[:, -1].float()
        ours = forced_logits(half, documents, written, beams).float()
    assert (ours - reference).abs().max() <= 2 * (theirs - reference).abs().max()


def forced_logits(model: Any, documents: tuple[Tensor, Tensor], written: Tensor, beams: int) -> Tensor:
    """Feed a text [b t] to our decoder, in its first beam, and give the logits [b v] behind it."""
    memory = model.get_encoder()(*documents)
    kind = Greedy if beams == 1 else Beam
    search = kind(Rules(beams, written.shape[1] + 1, 0), len(written), VOCABULARY, torch.device("cpu"))
    decoder = Decoder(model, search, memory.last_hidden_state.shape[1], masked=True)
    decoder.read(model, memory)
    search.reset(written[:, 0])
    for place in range(written.shape[1]):
        search.running[:, :, place] = written[:, place, None]
        logits = decoder.logits(written.shape[1])
        search.position += 1
    return logits.unflatten(0, (len(written), beams))[:, 0]


@pytest.mark.parametrize("family", ["transpooler", "pre_norm"])
def test_autocast_of_the_caller_is_kept(family: str):
    model, documents = make_model(family), make_documents(LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = both(model, documents, min_new_tokens=24)
        decoder = loop.writer_for(model, Rules(1, 9, 0), 4, 8, 0, False).decoder
    assert decoder.cache.dtype == decoder.head.dtype == torch.bfloat16
    assert decoder.blocks[0].residuals[0].norm.weight.dtype == torch.float32
    best = teacher_forced(model, documents, both(model, documents, min_new_tokens=24)[0])
    loss = [(best - teacher_forced(model, documents, one)).abs().max().item() for one in (theirs, ours)]
    assert loss[1] <= max(2 * loss[0], 1.0), loss


# --------------------------------------------------------------------------------------------------------------------
# How it is computed
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 4])
def test_the_memory_is_projected_once_a_layer_and_document(beams: int):
    model, seen = make_model("pyramidion"), []
    for layer in model.model.decoder.layers:
        for project in (layer.cross_attention.key, layer.cross_attention.value):
            project.register_forward_hook(lambda module, entering, left: seen.append((module, entering[0].shape[0])))
    generation = GenerationConfig(num_beams=beams, max_new_tokens=9)
    loop.decode(model, *make_documents([40, 22, 5]), generation)
    assert len({module for module, _ in seen}) == len(seen) == 2 * 3
    assert {rows for _, rows in seen} == {3}


@contextmanager
def no_questions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise where the host asks a tensor for a number."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host waits for the device")

    asking = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "__len__")
    with monkeypatch.context() as patch:
        for name in asking:
            patch.setattr(Tensor, name, refuse)
        yield


@pytest.mark.parametrize("beams", [1, 3])
def test_a_step_asks_the_device_nothing(monkeypatch: pytest.MonkeyPatch, beams: int):
    everything = {"ngram": 2, "banned": ((7,), (5, 6)), "repetition": 1.3, "floor": 5, "first": (9,), "last": (2, 4)}
    rules = Rules(beams, 12, 0, (2, 4), **everything, early_stopping=True)
    model, (tokens, mask) = make_model("both"), make_documents([30, 7])
    with torch.inference_mode():
        memory = model.get_encoder()(tokens, mask)
        writer = loop.writer_for(model, rules, 2, memory.last_hidden_state.shape[1], 0, True)
        writer.decoder.read(model, memory)
        writer.search.reset(torch.ones(2, dtype=torch.long))
        for position in range(11):
            with no_questions(monkeypatch):
                writer.decoder.step(writer.pace.length(position, 12))
    with pytest.raises(AssertionError, match="waits"), no_questions(monkeypatch):
        bool(writer.search.live)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_step_leaves_buffers_where_they_are(beams: int):
    """A captured graph knows addresses: whatever a step writes must go back to where it was."""
    model, documents = make_model("both"), make_documents([30, 7])
    with torch.inference_mode():
        memory = model.get_encoder()(*documents)
        rules = Rules(beams, 9, 0, tuple(range(2, 30)))
        writer = loop.writer_for(model, rules, 2, memory.last_hidden_state.shape[1], 0, True)
        writer.decoder.read(model, memory)
        writer.search.reset(torch.ones(2, dtype=torch.long))
        held = {name: value for name, value in vars(writer.search).items() if isinstance(value, Tensor)}
        assert held.pop("both").data_ptr() == held["running"].data_ptr()  # two of the others in one piece
        places, before = [one.data_ptr() for one in held.values()], [one.clone() for one in held.values()]
        for _ in range(8):
            writer.decoder.step(8)
    assert [vars(writer.search)[name].data_ptr() for name in held] == places
    changed = {id(one) for one, old in zip(held.values(), before, strict=True) if not torch.equal(one, old)}
    assert changed <= {id(one) for one in writer.search.moving()}, "what changes must be restored after a trial step"
    assert len(changed) > (3 if beams == 1 else 8)


def test_steps_that_come_too_late_change_nothing():
    """Texts end in the middle of an interval between two looks."""
    loop.PACES["cpu"] = loop.Pace(check=1000)
    model, shapes = lively_model(), set()
    for seed in range(3):
        for beams, settings in ((1, {}), (2, {"early_stopping": True}), (3, {"length_penalty": -1.0})):
            settings = {**settings, "eos_token_id": [*range(2, 20)]}
            written = assert_equal(model, make_documents([33, 9], seed), num_beams=beams, **settings)
            shapes.add((beams, written.shape[1] < 25))
    assert {(1, True), (2, True), (3, True)} <= shapes, "otherwise nothing ends early"


@pytest.mark.parametrize("early_stopping", [None, True, False, "never"])
def test_no_more_steps_than_transformers_takes(monkeypatch: pytest.MonkeyPatch, early_stopping: bool | str | None):
    """A batch of three is filled up to four: the fourth must not keep the others waiting."""
    loop.PACES["cpu"] = loop.Pace(grain=(4, 64), kept=1)
    model, steps, step = lively_model(), [], Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, length: (steps.append("ours"), step(self, length)))
    settings = {"max_new_tokens": 24, "eos_token_id": [*range(2, 30)]}
    settings |= {} if early_stopping is None else {"num_beams": 3, "early_stopping": early_stopping}
    for seed in range(3):
        steps.clear()
        hook = model.model.decoder.register_forward_hook(lambda *_: steps.append("theirs"))
        engine.generate_plainly(model, *make_documents([40, 9, 21], seed), GenerationConfig(**settings))
        hook.remove()
        loop.decode(model, *make_documents([40, 9, 21], seed), GenerationConfig(**settings))
        assert steps.count("ours") == steps.count("theirs") > 0


def test_results_are_frozen_once_nothing_lives():
    search = Beam(Rules(2, 9, 0, (2,)), 3, VOCABULARY, torch.device("cpu"))
    search.reset(torch.ones(3, dtype=torch.long))
    results = [search.best, search.scores, search.lengths, search.complete]
    logits = torch.zeros(6, VOCABULARY).index_fill(1, torch.tensor([2]), 9.0)
    search.live.fill_(False)
    before = [one.clone() for one in results]
    search.choose(logits, 8)
    assert all(torch.equal(one, old) for one, old in zip(results, before, strict=True))
    search.reset(torch.ones(3, dtype=torch.long))
    search.choose(logits, 8)
    assert not any(torch.equal(one, old) for one, old in zip(results, before, strict=True))


def test_lengths_grow_by_buckets():
    doubling = loop.Pace(bucket=64, doubles=True)
    assert [doubling.length(position, 1000) for position in (0, 63, 64, 127, 128, 511, 512)] == [
        *(64, 64, 128, 128, 256, 512),
        999,
    ]
    assert [loop.Pace().length(position, 40) for position in (0, 15, 16, 38)] == [16, 16, 32, 39]


def test_buffers_are_kept_for_the_next_call():
    loop.PACES["cpu"] = AS_ON_A_GPU
    model = make_model("transpooler", end=1.5)
    made = []
    for lengths in ([33, 9, 64], [64, 63, 5, 5], [40, 2, 7], [9, 17, 21]):
        for beams in (1, 2):
            assert_equal(model, make_documents(lengths), num_beams=beams)
        made.append(list(loop._KEPT[model].values()))
    assert len(made[0]) == len(made[-1]) == 2
    assert set(made[0]) == set(made[-1])
    loop.forget(model)
    assert model not in loop._KEPT


def test_at_most_so_many_sets_of_buffers_are_kept():
    loop.PACES["cpu"] = loop.Pace(kept=2)
    model = make_model()
    for limit in (3, 4, 5, 3):
        assert_equal(model, make_documents([9]), max_new_tokens=limit)
        assert len(loop._KEPT[model]) <= 2


def test_kept_buffers_do_not_keep_a_model():
    loop.PACES["cpu"] = AS_ON_A_GPU
    model, before = make_model(), len(loop._KEPT)
    assert_equal(model, make_documents([9]))
    assert len(loop._KEPT) == before + 1
    del model
    gc.collect()
    assert len(loop._KEPT) == before


def test_weights_that_were_trained_since_are_used():
    loop.PACES["cpu"] = AS_ON_A_GPU
    model, documents = make_model("both"), make_documents(LENGTHS)
    first = assert_equal(model, documents)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    assert not torch.equal(first, assert_equal(model, documents))
    model.load_state_dict(make_model("both", seed=5).state_dict(), assign=True)
    model.tie_weights()
    assert_equal(model, documents)
    assert len(loop._KEPT[model]) == 2, "a graph knows where weights were: other places, other graphs"


@pytest.mark.parametrize("family", [*FAMILIES, "copying"])
def test_documents_that_fill_their_batch_are_encoded_once_and_as_ever(family: str):
    loop.PACES["cpu"] = AS_ON_A_GPU
    model = make_model("pyramidion", copies=2) if family == "copying" else make_model(family)
    for lengths, recorded in (([33, 33], True), ([33, 32], False), ([64], True)):
        tokens, mask = make_documents(lengths)
        kept = loop.encode(model, tokens, mask)
        assert (kept is not None) == recorded
        if kept is not None:
            assert_same_memory(kept, model.get_encoder()(tokens, attention_mask=mask))
        with patch.object(model.model.encoder, "forward", wraps=model.model.encoder.forward) as forward:
            loop.decode(model, tokens, mask, GenerationConfig(max_new_tokens=3, num_beams=2))
        assert forward.call_count == 1
        assert_equal(model, (tokens, mask), num_beams=2)


def assert_same_memory(given: Any, expected: Any) -> None:
    assert set(given) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_only_what_is_the_same_work_each_time_is_recorded(monkeypatch: pytest.MonkeyPatch):
    tokens, _ = make_documents([20])
    assert not loop.recordable(make_model(), tokens), "a CPU is not kept waiting by its host"
    loop.PACES["cpu"] = AS_ON_A_GPU
    assert loop.recordable(make_model(), tokens)
    assert not loop.recordable(nn.Linear(2, 2), tokens)
    assert not loop.recordable(make_model().train(), tokens)
    assert not loop.recordable(make_model("pyramidion", scorer="random"), tokens)
    assert not loop.recordable(make_model("blockwise", attention="lsh", bucket_size=16), tokens)
    watched = make_model()
    handle = watched.model.encoder.layers[0].register_forward_hook(lambda *_: None)
    assert not loop.recordable(watched, tokens)
    handle.remove()
    assert loop.recordable(watched, tokens)
    monkeypatch.setattr(loop, "TOKENS", 19)
    assert not loop.recordable(watched, tokens)


def test_a_document_with_numbers_gone_wrong_does_not_spoil_the_next():
    loop.PACES["cpu"] = AS_ON_A_GPU
    model, documents = make_model(), make_documents(LENGTHS)
    kept = model.model.decoder.layers[0].attention.value.weight.detach().clone()
    with torch.no_grad():
        model.model.decoder.layers[0].attention.value.weight.fill_(torch.nan)
        loop.decode(model, *documents, GenerationConfig(max_new_tokens=24))
        model.model.decoder.layers[0].attention.value.weight.copy_(kept)
    assert_equal(model, documents)


# --------------------------------------------------------------------------------------------------------------------
# What is left to transformers
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"do_sample": True}, "`do_sample`"),
        ({"do_sample": True, "num_beams": 2}, "`do_sample`"),
        ({"num_beams": 3, "num_return_sequences": 2}, "`num_return_sequences`"),
        ({"sequence_bias": [[[5], -2.0]]}, "SequenceBiasLogitsProcessor"),
        ({"suppress_tokens": [5, 6]}, "SuppressTokensLogitsProcessor"),
        ({"renormalize_logits": True, "num_beams": 2}, "LogitNormalization"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor"),
        ({"max_time": 1000.0}, "MaxTimeCriteria"),
        ({"use_cache": False}, "`use_cache`"),
        ({"cache_implementation": "offloaded_static"}, "`cache_implementation`"),
        ({"prompt_lookup_num_tokens": 2}, "`assisted_generation`"),
    ],
    ids=str,
)
def test_other_options_are_left_to_transformers(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    if "cache_implementation" in options:
        options = {"cache_implementation": "static", "disable_compile": True}
    loop.tell.cache_clear()
    model, documents = make_model(), make_documents([17] if "prompt_lookup_num_tokens" in options else LENGTHS)
    generation = GenerationConfig(max_new_tokens=9, **options)
    torch.manual_seed(1)
    expected = engine.generate_plainly(model, *documents, generation)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.manual_seed(1)
            assert torch.equal(loop.decode(model, *documents, generation), expected)
    said = [record.getMessage() for record in caplog.records if record.name == loop.__name__]
    assert len(said) == 1, "once a reason"
    assert said[0].startswith(reason + ": not supported")


def prefix(model: Any, tokens: Tensor) -> dict[str, Any]:
    return {"decoder_input_ids": torch.tensor([[1, 9, 8]] * len(tokens))}


def own_cache(model: Any, tokens: Tensor) -> dict[str, Any]:
    return {"past_key_values": EncoderDecoderCache(*(DynamicCache(config=model.config) for _ in range(2)))}


@pytest.mark.parametrize(
    ("make", "reason"), [(prefix, "`decoder_input_ids`"), (own_cache, "`past_key_values`")], ids=named
)
def test_other_arguments_are_left_to_transformers(make: Callable[..., Any], reason: str, monkeypatch: Any):
    told: list[str] = []
    monkeypatch.setattr(loop, "tell", told.append)
    model, (tokens, mask) = make_model(), make_documents(LENGTHS)
    settings = {"attention_mask": mask, "max_new_tokens": 9}
    expected = model.generate(tokens, **settings, **make(model, tokens))
    written = model.generate(tokens, **settings, **make(model, tokens), custom_generate=loop._write)
    assert torch.equal(written, expected)
    assert told == [reason]


class Doubled(nn.Linear):
    """A linear map that does something else besides, as an adapter does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def adapt(model: Any) -> None:
    model.model.decoder.layers[1].attention.value.__class__ = Doubled


def hook(model: Any) -> None:
    model.model.decoder.layers[0].feed_forward.register_forward_hook(lambda *seen: (seen[2][0] * 2, None))


@pytest.mark.parametrize(
    ("change", "reason"), [(adapt, "a decoder with Doubled"), (hook, "a hook on PyramidionFeedForward")], ids=named
)
def test_changed_models_are_left_to_transformers(change: Callable[[Any], None], reason: str, monkeypatch: Any):
    told: list[str] = []
    monkeypatch.setattr(loop, "tell", told.append)
    model, documents = make_model(), make_documents(LENGTHS)
    before = both(model, documents)[0]
    change(model)
    expected, written = both(model, documents)
    assert torch.equal(written, expected)
    assert not torch.equal(expected, before)
    assert told == [reason]


def test_a_model_that_trains_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(loop, "tell", told.append)
    loop.decode(make_model().train(), *make_documents(LENGTHS), GenerationConfig(max_new_tokens=3))
    assert told == ["training mode"]


def test_recorders_of_transformers_are_no_hooks():
    model, documents = make_model(), make_documents(LENGTHS)
    with torch.inference_mode():
        model(*documents, decoder_input_ids=torch.ones(4, 1, dtype=torch.long), output_hidden_states=True)
    assert_equal(model, documents)


def test_errors_are_those_of_generate():
    model, (tokens, mask) = make_model(), make_documents(LENGTHS)
    mask[1] = False
    with pytest.raises(ValueError, match="at least one token of every document"):
        loop.decode(model, tokens, mask, GenerationConfig(max_new_tokens=3))


def test_a_failure_gives_the_buffers_back(monkeypatch: pytest.MonkeyPatch):
    loop.PACES["cpu"] = AS_ON_A_GPU
    model, documents = make_model(), make_documents(LENGTHS)
    assert_equal(model, documents)

    def fail(self: Any, length: int) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", fail)
        with pytest.raises(torch.OutOfMemoryError):
            loop.decode(model, *documents, GenerationConfig(max_new_tokens=24))
    assert model not in loop._KEPT
    assert_equal(model, documents)


def test_the_summarizer_writes_with_it(monkeypatch: pytest.MonkeyPatch):
    from pyramidion.generation.summarizer import Summarizer

    assert Summarizer.__init__.__kwdefaults__["engine"] is engine.generate
    called: list[Any] = []
    monkeypatch.setattr(engine, "decode", lambda *given: called.append(given))
    ids = torch.zeros(1, 2)
    engine.generate(1, ids, 3, 4)
    assert called == [(1, ids, 3, 4)]


# --------------------------------------------------------------------------------------------------------------------
# On a GPU
# --------------------------------------------------------------------------------------------------------------------


def gpu_model(family: str, **changes: Any) -> Any:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
    return make_model(family, **{**sizes, **changes}).cuda()


def gpu_documents(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens, mask = make_documents(lengths, seed)
    return tokens.cuda(), mask.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["transpooler", "both", "pyramidion"])
@pytest.mark.parametrize("beams", [1, 2, 8])
def test_replays_write_the_same(family: str, beams: int):
    model = gpu_model(family, end=1.2)
    if beams > 1:  # 150 times the better of many texts: a change of weights by 1e-6 decides otherwise now and then
        model = model.double()
    options = {"num_beams": beams, "max_new_tokens": 150, "min_new_tokens": 70, "no_repeat_ngram_size": 3}
    for seed, lengths in enumerate(([64, 64, 64, 64], [33, 5, 17, 1], [64, 40, 9], [12])):
        assert_equal(model, gpu_documents(lengths, seed), **options)
    first = next(iter(loop._KEPT[model].values()))
    assert {64, 128} <= {length for length, _ in first.graphs} <= {64, 128, 150}


@pytest.mark.gpu
@pytest.mark.parametrize("beams", [1, 3])
def test_a_second_call_captures_nothing(beams: int, monkeypatch: pytest.MonkeyPatch):
    model = gpu_model("transpooler", end=1.5)
    options = {"num_beams": beams, "max_new_tokens": 40}
    assert_equal(model, gpu_documents([64, 30, 5]), **options)
    monkeypatch.setattr(loop.Writer, "_capture", lambda *_: pytest.fail("captured again"))
    assert_equal(model, gpu_documents([64, 9, 21, 40]), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("beams", [1, 2])
def test_trained_weights_are_seen_by_graphs(beams: int):
    model, documents = gpu_model("both"), gpu_documents(LENGTHS)
    first = assert_equal(model, documents, num_beams=beams)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    assert not torch.equal(first, assert_equal(model, documents, num_beams=beams))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"copies": 2}, {"attention": "full"}, {"pooling": "mean"}])
@pytest.mark.parametrize("beams", [1, 2])
def test_recorded_encodings_and_beginnings_write_the_same(changes: dict[str, Any], beams: int):
    """Documents change, then weights in their place, then shapes; the first call of each shape is not recorded."""
    model, options = gpu_model("pyramidion", **changes).double(), {"num_beams": beams, "max_new_tokens": 12}
    for seed in range(4):
        assert_equal(model, gpu_documents([64, 64, 64], seed), **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    for seed, lengths in enumerate(([64, 64, 64], [64, 64, 60], [40, 40], [40, 40], [40, 40], [64, 64, 64])):
        assert_equal(model, gpu_documents(lengths, seed), **options)
    _, encoder = loop._ENCODERS[model]
    assert not encoder.refused
    assert len(encoder.recordings) == 2
    for writer in loop._KEPT[model].values():
        assert not writer.begin.refused
        assert writer.begin.recordings
    with torch.autocast("cuda", torch.bfloat16):
        for seed in range(3):
            loop.decode(model.float(), *gpu_documents([64, 64, 64], seed), GenerationConfig(**options))
    assert loop._ENCODERS[model][1] is not encoder


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
def test_half_precision_on_a_gpu(dtype: torch.dtype, autocast: bool, beams: int):
    exact, documents = gpu_model("pyramidion"), gpu_documents(LENGTHS)
    half = gpu_model("pyramidion") if autocast else gpu_model("pyramidion").to(dtype)
    options = {"num_beams": beams, "min_new_tokens": 24}
    best = teacher_forced(exact, documents, both(exact, documents, **options)[0])
    with torch.autocast("cuda", dtype, enabled=autocast):
        theirs, ours = both(half, documents, **options)
    loss = [(best - teacher_forced(exact, documents, one)).abs().max().item() for one in (theirs, ours)]
    assert loss[1] <= max(2 * loss[0], 1.0), loss
