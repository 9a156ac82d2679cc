"""The decoder in few launches: the logits of the decoder in torch's operations, and its tokens, at odd sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from pyramidion.generation import engine, fused, loop
from pyramidion.generation.fused import FusedDecoder
from pyramidion.generation.search import Beam, Greedy, Rules, Search
from pyramidion.generation.step import Decoder
from pyramidion.modeling_pyramidion import PyramidionEncoderOutput
from test_engine import assert_equal, make_documents, make_model

decoding: Any = pytest.importorskip("pyramidion.kernels.decoding")  # now: a test below pretends not to be interpreted
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
K = 11  # representations of a document: not a multiple of anything


def make_shallow(family: str = "transpooler", **changes: Any) -> Any:
    """Make a model whose decoder has one layer: the interpreter takes its time for each."""
    return make_model(family, decoder_layers=1, **changes)


def make_search(documents: int = 2, beams: int = 1, limit: int = 9, **rules: Any) -> Search:
    kind = Greedy if beams == 1 else Beam
    search = kind(Rules(beams, limit, 0, **rules), documents, 61, torch.device(DEVICE))
    search.reset(torch.full((documents,), 1, device=DEVICE))
    return search


def make_decoders(
    model: Any, *, documents: int = 2, beams: int = 1, k: int = K, masked: bool = True, **rules: Any
) -> tuple[Decoder, FusedDecoder]:
    """Make both kinds of decoder, with the same memory before them."""
    model = model.to(DEVICE)
    memory = torch.randn(documents, k, model.config.hidden_size, device=DEVICE).to(model.dtype)
    lengths = torch.tensor([6, k], device=DEVICE).repeat(documents)[:documents]
    mask = torch.arange(k, device=DEVICE) < lengths[:, None]
    made = []
    for kind in (Decoder, FusedDecoder):
        decoder = kind(model, make_search(documents, beams, **rules), k, masked=masked)
        decoder.read(model, PyramidionEncoderOutput(memory, memory_mask=mask if masked else None))
        made.append(decoder)
    return made[0], made[1]


def assert_same_logits(plain: Decoder, one: FusedDecoder, steps: int = 2, tolerance: float = 2e-5) -> None:
    """Compare logits step by step, and let both searches go on by the same ones."""
    for _ in range(steps):
        expected, given = plain.logits(8), one.logits(8)
        torch.testing.assert_close(given.float(), expected.float(), rtol=tolerance, atol=tolerance)
        plain.search.choose(expected.clone(), 8)
        one.search.choose(expected.clone(), 8)


@pytest.mark.parametrize("family", ["transpooler", "pre_norm", "positions"])
@torch.inference_mode()
def test_the_logits_are_those_of_single_operations(family: str):
    """Gains, offsets and biases are not trivial, so that folding them the wrong way shows."""
    model = make_model(family)
    for name, weight in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            weight.uniform_(0.5, 2)
    assert_same_logits(*make_decoders(model))


@torch.inference_mode()
def test_folding_is_exact():
    """Two products with a norm between them, against the same in double precision; a mean that is not 0 included."""
    d, out = 12, 7
    drawn = torch.Generator().manual_seed(0)
    leave, norm, enter = (
        [torch.randn(*size, generator=drawn, dtype=torch.float64) for size in sizes]
        for sizes in ([(d, d), (d,)], [(d,), (d,)], [(out, d), (out,)])
    )
    x, found = (torch.randn(5, d, generator=drawn, dtype=torch.float64) + 3 for _ in range(2))
    stream = x + found @ leave[0].T + leave[1]
    expected = torch.nn.functional.layer_norm(stream, (d,), *norm, eps=1e-5) @ enter[0].T + enter[1]
    own, mixed, carried, shift = decoding.Fold.of([tuple(leave)] * 2, [tuple(norm)] * 2, [tuple(enter)] * 2).layers()[1]
    raw = x @ own.T + found @ mixed.T + carried
    given = raw / (stream.var(1, correction=0, keepdim=True) + 1e-5).sqrt() + shift
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)  # folded in single precision at least


@torch.inference_mode()
def test_beams_see_their_own_past():
    plain, one = make_decoders(make_shallow(), documents=1, beams=3, masked=False)
    assert_same_logits(plain, one, 4)
    torch.testing.assert_close(one.cache, plain.cache, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
@torch.inference_mode()
def test_heads_may_be_shared_out(beams: int, monkeypatch: pytest.MonkeyPatch):
    """Parts of a softmax are put together, where masks leave some empty too."""
    monkeypatch.setattr(decoding, "KEYS", 32)  # 16 at a time in single precision
    monkeypatch.setattr(decoding, "processors", lambda _: 1000)
    plain, one = make_decoders(make_shallow(num_attention_heads=2), beams=beams, k=37)
    assert_same_logits(plain, one)
    assert one.launcher.split == 2  # of 37 representations, 32 first; the second has none of the first document


@pytest.mark.parametrize("position", [3, 31, 32, 36])
@pytest.mark.parametrize("beams", [1, 2])
@torch.inference_mode()
def test_the_newest_key_is_seen_once(position: int, beams: int, monkeypatch: pytest.MonkeyPatch):
    """Of two programs that share a past of 39 tokens, 32 and 7, by the one that has its place."""
    monkeypatch.setattr(decoding, "KEYS", 32)  # 16 at a time in single precision
    monkeypatch.setattr(decoding, "processors", lambda _: 1000)
    plain, one = make_decoders(make_shallow(num_attention_heads=2), beams=beams, limit=40)
    past, tokens = torch.randn_like(plain.cache), torch.randint(3, 61, plain.search.running.shape, device=DEVICE)
    origin = torch.randint(0, beams, plain.search.origin.shape, device=DEVICE)
    origin[..., position + 1 :] = -1
    for decoder in (plain, one):
        decoder.cache.copy_(past)
        decoder.search.running.copy_(tokens)
        decoder.search.origin.copy_(origin)
        decoder.search.position.fill_(position)
    torch.testing.assert_close(one.logits(39), plain.logits(39), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("major", "shared", "served"), [(9, 232448, True), (8, 166912, False), (12, 101376, False)])
def test_other_gpus_are_left_to_torch(major: int, shared: int, served: bool, monkeypatch: pytest.MonkeyPatch):
    """An instruction of Hopper's, and more shared memory than a GPU for games has."""
    found = SimpleNamespace(major=major, shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert decoding.runs_on(torch.device("cuda")) == served
    monkeypatch.setattr(torch.version, "cuda", None)
    assert decoding.runs_on(torch.device("cuda")) == decoding.interpreted()


@torch.inference_mode()
def test_heads_three_times_a_power_of_two_are_taken_in_pieces():
    assert [decoding._pieces(width) for width in (96, 48, 64, 24, 80)] == [(3, 32), (3, 16), (1, 64), (1, 32), (1, 128)]
    assert_same_logits(*make_decoders(make_shallow(hidden_size=96, num_attention_heads=2)))


@torch.inference_mode()
def test_wide_streams_are_noted_by_many_programs():
    """More than 32 of them, so that their moments are read in two turns."""
    sizes = {"hidden_size": 520, "num_attention_heads": 5, "intermediate_size": 24}
    assert_same_logits(*make_decoders(make_shallow(**sizes), documents=1), steps=1, tolerance=1e-4)


@torch.inference_mode()
def test_many_rows_are_several_programs():
    plain, one = make_decoders(make_shallow(seed=3, end=2.0), documents=11, ends=(2, 7))
    assert one.launcher.blocks == 2
    torch.testing.assert_close(one.logits(8), plain.logits(8), rtol=2e-5, atol=2e-5)
    for decoder in (plain, one):
        decoder.step(8)
    for kept, expected in zip(one.search.moving(), plain.search.moving(), strict=True):
        if kept is not one.search.origin:  # greedy texts have one past
            assert torch.equal(kept, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 1e-2)], ids=str)
@torch.inference_mode()
def test_wide_layers_are_summed_in_pieces(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch):
    """Five pieces of 64: three are fetched ahead in half precision, the others one after the other."""
    monkeypatch.setattr(decoding, "CHUNK", 16)  # the logits too
    sizes = {"hidden_size": 40, "num_attention_heads": 2, "intermediate_size": 300}
    decoders = make_decoders(make_shallow(**sizes).to(dtype), documents=1)
    assert_same_logits(*decoders, steps=1, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@torch.inference_mode()
def test_half_precision_is_as_near_as_single_operations(dtype: torch.dtype):
    """Triton's interpreter does not multiply in bfloat16."""
    plain, one = make_decoders(make_model("pre_norm").to(dtype))
    exact = make_model("pre_norm").to(DEVICE)
    reference = Decoder(exact, make_search(), K, masked=True)
    reference.read(exact, PyramidionEncoderOutput(torch.zeros(2, K, exact.config.hidden_size, device=DEVICE)))
    reference.memory.copy_(plain.memory)
    reference.mask.copy_(plain.mask)  # type: ignore[union-attr]
    truth = reference.logits(8)
    errors = [(decoder.logits(8).float() - truth).abs().max().item() for decoder in (plain, one)]
    assert errors[1] <= 1.5 * errors[0], errors


@pytest.mark.parametrize("rules", [{"ends": (2, 7), "floor": 3}, {}], ids=["ends", "none"])
@torch.inference_mode()
def test_a_launch_takes_the_likeliest_token(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "TOKENS", 32)  # two programs share the vocabulary out
    plain, one = make_decoders(make_shallow(seed=3, end=2.0), **rules)
    monkeypatch.setattr(one.search, "choose", None)
    for _ in range(4):
        plain.step(8)
        one.step(8)
    for kept, expected in zip(one.search.moving(), plain.search.moving(), strict=True):
        if kept is not one.search.origin:
            assert torch.equal(kept, expected)


@torch.inference_mode()
def test_new_weights_are_seen():
    model = make_model("pre_norm")
    plain, one = make_decoders(model)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.1)
    for decoder in (plain, one):
        decoder.refresh(model)
    assert_same_logits(plain, one, 1)


@pytest.mark.parametrize(
    "rules",
    [{"ngram": 2}, {"banned": ((5,),)}, {"repetition": 1.2}, {"first": (4,)}, {"last": (2,)}, {"beams": 2}],
    ids=["ngram", "banned", "repetition", "first", "last", "beams"],
)
@torch.inference_mode()
def test_other_rules_are_left_to_the_search(rules: dict[str, Any]):
    plain, one = make_decoders(make_shallow(), documents=1, **rules)
    for _ in range(3):
        plain.step(8)
        one.step(8)
    for kept, expected in zip(one.search.moving(), plain.search.moving(), strict=True):
        torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"activation_function": "gelu"}, {"hidden_size": 1032}, {"dtype": torch.float64}],
    ids=["activation", "width", "precision"],
)  # fmt: skip
def test_what_is_not_known_is_not_served(changes: dict[str, Any]):
    dtype = changes.pop("dtype", torch.float32)
    assert not fused.serves(make_model(**changes).to(DEVICE, dtype), make_search(), K)


@pytest.mark.parametrize(
    ("dtype", "documents", "k", "faster"),
    [
        (torch.bfloat16, 8, 512, True),
        (torch.bfloat16, 33, 9, False),
        (torch.float16, 8, 1025, False),
        (torch.float16, 32, 513, False),
        (torch.float32, 8, 9, False),
    ],
    ids=["few", "rows", "keys", "all keys", "single"],
)
def test_sizes_at_which_torch_is_faster_are_left_to_it(
    dtype: torch.dtype, documents: int, k: int, faster: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused.launching, "interpreted", lambda: False)
    model = make_model().to(dtype)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert fused.serves(model, make_search(documents), k) == faster


@pytest.mark.parametrize("changes", [{}, {"copies": 2}, {"copies": 1, "copy_length": 64, "pre_norm": False}], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_summaries_are_the_same(changes: dict[str, Any], beams: int):
    loop.PACES[DEVICE] = loop.Pace(fused=True, check=2, kept=2)
    model = make_shallow("both", seed=2, end=2.5, activation_function="relu", **changes).to(DEVICE)
    documents = tuple(part.to(DEVICE) for part in make_documents([33, 5]))
    assert_equal(model, documents, num_beams=beams, max_new_tokens=4)
    assert isinstance(next(iter(loop._KEPT[model].values())).decoder, FusedDecoder)


@pytest.mark.parametrize("beams", [1, 3])
@torch.inference_mode()
def test_what_may_be_copied_is_seen(beams: int):
    """The logarithms of all probabilities, with those of copying among them, as the decoder in torch gives them."""
    model = make_shallow(copies=3).to(DEVICE)
    tokens, mask = (part.to(DEVICE) for part in make_documents([33, 21]))
    kept, made = model.get_encoder()(tokens, attention_mask=mask), []
    for kind in (Decoder, FusedDecoder):
        k, c = kept.last_hidden_state.shape[1], kept.copy_states.shape[1]
        decoder = kind(model, make_search(2, beams), k, c, masked=True)
        decoder.read(model, kept)
        made.append(decoder)
    plain, one = made
    assert_same_logits(plain, one, 3)
    torch.testing.assert_close(one.logits(8).exp().sum(-1), torch.ones(2 * beams, device=DEVICE))
    for decoder in made:
        decoder.copy.shares.zero_()  # nothing to copy from
    assert (one.logits(8) - plain.logits(8)).abs().max() < 1e-4


@pytest.fixture(autouse=True)
def _paces() -> Any:
    paces = dict(loop.PACES)
    yield
    loop.PACES.clear()
    loop.PACES.update(paces)


# --------------------------------------------------------------------------------------------------------------------
# On a GPU: many programs, and the sizes that count
# --------------------------------------------------------------------------------------------------------------------


def deep_model(**changes: Any) -> Any:
    """Make a decoder of the deep presets' size, beside an encoder of little."""
    sizes = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 8}
    deep = {"encoder_lengths": [512, 256], "block_size": 128, "decoder_layers": 6}
    torch.manual_seed(0)
    from pyramidion.configuration_pyramidion import PyramidionConfig
    from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration

    return PyramidionForConditionalGeneration(PyramidionConfig(**{**sizes, **deep, **changes})).cuda().eval()


def written(model: Any, documents: tuple[Tensor, Tensor], ours: bool, **options: Any) -> Tensor:
    loop.PACES["cuda"] = loop.Pace(grain=(4, 64), bucket=64, doubles=True, check=16, kept=4, turns=8, fused=ours)
    loop.forget(model)
    return engine.generate(model, *documents, GenerationConfig(**options))


@pytest.mark.gpu
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize(("documents", "beams"), [(8, 1), (1, 1), (40, 1), (8, 2), (3, 4)])
def test_deep_models_write_the_same_in_single_precision(
    pre_norm: bool, documents: int, beams: int, monkeypatch: pytest.MonkeyPatch
):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = deep_model(pre_norm=pre_norm, decoder_positions=True)
    tokens = torch.randint(3, 32000, (documents, 512), device="cuda")
    mask = torch.arange(512, device="cuda") < torch.randint(200, 513, (documents, 1), device="cuda")
    options = {"num_beams": beams, "min_new_tokens": 100, "max_new_tokens": 100}
    monkeypatch.setattr(fused, "serves", lambda *_: True)
    plain, one = (written(model, (tokens, mask), ours, **options) for ours in (False, True))
    assert (plain == one).float().mean() > 0.99  # sums in another order may decide a tie


@pytest.mark.gpu
def test_launches_leave_nothing_behind():
    model = deep_model().to(torch.bfloat16)
    tokens = torch.randint(3, 32000, (8, 512), device="cuda")
    mask = torch.ones_like(tokens)
    options = {"min_new_tokens": 100, "max_new_tokens": 100}
    first = written(model, (tokens, mask), True, **options)
    for _ in range(3):
        assert torch.equal(engine.generate(model, tokens, mask, GenerationConfig(**options)), first)
