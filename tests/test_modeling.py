"""The model family: transformers' idiom, masks that are exact, and an account of what was kept."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)

from pyramidion import (
    PyramidionConfig,
    PyramidionEncoderModel,
    PyramidionForConditionalGeneration,
    PyramidionForSequenceClassification,
    PyramidionModel,
)

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "encoder_lengths": [53, 23, 23, 7],
    "decoder_layers": 2,
    "block_size": 11,
    "bucket_size": 4,
    "num_hashes": 2,
    "local_heads": 2,
    "local_window": 5,
}
# One of each kind: attention, pooling, scorer, norm.
KINDS: dict[str, dict[str, Any]] = {
    "full": {"attention": "full", "encoder_lengths": [53, 53]},
    "blockwise": {"encoder_lengths": [53, 53]},
    "lsh": {"attention": "lsh", "encoder_lengths": [53, 53]},
    "efficient": {"attention": "efficient", "encoder_lengths": [53, 53]},
    "full-soft": {"attention": "full"},
    "soft": {},
    "soft-sharp": {"pool_base": 20.0},
    "pre-norm": {"pre_norm": True, "activation_function": "gelu", "decoder_positions": True},
    "lsh-soft": {"attention": "lsh"},
    "efficient-soft": {"attention": "efficient"},
    "hard": {"pooling": "hard"},
    "straight-through": {"pooling": "straight-through"},
    "power": {"pooling": "power"},
    "power-full": {"pooling": "power", "attention": "full"},
    "power-soft": {"scorer": "power"},
    "nonlinear": {"scorer": "nonlinear"},
    "embedding": {"scorer": "embedding", "scorer_dimension": 3},
    "random": {"pooling": "hard", "scorer": "random"},
    "index": {"pooling": "hard", "scorer": "index"},
    "mean": {"pooling": "mean"},
    "max": {"pooling": "max"},
    "funnel": {"pooling": "funnel", "input_length": 53, "encoder_lengths": [23, 23, 7]},
    "mixed": {"pooling": [None, "mean", None, "soft"], "scorer": [None, None, None, "nonlinear"]},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
STILL = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def config_of(kind: str = "soft", **changes: Any) -> PyramidionConfig:
    return PyramidionConfig(**{**SMALL, **KINDS[kind], **changes})


def model_of(kind: str = "soft", **changes: Any) -> PyramidionForConditionalGeneration:
    torch.manual_seed(1)
    return PyramidionForConditionalGeneration(config_of(kind, **changes)).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


def batch_of(lengths: list[int], *, left: bool = False, n: int | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Pad random documents of given lengths: ids, mask, and the documents by themselves."""
    documents = [tokens(length) for length in lengths]
    n = n or max(lengths)
    ids, mask = torch.zeros(len(lengths), n, dtype=torch.long), torch.zeros(len(lengths), n, dtype=torch.long)
    for row, document in enumerate(documents):
        place = slice(n - len(document), n) if left else slice(0, len(document))
        ids[row, place], mask[row, place] = document, 1
    return ids, mask, documents


# --------------------------------------------------------------------------------------------------------------------
# transformers' idiom
# --------------------------------------------------------------------------------------------------------------------


def test_auto_classes_find_the_family(tmp_path: Path):
    model = model_of()
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert isinstance(AutoConfig.from_pretrained(tmp_path), PyramidionConfig)
    for auto, kind in (
        (AutoModel, PyramidionModel),
        (AutoModelForTextEncoding, PyramidionEncoderModel),
        (AutoModelForSeq2SeqLM, PyramidionForConditionalGeneration),
        (AutoModelForSequenceClassification, PyramidionForSequenceClassification),
    ):
        loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is kind
        assert all(name.startswith("classifier.") for name in info["missing_keys"])
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]


@every_kind
def test_save_and_load_give_the_same_model(kind: str, tmp_path: Path):
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.config.to_dict() == model.config.to_dict() | {"_name_or_path": again.config._name_or_path}
    ids, mask, _ = batch_of([29, 3])
    call = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(2, 4)}
    assert torch.equal(model(**call).logits, again.eval()(**call).logits)


def test_embeddings_are_one_tensor():
    model = model_of()
    table = model.model.shared.weight
    assert model.lm_head.weight is table
    assert model.model.encoder.embed_tokens.weight is table
    assert model.model.decoder.embed_tokens.weight is table
    names = [name for name, _ in model.named_parameters()]
    assert [name for name in names if "embed" in name or "shared" in name or "head" in name] == ["model.shared.weight"]


def test_resizing_keeps_what_was_there():
    model = model_of()
    ids, mask, _ = batch_of([29, 3])
    call = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(2, 4)}
    before = model(**call).logits
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    assert model.config.vocab_size == VOCABULARY + 5
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
    after = model(**call).logits
    assert after.shape[-1] == VOCABULARY + 5
    torch.testing.assert_close(after[..., :VOCABULARY], before)


@every_kind
def test_gradient_checkpointing_changes_no_gradient(kind: str):
    ids, mask, _ = batch_of([47, 5])
    labels = tokens(2, 6)
    gradients = []
    for checkpointing in (False, True):
        model = model_of(kind, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(7)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize("kind", ["full", "blockwise", "soft", "lsh-soft", "efficient-soft", "power", "funnel"])
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own flex attention
def test_implementations_of_attention_agree(kind: str, implementation: str):
    """Compare with our own eager function. Heads of 6 dimensions are too narrow for flex attention: they get 16."""
    model = model_of(kind, hidden_size=64)
    device = "cuda" if implementation == "flex_attention" else "cpu"
    model = model.to(device)
    ids, mask, _ = batch_of([47, 13, 2])
    call = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(3, 9)}
    call = {name: value.to(device) for name, value in call.items()}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**call).logits
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        torch.testing.assert_close(model(**call).logits, expected, atol=2e-5, rtol=1e-4)


def test_hidden_states_and_attentions_on_request():
    model = model_of(attention_dropout=0.0)
    model.set_attn_implementation("eager")
    ids, mask, _ = batch_of([53, 31])
    out = model(
        input_ids=ids,
        attention_mask=mask,
        decoder_input_ids=tokens(2, 5),
        output_hidden_states=True,
        output_attentions=True,
    )
    assert [state.shape[1] for state in out.encoder_hidden_states] == [53, 53, 23, 23, 7]
    assert torch.equal(out.encoder_hidden_states[-1], out.encoder_last_hidden_state)
    assert [state.shape for state in out.decoder_hidden_states] == [(2, 5, 24)] * 3
    assert [weights.shape for weights in out.cross_attentions] == [(2, 4, 5, 7)] * 2
    assert [weights.shape for weights in out.decoder_attentions] == [(2, 4, 5, 5)] * 2
    assert len(out.encoder_attentions) == 4
    assert out.encoder_attentions[0].shape == (5 + 3, 4, 11, 11)  # blocks that hold tokens
    for weights in (*out.encoder_attentions, *out.cross_attentions):
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    plain = model(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(2, 5))
    assert plain.encoder_hidden_states is None
    assert plain.encoder_attentions is None


def test_a_tuple_on_request():
    model = model_of()
    call = {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 3)}
    full = model(**call)
    assert torch.equal(model(**call, return_dict=False)[0], full.logits)
    model.config.return_dict = False
    assert torch.equal(model(**call)[0], full.logits)


def test_vectors_do_for_tokens():
    model = model_of()
    ids, mask, _ = batch_of([29, 3], left=True)
    embeds = model.get_input_embeddings()(ids)
    given = tokens(2, 4)
    by_ids = model(input_ids=ids, attention_mask=mask, decoder_input_ids=given).logits
    assert torch.equal(by_ids, model(inputs_embeds=embeds, attention_mask=mask, decoder_input_ids=given).logits)


def test_loss_is_the_cross_entropy_of_the_next_token():
    model = model_of()
    ids, labels = tokens(2, 31), tokens(2, 9)[:, :6]  # a slice, as users cut them
    labels[1, 4:] = -100
    out = model(input_ids=ids, labels=labels)
    start = torch.full((2, 1), model.config.decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], 1).where(torch.cat([start, labels[:, :-1]], 1) >= 0, 0)
    logits = model(input_ids=ids, decoder_input_ids=shifted).logits
    terms = [
        -logits[b, t].double().log_softmax(-1)[labels[b, t]]
        for b, t in itertools.product(range(2), range(6))
        if labels[b, t] >= 0
    ]
    torch.testing.assert_close(out.loss.double(), sum(terms) / len(terms), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        model(input_ids=ids, labels=labels, num_items_in_batch=20).loss.double(), sum(terms) / 20, atol=1e-6, rtol=1e-6
    )


# --------------------------------------------------------------------------------------------------------------------
# Generation
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"num_beams": 4, "num_return_sequences": 2}],
    ids=["greedy", "beam", "sample", "beams"],
)
@pytest.mark.parametrize("kind", ["soft", "pre-norm", "funnel", "full"])
def test_caches_change_nothing(kind: str, strategy: dict[str, Any]):
    model = model_of(kind)
    ids, mask, _ = batch_of([53, 17, 2])
    written = []
    for cache in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
        torch.manual_seed(3)
        options = {"min_new_tokens": 12, "max_new_tokens": 12, "no_repeat_ngram_size": 1}  # no word twice: they differ
        written.append(model.generate(ids, attention_mask=mask, **options, **strategy, **cache))
    assert len({tuple(row.tolist()) for row in written[0]}) == len(written[0])  # documents are told apart
    assert len(set(written[0][0].tolist())) == 13
    assert torch.equal(written[1], written[0])
    assert torch.equal(written[2], written[0])


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_does_not_see_padding_or_neighbours(beams: int):
    model = model_of()
    options = {"num_beams": beams, "max_new_tokens": 10, "min_new_tokens": 10, "no_repeat_ngram_size": 1}
    ids, mask, documents = batch_of([53, 17, 2], n=60)
    together = model.generate(ids, attention_mask=mask, **options)
    for row, document in enumerate(documents):
        assert torch.equal(model.generate(document[None], **options)[0], together[row])


def test_the_cross_cache_holds_k():
    model = model_of()
    out = model(input_ids=tokens(2, 53), decoder_input_ids=tokens(2, 3), use_cache=True)
    cross = out.past_key_values.cross_attention_cache
    assert [layer.keys.shape for layer in cross.layers] == [(2, 4, 7, 6)] * 2
    assert out.encoder_last_hidden_state.shape == (2, 7, 24)
    beams = model.generate(
        tokens(2, 53), num_beams=2, max_new_tokens=4, return_dict_in_generate=True, output_logits=True
    )
    assert [layer.keys.shape for layer in beams.past_key_values.cross_attention_cache.layers] == [(4, 4, 7, 6)] * 2


def test_memory_is_encoded_once_and_reused():
    model = model_of()
    ids, mask, _ = batch_of([53, 3])
    memory = model.get_encoder()(ids, mask)
    given = tokens(2, 5)
    direct = model(input_ids=ids, attention_mask=mask, decoder_input_ids=given).logits
    assert torch.equal(model(encoder_outputs=memory, attention_mask=mask, decoder_input_ids=given).logits, direct)
    first = model(encoder_outputs=memory, decoder_input_ids=given[:, :2], use_cache=True)
    second = model(encoder_outputs=memory, decoder_input_ids=given[:, 2:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), direct, atol=1e-5, rtol=1e-4)


# --------------------------------------------------------------------------------------------------------------------
# Masks
# --------------------------------------------------------------------------------------------------------------------


@every_kind
def test_padding_and_neighbours_change_nothing(kind: str):
    model = model_of(kind)
    lengths = [53, 1, 12, 30, 5, 67]  # full, one token, shorter and longer than a block, below k, beyond the input
    ids, mask, documents = batch_of(lengths, n=71)
    given = tokens(1, 4)
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask, decoder_input_ids=given.expand(6, -1))
        for row, document in enumerate(documents):
            alone = model(input_ids=document[None], decoder_input_ids=given)
            k = alone.encoder_last_hidden_state.shape[1]
            assert together.memory_mask[row].sum() == k
            torch.testing.assert_close(
                together.encoder_last_hidden_state[row, :k], alone.encoder_last_hidden_state[0], atol=1e-5, rtol=1e-4
            )
            torch.testing.assert_close(together.logits[row], alone.logits[0], atol=1e-5, rtol=1e-4)


@every_kind
def test_left_right_and_scattered_padding_agree(kind: str):
    model = model_of(kind)
    ids, mask, documents = batch_of([40, 13, 1], n=43)
    given = tokens(3, 4)
    scattered, holes = torch.zeros_like(ids), torch.zeros_like(mask)
    for row, document in enumerate(documents):
        place = torch.randperm(43)[: len(document)].sort().values
        scattered[row, place], holes[row, place] = document, 1
    left = torch.stack([row.roll(43 - len(document)) for row, document in zip(ids, documents, strict=True)])
    left_mask = torch.stack([row.roll(43 - len(document)) for row, document in zip(mask, documents, strict=True)])
    with torch.no_grad():
        right = model(input_ids=ids, attention_mask=mask, decoder_input_ids=given).logits
        for other, real in ((left, left_mask), (scattered, holes), (left, left_mask.bool())):
            assert torch.equal(model(input_ids=other, attention_mask=real, decoder_input_ids=given).logits, right)


@every_kind
def test_what_padding_holds_is_never_looked_at(kind: str):
    model = model_of(kind)
    ids, mask, _ = batch_of([53, 13, 1])
    given = tokens(3, 4)
    garbage = ids.where(mask == 1, -100)
    embeds = model.get_input_embeddings()(ids).masked_fill((mask == 0)[..., None], torch.nan)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=given).logits
        assert torch.equal(model(input_ids=garbage, attention_mask=mask, decoder_input_ids=given).logits, expected)
        logits = model(inputs_embeds=embeds, attention_mask=mask, decoder_input_ids=given).logits
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, expected)


@every_kind
def test_the_past_of_a_model_changes_nothing(kind: str):
    model = model_of(kind)
    ids, mask, _ = batch_of([37, 13])
    call = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(2, 4)}
    with torch.no_grad():
        first = model(**call).logits
        model(input_ids=tokens(3, 171), decoder_input_ids=tokens(3, 7))
        model(input_ids=tokens(1, 2), decoder_input_ids=tokens(1, 1))
        assert torch.equal(model(**call).logits, first)


@pytest.mark.parametrize("n", [1, 2, 6, 7, 10, 11, 12, 53, 54])
@pytest.mark.parametrize("kind", ["soft", "full", "lsh-soft", "efficient-soft", "power", "max", "funnel"])
def test_any_length_works(kind: str, n: int):
    model = model_of(kind)
    out = model(input_ids=tokens(2, n), labels=tokens(2, 3), output_selections=True)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    whole = out.encoder_selection
    assert whole.n == n
    assert whole.k == out.encoder_last_hidden_state.shape[1]


def test_8193_tokens():
    model = model_of(encoder_lengths=[8192, 2048, 512], block_size=512, decoder_layers=1)
    document = tokens(8193)
    with torch.no_grad():
        alone = model.get_encoder()(document[None], output_selections=True)
        ids = torch.zeros(2, 8300, dtype=torch.long)
        ids[0, :8193], ids[1, :40] = document, document[:40]
        mask = (torch.arange(8300) < torch.tensor([[8193], [40]])).long()
        together = model.get_encoder()(ids, mask)
    assert alone.last_hidden_state.shape == (1, 512, 24)
    assert (alone.selection.slots >= 0).all()
    torch.testing.assert_close(together.last_hidden_state[0], alone.last_hidden_state[0], atol=1e-5, rtol=1e-4)


def test_positions_are_counted_from_the_start_of_the_document():
    """Without positions, equal blocks of tokens are encoded equally; with them, the second differs from the first."""
    model = model_of("blockwise", encoder_lengths=[22], block_size=11)
    block = tokens(1, 11)
    states = model.get_encoder()(torch.cat([block, block], 1), output_hidden_states=True).hidden_states
    embedded = model.get_input_embeddings()(block)
    width = model.config.hidden_size
    for position in range(22):
        angles = [position / 10000 ** (i / (width // 2)) for i in range(width // 2)]
        expected = torch.tensor([*map(torch.sin, torch.tensor(angles)), *map(torch.cos, torch.tensor(angles))])
        torch.testing.assert_close(states[0][0, position] - embedded[0, position % 11], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_norms_stand_behind_the_sums_or_in_front_of_the_sublayers(pre_norm: bool):
    from pyramidion.attention import Layout

    encoder = model_of("blockwise", pre_norm=pre_norm).get_encoder()
    layer, layout, x = encoder.layers[0], Layout([11, 11], 11), torch.randn(2, 11, 24)
    first, second = layer.attention_residual.norm, layer.feed_forward_residual.norm
    for norm in (first, second):
        torch.nn.init.normal_(norm.weight)

    def feed(y: Tensor) -> Tensor:
        return layer.feed_forward.narrow(layer.feed_forward.widen(y).relu())

    if pre_norm:
        middle = x + layer.attention(first(x), layout)[0]
        expected = middle + feed(second(middle))
    else:
        middle = first(x + layer.attention(x, layout)[0])
        expected = second(middle + feed(middle))
    torch.testing.assert_close(layer(x, layout)[0], expected, atol=1e-5, rtol=1e-4)
    out = encoder(tokens(2, 11), output_hidden_states=True)
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state) == (
        not pre_norm
    )  # a last norm, if they come first


def test_embeddings_are_scaled_by_the_root_of_the_width():
    table = model_of().get_input_embeddings()
    assert torch.equal(table(torch.tensor([5])), table.weight[5:6] * 24**0.5)


def test_no_positions_in_the_decoder_by_default():
    model, placed = model_of(), model_of(decoder_positions=True)
    same = torch.full((1, 6), 5)
    ids = tokens(1, 30)
    plain = model(input_ids=ids, decoder_input_ids=same).logits[0]
    torch.testing.assert_close(plain[5], plain[0], atol=1e-5, rtol=1e-4)  # equal tokens, equal memory: nothing differs
    moved = placed(input_ids=ids, decoder_input_ids=same).logits[0]
    assert (moved[5] - moved[0]).abs().max() > 1e-3


# --------------------------------------------------------------------------------------------------------------------
# What was kept
# --------------------------------------------------------------------------------------------------------------------


class Nothing(torch.nn.Module):
    """A layer that changes nothing, so that the memory is pooling alone."""

    counted = False

    def forward(self, x: Tensor, layout: Any) -> tuple[Tensor, None]:
        return x, None


@pytest.mark.parametrize("kind", ["soft", "soft-sharp", "hard", "random", "index", "mean", "embedding"])
@pytest.mark.parametrize("left", [False, True])
def test_the_account_is_exact(kind: str, left: bool):
    encoder = model_of(kind).get_encoder()
    encoder.layers = torch.nn.ModuleList(Nothing() for _ in encoder.layers)
    ids, mask, _ = batch_of([53, 31, 4], left=left)
    out = encoder(ids, mask, output_selections=True, output_hidden_states=True)
    assert len(out.selections) == 2
    embedded = torch.zeros(3, 53, 24)  # what entered, where the user put it
    for row, real in enumerate(mask.bool()):
        embedded[row, real] = out.hidden_states[0][row, : real.sum()]
    torch.testing.assert_close(out.selection.pool(embedded), out.last_hidden_state, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        out.selections[1].pool(out.selections[0].pool(embedded)), out.last_hidden_state, atol=1e-5, rtol=1e-4
    )
    assert (out.selection.slots[mask == 0] == -1).all()
    filled = out.selection.mask
    assert filled.sum(1).tolist() == [7, 7, 4]
    torch.testing.assert_close(out.selection.dense().sum(-1), filled.float())
    winners = out.selection.winners
    for row in range(3):  # order is kept
        own = winners[row, filled[row]].tolist()
        assert own == sorted(own)
        assert mask[row, own].all()


def test_no_account_unless_asked_and_one_where_nothing_pools():
    ids, mask, _ = batch_of([30, 12], left=True)
    plain = model_of()(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(2, 2))
    assert plain.encoder_selection is None
    assert plain.encoder_selections is None
    for kind in ("blockwise", "funnel"):
        out = model_of(kind).get_encoder()(ids, mask, output_selections=True)
        assert out.selection.slots[1].tolist() == [-1] * 18 + list(range(12))
        assert out.selection.slots[0].tolist() == list(range(30))
    assert len(out.selections) == 2


# --------------------------------------------------------------------------------------------------------------------
# PoWER and Funnel
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["power", "power-full"])
def test_power_keeps_the_tokens_that_receive_most(kind: str):
    model = model_of(kind, encoder_lengths=[53, 17])
    model.set_attn_implementation("eager")
    ids, mask, _ = batch_of([53, 31])
    out = model.get_encoder()(ids, mask, output_attentions=True, output_selections=True)
    weights = out.attentions[1]
    for row, n in enumerate((53, 31)):
        got = torch.zeros(n, dtype=torch.float64)
        if kind == "power-full":
            got += weights[row, :, :n, :n].double().sum((0, 1))
        else:
            start = 0 if row == 0 else 5
            for block in range(-(-n // 11)):
                size = min(11, n - 11 * block)
                got[11 * block : 11 * block + size] = weights[start + block, :, :size, :size].double().sum((0, 1))
        assert out.selections[0].winners[row].tolist() == got.topk(17).indices.sort().values.tolist()


def test_a_trained_blockwise_model_becomes_power_and_goes_on_learning(tmp_path: Path):
    ids, mask, _ = batch_of([53, 40, 33, 21])
    labels = tokens(4, 5)
    model = model_of("blockwise", dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)

    def train(model: PyramidionForConditionalGeneration, steps: int) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        losses = []
        for _ in range(steps):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    train(model, 30)
    changes = {"pooling": "power", "input_length": 53, "encoder_lengths": [23, 7]}
    converted = model.repool(**changes)
    for (name, kept), (other, given) in zip(converted.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(kept, given)
        assert kept is not given
    losses = train(converted, 30)
    assert losses[-1] < losses[0] / 2
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True, **changes)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.poolings.keys() == {0, 1}
    assert loaded.get_encoder()(ids, mask).last_hidden_state.shape[1] == 7
    with pytest.raises(ValueError, match="`repool` must change the pooling alone"):
        model.repool(decoder_layers=1)
    soft = model.repool(input_length=53, encoder_lengths=[23, 7])
    assert set(dict(soft.named_parameters())) - set(dict(model.named_parameters())) == {
        f"model.encoder.poolers.{layer}.scorer.linear.{part}" for layer in (0, 1) for part in ("weight", "bias")
    }


def test_funnel_spreads_and_adds_what_stood_before():
    """Rebuild it by hand: means of windows behind layer 1, layer 2 on them, each token its window's, plus layer 1."""
    model = model_of("funnel", input_length=48, encoder_lengths=[12, 12], block_size=64)
    encoder = model.get_encoder()
    ids = tokens(2, 48)
    got = encoder(ids, output_hidden_states=True)
    from pyramidion.attention import Layout

    first, _ = encoder.layers[0](got.hidden_states[0], Layout([48, 48], 64))
    means = first.view(2, 12, 4, 24).mean(2)
    second, _ = encoder.layers[1](means, Layout([12, 12], 64))
    torch.testing.assert_close(got.last_hidden_state, second.repeat_interleave(4, 1) + first, atol=1e-5, rtol=1e-4)
    assert model.config.memory_length == 48


# --------------------------------------------------------------------------------------------------------------------
# Learning
# --------------------------------------------------------------------------------------------------------------------


@every_kind
def test_gradients_reach_every_parameter(kind: str):
    model = model_of(kind).train()
    ids, mask, _ = batch_of([53, 31, 47])
    model(input_ids=ids, attention_mask=mask, labels=tokens(3, 6)).loss.backward()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert kind in ("hard",) or len(learning) == len(list(model.named_parameters()))
    for name, parameter in learning.items():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        # A key's bias shifts all products of a query alike, and a bias behind the scores all scores: no effect at all.
        if not name.endswith(("key.bias", "scorer.linear.bias", "scorer.out.bias")):
            assert parameter.grad.abs().max() > 0, name


KEEN = ("soft", "soft-sharp", "straight-through", "lsh-soft", "efficient-soft", "power")
NARROW = [(kind, torch.bfloat16) for kind in KEEN] + [(kind, torch.float16) for kind in ("soft", "straight-through")]


@pytest.mark.parametrize(("kind", "dtype"), [*NARROW, ("soft", torch.float32)], ids=str)
def test_fifty_steps_without_nan(kind: str, dtype: torch.dtype):
    """In single precision the others learn below."""
    model = model_of(kind, encoder_lengths=[53, 23, 7], decoder_layers=1).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=2.0**10)
    losses = []
    ids, mask, _ = batch_of([53, 31, 7, 1])
    labels = tokens(4, 6)
    for _ in range(50):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert all(map(torch.isfinite, torch.tensor(losses)))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["soft", "lsh-soft", "efficient-soft", "power", "max", "funnel"])
def test_weights_in_half_precision(kind: str, dtype: torch.dtype):
    model = model_of(kind).to(dtype)
    ids, mask, _ = batch_of([53, 31, 1])
    out = model(input_ids=ids, attention_mask=mask, labels=tokens(3, 5))
    out.loss.backward()
    assert out.logits.dtype == dtype
    assert out.encoder_last_hidden_state.dtype == dtype
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.generate(ids, attention_mask=mask, max_new_tokens=3).shape == (3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "blockwise", "soft", "soft-sharp", "straight-through", "lsh", "efficient",
                                  "power", "funnel", "mean"])  # fmt: skip
def test_the_papers_models_overfit_copying(kind: str):
    """Learn to write down the four tokens behind the marks of each of sixteen documents, and then write them."""
    torch.manual_seed(0)
    mark, documents, n = 3, 16, 48
    ids = torch.randint(4, VOCABULARY, (documents, n))
    places = torch.stack([torch.randperm(n // 2 - 1)[:4].sort().values * 2 for _ in range(documents)])
    ids.scatter_(1, places, mark)
    labels = torch.cat([ids.gather(1, places + 1), torch.full((documents, 1), 2)], 1)
    lengths = {"encoder_lengths": [48, 24, 12]} if kind not in ("full", "blockwise", "lsh", "efficient") else {}
    if kind == "funnel":
        lengths = {"encoder_lengths": [12, 12], "input_length": 48}
    model = model_of(kind, hidden_size=48, intermediate_size=96, block_size=16, **lengths, **STILL).train()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(500):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0.02:
            break
    assert loss.item() < 0.1
    written = model.eval().generate(ids, max_new_tokens=5)
    assert (written[:, 1:6] == labels).float().mean() > 0.9


# --------------------------------------------------------------------------------------------------------------------
# Classification
# --------------------------------------------------------------------------------------------------------------------


def test_classification_on_the_same_encoder(tmp_path: Path):
    writer = model_of()
    writer.save_pretrained(tmp_path)
    model, info = PyramidionForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    model.eval()
    assert torch.equal(model.model.shared.weight, writer.model.shared.weight)
    ids, mask, documents = batch_of([53, 31, 4])
    out = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 2, 1]), output_selections=True)
    assert out.logits.shape == (3, 3)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, torch.tensor([0, 2, 1])))
    assert out.selection.k == 7
    for row, document in enumerate(documents):
        memory = writer.get_encoder()(document[None]).last_hidden_state[0]
        torch.testing.assert_close(out.logits[row], model.classifier(memory.mean(0)), atol=1e-5, rtol=1e-4)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    number = PyramidionForSequenceClassification(config_of(num_labels=1)).eval()
    assert number(input_ids=ids, attention_mask=mask, labels=torch.rand(3)).loss.ndim == 0


# --------------------------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder_lengths": [512, 2048]}, "must not grow: 512 representations enter layer 2 and 2048 would leave it"),
        ({"encoder_lengths": [512], "input_length": 256}, "must not grow: 256 .* enter layer 1 and 512 would leave"),
        ({"encoder_lengths": []}, "`encoder_lengths` must give at least one layer"),
        ({"encoder_lengths": [8, 0]}, "each with at least 1 representation, got \\[8, 0\\]"),
        ({"encoder_lengths": [8], "input_length": 0}, "`input_length` must be at least 1, got 0"),
        ({"hidden_size": 100}, "`hidden_size` must be a multiple of `num_attention_heads`, got 100 and 8"),
        ({"hidden_size": 9, "num_attention_heads": 3}, "`hidden_size` must be even, .* got 9"),
        ({"block_size": 2**20 + 1}, "`block_size` must be at most 2\\^20 = 1048576, got 1048577"),
        ({"block_size": 0}, "`block_size` must be at least 1, got 0"),
        ({"attention": "sparse"}, "`attention` must be one of full, blockwise, lsh, efficient, got 'sparse'"),
        ({"pooling": "average"}, "`pooling` must be one of soft, .* got 'average'"),
        ({"scorer": "quadratic"}, "`scorer` must be one of linear, .* got 'quadratic'"),
        ({"scorer": ["linear"] * 6}, "`scorer` must be None for a layer that does not pool: layer 1 goes from 8192 to"),
        ({"scorer": ["linear"]}, "`scorer` must name one for each of the 6 encoder layers, got \\['linear'\\]"),
        ({"pooling": ["soft"] * 5}, "`pooling` must name one for each of the 6 encoder layers"),
        ({"pooling": [None, None, "soft", None, None, None]}, "`pooling` must say how layer 4 goes from 2048 to 512"),
        ({"scorer": "linear", "encoder_lengths": [9, 9]}, "`scorer` must be None where no layer pools, got 'linear'"),
        ({"scorer": "linear", "pooling": "mean"}, "`scorer` must be None with `pooling` 'mean', .* got 'linear'"),
        ({"scorer": "power", "attention": "lsh"}, "`power` must have an attention matrix .* got 'lsh'"),
        ({"pooling": "power", "attention": "efficient"}, "`power` must have an attention matrix .* got 'efficient'"),
        ({"pooling": [None, None, "funnel", "mean", None, None]}, "`pooling` must be funnel in every layer"),
        ({"local_heads": 9}, "`local_heads` must be between 0 and `num_attention_heads` = 8, got 9"),
        ({"scorer_dimension": 768}, "`scorer_dimension` must be between 0 and .* 767, got 768"),
        ({"dropout": 1.0}, "`dropout` must be at least 0 and below 1, got 1.0"),
        ({"decoder_layers": 0}, "`decoder_layers` must be at least 1, got 0"),
        ({"pool_temperature": 0.0}, "`pool_temperature` must be a positive number, got 0.0"),
        ({"tie_word_embeddings": False}, "`tie_word_embeddings` must be True: .* got False"),
        ({"pool_base": 1.0}, "`pool_base` must be a number above 1, got 1.0"),
        ({"enocder_lengths": [8]}, "`enocder_lengths` is not a setting .* Did you mean `encoder_lengths`\\?"),
        ({"colour": "red"}, "`colour` is not a setting of PyramidionConfig, got 'red'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_are_refused_with_rule_and_value(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        PyramidionConfig(**settings)


def test_a_wrong_type_is_refused():
    with pytest.raises(Exception, match="encoder_lengths"):
        PyramidionConfig(encoder_lengths="8192")


def test_contradictions_are_refused_when_loading_too(tmp_path: Path):
    model_of().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must not grow"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, encoder_lengths=[7, 53])


def test_inputs_are_refused_with_rule_and_value():
    model = model_of()
    ids = tokens(2, 9)
    with pytest.raises(ValueError, match="Exactly one of `input_ids` and `inputs_embeds` must be given, got neither"):
        model(decoder_input_ids=ids)
    with pytest.raises(ValueError, match="got both"):
        model.get_encoder()(ids, inputs_embeds=torch.randn(2, 9, 24))
    with pytest.raises(ValueError, match="must mark at least one token of every document, got none in row 1"):
        model.get_encoder()(ids, torch.tensor([[1] * 9, [0] * 9]))
    with pytest.raises(ValueError, match="`attention_mask` must be \\[b n\\] = \\[2, 9\\], got shape \\[2, 8\\]"):
        model.get_encoder()(ids, torch.ones(2, 8))
    with pytest.raises(ValueError, match="`input_ids` must be \\[b n\\] with at least one token"):
        model.get_encoder()(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="`encoder_outputs` must be what the encoder returned"):
        model(encoder_outputs=(torch.randn(2, 7, 24),), decoder_input_ids=ids)


# --------------------------------------------------------------------------------------------------------------------
# On a GPU
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_kind
def test_a_gpu_agrees_with_a_cpu(kind: str):
    model = model_of(kind)
    ids, mask, _ = batch_of([53, 31, 1])
    call = {"input_ids": ids, "attention_mask": mask, "labels": tokens(3, 6)}
    on_cpu = model(**call, output_selections=True)
    on_cpu.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model = model.cuda()
    model.zero_grad()
    on_gpu = model(**{name: value.cuda() for name, value in call.items()}, output_selections=True)
    on_gpu.loss.backward()
    assert torch.equal(on_gpu.encoder_selection.slots.cpu(), on_cpu.encoder_selection.slots)
    torch.testing.assert_close(on_gpu.logits.cpu(), on_cpu.logits, atol=1e-4, rtol=1e-3)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad.cpu(), gradients[name], atol=1e-4, rtol=1e-2, msg=name)


@pytest.mark.parametrize("kind", ["soft", "pre-norm", "power", "full-soft"])
def test_blocks_may_be_computed_some_after_the_others(kind: str, monkeypatch: pytest.MonkeyPatch):
    model = model_of(kind, **STILL).train()
    ids, mask, _ = batch_of([53, 50, 2])
    labels, seen = tokens(3, 7), []
    first = model.model.encoder.layers[0].attention
    first.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    want = loss_and_gradients(model, model, ids, mask, labels)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    monkeypatch.setattr("pyramidion.modeling_pyramidion.PIECE", 33)  # three blocks of 11
    got = loss_and_gradients(model, model, ids, mask, labels)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    whole, *pieces = seen
    assert pieces[: len(pieces) // 2] == ([whole] if kind == "full-soft" else [3, 3, 3, 2])
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask, labels=labels).loss, want[0])


def test_dropout_is_the_same_when_pieces_are_computed_again(monkeypatch: pytest.MonkeyPatch):
    """The gradient of a loss is that of a finite difference only if backward drops what forward dropped."""
    monkeypatch.setattr("pyramidion.modeling_pyramidion.PIECE", 33)
    model = model_of("soft", dropout=0.3).double().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask, _ = batch_of([53, 50, 2])
    labels, weight, small = tokens(3, 7), model.model.encoder.layers[0].feed_forward.widen.bias, 1e-5

    def loss() -> Tensor:
        torch.manual_seed(3)
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    (gradient,) = torch.autograd.grad(loss(), weight)
    place = int(gradient.abs().argmax())
    with torch.no_grad():
        weight[place] += small
    above = loss().item()
    with torch.no_grad():
        weight[place] -= 2 * small
    assert (above - loss().item()) / (2 * small) == pytest.approx(gradient[place].item(), rel=1e-4)


# --------------------------------------------------------------------------------------------------------------------
# In compiled graphs
# --------------------------------------------------------------------------------------------------------------------


def loss_and_gradients(call: Any, model: Any, *batch: Tensor) -> list[Tensor]:
    ids, mask, labels = batch
    torch.manual_seed(5)  # of hashes and of random scores
    loss = call(input_ids=ids, attention_mask=mask, labels=labels).loss
    return [loss, *torch.autograd.grad(loss, [weight for weight in model.parameters() if weight.requires_grad])]


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_only_the_device_knows_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch):
    """What a graph computes, outside of one: blocks of padding alone take part, and leave no trace."""
    model = model_of(kind, **STILL).train()
    ids, mask, _ = batch_of([53, 17, 2], left=True)
    labels = tokens(3, 7)
    want = loss_and_gradients(model, model, ids, mask, labels)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    got = loss_and_gradients(model, model, ids, mask, labels)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_one_graph_serves_all_lengths():
    """Of whole blocks, and of as many rounds; forward and backward."""
    torch._dynamo.reset()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    shape = {"input_length": 64, "encoder_lengths": [16], "block_size": 8, "decoder_layers": 1}
    model = model_of(**sizes, **shape, **STILL).train()
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for n, lengths, t in ((56, [55, 33, 4], 7), (40, [40, 35, 39], 5), (48, [48, 48, 47], 9)):
        (ids, mask, _), labels, before = batch_of(lengths, n=n), tokens(3, t), count.frame_count
        got, want = (loss_and_gradients(call, model, ids, mask, labels) for call in (compiled, model))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert not before or count.frame_count == before, f"compiled again for {n} tokens"
    assert count.frame_count


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kind", ["full", "soft", "soft-sharp", "straight-through", "lsh-soft", "efficient-soft", "power"]
)
def test_fifty_steps_without_nan_on_a_gpu(kind: str, dtype: torch.dtype):
    """Lengths that leave a block nearly empty, with a mask, which some fused kernels have got wrong."""
    still = {"block_size": 192, "encoder_lengths": [577, 211, 67], "hidden_size": 128, "num_attention_heads": 2}
    lengths = {"encoder_lengths": [577, 577]} if kind == "full" else {}
    model = model_of(kind, **{**still, **lengths}).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    ids, mask, _ = batch_of([577, 385, 193, 1])
    ids, mask, labels = ids.cuda(), mask.cuda(), tokens(4, 9).cuda()
    losses = []
    for _ in range(50):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    assert torch.isfinite(torch.stack(losses)).all()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # from inside torch, about its own graphs and matrix precision
@pytest.mark.parametrize("beams", [1, 3])
def test_a_compiled_static_cache_writes_the_same(beams: int):
    model = model_of(hidden_size=64).cuda()
    ids, mask, _ = batch_of([53, 17, 2])
    options = {"min_new_tokens": 12, "max_new_tokens": 12, "no_repeat_ngram_size": 1, "num_beams": beams}
    dynamic = model.generate(ids.cuda(), attention_mask=mask.cuda(), **options)
    static = model.generate(ids.cuda(), attention_mask=mask.cuda(), cache_implementation="static", **options)
    assert torch.equal(static, dynamic)
