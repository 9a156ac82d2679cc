"""The operator against its definition: three backends, the paper's algorithm, and the properties it promises."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from pyramidion import hard_topk, soft_topk, straight_through_topk

SIZES = [(1, 1), (2, 1), (3, 2), (7, 3), (13, 5), (16, 4), (29, 11), (31, 1), (64, 8), (5, 7), (97, 13)]


def draw(b: int, n: int, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(b, n, dtype=dtype)


def patchy(b: int, n: int) -> torch.Tensor:
    """A mask with holes anywhere, one full row and one empty one."""
    mask = torch.rand(b, n) > 0.35
    mask[0], mask[1] = True, False
    return mask


def algorithm_1(vectors: np.ndarray, values: np.ndarray, k: int, base: float | None) -> tuple[np.ndarray, np.ndarray]:
    """The paper's Algorithm 1 over the vectors themselves, as written: powers of two, plain loops, float64."""
    for _ in range(round(math.log2(len(values) // k))):
        order = sorted(range(len(values)), key=lambda i: -values[i])
        vectors, values = vectors[order], values[order]
        half = len(values) // 2
        new_vectors, new_values = np.zeros((half, vectors.shape[1])), np.zeros(half)
        for i in range(half):
            j = 2 * half - 1 - i
            one, two = (values[i], values[j]) if base is None else (base ** values[i], base ** values[j])
            w = math.exp(one) / (math.exp(one) + math.exp(two))
            new_vectors[i] = w * vectors[i] + (1 - w) * vectors[j]
            new_values[i] = w * values[i] + (1 - w) * values[j]
        vectors, values = new_vectors, new_values
    return vectors, values


@pytest.mark.parametrize("base", [None, 20.0])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (8, 8), (16, 2), (64, 8), (256, 32)])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_powers_of_two_are_algorithm_1(n: int, k: int, base: float | None, backend: str) -> None:
    scores, x = draw(1, n), torch.randn(1, n, 3, dtype=torch.float64)
    vectors, values = algorithm_1(x[0].numpy(), scores[0].numpy(), k, base)
    chosen = soft_topk(scores, k, base=base, backend=backend)
    mine, theirs = chosen.pool(x)[0].numpy(), vectors
    by_score, by_value = np.argsort(chosen.scores[0].numpy()), np.argsort(values)  # the paper does not keep the order
    np.testing.assert_allclose(mine[by_score], theirs[by_value], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(chosen.scores[0].numpy()[by_score], values[by_value], rtol=1e-13)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("base", [None, 20.0])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_torch_is_the_reference(n: int, k: int, base: float | None, sort: bool, coarse: bool) -> None:
    scores, mask = draw(4, n), patchy(4, n)
    if coarse:
        scores = (2 * scores).round()  # ties everywhere
    options = {"mask": mask, "base": base, "sort": sort, "temperature": 0.7}
    want, got = (soft_topk(scores, k, backend=backend, **options) for backend in ("reference", "torch"))
    for name in ("slots", "mask", "winners"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("weights", "scores"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_single_precision_takes_the_decisions_of_double(backend: str) -> None:
    scores = draw(2, 301, dtype=torch.float32)
    single, double = (soft_topk(s, 7, backend=backend) for s in (scores, scores.double()))
    assert torch.equal(single.slots, double.slots)
    assert single.weights.dtype == single.scores.dtype == torch.float32
    torch.testing.assert_close(single.weights, double.weights.float(), rtol=1e-6, atol=0)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_always_holds(data: st.DataObject) -> None:
    """Any n, k and mask: every real token in one slot, every slot's weights sum to 1, winners ascend and dominate."""
    b, n, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 45))
    few = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 3.0])  # ties
    values = data.draw(st.lists(st.one_of(few, st.floats(-30, 30)), min_size=b * n, max_size=b * n))
    scores = torch.tensor(values, dtype=torch.float64).view(b, n)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=b * n, max_size=b * n))).view(b, n)
    chosen = soft_topk(scores, k, mask=mask, sort=data.draw(st.booleans()))
    assert torch.equal(chosen.slots >= 0, mask)
    count = mask.sum(1)
    assert torch.equal(chosen.mask.sum(1), count.clamp(max=k))
    total = chosen.dense().sum(-1)
    torch.testing.assert_close(total, chosen.mask.double())
    for row in range(b):
        winners = chosen.winners[row][chosen.mask[row]]
        assert (winners.diff() > 0).all(), "slots are numbered by their winners' positions"
        assert torch.equal(chosen.slots[row][winners], torch.arange(len(winners)))
        assert (chosen.winners[row][~chosen.mask[row]] == -1).all()
        if count[row] <= k:
            assert torch.equal(winners, mask[row].nonzero()[:, 0]), "k >= n is the identity"
            assert (chosen.weights[row][mask[row]] == 1).all()
    assert (chosen.weights[~mask] == 0).all()


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_padding_and_neighbours_change_nothing_to_the_bit(n: int, k: int, sort: bool) -> None:
    scores = draw(1, n, dtype=torch.float32)
    alone = soft_topk(scores, k, sort=sort)
    left, right = 19, 301  # enough for several rounds more
    batch = torch.full((3, left + n + right), torch.nan)
    mask = torch.zeros(batch.shape, dtype=torch.bool)
    batch[0], mask[0] = torch.rand(batch.shape[1]), True
    batch[1, left : left + n], mask[1, left : left + n] = scores[0], True
    among = soft_topk(batch, k, mask=mask, sort=sort)
    assert torch.equal(among.weights[1, left : left + n], alone.weights[0])
    assert torch.equal(among.slots[1, left : left + n], alone.slots[0])
    assert torch.equal(among.scores[1], alone.scores[0])
    assert torch.equal(among.winners[1], torch.where(alone.mask[0], alone.winners[0] + left, -1))
    assert not among.mask[2].any()


@pytest.mark.parametrize("sharper", [{"base": 1e6}, {"temperature": 1e-4}])
def test_sharper_approaches_the_hard_choice(sharper: dict[str, float]) -> None:
    scores = torch.stack([torch.randperm(128) for _ in range(3)]).double() / 128
    hard = hard_topk(scores, 8)
    soft = soft_topk(scores, 8, **sharper)
    assert torch.equal(soft.winners, hard.winners)
    torch.testing.assert_close(soft.weights, hard.weights, rtol=0, atol=1e-6)
    plain = soft_topk(scores, 8)
    milder = soft_topk(scores, 8, **{name: value**0.5 for name, value in sharper.items()})
    gaps = [(choice.weights - hard.weights).abs().sum() for choice in (plain, milder, soft)]
    assert gaps[0] > gaps[1] > gaps[2]


@pytest.mark.parametrize("base", [None, 5.0])
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gradients(base: float | None, sort: bool, backend: str) -> None:
    scores, x = draw(3, 7).requires_grad_(), torch.randn(3, 7, 2, dtype=torch.float64, requires_grad=True)
    mask = patchy(3, 7)

    def pooled(scores: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = {"base": base, "sort": sort, "backend": backend, "temperature": 0.8}
        first = soft_topk(scores, 3, mask=mask, **options)
        second = soft_topk(first.scores, 2, mask=first.mask, **options)
        twice = second.pool(first.pool(x))
        return first.pool(x), first.scores, first.then(second).pool(x), twice, first.unpool(second.unpool(twice))

    assert gradcheck(pooled, (scores, x))


def test_every_real_score_learns_and_no_other() -> None:
    scores, mask = draw(3, 31).requires_grad_(), patchy(3, 31)
    chosen = soft_topk(scores, 4, mask=mask)
    (chosen.pool(torch.randn(3, 31, 5, dtype=torch.float64)) ** 2).sum().backward()
    assert torch.equal(scores.grad != 0, mask)


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_ties_go_to_the_one_that_stands_first(backend: str, sort: bool) -> None:
    chosen = soft_topk(torch.zeros(1, 8), 2, backend=backend, sort=sort)
    assert chosen.winners.tolist() == [[0, 1]]
    assert (chosen.weights == 0.25).all()


def test_ties_are_the_same_every_time() -> None:
    assert hard_topk(torch.zeros(1, 8), 3).winners.tolist() == [[0, 1, 2]]
    tied = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    assert hard_topk(tied, 2).winners.tolist() == [[1, 2]]
    again = [soft_topk(tied.expand(3, 5), 2).slots for _ in range(3)]
    assert all(torch.equal(slots, again[0]) for slots in again)
    assert (again[0] == again[0][0]).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_hard_topk_is_the_true_top_k_in_order(n: int, k: int, masked: bool) -> None:
    scores, mask = draw(4, n), patchy(4, n) if masked else torch.ones(4, n, dtype=torch.bool)
    chosen = hard_topk(scores, k, mask=mask)
    for row in range(4):
        tokens = mask[row].nonzero()[:, 0].tolist()
        best = sorted(sorted(tokens, key=lambda i: -scores[row, i])[:k])
        assert chosen.winners[row].tolist() == best + [-1] * (k - len(best))
        assert chosen.slots[row].tolist() == [best.index(i) if i in best else -1 for i in range(n)]
        assert torch.equal(chosen.scores[row, : len(best)], scores[row, best])
    assert torch.equal(chosen.weights, (chosen.slots >= 0).double())


def test_straight_through_shows_the_hard_choice_and_learns_the_soft_one() -> None:
    scores, mask = draw(3, 23).requires_grad_(), patchy(3, 23)
    x = torch.randn(3, 23, 5, dtype=torch.float64, requires_grad=True)
    chosen = straight_through_topk(scores, 4, mask=mask)
    hard, soft = hard_topk(scores, 4, mask=mask), soft_topk(scores, 4, mask=mask)
    assert torch.equal(chosen.pool(x), hard.pool(x))
    assert torch.equal(chosen.pool(x[..., 0]), hard.pool(x[..., 0]))
    grad = torch.randn(3, 4, 5, dtype=torch.float64)
    got = torch.autograd.grad(chosen.pool(x), (scores, x), grad)
    blends = soft.pool(x)
    slot = soft.slots.gather(1, hard.winners.clamp(min=0)).clamp(min=0)
    stand_in = blends.gather(1, slot[..., None].expand(-1, -1, 5)) * hard.mask[..., None]
    want = torch.autograd.grad(stand_in, (scores, x), grad)
    for name, one, two in zip(("scores", "x"), got, want, strict=True):
        torch.testing.assert_close(one, two, msg=name)
    assert got[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_scores_are_kept_in_float32(dtype: torch.dtype) -> None:
    scores, x = draw(2, 41).to(dtype), torch.randn(2, 41, 3).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chosen = soft_topk(scores, 5)
        pooled = chosen.pool(x)
    assert chosen.weights.dtype == chosen.scores.dtype == hard_topk(scores, 5).scores.dtype == torch.float32
    assert torch.equal(chosen.slots, soft_topk(scores.double(), 5).slots)
    assert pooled.dtype == dtype
    exact = chosen.dense().double() @ x.double()
    assert (pooled.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps


def test_compiles_to_one_graph_with_dynamic_n() -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def both(s: torch.Tensor, x: torch.Tensor, m: torch.Tensor) -> tuple[object, ...]:
        first = soft_topk(s, 8, mask=m)
        return first.pool(x), straight_through_topk(s, 8, mask=m).pool(x), first

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=count)
    for n in (17, 19, 23, 31, 32):
        s, x, m = torch.rand(3, n), torch.randn(3, n, 5), torch.rand(3, n) > 0.2
        for got, want in zip(compiled(s, x, m)[:2], both(s, x, m)[:2], strict=True):
            torch.testing.assert_close(got, want)
    assert len(graphs) == 1, f"{len(graphs)} graphs for 17 to 32 tokens"
    compiled(torch.rand(3, 33), torch.randn(3, 33, 5), torch.ones(3, 33, dtype=torch.bool))
    assert len(graphs) == 2


@pytest.mark.slow
def test_compiled_by_inductor_with_gradients() -> None:
    compiled = torch.compile(lambda s, x: soft_topk(s, 5).pool(x), fullgraph=True, dynamic=True)
    for n in (13, 19):  # of as many rounds
        scores, x = draw(2, n).requires_grad_(), torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True)
        want = torch.autograd.grad(soft_topk(scores, 5).pool(x).sin().sum(), (scores, x))
        got = torch.autograd.grad(compiled(scores, x).sin().sum(), (scores, x))
        torch.testing.assert_close(got, want)


def test_where_nobody_looks_a_bad_score_shows() -> None:
    scores = torch.rand(2, 9)
    scores[0, 3], scores[1, 4] = torch.nan, torch.inf
    code = torch.compile(lambda s: soft_topk(s, 3), fullgraph=True, backend="eager")
    weights = code(scores).weights
    assert weights.isnan().nonzero().tolist() == [[0, 3], [1, 4]]
    scores[1, 4] = -torch.inf
    weights = torch.compile(lambda s: hard_topk(s, 1), fullgraph=True, backend="eager")(scores).weights
    assert weights.isnan().nonzero().tolist() == [[0, 3], [1, 4]]


BAD = [
    ((torch.rand(3), 2), {}, r"`scores` must be a tensor \[b n\], got torch.float32 of shape \[3\]"),
    (([[1.0]], 2), {}, r"`scores` must be a tensor \[b n\], got list"),
    ((torch.ones(1, 3, dtype=torch.long), 2), {}, "`scores` must be floating point, got torch.int64"),
    ((torch.rand(1, 0), 2), {}, r"at least one input a row, got shape \[1, 0\]"),
    ((torch.rand(1, 3), 0), {}, "`k` must be at least 1, got 0"),
    ((torch.rand(1, 3), -2), {}, "`k` must be at least 1, got -2"),
    ((torch.rand(1, 3), 1.5), {}, "`k` must be a whole number, got 1.5"),
    ((torch.rand(1, 3), True), {}, "`k` must be a whole number, got True"),
    ((torch.rand(1, 3), 2), {"mask": torch.ones(1, 3)}, "`mask` must be a bool tensor"),
    ((torch.rand(1, 3), 2), {"mask": torch.ones(1, 2).bool()}, r"shape of `scores`, \[1, 3\], got \[1, 2\]"),
    ((torch.rand(1, 3), 2), {"mask": torch.ones(1, 3, device="meta").bool()}, "device of `scores`, cpu, got meta"),
    ((torch.tensor([[0.0, math.nan]]), 1), {}, "must be finite where `mask` is True, got nan at row 0, input 1"),
    ((torch.tensor([[0.0], [math.inf]]), 1), {}, "got inf at row 1, input 0"),
]
SOFT_BAD = [
    ({"temperature": 0.0}, "`temperature` must be a positive number, got 0.0"),
    ({"temperature": math.nan}, "`temperature` must be a positive number, got nan"),
    ({"base": 1.0}, "`base` must be a number above 1, .* got 1.0"),
    ({"base": 1e200}, r"`base \*\* scores` must stay finite, got 1e\+200 \*\* 2.0"),
    ({"backend": "cuda"}, "`backend` must be one of auto, reference, torch, triton, got 'cuda'"),
]


@pytest.mark.parametrize("choose", [soft_topk, hard_topk, straight_through_topk])
@pytest.mark.parametrize(("inputs", "options", "message"), BAD)
def test_bad_input_is_refused_with_the_rule_and_the_value(choose, inputs, options, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        choose(*inputs, **options)


@pytest.mark.parametrize(("options", "message"), SOFT_BAD)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soft_topk(torch.full((1, 3), 2.0), 2, **options)


def test_triton_says_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidion.kernels import launching

    monkeypatch.setattr(launching, "interpreted", lambda: True)
    with pytest.raises(ValueError, match="got float64: use 'torch'"):
        soft_topk(torch.rand(1, 3).double(), 2, backend="triton")
    monkeypatch.setattr(launching, "interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"needs CUDA tensors .* got a tensor on cpu"):
        soft_topk(torch.rand(1, 3), 2, backend="triton")
    monkeypatch.setattr(launching, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="triton, which is not installed"):
        soft_topk(torch.rand(1, 3), 2, backend="triton")
    assert soft_topk(torch.rand(1, 3), 2).k == 2, "auto never raises"
