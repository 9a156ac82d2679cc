"""Explanations: what they say is what the model did, and every number adds up."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pyramidion.cli import main
from pyramidion.explain import Copies, Explanation, Stage, explain
from pyramidion.explain.passages import Words, find_blocks, find_sections, find_sentences, find_words
from pyramidion.explain.reading import _beginning, _written_spans, model_name
from pyramidion.explain.terminal import inert
from pyramidion.generation import Summarizer
from pyramidion.generation.engine import generate_plainly
from pyramidion.modeling_pyramidion import PyramidionEncoderLayer, PyramidionForConditionalGeneration
from pyramidion.presets import preset
from test_generation import VOCABULARY, make_text, make_tokenizer, write_model

TEXT = (
    "What is kept\n\nPooling keeps tokens that a task needs. It drops the others, in many rounds.\n\n"
    "What is lost\n\n" + make_text(3, 90) + " Nothing else 😀 of a long document.\n"
)
OPTIONS = {"max_new_tokens": 7, "min_new_tokens": 2}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("explained") / "model", encoder_lengths=[128, 61, 17], block_size=64)


@pytest.fixture(scope="module")
def summarizer(folder: Path) -> Summarizer:
    return Summarizer.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def explained(summarizer: Summarizer) -> Explanation:
    return explain(summarizer, TEXT, title="A title", **OPTIONS)


def make_summarizer(tokenizer: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> Summarizer:
    """Make a model with random weights that minds its input."""
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "block_size": 64, **changes}
    model = PyramidionForConditionalGeneration(preset("tiny-pyramidion", **sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "attention" in name and weight.ndim == 2:
                weight.mul_(2)
    return Summarizer(model.to(dtype), tokenizer)


# --------------------------------------------------------------------------------------------------------------------
# What the model did
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 1}, {"num_beams": 3, "max_new_tokens": 11}, {"max_length": 50}])
def test_the_summary_is_the_summarizers(summarizer: Summarizer, options: dict[str, Any]):
    for text in (TEXT, make_text(5, 40), make_text(6, 3).encode()):
        [summary] = summarizer([text], **options)
        explanation = explain(summarizer, text, **options)
        assert explanation.summary == summary.text
        assert explanation.note == summary.note
        assert explanation.words.tokens == summary.document_tokens - summary.cut + 1


def test_another_engine_is_used(summarizer: Summarizer):
    calls = []

    def engine(*given: Any) -> torch.Tensor:
        calls.append(given)
        return generate_plainly(*given)

    own = Summarizer(summarizer.model, summarizer.tokenizer, engine=engine)
    assert explain(own, TEXT, **OPTIONS).summary == own([TEXT], **OPTIONS)[0].text
    assert len(calls) == 2


def test_weights_of_a_slot_sum_to_one(explained: Explanation):
    assert [stage.name for stage in explained.stages] == ["tokens", "layer 2", "layer 3"]
    assert [stage.k for stage in explained.stages] == [explained.words.tokens, 61, 17]
    for stage in explained.stages:
        for slot in range(stage.k):
            assert stage.weights[stage.slots == slot].sum() == pytest.approx(1, abs=1e-6)


def test_shares_sum_to_the_attention_paid(explained: Explanation):
    filled = np.unique(explained.memory.slots)
    for token in range(explained.written.tokens):
        shares = explained.shares(token)
        assert shares.shape == (explained.words.tokens,)
        assert shares.sum() == pytest.approx(explained.attention[token, filled].sum(), abs=1e-6)
        assert shares.sum() == pytest.approx(1, abs=1e-5)
        i = int(shares.argmax())
        slot, weight = explained.memory.slots[i], explained.memory.weights[i]
        assert shares[i] == pytest.approx(explained.attention[token, slot] * weight)


def test_what_a_word_drew_on_is_the_mean_of_its_tokens(explained: Explanation):
    token = explained.written.token
    word = int(np.diff(token).argmax())
    assert token[word + 1] - token[word] > 1  # a word of several tokens
    mean = np.mean([explained.shares(t) for t in range(token[word], token[word + 1])], axis=0)  # [n]
    drawn = explained.drawn(word)
    for i in (0, 5, len(explained.words) - 1):
        first, last = explained.words.token[i : i + 2]
        assert drawn[i] == pytest.approx(mean[first:last].sum())
    assert drawn.sum() == pytest.approx(1, abs=1e-5)


def test_pooling_by_hand_is_what_the_model_pooled(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    """With layers that change nothing, pooling the vectors once by an explanation is the memory."""
    summarizer = make_summarizer(tokenizer, torch.float64, encoder_lengths=[128, 61, 31, 17])
    monkeypatch.setattr(PyramidionEncoderLayer, "forward", lambda self, x, layout: (x, None))
    encoder = summarizer.model.model.encoder
    encoder.norm = torch.nn.Identity()
    seen: list[Any] = []
    hooks = [encoder.poolers[name].register_forward_hook(lambda *call: seen.append(call)) for name in encoder.poolers]
    explanation = explain(summarizer, TEXT, **OPTIONS)
    for hook in hooks:
        hook.remove()
    n = explanation.words.tokens
    given = seen[-3][1][0][0]  # [n d] what the first pooler was given, of the last time it was
    for stage, (_, _, pooled) in zip(explanation.stages[1:], seen[-3:], strict=True):
        assert (stage.k, n) == (pooled.x.shape[1], len(given))
        by_hand = torch.zeros(stage.k, given.shape[1], dtype=torch.float64)
        for i in range(n):
            by_hand[stage.slots[i]] += stage.weights[i] * given[i]
        torch.testing.assert_close(by_hand, pooled.x[0], rtol=0, atol=1e-12)


def test_each_layer_pools_as_its_selection_says(summarizer: Summarizer):
    """With real layers too: what a pooler gave is what the reported slots and weights make of what it got."""
    encoder, seen = summarizer.model.model.encoder, []
    hooks = [encoder.poolers[name].register_forward_hook(lambda *call: seen.append(call)) for name in encoder.poolers]
    explanation = explain(summarizer, TEXT, **OPTIONS)
    for hook in hooks:
        hook.remove()
    first, second = ((inputs[0][0].double(), pooled) for _, inputs, pooled in seen[-2:])
    stage, composed = explanation.stages[1:]
    by_hand = torch.zeros(61, first[0].shape[1], dtype=torch.float64)
    by_hand.index_add_(0, torch.tensor(stage.slots), first[0] * torch.tensor(stage.weights)[:, None])
    torch.testing.assert_close(by_hand, first[1].x[0].double(), rtol=0, atol=1e-5)
    slots, weights = second[1].selection.slots[0].numpy(), second[1].selection.weights[0].double().numpy()
    assert (composed.slots == slots[stage.slots]).all()
    np.testing.assert_allclose(composed.weights, stage.weights * weights[stage.slots], rtol=1e-6, atol=0)


def test_attention_is_that_of_the_steps_that_wrote(summarizer: Summarizer):
    """transformers' own loop, asked for its attentions while it writes, says the same."""
    model = copy.deepcopy(summarizer.model)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*summarizer.tokenizer(TEXT, add_special_tokens=False)["input_ids"], 2]])
    lengths = {"max_new_tokens": 7, "min_new_tokens": 7, "num_beams": 1}
    told = model.generate(ids, **lengths, output_attentions=True, return_dict_in_generate=True, no_repeat_ngram_size=2)
    explanation = explain(summarizer, TEXT, **lengths)
    assert explanation.written.tokens == len(told.cross_attentions) == 7
    for t, layers in enumerate(told.cross_attentions):
        for layer, weights in enumerate(layers):  # [1 h 1 k]
            np.testing.assert_allclose(explanation.layers[layer, t], weights[0, :, 0].mean(0), atol=1e-6)
    np.testing.assert_allclose(explanation.attention, explanation.layers.mean(0))
    steps = explanation.layers[0]
    assert np.abs(steps[1:] - steps[:-1]).max() > 1e-4  # steps differ, or nothing was compared


def test_the_model_is_left_as_it_was(summarizer: Summarizer):
    model = summarizer.model
    hooks = sum(len(part._forward_hooks) for part in model.modules())
    weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    implementation = model.config._attn_implementation
    explain(summarizer, TEXT, **OPTIONS)
    assert model.config._attn_implementation == implementation != "eager"
    assert sum(len(part._forward_hooks) for part in model.modules()) == hooks
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == weights
    assert not model.training


POOLINGS = {
    "soft": {},
    "hard": {"pooling": "hard"},
    "straight-through": {"pooling": "straight-through"},
    "power": {"pooling": "power", "scorer": None},
    "mean": {"pooling": "mean", "scorer": None},
    "max": {"pooling": "max", "scorer": None},
    "funnel": {"pooling": "funnel", "scorer": None},
    "none": {"encoder_lengths": [128, 128], "scorer": None},
    "at once": {"encoder_lengths": [23, 23], "input_length": 128},
}


@pytest.mark.parametrize("name", POOLINGS)
def test_every_pooling_can_be_explained(name: str, tokenizer: Any):
    summarizer = make_summarizer(tokenizer, **{"encoder_lengths": [128, 61, 17], **POOLINGS[name]})
    explanation = explain(summarizer, TEXT, **OPTIONS)
    n = explanation.words.tokens
    expected = {"none": [n], "funnel": [n, 61, 17, n], "at once": [n, 23]}.get(name, [n, 61, 17])
    assert [stage.k for stage in explanation.stages] == expected
    assert explanation.layers.shape == (2, explanation.written.tokens, expected[-1])
    dropped = int((explanation.stages[-1].slots < 0).sum())
    assert dropped == (n - 17 if name in ("hard", "straight-through", "power") else 0)
    assert explanation.held().sum() == pytest.approx(1, abs=1e-5)
    assert explanation.drawn(0).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "copies", "before"),
    [
        *((name, copies, None) for name in POOLINGS for copies in (1, 3)),
        *((name, copies, 61) for name in ("soft", "mean") for copies in (1, 2)),
    ],
)
def test_what_was_copied_is_the_rest_of_what_was_written(name: str, copies: int, before: int | None, tokenizer: Any):
    """Of the probability of each token: the vocabulary's part as one computes it by hand, copying is the rest."""
    changes = {"encoder_lengths": [128, 61, 17], "copies": copies, **POOLINGS[name]}
    if before is not None:
        changes["copy_length"] = before
    summarizer = make_summarizer(tokenizer, torch.float64, **changes)
    model: Any = summarizer.model
    seen: list[torch.Tensor] = []

    def engine(model: Any, ids: torch.Tensor, mask: torch.Tensor, generation: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        some = ids[0, torch.randint(len(ids[0]), (9,), generator=generator)]  # half of it out of the document
        wrote = torch.cat([some, torch.randint(5, VOCABULARY, (9,), generator=generator)])
        seen.extend([ids, torch.cat([torch.tensor([model.config.decoder_start_token_id]), wrote])[None]])
        return seen[1]

    explanation = explain(Summarizer(model, tokenizer, engine=engine), TEXT)
    ids, wrote = seen
    with torch.no_grad():
        out = model(ids, decoder_input_ids=wrote[:, :-1])
        states = model.model(ids, decoder_input_ids=wrote[:, :-1]).last_hidden_state
        chances = model.copier(states, out.copy_states, out.copy_shares).each.sum(-1)[0]  # [t c]
    label = wrote[0, 1:, None]
    whole = out.logits[0].gather(1, label).exp()[:, 0]
    by_words = model.lm_head(states)[0].softmax(-1).gather(1, label)[:, 0] * (1 - chances.sum(1))
    found = explanation.copies
    assert found is not None
    k = explanation.memory.k if before is None else before
    assert ids[0][torch.from_numpy(found.origins)].tolist() == out.copy_tokens[0, :k].flatten().tolist()
    expected = (1 - by_words / whole).detach().numpy()
    np.testing.assert_allclose(found.shares.sum(1), expected, atol=1e-9)
    assert expected.max() > 0.01
    for word in range(len(explanation.written)):
        first, last = explanation.written.token[word : word + 2]
        assert explanation.copied(word).sum() == pytest.approx(expected[first:last].mean(), abs=1e-9)
        for origin in explanation.copied(word).nonzero()[0]:  # a word that has the token that was written
            tokens = ids[0, explanation.words.token[origin] : explanation.words.token[origin + 1]].tolist()
            assert set(tokens) & set(label[first:last, 0].tolist())
    data = explanation.to_dict()["copied"]
    assert [sum(share for _, share in places) for places in data] == pytest.approx(expected, abs=1e-5)
    assert all(ids[0, source] == label[t, 0] for t, places in enumerate(data) for source, _ in places)
    assert " words were copied from the text" in explanation.text()


def test_copies_that_cannot_be_are_refused(tokenizer: Any, explained: Explanation):
    assert explained.copies is None
    assert not explained.copied(0).any()
    assert "copied" not in explained.text()
    t, k, n = explained.written.tokens, explained.memory.k, explained.words.tokens
    good = Copies(np.arange(k), np.full((t, k), 1 / k))
    assert replace(explained, copies=good).copied(0).sum() == pytest.approx(1)
    wrong = {
        r"origins \[c\] and shares \[t c\]": Copies(good.origins[1:], good.shares),
        f"from 0 to {n - 1:,}, got {n}": Copies(good.origins + n - k + 1, good.shares),
        "at least 0 and at most 1": Copies(good.origins, good.shares * 1.001),
        "must be at least 0": Copies(good.origins, -good.shares),
        "at least 0 and": Copies(good.origins, good.shares * np.nan),
    }
    for said, copies in wrong.items():
        with pytest.raises(ValueError, match=said):
            replace(explained, copies=copies)


def test_a_text_shorter_than_the_memory_is_kept_whole(summarizer: Summarizer):
    explanation = explain(summarizer, "Two words", **OPTIONS)
    assert explanation.words.tokens < 17
    for stage in explanation.stages:
        assert stage.slots.tolist() == list(range(explanation.words.tokens))
        assert (stage.weights == 1).all()


def test_low_precision_is_explained(tokenizer: Any):
    explanation = explain(make_summarizer(tokenizer, torch.bfloat16, encoder_lengths=[128, 61, 17]), TEXT, **OPTIONS)
    assert 1e-3 < explanation.rounding < 0.05
    assert explanation.held().sum() == pytest.approx(1, abs=1e-5)


def test_a_cut_text_is_shown_as_far_as_it_was_read(summarizer: Summarizer):
    explanation = explain(summarizer, TEXT, max_length=40, **OPTIONS)
    assert explanation.words.tokens == 40
    assert TEXT.startswith(explanation.source)
    assert 40 < len(explanation.source) < len(TEXT)
    tokens = summarizer.tokenizer(explanation.source, add_special_tokens=False)["input_ids"]
    assert len(tokens) == 39
    assert "cut: " in (explanation.note or "")


@pytest.mark.parametrize("text", ["", "  \n", "\u200b", b"\xff\xfe\x00", "\x01\x02\x03\x04\x05\x06", b"\x80abc"])
def test_what_is_no_text_is_refused(summarizer: Summarizer, text: str | bytes):
    with pytest.raises(ValueError, match=r"^`text` must be something to summarise: "):
        explain(summarizer, text)


@pytest.mark.parametrize("text", [["a text"], 7, None])
def test_one_text_is_asked_for(summarizer: Summarizer, text: Any):
    with pytest.raises(ValueError, match=r"^`text` must be one text, str or bytes, got (list|int|NoneType)\.$"):
        explain(summarizer, text)


def test_titles(summarizer: Summarizer, explained: Explanation):
    assert explained.title == "A title"
    assert explain(summarizer, "Short one", **OPTIONS).title == "Short one"
    long = explain(summarizer, "pooling   keeps\n" * 40, **OPTIONS).title
    assert long.startswith("pooling keeps pooling")
    assert len(long) <= 80
    assert long.endswith("…")
    assert explain(summarizer, "x y", title="half \ud83d of it", **OPTIONS).title == "half \ufffd of it"


def test_a_model_is_called_by_its_folder(folder: Path, explained: Explanation):
    assert explained.model == folder.parent.name
    for path, name in {"runs/mine": "mine", "runs/mine/model": "mine", "model": "model", "": "pyramidion"}.items():
        model = preset("tiny-pyramidion")
        model.name_or_path = path
        assert model_name(type("M", (), {"config": model})) == name


def test_progress_is_told(summarizer: Summarizer):
    told: list[Any] = []
    explain(summarizer, TEXT, progress=lambda *what: told.append(what), **OPTIONS)
    assert told == [(0, 2, "writing the summary"), (1, 2, "looking at what was kept")]


# --------------------------------------------------------------------------------------------------------------------
# Sums are checked
# --------------------------------------------------------------------------------------------------------------------


def changed(stage: Stage, **changes: Any) -> tuple[Stage, ...]:
    return (replace(stage, **changes),)


def test_an_explanation_that_does_not_add_up_is_refused(explained: Explanation):
    first, middle, memory = explained.stages
    more, less = memory.weights.copy(), memory.weights.copy()
    more[5] += 1e-3
    less[0] = -0.5
    elsewhere = memory.slots.copy()
    elsewhere[9] = 17
    louder = explained.layers.copy()
    louder[:, 3, 2] += 1e-3
    wrong: dict[str, dict[str, Any]] = {
        r"weights of a slot must sum to 1, got 1\.001 in slot \d+ of 'layer 3'": {
            "stages": (first, middle, *changed(memory, weights=more))
        },
        r"Weights must be at least 0.*'layer 3'": {"stages": (first, middle, *changed(memory, weights=less))},
        r"Slots must be below 17 in 'layer 3', got 17": {"stages": (first, middle, *changed(memory, slots=elsewhere))},
        r"must sum to 1, got 0 in slot 17": {"stages": (first, *changed(memory, k=18))},
        r"tokens must have a slot and a weight": {"stages": (first, *changed(middle, slots=middle.slots[1:]))},
        r"Attention must sum to 1.*got 1\.001 at summary token 3": {"layers": louder},
        r"`layers` must be \[l t k\] with t = \d+ and k = 17, got \[2, \d+, 17\]": {"layers": explained.layers[:, 1:]},
        r"`layers` must be .* and k = 61": {"stages": (first, middle)},
        r"`stages` must begin with the source tokens": {"stages": ()},
        r"`words` must follow each other in the 40 characters": {"source": explained.source[:40]},
        r"`words` must follow each other in the 3 characters": {"summary": explained.summary[:3]},
        r"`words` must have at least one token": {
            "words": Words(explained.words.start, explained.words.end, explained.words.token + 1)
        },
    }
    assert repr(replace(explained)).startswith("Explanation('A title', ")
    for said, changes in wrong.items():
        with pytest.raises(ValueError, match=said):
            replace(explained, **changes)


def test_numbers_that_are_none_are_refused(explained: Explanation):
    first, middle, memory = explained.stages
    weights, layers = memory.weights.copy(), explained.layers.copy()
    weights[3] = layers[0, 0, 0] = np.nan
    with pytest.raises(ValueError):
        replace(explained, stages=(first, middle, replace(memory, weights=weights)))
    with pytest.raises(ValueError):
        replace(explained, layers=layers)


def test_weights_of_dropped_tokens_are_refused(tokenizer: Any):
    explanation = explain(make_summarizer(tokenizer, pooling="hard"), make_text(1, 300), **OPTIONS)
    memory = explanation.memory
    weights = memory.weights.copy()
    weights[memory.slots < 0] = 0.1
    with pytest.raises(ValueError, match="0 where a token is dropped"):
        replace(memory, weights=weights).check(explanation.words.tokens)


def test_shares_that_miss_attention_are_refused(explained: Explanation):
    """A slot may be off by rounding; all of them together may not."""
    memory = replace(explained.memory, weights=explained.memory.weights * (1 + 9e-6))
    replace(explained, stages=(*explained.stages[:-1], memory))
    with pytest.raises(ValueError, match="The shares of the source tokens must sum to 1"):
        replace(explained, stages=(*explained.stages[:-1], memory), rounding=5e-6)


# --------------------------------------------------------------------------------------------------------------------
# Words
# --------------------------------------------------------------------------------------------------------------------


def spell(text: str, tokenizer: Any) -> tuple[list[str], Words]:
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    words = find_words(text, [*encoded["offset_mapping"], (len(text), len(text))])
    words.check(text)
    assert words.tokens == len(encoded["input_ids"]) + 1
    return [text[start:end] for start, end in zip(words.start, words.end, strict=True)], words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("keeps tokens, in many.", ["keeps", "tokens,", "in", "many.", ""]),
        ("a\n\nb", ["a", "\n\n", "b", ""]),
        (" a  b ", ["a", "b", " ", ""]),
        ("a\n  b", ["a", "\n  ", "b", ""]),
        ("it's </s> x", ["it's", "</s>", "x", ""]),
        ("naïve 😀🇫🇷", ["naïve", "😀🇫🇷", ""]),
        ("保持 令牌", ["保", "持", "令", "牌", ""]),
        ("z\u202ey\x00", ["z\u202ey\x00", ""]),
        ("\t\r\n", ["\t\r\n", ""]),
    ],
)
def test_words_of_a_text(text: str, expected: list[str], tokenizer: Any):
    assert spell(text, tokenizer)[0] == expected


def test_a_run_without_spaces_is_cut_at_its_tokens(tokenizer: Any):
    short, long = "x" * 32, "x" * 33
    assert spell(short, tokenizer)[0] == [short, ""]
    words, found = spell(f"a {long} b", tokenizer)
    assert (words[0], "".join(words[1:-2]), words[-2]) == ("a", long, "b")
    assert len(words) > 20
    assert (np.diff(found.token) >= 1).all()


def test_tokens_of_one_character_stay_together(tokenizer: Any):
    words, found = spell("😀" * 40, tokenizer)
    assert words == [*("😀" * 40), ""]
    assert (np.diff(found.token)[:-1] >= 4).all()


def test_other_tokenizers_offsets_are_taken():
    """Some trim white space from tokens, so that one of white space alone stands for nothing; some go backwards."""
    words = find_words("ab  cd", [(0, 2), (3, 3), (4, 6), (6, 6)])
    assert [(int(a), int(b)) for a, b in zip(words.start, words.end, strict=True)] == [(0, 2), (3, 3), (4, 6), (6, 6)]
    for offsets in ([(0, 6), (0, 2), (6, 12)], [(0, 2), (3, 6), (0, 2), (7, 12)]):
        words = find_words("of the house", offsets)
        words.check("of the house")
        assert words.tokens == len(offsets)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(0, 30))
def test_any_text_has_its_tokens_in_words(text: str, cut: int):
    tokenizer = make_cached()
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    spans = encoded["offset_mapping"][: max(len(encoded["input_ids"]) - cut, 0)]
    read = text[: max((end for _, end in spans), default=0)]
    words = find_words(read, [*spans, (len(read), len(read))])
    words.check(read)
    assert words.tokens == len(spans) + 1
    shown = "".join(read[a:b] for a, b in zip(words.start, words.end, strict=True))
    assert "".join(shown.split()) == "".join(read.split())  # nothing visible stands outside a word
    blocks, sections = find_blocks(read), find_sections(read, words, find_blocks(read))
    assert "".join(read[start:end] for start, end, _ in blocks) == read
    for parts in (find_sentences(read, words), [(start, end) for _, start, end in sections]):
        assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] == len(words)


def make_cached(kept: list[Any] = []) -> Any:  # noqa: B006
    if not kept:
        kept.append(make_tokenizer())
    return kept[0]


def test_sums_and_largest_are_by_word():
    words = Words(np.array([0, 2, 5]), np.array([1, 4, 6]), np.array([0, 1, 4, 6]))
    values = np.array([[1.0, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    assert words.sums(values).tolist() == [[1, 9, 11], [6, 12, 3]]
    assert words.largest(values).tolist() == [[1, 4, 6], [6, 5, 2]]
    assert (len(words), words.tokens) == (3, 6)


# --------------------------------------------------------------------------------------------------------------------
# What was written
# --------------------------------------------------------------------------------------------------------------------


def test_written_tokens_find_their_characters(tokenizer: Any):
    text = "keeps 😀 tokens, 保持"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    told, spans = _written_spans(tokenizer, [*ids, 2])
    assert told == text
    expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert spans[-1] == (len(text), len(text))
    for (start, end), (first, last) in zip(spans, expected, strict=False):
        assert text[start:end].strip() == text[first:last].strip()


def test_special_and_broken_tokens_are_written(tokenizer: Any):
    ids = tokenizer(" a😀b ", add_special_tokens=False)["input_ids"]
    told, spans = _written_spans(tokenizer, [1, *ids, 0, 2])
    assert told == "a😀b"
    assert spans[0] == (0, 0)
    assert spans[-2:] == [(3, 3), (3, 3)]
    ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    assert _written_spans(tokenizer, [1, *ids])[1][:2] == [(0, 0), (0, 1)]
    emoji = tokenizer("😀", add_special_tokens=False)["input_ids"]
    told, spans = _written_spans(tokenizer, [*emoji[:2], *emoji[:3]])  # halves of characters
    assert "\ufffd" in told
    assert all(0 <= start <= end <= len(told) for start, end in spans)


def test_a_summary_ends_where_it_was_ended(summarizer: Summarizer):
    def engine(model: Any, ids: torch.Tensor, mask: torch.Tensor, generation: Any) -> torch.Tensor:
        return torch.tensor([[1, 40, 41, 2, 0, 0]])

    explanation = explain(Summarizer(summarizer.model, summarizer.tokenizer, engine=engine), TEXT)
    assert explanation.written.tokens == 3
    assert explanation.written.start[-1] == explanation.written.end[-1] == len(explanation.summary)

    def padded(model: Any, ids: torch.Tensor, mask: torch.Tensor, generation: Any) -> torch.Tensor:
        return torch.tensor([[2, 40, 41, 42, 0, 0]])  # begins with the end token, as some models do, and has no end

    assert explain(Summarizer(summarizer.model, summarizer.tokenizer, engine=padded), TEXT).written.tokens == 3


def test_an_empty_summary_is_explained(summarizer: Summarizer):
    def engine(model: Any, ids: torch.Tensor, mask: torch.Tensor, generation: Any) -> torch.Tensor:
        return torch.tensor([[1, 2]])

    explanation = explain(Summarizer(summarizer.model, summarizer.tokenizer, engine=engine), TEXT)
    assert explanation.summary == ""
    assert (len(explanation.written), explanation.written.tokens) == (1, 1)
    assert "(nothing was written)" in explanation.text()


# --------------------------------------------------------------------------------------------------------------------
# Sections and passages
# --------------------------------------------------------------------------------------------------------------------


def headings(text: str) -> list[str]:
    return [text[start:end].strip() for start, end, heading in find_blocks(text) if heading]


LONG = "This line is a paragraph of a text that has some more to say, and so is longer than any heading would be. "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"One\n\n{LONG}\n\nTwo words\n\n{LONG}", ["One", "Two words"]),
        (f"One\n{LONG}\n{LONG}\nTwo\n{LONG}", ["One", "Two"]),
        (f"One\r\n\r\n{LONG}\r\n\r\nTwo\r\n\r\n{LONG}", ["One", "Two"]),
        ("A line\r\nIt ends here.\r\nMore of it.", []),
        (f"# One\n{LONG}\n## Two\n{LONG}", ["# One", "## Two"]),
        (f"A sentence.\n\n{LONG}", []),
        (f"A list:\n\n{LONG}", []),
        ("One\n\nTwo\n\nThree", []),
        (f"{'x' * 73}\n\n{LONG}", []),
        (f"{'x' * 72}\n\n{LONG}", ["x" * 72]),
        (f"12\n\n{LONG}", []),
        (f"{LONG}\nlast words of it\n\n{LONG}", []),
        ("short line\nanother line\nand a third", []),
        ("", []),
    ],
)
def test_headings(text: str, expected: list[str]):
    assert headings(text) == expected
    assert "".join(text[start:end] for start, end, _ in find_blocks(text)) == text


def sections(text: str, tokenizer: Any) -> list[tuple[str, str]]:
    words = spell(text, tokenizer)[1]
    found = find_sections(text, words, find_blocks(text))
    return [(title, text[words.start[start] : words.end[end - 1]].strip()) for title, start, end in found]


def test_sections_begin_with_their_headings(tokenizer: Any):
    found = sections(f"Before. It\n\n{LONG}\n\n# One\n\n{LONG}\n\nTwo\n\n{LONG}", tokenizer)
    assert [title for title, _ in found] == ["Before. It", "One", "Two"]
    assert found[1][1].startswith("# One")
    assert found[1][1].endswith("would be.")
    found = sections(f"{LONG}\n\n# One\n\n{LONG}", tokenizer)
    assert [title for title, _ in found] == ["Before the first heading", "One"]


def test_a_text_without_headings_is_cut_into_parts(tokenizer: Any):
    found = sections("\n".join(f"{LONG}{i}." for i in range(30)), tokenizer)
    assert 10 <= len(found) <= 12
    assert found[0][0] == "Paragraphs 1 to 3"
    assert found[-1][0].endswith("to 30")
    assert [title for title, _ in sections("One.\nTwo.\nThree.", tokenizer)] == [f"Paragraph {i}" for i in (1, 2, 3)]
    uneven = sections(f"{LONG * 9}\nIn short.\n{LONG * 4}", tokenizer)
    assert [title for title, _ in uneven] == [f"Paragraph {i}" for i in (1, 2, 3)]
    found = sections("A first one. Then a second one. And a third", tokenizer)
    assert [text for _, text in found][:2] == ["A first one.", "Then a second one."]
    assert found[0][0] == "Sentence 1"


def test_the_end_token_is_in_no_sentence(tokenizer: Any):
    for text in ("One here. Two there", "One here. Two there.\n"):
        words = spell(text, tokenizer)[1]
        found = find_sentences(text, words)
        told = [text[words.start[start] : words.end[end - 1]].strip() for start, end in found]
        assert told == ["One here.", text[10:].strip(), ""]
        assert found[-1] == (len(words) - 1, len(words))


def test_what_sections_hold(explained: Explanation):
    found = explained.by_section()
    assert [one.text for one in found] == ["What is kept", "What is lost"]
    for stage in range(3):
        assert sum(one.share for one in explained.by_section(stage)) == pytest.approx(1, abs=1e-5)
    assert sum(one.part for one in found) == pytest.approx(1)
    for one in explained.by_section(0):
        assert one.share == pytest.approx(one.part)  # before any pooling each token holds as much as any other
    first = found[0]
    token = explained.words.token
    by_hand = explained.memory.weights[token[first.start] : token[first.end]].sum() / 17
    assert first.share == pytest.approx(by_hand)
    assert first.density == pytest.approx(first.share / first.part)


def test_the_sentences_that_hold_most(explained: Explanation):
    passages = explained.top(4)
    shares = [one.share for one in passages]
    assert len(passages) == 4
    assert shares == sorted(shares, reverse=True)
    every = explained.top(10**6)
    assert max(one.share for one in every) == shares[0]
    end = explained.memory.weights[-1] / 17  # the end token is in no sentence
    assert sum(one.share for one in every) + end == pytest.approx(1, abs=1e-5)
    assert all(one.text and one.text in explained.source for one in every)
    dense = [one.density for one in explained.top(4, by="density")]
    assert dense == sorted(dense, reverse=True)
    assert dense[0] >= passages[0].density
    assert explained.top(0) == explained.top(-3) == []
    with pytest.raises(ValueError, match="`by` must be share or density, got 'length'"):
        explained.top(by="length")


def test_survival_is_the_most_that_a_token_holds(explained: Explanation):
    survival, held = explained.survival(), explained.held()
    assert (explained.survival(0) == 1).all()
    for i in range(len(explained.words)):
        first, last = explained.words.token[i : i + 2]
        own = explained.memory.weights[first:last]
        assert survival[i] == own.max()
        assert held[i] == pytest.approx(own.sum() / 17)
    assert 0 <= survival.min() <= survival.max() <= 1


# --------------------------------------------------------------------------------------------------------------------
# Forms
# --------------------------------------------------------------------------------------------------------------------


def test_the_dictionary_says_it_all(explained: Explanation, tmp_path: Path):
    path = tmp_path / "explained.json"
    explained.save_json(path)
    data = json.loads(path.read_text())
    assert data == json.loads(json.dumps(explained.to_dict()))
    assert list(data) == [
        *("title", "model", "note", "source", "words", "blocks", "sections", "stages", "passages"),
        *("summary", "written", "attention", "copied"),
    ]
    assert data["copied"] is None  # it does not copy
    n = data["words"]["token"][-1]
    for stage in data["stages"]:
        assert len(stage["slots"]) == len(stage["weights"]) == n
        sums = np.bincount(stage["slots"], stage["weights"])
        np.testing.assert_allclose(sums, 1, atol=1e-5)
    np.testing.assert_allclose(np.sum(data["attention"], axis=1), 1, atol=1e-5)
    assert data["source"] == explained.source
    assert [one["title"] for one in data["sections"]] == ["What is kept", "What is lost"]
    assert data["passages"][0]["share"] == pytest.approx(explained.top(1)[0].share, abs=1e-6)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("colour", [True, False])
def test_the_terminal_text_fits(explained: Explanation, width: int, colour: bool):
    text = explained.text(width, colour=colour)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= width
    assert ("\x1b[" in text) == colour
    assert ("**" in text) != colour or explained.survival().max() < 0.5
    joined = " ".join(plain.split())
    for said in ("A title", "61 after layer 2, 17 after layer 3", "Summary", "What each section holds of the memory"):
        assert said in joined
    assert f"{explained.by_section()[0].share:.1%}" in joined


def test_a_terminal_must_have_room(explained: Explanation):
    with pytest.raises(ValueError, match="`width` must be at least 20, got 19"):
        explained.text(19)


def test_a_terminal_obeys_no_text(summarizer: Summarizer):
    hostile = "a\x1b[31m b\x07 c\x9b2J d\u202ee f\u2066g [bold]h[/bold] :smile:"
    explanation = explain(summarizer, hostile, title=hostile, **OPTIONS)
    text = explanation.text(80)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "[bold]h[/bold] :smile:" in " ".join(text.split())
    assert inert("a\x00b\tc\n d\x7f") == "a␀b c d␡"


def test_many_sections_share_a_row(tokenizer: Any):
    summarizer = make_summarizer(tokenizer, pooling="mean", scorer=None)  # every section holds something
    text = "\n\n".join(f"Heading {chr(65 + i)}\n\n{make_text(i, 9)} {LONG}" for i in range(15))
    explanation = explain(summarizer, text, **OPTIONS)
    assert len(explanation.sections) == 15
    lines = explanation.text(100).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("section"))
    rows = lines[start + 1 : start + 13]
    found = sorted(explanation.by_section(), key=lambda one: -one.share)
    assert {row[: len("Heading A")] for row in rows[:-1]} == {one.text for one in found[:11]}
    share, part = (sum(getattr(one, kind) for one in found[11:]) for kind in ("share", "part"))
    assert rows[-1].split()[:5] == ["(4", "other", "sections)", f"{share:.1%}", f"{part:.1%}"]


def test_marks_are_the_survival(explained: Explanation):
    passage = explained.top(1)[0]
    expected = []
    for i in range(passage.start, passage.end):
        word = explained.source[explained.words.start[i] : explained.words.end[i]].strip()
        survival = explained.survival()[i]
        mark = "**" if survival >= 0.5 else "*" if survival >= 0.1 else ""
        expected += [f"{mark}{word}{mark}"] if word else []
    assert len({word.count("*") for word in expected}) > 1
    assert " ".join(expected)[:300] in " ".join(explained.text(200).split())


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the command in an empty folder with a text in it."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a text.txt").write_text(TEXT)

    def run(*arguments: str, **options: Any) -> Any:
        line = ["explain", "--model", str(folder), "--max-new-tokens", "5", "--device", "cpu", *arguments]
        return CliRunner().invoke(main, line, **options)  # of an option that is given twice the second counts

    return run


def test_the_command_writes_a_page(call: Any, tmp_path: Path):
    done = call("a text.txt")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "a text.explained.html\n")
    page = (tmp_path / "a text.explained.html").read_text()
    assert "<title>a text.txt</title>" in page
    done = call("-", "--title", "Mine", "--output", "mine.html", input=TEXT.encode())
    assert (done.exit_code, done.stderr) == (0, "mine.html\n")
    assert "<title>Mine</title>" in (tmp_path / "mine.html").read_text()


def test_without_a_text_the_command_takes_the_built_in_one(call: Any, tmp_path: Path, folder: Path):
    done = call("--text", "--output", "page.html")
    assert done.exit_code == 0
    assert done.stdout.startswith("How Strongly Circadian Neurons Should Be Coupled\n")
    assert done.stderr.splitlines()[-2:] == ["page.html", f"Any other text: pyramidion serve --model {str(folder)!r}"]
    assert "suprachiasmatic" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("text", "title"),
    [("A heading\n\nThen text.", "A heading"), ("A line that\ngoes on.", "A line that goes on."), ("Alone\n", "Alone")],
)
def test_a_line_alone_above_a_text_is_its_title(text: str, title: str):
    assert _beginning(text) == title


def test_the_command_writes_numbers_and_text(call: Any, tmp_path: Path, summarizer: Summarizer):
    done = call("a text.txt", "--json", "numbers.json", "--text", "--max-length", "60")
    assert (done.exit_code, done.stderr) == (0, "numbers.json\n")
    data = json.loads((tmp_path / "numbers.json").read_text())
    [summary] = summarizer([TEXT], max_length=60, max_new_tokens=5)
    assert data["summary"] == summary.text
    assert " ".join(summary.text.split()) in " ".join(done.stdout.split())
    assert "\x1b" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a text.txt", "numbers.json"]


def test_the_command_opens_the_page(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert call("a text.txt", "--text", "--open").exit_code == 0
    assert opened == [(tmp_path / "a text.explained.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.txt"], "`FILE` must be a text file that can be read, got 'missing.txt': No such file or directory."),
        (["."], "`FILE` must be a text file that can be read, got '.': Is a directory."),
        (["nul\0.txt"], "`FILE` must be a text file that can be read, got 'nul"),
        (["empty.txt"], "`FILE` must be a text to summarise, got 'empty.txt': empty."),
        (["binary.txt"], "`FILE` must be a text to summarise, got 'binary.txt': not a text: byte 0 is not UTF-8."),
        (["-"], "`FILE` must be a text to summarise, got '-': empty."),
        (["a text.txt", "--output", "."], "`--output` must be a file that can be written, got a folder: '.'."),
        (
            ["a text.txt", "--json", "no/x.json"],
            "`--json` must be a file that can be written, got one in a folder that",
        ),
        (["a text.txt", "--output", "a text.txt"], "`--output` must be another file than `FILE`, got 'a text.txt'."),
        (["a text.txt", "--output", "x", "--json", "./x"], "`--json` must be another file than `--output`, got 'x'."),
        (["a text.txt", "--max-length", "1"], "`--max-length` must be at least 2, got 1."),
        (["a text.txt", "--num-beams", "0"], "`--num-beams` must be a whole number of at least 1, got 0."),
        (["a text.txt", "--device", "mars"], "`--device` must be auto, cpu or cuda, got 'mars'."),
        (["a text.txt", "--model", "nowhere"], "`--model` must be a folder with a model's config.json, got 'nowhere'."),
    ],
)
def test_the_command_refuses_in_one_line(call: Any, tmp_path: Path, arguments: list[str], said: str):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\x80\x81" * 50)
    before = sorted(path.name for path in tmp_path.iterdir())
    done = call(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"pyramidion: {said}")
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_page_that_cannot_be_written_is_said(call: Any, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyramidion.explain.account.write_whole", full)
    done = call("a text.txt")
    assert done.exit_code == 2
    assert done.stderr == (
        "pyramidion: `--output` must be a file that can be written, got 'a text.explained.html': "
        "No space left on device.\n"
    )


def test_jinja_is_asked_for_by_name(call: Any, explained: Explanation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pyramidion.explain import browser

    browser._template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = call("a text.txt")
    assert done.exit_code == 2
    assert done.stderr == (
        "pyramidion: `--output` must have jinja2 to write a page with: pip install 'pyramidion[serve]'.\n"
    )
    with pytest.raises(ImportError, match=r"pip install 'pyramidion\[serve\]'"):
        explained.save_html(tmp_path / "x.html")
    assert call("a text.txt", "--text").exit_code == 0


def test_a_strange_file_name_is_shown(call: Any, tmp_path: Path):
    name = "a\u202e<script>\udcff.txt"
    (tmp_path / name).write_text(TEXT)
    done = call(name, "--json", "x.json")
    assert done.exit_code == 0
    assert json.loads((tmp_path / "x.json").read_text())["title"] == "a\u202e<script>\ufffd.txt"
