"""The kernels of a model against torch in float64, with Philox written out: in Triton's interpreter, or on a GPU."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
from pyramidion.kernels import direction, embedding, feed_forward, functions, products, residual, tiles
from pyramidion.kernels.dropout import dropout, scale, threshold
from pyramidion.kernels.launching import unplanned
from pyramidion.kernels.tiles import Tiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


TILINGS = ("FORWARD", "BACKWARD", "ADD_FORWARD", "ADD_BACKWARD")


def tile_by(monkeypatch: pytest.MonkeyPatch, *tiling: int) -> None:
    """Let all kernels go through rows in another way."""
    for module, name in product((residual, feed_forward, embedding, direction), TILINGS):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, Tiling(*tiling))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        tile_by(monkeypatch, 16, 1, 1, 1)  # the interpreter takes its time for each tile
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter's arithmetic is modulo 2³²
        yield


def philox(seed: int, draws: np.ndarray) -> list[np.ndarray]:
    """Draw four words for each counter, as Salmon et al. (2011) define Philox 4x32, with 7 rounds."""
    counter = [draws.astype(np.uint64), *(np.zeros_like(draws, dtype=np.uint64) for _ in range(3))]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        one, two = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
        counter = [(two >> high) ^ counter[1] ^ np.uint64(key[0]), two & low,
                   (one >> high) ^ counter[3] ^ np.uint64(key[1]), one & low]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def kept(seed: int, draws: int, rate: float) -> np.ndarray:
    """Say which of the 8 neighbours of each draw stay: [8 * draws]."""
    words = philox(seed, np.arange(draws))
    halves = [(word >> np.uint64(shift)) & np.uint64(0xFFFF) for word in words for shift in (0, 16)]
    return (np.stack(halves, 1) >= threshold(rate)).reshape(-1)


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> int:
    fixed = (0x12345678 << 32) | 0x9ABCDEF1
    for module in (residual, feed_forward, embedding):
        monkeypatch.setattr(module, "new_seed", lambda device: torch.tensor([fixed], device=device))
    return fixed


def near(found: Tensor, want: Tensor, plain: Tensor, what: str) -> None:
    """Ask for an error at most twice that of torch's own computation in the same precision."""
    assert found.shape == want.shape, what
    assert found.dtype == plain.dtype, what
    error, allowed = ((one.double().cpu() - want).norm() for one in (found, plain))
    assert error <= 2 * allowed + want.norm() * torch.finfo(plain.dtype).eps, f"{what}: {error:.2e}, {allowed:.2e}"


Inputs = list[Tensor]


def by_torch(kind: str, inputs: Inputs, keep: Tensor, rate: float, half: torch.dtype | None) -> Inputs:
    """Compute what the kernels do, in the precision of the inputs, or with the norm in `half`."""
    x, change, weight, bias, *shifts = inputs
    change = change + shifts[0].to(change.dtype) if shifts else change
    total = x if kind == "norm" else x + torch.where(keep.to(x.device).view(x.shape), change * scale(rate), 0.0)
    normed = F.layer_norm(total.to(weight.dtype), weight.shape, weight, bias).to(half or x.dtype)
    return {"norm": [normed], "add_norm": [normed], "add_and_norm": [total.to(x.dtype), normed], "add": [total]}[kind]


def by_kernels(kind: str, inputs: Inputs, rate: float, half: torch.dtype) -> Inputs:
    x, change, weight, bias, *shifts = inputs
    shift = shifts[0] if shifts else None
    with torch.autocast(DEVICE, half, enabled=half != torch.float32):
        if kind == "norm":
            return [residual.norm(x, weight, bias, 1e-5)]
        if kind == "add":
            return [residual.add(x, change, shift, rate)]
        if kind == "add_norm":
            return [residual.add_norm(x, change, shift, weight, bias, rate, 1e-5)]
        return list(residual.add_and_norm(x, change, shift, weight, bias, rate, 1e-5))


def both_ways(leaves: Inputs, along: Inputs, run: Any) -> Inputs:
    """Give the results and the gradients of all leaves, those that have one."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outs = run(leaves)
    arriving = [one.to(out) for one, out in zip(along, outs, strict=False)]
    grads = torch.autograd.grad(outs, leaves, arriving, allow_unused=True)
    return [*outs, *(grad for grad in grads if grad is not None)]


CHANGES = [(0.0, False), (0.0, True), (0.1, True), (0.5, False)]  # rate of dropout, whether there is a bias


@pytest.mark.parametrize(("shape", "d"), [((1,), 8), ((7, 11), 24), ((3,), 768), ((1, 2), 1000)])
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
@pytest.mark.parametrize(
    ("kind", "rate", "shifted"),
    [("norm", 0.0, False), *((kind, *change) for kind in ("add_norm", "add_and_norm", "add") for change in CHANGES)],
)
def test_residual_connections(
    kind: str, shape: tuple[int, ...], d: int, rate: float, x_dtype: torch.dtype, dtype: torch.dtype, shifted: bool,
    seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(d)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    dtypes = (x_dtype, dtype, torch.float32, torch.float32, torch.float32)
    drawn = draw(*shape, d) * 3 + 1, draw(*shape, d), 1 + draw(d) / 2, draw(d), draw(d)
    inputs = [one.to(DEVICE, as_) for one, as_ in zip(drawn, dtypes, strict=True)][: 5 if shifted else 4]
    along = [draw(*shape, d).to(dtype) for _ in range(2)]
    keep = torch.from_numpy(kept(seed, along[0].numel() // 8, rate))

    exact = [one.double().cpu() for one in inputs]
    want = both_ways(exact, along, lambda leaves: by_torch(kind, leaves, keep, rate, None))
    plain = both_ways(inputs, along, lambda leaves: by_torch(kind, leaves, keep, rate, dtype))
    found = both_ways(inputs, along, lambda leaves: by_kernels(kind, leaves, rate, dtype))
    assert len(found) == len(plain)
    for place, (one, right, usual) in enumerate(zip(found, want, plain, strict=True)):
        near(one, right, usual, f"{kind} {place}")


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("rows", "d"), [(1, 8), (3, 24), (77, 8), (3, 1000), (5, 3072), (2, 4104)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_dropout(rows: int, d: int, dtype: torch.dtype, shifted: bool, rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(d)
    drawn = [torch.randn(size, generator=generator) for size in ((rows, d), (rows, d), (d,))]
    along, x, bias = drawn[0].to(dtype), drawn[1].to(DEVICE, dtype), drawn[2].to(DEVICE)
    inputs = [x, bias] if shifted else [x]
    keep = torch.from_numpy(kept(seed, rows * d // 8, rate)).view(rows, d)

    def by_hand(leaves: Inputs) -> Inputs:
        total = leaves[0] + leaves[1].to(leaves[0].dtype) if shifted else leaves[0]
        return [torch.where(keep.to(total.device), total.relu() * scale(rate), 0.0)]

    want = both_ways([one.double().cpu() for one in inputs], [along], by_hand)
    plain = both_ways(inputs, [along], by_hand)
    ours = both_ways(inputs, [along], lambda leaves: [feed_forward.relu_dropout(leaves[0], (*leaves, None)[1], rate)])
    assert len(ours) == len(want)
    for name, one, right, usual in zip(("out", "grad x", "grad bias"), ours, want, plain, strict=False):
        near(one, right, usual, name)


@pytest.mark.parametrize(("tiling", "shifted"), [((1, 4, 1, 1), True), ((2, 1, 2, 2), False), ((8, 2, 1, 3), True)])
def test_tiles_change_nothing(
    tiling: tuple[int, ...], shifted: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However rows are shared among programs, the same numbers are kept, forward and backward."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(size, generator=generator).to(DEVICE) for size in ((7, 40), (7, 40), (40,), (40,), (40,))]
    along = [torch.randn(7, 40, generator=generator) for _ in range(2)]

    def everything() -> Inputs:
        found = []
        for kind in ("add_norm", "add_and_norm", "add"):
            given = inputs if shifted else inputs[:4]
            found += both_ways(given, along, lambda leaves, kind=kind: by_kernels(kind, leaves, 0.3, torch.float32))
        shift = inputs[4] if shifted else None
        return found + both_ways(inputs[:1], along, lambda leaves: [feed_forward.relu_dropout(leaves[0], shift, 0.3)])

    usual = everything()
    tile_by(monkeypatch, *tiling)
    monkeypatch.setattr(tiles, "LANES", 2)  # three groups of columns
    for place, (one, other) in enumerate(zip(everything(), usual, strict=True)):
        torch.testing.assert_close(one, other, msg=lambda m, place=place: f"{place}: {m}")
        if one.ndim > 1:
            assert torch.equal(one == 0, other == 0), place


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    x = torch.ones(100, 2000 if DEVICE == "cuda" else 400, device=DEVICE)
    torch.manual_seed(0)
    one, two = (feed_forward.relu_dropout(x, None, 0.1) for _ in range(2))
    for out in (one, two):
        assert (out == 0).double().mean().item() == pytest.approx(0.1, abs=0.006)
        assert out.double().mean().item() == pytest.approx(1, abs=0.006)
    both = ((one == 0) & (two == 0)).double().mean().item()
    assert both == pytest.approx(0.01, abs=0.002), "two draws are independent"
    torch.manual_seed(0)
    assert torch.equal(feed_forward.relu_dropout(x, None, 0.1), one), "torch's seed decides"


def test_operators_are_registered_as_torch_asks() -> None:
    seed = torch.tensor([5], device=DEVICE)
    x, change = (torch.randn(3, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(16, device=DEVICE, requires_grad=True) for _ in range(2))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for drawn, shift in ((seed, None), (None, None), (seed, weight), (None, weight)):
        for changed, keeps_sum in ((change, False), (change, True), (None, False)):
            given = (changed, shift, weight, bias, drawn) if changed is not None else (None, None, weight, bias, None)
            inputs = (x, *given, 0.1 if given[-1] is not None else 0.0, 1e-5, torch.float32, keeps_sum)
            torch.library.opcheck(residual._normed.registered, inputs, test_utils=checks)
        rate = 0.1 if drawn is not None else 0.0
        torch.library.opcheck(residual._added.registered, (x, change, shift, drawn, rate), test_utils=checks)
        torch.library.opcheck(feed_forward._relu_dropout.registered, (x, shift, drawn, rate), test_utils=checks)


def test_nothing_may_come_in() -> None:
    x = torch.empty(0, 16, device=DEVICE, requires_grad=True)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    out = residual.add_norm(x, x, weight, weight, weight, 0.0, 1e-5)
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert grads[0].shape == (0, 16)
    assert torch.equal(grads[1], torch.zeros_like(weight))
    assert feed_forward.relu_dropout(x, None, 0.1).shape == residual.add(x, x, weight, 0.1).shape == (0, 16)


# ------------------------------------------------------------------------------------------------- biases handed over


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the kernels serve this device too, and note whether each that may add a bias was given one."""
    given: list[bool] = []
    monkeypatch.setattr(functions, "served", lambda x: x.dtype != torch.float64)

    def noted(run: Any, place: int) -> Any:
        def call(*inputs: Any) -> Any:
            given.append(inputs[place] is not None)
            return run(*inputs)

        return call

    monkeypatch.setattr(feed_forward, "relu_dropout", noted(feed_forward.relu_dropout, 1))
    for name in ("add_norm", "add_and_norm", "add"):
        monkeypatch.setattr(residual, name, noted(getattr(residual, name), 2))
    return given


def layer(pre_norm: bool, rate: float = 0.0, **options: Any) -> Any:
    pytest.importorskip("transformers")
    from pyramidion.configuration_pyramidion import PyramidionConfig
    from pyramidion.modeling_pyramidion import PyramidionDecoderLayer

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "decoder_layers": 1}
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), rate)
    config = PyramidionConfig(**sizes, **rates, pre_norm=pre_norm, **options)
    made = PyramidionDecoderLayer(config, 0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.3)
    return made.to(DEVICE)


def learned(made: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Give what comes out of a decoder layer, and the gradients of its parameters."""
    generator = torch.Generator().manual_seed(7)
    x, memory, along = (torch.randn(size, generator=generator) for size in ((2, 3, 16), (2, 5, 16), (2, 3, 16)))
    out = made.to(dtype)(x.to(DEVICE, dtype).requires_grad_(), memory.to(DEVICE, dtype))
    made.zero_grad()
    out.backward(along.to(out))
    grads = {name: one.grad.float() for name, one in made.named_parameters() if one.grad is not None}
    return {"out": out.detach().float(), **grads}


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_layer_learns_as_before(pre_norm: bool, activation: str, everywhere: list[bool]) -> None:
    made = layer(pre_norm, activation_function=activation)
    want = learned(made, torch.float64)
    assert not everywhere
    found = learned(made, torch.float32)
    assert everywhere == [True] * 3  # the bias in the middle goes with its product
    assert found.keys() == want.keys() >= {f"feed_forward.{name}.bias" for name in ("widen", "narrow")}
    for name, one in want.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("options", [{}, {"pre_norm": True, "decoder_positions": True, "copies": 1}], ids=str)
def test_a_model_learns_as_before(options: dict[str, Any], everywhere: list[bool]) -> None:
    """Embedding, products, residual connections and scorers of a whole model: its loss and all its gradients."""
    pytest.importorskip("transformers")
    from pyramidion import PyramidionConfig, PyramidionForConditionalGeneration

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    lengths = {"input_length": 24, "encoder_lengths": [24, 12, 6], "block_size": 8, "decoder_layers": 2}
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    config = PyramidionConfig(**sizes, **lengths, **rates, **options)
    model = PyramidionForConditionalGeneration(config).to(DEVICE).train()
    ids = torch.randint(3, 40, (3, 24), device=DEVICE)
    mask = torch.arange(24, device=DEVICE) < torch.tensor([[24], [5], [17]], device=DEVICE)
    labels = torch.randint(3, 40, (3, 7), device=DEVICE)

    def learn(dtype: torch.dtype) -> dict[str, Tensor]:
        model.to(dtype).zero_grad()
        loss = model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
        loss.backward()
        grads = {name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None}
        return {"loss": loss.detach().float(), **grads}

    want = learn(torch.float64)
    assert not everywhere
    found = learn(torch.float32)
    assert len(everywhere) > 8
    assert (
        found.keys() == want.keys() >= {"loss", "model.shared.weight", "model.encoder.poolers.1.scorer.linear.weight"}
    )
    for name, one in want.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_who_looks_on_or_replaces_sees_the_whole_layer(everywhere: list[bool]) -> None:
    made = layer(False)
    want = learned(made)
    seen = []
    made.attention.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    made.cross_attention.out.register_forward_hook(lambda module, inputs, output: output.clone())
    made.feed_forward.widen, was = torch.nn.Sequential(made.feed_forward.widen), made.feed_forward.widen
    made.feed_forward.narrow.bias.requires_grad_(False)
    everywhere.clear()
    found = learned(made)
    assert everywhere == [False] * 3
    assert isinstance(seen[0], Tensor)
    made.feed_forward.widen = was
    for name, one in want.items():
        if name != "feed_forward.narrow.bias":
            other = found[name.replace("widen.", "widen.0.")]
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert "feed_forward.narrow.bias" not in found


def test_biases_stay_where_nothing_is_learned(everywhere: list[bool]) -> None:
    linear, x = torch.nn.Linear(16, 24, device=DEVICE), torch.randn(3, 16, device=DEVICE)
    multiply = partial(functions.multiply, x, bare=True)
    assert multiply(linear)[1][1] is linear.bias
    with torch.no_grad():
        assert multiply(linear)[1][1] is None
    for other in (torch.nn.Linear(16, 20, device=DEVICE), torch.nn.Linear(16, 24, bias=False, device=DEVICE)):
        _, (whole, bias) = multiply(other)
        assert bias is None
        torch.testing.assert_close(whole, other(x))
    assert functions.multiply(x, linear)[1][1] is None
    linear.forward = lambda x: x  # type: ignore[method-assign]
    assert multiply(linear)[1][0] is x


def test_a_compiled_layer_hands_biases_over(everywhere: list[bool]) -> None:
    torch._dynamo.reset()
    made = layer(False)
    want = learned(made)
    made.forward = torch.compile(made.forward, fullgraph=True, backend="aot_eager")
    found = learned(made)
    for name, one in want.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert everywhere == [True] * 7  # in a graph the bias in the middle is handed over too


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_drops_the_same(reentrant: bool, everywhere: list[bool]) -> None:
    made = layer(False, 0.3)
    torch.manual_seed(3)
    want = learned(made)
    made.forward = partial(checkpoint, made.forward, use_reentrant=reentrant)
    torch.manual_seed(3)
    found = learned(made)
    for name, one in want.items():
        torch.testing.assert_close(found[name], one, msg=lambda m, name=name: f"{name}: {m}")


# ------------------------------------------------------------------------------------------- several products at once


def around(made: Any, x: Tensor, weighed: Any, relu: bool) -> Tensor:
    """Go through products with a residual connection around them, each with a shape of its own."""
    rest, *outs = made(x, weighed, relu)
    return rest.float().sin().sum() + sum((out.float() * out.float().cos()).sum() for out in outs)


def by_hand(x: Tensor, weighed: Any, relu: bool) -> list[Tensor]:
    outs = [F.linear(x, weight, bias) for weight, bias in weighed]
    return [x, *(out.relu() if relu else out for out in outs)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("sizes", [(24,), (16, 8, 40)])
@pytest.mark.parametrize(("of_x", "of_weight", "half"), [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float32, torch.float32, torch.bfloat16),
])  # fmt: skip
def test_products_learn_as_one_by_one(
    of_x: torch.dtype, of_weight: torch.dtype, half: torch.dtype, sizes: tuple[int, ...], relu: bool
) -> None:
    x = torch.randn(5, 7, 16, device=DEVICE).to(of_x)
    flat = [torch.randn(*shape, device=DEVICE, dtype=of_weight) for e in sizes for shape in ((e, 16), (e,))]

    def learned(run: Any, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [one.to(dtype or one.dtype, copy=True).requires_grad_() for one in (x, *flat)]
        weighed = list(zip(leaves[1::2], leaves[2::2], strict=True))
        around(run, leaves[0], weighed, relu).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    want = [one.cpu() for one in learned(by_hand, torch.float64)]
    with torch.autocast(DEVICE, half, enabled=half != torch.float32):
        plain = learned(by_hand, None)
    found = learned(lambda x, weighed, relu: products.multiply(x, weighed, half, relu=relu), None)
    assert len(found) == len(want) == 1 + 2 * len(sizes)
    for number, three in enumerate(zip(found, want, plain, strict=True)):
        near(*three, f"gradient {number}")


def test_products_ask_only_for_what_learns() -> None:
    x, weight, bias = (torch.randn(*shape, device=DEVICE) for shape in ((3, 8), (16, 8), (16,)))
    for learning in range(8):
        leaves = [
            one.clone().requires_grad_(bool(learning >> place & 1)) for place, one in enumerate((x, weight, bias))
        ]
        rest, out, other = products.multiply(leaves[0], [tuple(leaves[1:]), (weight, None)], torch.float32)
        total = out.sin().sum() + (rest * 0.5).sum()  # nobody looks at the other
        assert total.requires_grad == (learning > 0)
        if learning:
            total.backward()
            assert [leaf.grad is not None for leaf in leaves] == [bool(learning >> place & 1) for place in range(3)]
        assert torch.equal(other, F.linear(x, weight))


def test_what_arrives_for_x_is_taken_over_only_where_it_can_be() -> None:
    """A gradient that is spread over the batch without memory of its own is left alone, and counts."""
    x, weight = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.randn(16, 8, device=DEVICE)
    rest, out = products.multiply(x, [(weight, None)], torch.float32)
    arriving = torch.ones(1, device=DEVICE).expand(3, 8)
    torch.autograd.backward([rest, out], [arriving, torch.ones_like(out)])
    assert arriving.unique().tolist() == [1]
    torch.testing.assert_close(x.grad, 1 + weight.sum(0).expand(3, 8))
    _, out = products.multiply(x, [(weight, None)], torch.float32)
    first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---------------------------------------------------------------------------------------------------------- embedding


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "d"), [((2, 7), 8), ((1, 3), 24), ((5, 11), 1000)])
def test_embedding_is_that_of_torch(
    shape: tuple[int, int], d: int, dtype: torch.dtype, placed: bool, rate: float, seed: int
) -> None:
    words, count = 13, shape[0] * shape[1]
    tokens = torch.randint(words, shape, device=DEVICE)
    tokens[0, 0] = 2
    places = torch.randint(4, shape, device=DEVICE) if placed else None
    weight, table, along = (torch.randn(*size, device=DEVICE) for size in ((words, d), (3, d), (*shape, d)))
    keep = torch.from_numpy(kept(seed, count * d // 8, rate)).view(*shape, d)

    def by_torch(leaves: Inputs) -> Inputs:
        x = F.embedding(tokens.to(leaves[0].device), leaves[0], 2) * 1.7
        if places is not None:
            x = x + F.pad(table.to(x), (0, 0, 1, 0))[places.to(x.device)]
        return [torch.where(keep.to(x.device), x * scale(rate), 0.0).to(dtype if x.dtype != torch.float64 else x.dtype)]

    want = both_ways([weight.double().cpu()], [along.cpu()], by_torch)
    plain = both_ways([weight], [along], by_torch)
    options = (places, table if placed else None, 2, 1.7, rate, dtype)
    found = both_ways([weight], [along], lambda leaves: [embedding.embed(tokens, leaves[0], *options)])
    for name, *three in zip(("vectors", "table"), found, want, plain, strict=True):
        near(*three, name)
    assert not found[1][2].any()  # padding learns nothing


def test_a_token_that_does_not_exist_is_no_number() -> None:
    weight = torch.randn(5, 8, device=DEVICE)
    for token in (-1, 5):
        found = embedding.embed(
            torch.tensor([[1, token]], device=DEVICE), weight, None, None, 0, 1.0, 0.0, weight.dtype
        )
        assert found.isnan().any(2).tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "d"), [((1, 1), 8), ((2, 37), 24), ((3, 5), 1000)])
def test_a_direction_scores_as_torch_does(shape: tuple[int, int], d: int, dtype: torch.dtype) -> None:
    leaves = [torch.randn(*size, device=DEVICE) for size in ((*shape, d), (1, d), (1,))]
    leaves[0] = leaves[0].to(dtype)
    along = torch.randn(*shape, device=DEVICE)

    def by_torch(inputs: Inputs) -> Inputs:
        x, weight, bias = inputs
        return [F.linear(x.to(weight.dtype), weight, bias).squeeze(-1)]

    want = both_ways([one.double().cpu() for one in leaves], [along.cpu()], by_torch)
    plain = both_ways(leaves, [along], by_torch)
    found = both_ways(leaves, [along], lambda inputs: [direction.score(*inputs)])
    for name, *three in zip(("scores", "x", "weight", "bias"), found, want, plain, strict=True):
        near(*three, name)
    cut = leaves[0][:, : max(1, shape[1] // 2)]  # whoever asks for a part of a document
    torch.testing.assert_close(direction.score(cut, *leaves[1:]), by_torch([cut, *leaves[1:]])[0])


# --------------------------------------------------------------------------------------------------------------------
# Shapes that never come again
# --------------------------------------------------------------------------------------------------------------------


def test_unplanned_leaves_cudnn_out_and_all_as_it_was():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with unplanned(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    with unplanned(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before


# --------------------------------------------------------------------------------------------------------------------
# Dropout on a CPU
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_dropout_keeps_its_share_and_scales_it_exactly(rate: float, dtype: torch.dtype):
    x = (torch.rand(1001, 997) + 0.5).to(dtype).requires_grad_()
    torch.manual_seed(3)
    out = dropout(x, rate)
    kept = out != 0
    dropped = threshold(rate) / 65536
    assert abs(dropped - rate) <= 0.5 / 65536
    assert abs((~kept).double().mean() - dropped) < 5 * (rate * (1 - rate) / x.numel()) ** 0.5
    assert torch.equal(out[kept], (x * scale(rate))[kept])
    assert scale(rate) * (1 - dropped) == pytest.approx(1, rel=1e-12)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.equal(slope, torch.where(kept, torch.tensor(scale(rate), dtype=dtype), torch.zeros((), dtype=dtype)))
    torch.manual_seed(3)
    assert torch.equal(dropout(x, rate), out)
    assert not torch.equal(dropout(x, rate), out)


def test_dropout_treats_neighbours_and_places_alike():
    """Four elements share a draw: each of them, and each pair, must be dropped as often as any."""
    torch.manual_seed(0)
    dropped = (dropout(torch.ones(200_000, 4), 0.3) == 0).double()
    share, once = threshold(0.3) / 65536, 5 * (0.21 / 200_000) ** 0.5
    assert ((dropped.mean(0) - share).abs() < once).all()
    both = dropped.T @ dropped / len(dropped)
    assert ((both - share**2).abs() < once)[~torch.eye(4, dtype=torch.bool)].all()


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 3, 7)], ids=str)
def test_dropout_of_any_shape(shape: tuple[int, ...]):
    x = torch.ones(shape).transpose(0, -1)
    assert dropout(x, 0.5).shape == x.shape
    assert torch.equal(dropout(x, 0.0), x)
    assert not dropout(x, 1.0).any()
    kept = torch.nn.functional.dropout(x, 1e-7)
    assert torch.equal(dropout(x, 1e-7) != 0, kept != 0)


def test_dropout_compiles_as_torchs_own():
    compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    assert 0.05 < (compiled(torch.ones(10_000), 0.1) == 0).double().mean() < 0.15
