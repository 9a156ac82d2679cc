"""The loss over a vocabulary against F.cross_entropy in float64, both ways: as plain torch and as a kernel.

The kernel runs in Triton's interpreter without a GPU, compiled with one. Sizes are primes, so that a swapped axis or a
forgotten rest cannot pass, and an error may be twice that of torch in the same precision.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.backends.common
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pyramidion.kernels import loss
from pyramidion.kernels.loss import linear_cross_entropy

cross_entropy = pytest.importorskip("pyramidion.kernels.cross_entropy", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEFT_OUT = -100
WAYS = ["torch", "triton"]


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Take one way or the other, in blocks so small that a row is several."""
    monkeypatch.setattr(loss, "served", lambda x: request.param == "triton" and x.dtype != torch.float64)
    monkeypatch.setattr(cross_entropy, "BLOCK", 16)
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter's arithmetic with infinities
        yield request.param


class Recorder(TorchDispatchMode):
    """Keep the name, shape and dtype of whatever torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.Size, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.dtype != torch.uint8:  # bytes: the interpreter's own copies
                self.made.append((str(func), tensor.shape, tensor.dtype))
        return out


def draw(t: int, d: int, v: int, dtype: torch.dtype = torch.float32, left_out: float = 0.3) -> tuple[Tensor, ...]:
    """Draw x [t d], weight [v d] and labels [t], some of them left out."""
    x, weight = torch.randn(t, d, device=DEVICE).to(dtype), torch.randn(v, d, device=DEVICE).to(dtype)
    labels = torch.randint(v, (t,), device=DEVICE)
    return x, weight, labels.masked_fill(torch.rand(t, device=DEVICE) < left_out, LEFT_OUT)


def plain(x: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, count: float | None = None) -> Tensor:
    """Hold all logits, as usual; the softmax in float32 at least."""
    logits = F.linear(x, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, labels, ignore_index=LEFT_OUT, label_smoothing=smoothing, reduction="sum")
    return total / (max(1, int((labels != LEFT_OUT).sum())) if count is None else count)


def named(give: Any, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Run forward and backward, with an arriving gradient that is not 1, and name all that comes out."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    value = give(x, weight)
    grads = torch.autograd.grad(value, (x, weight), torch.full_like(value, 1.7))
    assert [g.dtype for g in grads] == [x.dtype, weight.dtype]
    return {"loss": value.detach(), "grad x": grads[0], "grad weight": grads[1]}


def compare(x: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, **options: Any) -> None:
    found = named(lambda x, w: linear_cross_entropy(x, w, labels, smoothing=smoothing, **options), x, weight)
    usual = named(lambda x, w: plain(x, w, labels, smoothing, options.get("count")), x, weight)
    exact = named(lambda x, w: plain(x, w, labels, smoothing, options.get("count")), x.double(), weight.double())
    assert found["loss"].dtype == torch.float32
    assert found["loss"].shape == ()
    counted = int((labels != LEFT_OUT).sum()) if options.get("count") is None else int(options["count"])
    term = {"loss": 1.0, "grad x": weight.norm() / max(counted, 1), "grad weight": x.norm() / max(counted, 1)}
    for name, want in exact.items():
        error, allowed = ((one[name].double() - want).norm() for one in (found, usual))
        rounding = 2 * (want.norm() + term[name]) * torch.finfo(x.dtype).eps  # a sum over v, in another order
        assert error <= 2 * allowed + rounding, f"{name}: {error:.2e} against {allowed:.2e}"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("t", "d", "v", "chunk"), [(1, 1, 1, None), (7, 5, 3, 1), (29, 3, 17, 8), (23, 5, 67, 23), (13, 2, 131, 100)]
)
def test_is_the_cross_entropy(t: int, d: int, v: int, chunk: int | None, smoothing: float) -> None:
    compare(*draw(t, d, v), smoothing=smoothing, chunk=chunk)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    t=st.integers(0, 9), d=st.integers(1, 5), v=st.integers(1, 70), chunk=st.integers(1, 10),
    smoothing=st.sampled_from([0.0, 0.2, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_is_the_cross_entropy_at_any_size(t: int, d: int, v: int, chunk: int, smoothing: float, seed: int) -> None:
    torch.manual_seed(seed)
    compare(*draw(t, d, v), smoothing=smoothing, chunk=chunk)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_costs_no_more_than_its_own(dtype: torch.dtype, smoothing: float) -> None:
    compare(*draw(37, 7, 53, dtype), smoothing=smoothing, chunk=16)


def test_float64_stays_float64() -> None:
    x, weight, labels = draw(7, 3, 19, torch.float64)
    inputs = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, labels, smoothing=0.1, chunk=3), inputs)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert linear_cross_entropy(*inputs, labels).dtype == torch.float64


def test_strides_do_not_matter() -> None:
    x, weight, labels = draw(11, 5, 23)
    compare(x.T.contiguous().T, weight.T.contiguous().T, torch.stack([labels, labels], 1)[:, 0], chunk=4)


# ------------------------------------------------------------------------------------------------- labels and counts


def test_what_is_left_out_weighs_nothing() -> None:
    x, weight, labels = draw(12, 3, 19, left_out=0)
    labels[4:8] = LEFT_OUT  # a chunk of its own
    labels[[0, 11]] = LEFT_OUT
    compare(x, weight, labels, smoothing=0.1, chunk=4)
    found = named(lambda x, w: linear_cross_entropy(x, w, labels, smoothing=0.1, chunk=4), x, weight)
    assert found["grad x"].eq(0).all(1).nonzero().flatten().tolist() == [0, 4, 5, 6, 7, 11]


@pytest.mark.parametrize("t", [0, 5])
def test_no_label_at_all_costs_nothing(t: int) -> None:
    x, weight, labels = draw(t, 3, 19, left_out=1)
    for name, value in named(lambda x, w: linear_cross_entropy(x, w, labels), x, weight).items():
        assert value.eq(0).all(), name
    assert linear_cross_entropy(x, weight, labels, count=2) == 0


def test_another_label_may_be_left_out() -> None:
    x, weight, labels = draw(9, 3, 19, left_out=0)
    labels[2] = labels[5] = 1
    got = linear_cross_entropy(x, weight, labels, ignored=1, chunk=4)
    torch.testing.assert_close(got, F.cross_entropy(x @ weight.T, labels, ignore_index=1))


@pytest.mark.parametrize("count", [7, torch.tensor(7), torch.tensor(7.0, dtype=torch.float64), torch.tensor(7.0)])
def test_count_is_a_number_or_a_tensor(count: Tensor | int) -> None:
    x, weight, labels = draw(13, 3, 19)
    compare(x, weight, labels, count=count.to(DEVICE) if isinstance(count, Tensor) else count, chunk=5)


def test_parts_with_one_count_are_the_whole() -> None:
    x, weight, labels = draw(13, 3, 19)
    count = (labels != LEFT_OUT).sum()
    whole, first, second = (
        named(lambda x, w, s=s: linear_cross_entropy(x, w, labels[s], count=count), x[s], weight)
        for s in (slice(None), slice(4), slice(4, None))
    )
    for name in ("loss", "grad weight"):
        torch.testing.assert_close(first[name] + second[name], whole[name], msg=name)
    torch.testing.assert_close(torch.cat([first["grad x"], second["grad x"]]), whole["grad x"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 3, 5)}, "`x` must be"),
        ({"x": torch.zeros(4, 5, dtype=torch.int64)}, "`x` must be"),
        ({"weight": torch.zeros(7, 3)}, "`weight` must have"),
        ({"weight": torch.zeros(0, 5)}, "`weight` must have"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "`labels` must be int64"),
        ({"labels": torch.zeros(4)}, "`labels` must be int64"),
        ({"labels": torch.tensor([0, 1, 7, 2])}, "`labels` must be from 0 to 6, or -100 .* got 7"),
        ({"labels": torch.tensor([0, 1, -1, 2])}, "got -1"),
        ({"labels": torch.zeros(4, dtype=torch.int64, device="meta")}, "must be on one device"),
        ({"smoothing": 1.5}, "`smoothing` must be"),
        ({"chunk": 0}, "`chunk` must be"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    options = {"x": torch.zeros(4, 5), "weight": torch.zeros(7, 5), "labels": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**options, **changes})


# -------------------------------------------------------------------------------------------------------- large logits


def score(way: str, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Score rows of given logits, in a room that is wider, with anything beside them -> losses, gradients."""
    losses, room = logits.new_empty(len(logits)), torch.cat([logits, torch.full_like(logits, torch.nan)], 1)
    grads = room[:, : logits.shape[1]]
    of_loss = loss._kernel() if way == "triton" else loss._score
    of_loss(grads, labels, losses, smoothing, LEFT_OUT, True)
    return losses, grads


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_cost_no_digits(way: str, smoothing: float) -> None:
    small = torch.arange(41, device=DEVICE).repeat(3, 1) / 8 - 2.0  # exact, also with what is added
    labels = torch.tensor([0, 40, 17], device=DEVICE)
    want = F.cross_entropy(small.double(), labels, reduction="none", label_smoothing=smoothing)
    for offset in (-1e4, 1e4):
        losses, grads = score(way, small + offset, labels, smoothing)
        torch.testing.assert_close(losses, want.float(), rtol=2e-6, atol=0)
        torch.testing.assert_close(grads, score(way, small, labels, smoothing)[1], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_far_apart_stay_finite(smoothing: float) -> None:
    x = torch.tensor([[100.0], [-100.0], [100.0]], device=DEVICE)
    weight = torch.linspace(-100, 100, 37, device=DEVICE).unsqueeze(1)
    compare(x, weight, torch.tensor([0, 0, 36], device=DEVICE), smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinitely_small_logits_are_no_nan(way: str, smoothing: float) -> None:
    logits = torch.randn(4, 53, device=DEVICE)
    logits[0, :35] = logits[1, 20:] = logits[2, 3] = -torch.inf  # whole blocks, first or last, or the label
    labels = torch.tensor([40, 7, 3, LEFT_OUT], device=DEVICE)
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(exact, labels, reduction="none", label_smoothing=smoothing)
    losses, grads = score(way, logits, labels, smoothing)
    torch.testing.assert_close(losses, want.detach().float())
    torch.testing.assert_close(grads, torch.autograd.grad(want.sum(), exact)[0].float().nan_to_num(0.0))


def test_a_vocabulary_of_a_quarter_million(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK", 4096)
    logits, labels = 3 * torch.randn(2, 262144, device=DEVICE) + 50, torch.tensor([262143, 5], device=DEVICE)
    losses, grads = score(way, logits, labels, 0.1)
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(exact, labels, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(losses, want.detach().float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, torch.autograd.grad(want.sum(), exact)[0].float())


def test_an_unknown_label_shows_in_its_own_row_alone(way: str) -> None:
    if way == "torch":
        pytest.skip("torch refuses it itself")
    losses, grads = score(way, torch.randn(4, 19, device=DEVICE), torch.tensor([3, 19, -1, LEFT_OUT], device=DEVICE))
    assert losses.isnan().tolist() == [False, True, True, False]
    assert grads.isnan().any(1).tolist() == [False, True, True, False]


def test_a_large_count_drowns_nothing_in_float16() -> None:
    x, weight, labels = draw(31, 7, 53, torch.float16)
    count, loud = 10**8, 2.0**20  # as a gradient scaler has it
    found = named(lambda x, w: linear_cross_entropy(x, w, labels, count=count) * loud, x, weight)
    exact = named(lambda x, w: plain(x, w, labels, count=count) * loud, x.double(), weight.double())
    for name, want in exact.items():
        assert (found[name].double() - want).norm() < 2e-3 * want.norm(), name


# ------------------------------------------------------------------------------------------------ precision and memory


def test_autocast_multiplies_in_half_and_sums_in_single() -> None:
    x, weight, labels = draw(29, 7, 53)
    halves = x.bfloat16(), weight.bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = named(lambda x, w: linear_cross_entropy(x, w, labels, chunk=8), x, weight)
    want = named(lambda x, w: linear_cross_entropy(x, w, labels, chunk=8), *halves)
    assert torch.equal(found["loss"], want["loss"])
    for name in ("grad x", "grad weight"):
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name].bfloat16(), want[name]), name
    assert not torch.equal(found["grad weight"].bfloat16().float(), found["grad weight"])  # the sum was not rounded


def test_the_scale_is_not_rounded_to_half() -> None:
    x, weight, labels = draw(13, 7, 23)
    with torch.autocast(DEVICE, torch.bfloat16):
        whole, third = (named(lambda x, w, c=c: linear_cross_entropy(x, w, labels, count=c), x, weight) for c in (1, 3))
    for name in whole:
        torch.testing.assert_close(3 * third[name], whole[name], rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize(("x_dtype", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_products_have_the_precision_of_x(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    x, weight, labels = draw(13, 7, 23)
    with Recorder() as seen:
        named(lambda x, w: linear_cross_entropy(x, w, labels), x.to(x_dtype), weight.to(dtype))
    assert {made for name, _, made in seen.made if name.startswith("aten.mm.out")} == {x_dtype}


@pytest.mark.parametrize("autocast", [False, True])
def test_only_one_chunk_of_logits_is_ever_there(way: str, autocast: bool) -> None:
    t, d, v, chunk = 29, 3, 101, 8
    x, weight, labels = draw(t, d, v)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast), Recorder() as seen:
        named(lambda x, w: linear_cross_entropy(x, w, labels, chunk=chunk, smoothing=0.1), x, weight)
    assert max(shape.numel() for _, shape, _ in seen.made) == chunk * 128  # rows are padded to a multiple of 64
    wide = [name for name, shape, dtype in seen.made if v in shape and chunk in shape and dtype == torch.float32]
    assert bool(wide) == (way == "torch" or not autocast), wide
    assert len([name for name, shape, _ in seen.made if "empty" in name and shape == (chunk, 128)]) == 1
    assert not [name for name, shape, _ in seen.made if "zeros" in name and shape in (x.shape, weight.shape)]


def test_without_gradients_none_are_computed() -> None:
    x, weight, labels = draw(13, 3, 101)
    want = plain(x, weight, labels)
    weight.requires_grad_()
    with torch.no_grad(), Recorder() as seen:
        torch.testing.assert_close(linear_cross_entropy(x, weight, labels, chunk=13), want)
    assert not [name for name, shape, _ in seen.made if shape in (x.shape, weight.shape) and "slice" not in name]
    for of_x, of_weight in ((True, False), (False, True)):
        one, two = x.detach().requires_grad_(of_x), weight.detach().requires_grad_(of_weight)
        with Recorder() as seen:
            linear_cross_entropy(one, two, labels, chunk=13).backward()
        shapes = [shape for name, shape, _ in seen.made if "mm" in name]
        assert shapes == [(13, 101), x.shape if of_x else weight.shape]
        assert [t.grad is not None for t in (one, two)] == [of_x, of_weight]


def test_chunks_fill_the_room_evenly() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert loss._fit(16384, 262144, torch.bfloat16, gpu) == 1024
    assert loss._fit(8193, 32768, torch.bfloat16, gpu) == 4097  # two halves, not 8192 and 1
    assert loss._fit(100, 32000, torch.float32, gpu) == 100
    assert loss._fit(1024, 32768, torch.float32, cpu) == 256
    assert loss._fit(5, 1 << 40, torch.float32, gpu) == 1
    assert loss._fit(0, 32000, torch.float32, gpu) == 1


# -------------------------------------------------------------------------------------- graphs, checkpoints, compilers


def test_backward_may_be_asked_twice() -> None:
    x, weight, labels = draw(13, 3, 19)
    x.requires_grad_(), weight.requires_grad_()
    value = linear_cross_entropy(x, weight, labels)
    first = torch.autograd.grad(value * 2, (x, weight), retain_graph=True)
    second = torch.autograd.grad(value * 2, (x, weight))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_may_be_checkpointed(reentrant: bool) -> None:
    x, weight, labels = draw(13, 3, 19)

    def again(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(linear_cross_entropy, x, weight, labels, use_reentrant=reentrant)

    got, want = [], []
    for kept, give in ((got, again), (want, lambda x, w: linear_cross_entropy(x, w, labels))):
        one, two = x.clone().requires_grad_(), weight.clone().requires_grad_()
        give(one * 2, two).backward()
        kept += [one.grad, two.grad]
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("of_x", [True, False])
def test_operators_are_registered_as_torch_asks(way: str, of_x: bool, mixed: bool) -> None:
    x, weight, labels = draw(13, 3, 19)
    ways = [(-torch.rand(13)).requires_grad_() for _ in range(2)] if mixed else [None, None]
    inputs = x.requires_grad_(of_x), weight.requires_grad_(), labels, *ways
    options = 0.1, LEFT_OUT, 5, torch.bfloat16, way == "triton", of_x, True
    torch.library.opcheck(loss._sum.registered, (*inputs, *options))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_label_may_come_from_elsewhere(way: str, smoothing: float, chunk: int | None) -> None:
    """Loss and all four gradients are those of -log(written · p + copied), in float64 and with torch's own parts."""
    x, weight, labels = draw(17, 6, 23)
    share = torch.rand(17, dtype=torch.float64) * 0.9
    written, copied = (1 - share).log(), (share * torch.rand(17)).log()
    copied[3] = -87.0  # nothing
    plain = [one.double().requires_grad_() for one in (x, weight, written, copied)]
    options = {"label_smoothing": smoothing, "ignore_index": LEFT_OUT, "reduction": "none"}
    losses = F.cross_entropy(plain[0] @ plain[1].T, labels, **options)
    want = -torch.logaddexp(plain[2] - losses, plain[3])[labels != LEFT_OUT].mean()
    fast = [one.float().detach().requires_grad_() for one in (x, weight, written, copied)]
    ways = {"written": fast[2], "copied": fast[3]}
    got = linear_cross_entropy(fast[0], fast[1], labels, smoothing=smoothing, chunk=chunk, **ways)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)
    for one, two in zip(torch.autograd.grad(got, fast), torch.autograd.grad(want, plain), strict=True):
        torch.testing.assert_close(one.double(), two, atol=2e-6, rtol=2e-5)


def test_ways_are_refused_where_they_do_not_fit() -> None:
    x, weight, labels = draw(5, 3, 7)
    with pytest.raises(ValueError, match="`written` must be given where the other one is"):
        linear_cross_entropy(x, weight, labels, copied=torch.zeros(5))
    with pytest.raises(ValueError, match=r"`copied` must be float32 or float64 and one for each of the 5 labels"):
        linear_cross_entropy(x, weight, labels, written=torch.zeros(5), copied=torch.zeros(4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graph_sees_one_node_each_way(dynamic: bool) -> None:
    nodes: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if "pyramidion" in str(node.target))
        return make_boxed_func(graph.forward)

    def step(x: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return linear_cross_entropy(x.sin(), weight, labels, count=count, smoothing=0.1).cos()

    torch._dynamo.reset()
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for t in (13, 17) if dynamic else (13,):
        x, weight, labels = draw(t, 3, 19)
        count = torch.tensor(5, device=DEVICE)
        got, want = (named(lambda x, w, f=f: f(x, w, labels, count), x, weight) for f in (compiled, step))  # noqa: B023
        for name in want:
            torch.testing.assert_close(got[name], want[name], msg=name)
    assert nodes == ["pyramidion.linear_cross_entropy.default", "pyramidion.linear_cross_entropy_backward.default"]


# ---------------------------------------------------------------------------------------------------------------- GPU


@pytest.fixture
def full_size(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch":
        pytest.skip("a GPU has kernels")
    monkeypatch.undo()


@pytest.mark.gpu
@pytest.mark.usefixtures("full_size")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "v"), [(4099, 32128), (2053, 50265), (300, 262144)])
def test_kernel_at_full_size(t: int, v: int, dtype: torch.dtype) -> None:
    x, weight, labels = draw(t, 256, v, dtype)
    compare(x, weight / 16, labels, smoothing=0.1, chunk=1024)


@pytest.mark.gpu
@pytest.mark.usefixtures("full_size")
def test_memory_stays_below_that_of_all_logits() -> None:
    t, d, v = 16384, 512, 128000
    x, weight, labels = draw(t, d, v)
    x.requires_grad_(), weight.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        linear_cross_entropy(x, weight, labels).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < loss.ROOM + 3 * 4 * v * d + 4 * 4 * t * d, f"{used >> 20} MiB"  # all logits: 4000 MiB in bfloat16


@pytest.mark.gpu
@pytest.mark.usefixtures("full_size")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device_and_a_graph_replays() -> None:
    x, weight, labels = draw(300, 64, 1009)
    x.requires_grad_(), weight.requires_grad_()

    def step() -> list[Tensor]:
        value = linear_cross_entropy(x, weight, labels, chunk=100)
        return [value.detach(), *torch.autograd.grad(value, (x, weight))]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
        labels.random_(1009)
        graph.replay()
        torch.testing.assert_close(got, step())
