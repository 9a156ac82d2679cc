"""The kernels against the torch backend: in Triton's interpreter without a GPU, compiled with one.

The same decisions to the bit, gradients by name, and an error at most twice that of the torch backend against float64.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pyramidion import Selection, hard_topk, soft_topk

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make blocks so small that a few dozen tokens are sorted, merged in several steps and shared by programs."""
    from pyramidion.topk import fused

    if INTERPRETED:
        for name, value in {"BLOCK": 16, "GROUP": 2, "TILE": 4, "MEMBERS": 8}.items():
            monkeypatch.setattr(fused, name, value)
    with np.errstate(over="ignore", invalid="ignore"):  # the interpreter's arithmetic on places that are masked out
        yield


def everything(scores: Tensor, x: Tensor, k: int, backend: str, **options: object) -> dict[str, Tensor]:
    """Run forward and backward and name all that comes out."""
    scores, x = scores.detach().requires_grad_(), x.detach().requires_grad_()
    chosen = soft_topk(scores, k, backend=backend, **options)  # type: ignore[arg-type]
    pooled = chosen.pool(x, backend=backend)
    generator = torch.Generator().manual_seed(1)
    along, above = (torch.randn(t.shape, generator=generator).to(t) for t in (pooled, chosen.scores))
    grads = torch.autograd.grad([pooled, chosen.scores], (scores, x), [along, above])
    named = {name: getattr(chosen, name) for name in ("slots", "mask", "winners", "weights", "scores")}
    return {**named, "pooled": pooled, "grad scores": grads[0], "grad x": grads[1]}


def compare(scores: Tensor, x: Tensor, k: int, **options: object) -> dict[str, Tensor]:
    """Compare all that comes out, and give it."""
    exact = everything(scores.double(), x.double(), k, "torch", **options)
    plain = everything(scores, x, k, "torch", **options)
    fused = everything(scores, x, k, "triton", **options)
    for name, want in exact.items():
        if not want.is_floating_point():
            assert torch.equal(fused[name], want), name
            continue
        assert fused[name].dtype == plain[name].dtype, name
        error, allowed = ((found[name].double() - want).norm() for found in (fused, plain))
        rounding = want.norm() * torch.finfo(plain[name].dtype).eps
        assert error <= 2 * allowed + rounding / 2, f"{name}: {error:.2e} against {allowed:.2e}"
    return fused


@pytest.mark.parametrize("options", [{}, {"base": 20.0}, {"sort": False}, {"temperature": 0.1}])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 5), (7, 3), (19, 1), (31, 7)])
def test_kernels_are_the_torch_backend(n: int, k: int, options: dict[str, object]) -> None:
    compare(torch.rand(2, n, device=DEVICE), torch.randn(2, n, 5, device=DEVICE), k, **options)


def test_runs_are_merged_back_and_forth() -> None:
    """Seven blocks: three merges, with a run left over."""
    compare(torch.rand(2, 61, device=DEVICE), torch.randn(2, 61, 5, device=DEVICE), 13)


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (11, 3), (37, 3)])
def test_kernels_with_masks(n: int, k: int, sort: bool) -> None:
    mask = torch.rand(3, n, device=DEVICE) > 0.3
    mask[0], mask[1] = True, False
    scores = torch.rand(3, n, device=DEVICE).masked_fill(~mask, 0.5)
    quiet = compare(scores, torch.randn(3, n, 5, device=DEVICE), k, mask=mask, sort=sort)
    loud = soft_topk(scores.masked_fill(~mask, torch.nan), k, mask=mask, sort=sort, backend="triton")
    for name in ("slots", "weights", "scores", "winners"):
        assert torch.equal(quiet[name], getattr(loud, name)), name


def test_kernels_break_ties_alike() -> None:
    compare(torch.randint(0, 3, (2, 29), device=DEVICE).float(), torch.randn(2, 29, 3, device=DEVICE), 5)
    compare(torch.zeros(1, 40, device=DEVICE), torch.randn(1, 40, 3, device=DEVICE), 3)
    compare(torch.randint(0, 3, (2, 23), device=DEVICE).float(), torch.randn(2, 23, 3, device=DEVICE), 3, sort=False)
    compare(-torch.randint(0, 2, (1, 40), device=DEVICE).float(), torch.randn(1, 40, 3, device=DEVICE), 3)  # -0.0 too


def test_bad_scores_show_in_their_own_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidion.topk import operators

    monkeypatch.setattr(operators, "_looks", lambda scores: False)
    scores = torch.rand(2, 19, device=DEVICE)
    scores[0, 3], scores[1, 4] = torch.nan, -torch.inf
    for backend in ("torch", "triton"):
        weights = soft_topk(scores, 4, backend=backend).weights
        assert weights.isnan().nonzero().tolist() == [[0, 3], [1, 4]], backend


@pytest.mark.parametrize("d", [1, 3, 1025])
def test_pooling_kernels_serve_any_selection(d: int) -> None:
    scores, x = torch.rand(2, 13, device=DEVICE), torch.randn(2, 13, d, device=DEVICE)
    first = soft_topk(scores, 6, backend="torch")
    by_hand = Selection(first.slots, first.weights, first.mask, first.scores, first.winners)  # without its members
    for chosen in (first, first.then(hard_topk(first.scores, 3)), by_hand):
        weights = chosen.weights.clone().requires_grad_()
        learned = Selection(chosen.slots, weights, chosen.mask, chosen.scores, chosen.winners, chosen.members)
        found = []
        for backend in ("torch", "triton"):
            y = x.detach().requires_grad_()
            pooled = learned.pool(y, backend=backend)
            found.append((pooled, *torch.autograd.grad(pooled, (y, weights), torch.ones_like(pooled))))
        for name, one, two in zip(("pooled", "grad x", "grad weights"), *found, strict=True):
            torch.testing.assert_close(one, two, msg=lambda m, name=name: f"{name}: {m}")


def test_trees_too_deep_for_registers_go_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidion.topk import fused

    monkeypatch.setattr(fused, "LEAVES", 4)
    compare(torch.rand(1, 17, device=DEVICE), torch.randn(1, 17, 2, device=DEVICE), 2)


def test_operators_are_registered_as_torch_asks() -> None:
    from pyramidion.topk import fused

    scores = torch.rand(2, 19, device=DEVICE, requires_grad=True)
    x = torch.randn(2, 19, 3, device=DEVICE, requires_grad=True)
    chosen = soft_topk(scores.detach(), 4, backend="triton")
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(fused._tournament.registered, (scores, None, 4, 1.0, 0.0, True), test_utils=checks)
    weights = chosen.weights.clone().requires_grad_()
    torch.library.opcheck(fused._pool.registered, (x, chosen.slots, weights, chosen.members), test_utils=checks)


def test_compiled_graph_sees_one_node_each() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda s, x: soft_topk(s, 4, backend="triton").pool(x, backend="triton"), fullgraph=True, backend=keep
    )
    scores, x = torch.rand(2, 19, device=DEVICE), torch.randn(2, 19, 3, device=DEVICE)
    got = compiled(scores, x)
    assert torch.equal(got, soft_topk(scores, 4, backend="triton").pool(x, backend="triton"))
    ours = [node.target.name() for node in graphs[0].graph.nodes if "pyramidion" in str(node.target)]
    assert ours == ["pyramidion::tournament", "pyramidion::pool_fused"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("b", "n", "k", "d"), [(3, 2048, 512, 64), (2, 8193, 2048, 768), (2, 20011, 700, 40), (1, 131072, 512, 16)]
)
def test_kernels_at_full_size(b: int, n: int, k: int, d: int, dtype: torch.dtype) -> None:
    scores, x = torch.rand(b, n, device="cuda").to(dtype), torch.randn(b, n, d, device="cuda").to(dtype)
    compare(scores, x, k)
    mask = torch.rand(b, n, device="cuda") > 0.4
    compare(scores, x, k, mask=mask, base=20.0)


@pytest.mark.gpu
def test_many_documents_at_once_never_wait_for_ever() -> None:
    for b in (1, 7, 64, 1500):
        scores = torch.rand(b, 1031, device="cuda")
        found, want = (soft_topk(scores, 17, backend=backend) for backend in ("triton", "torch"))
        assert torch.equal(found.slots, want.slots)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph() -> None:
    scores, x = torch.rand(4, 3001, device="cuda"), torch.randn(4, 3001, 8, device="cuda")
    soft_topk(scores, 100).pool(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooled = soft_topk(scores, 100).pool(x)
    for _ in range(3):
        scores.uniform_()
        graph.replay()
        assert torch.equal(pooled, soft_topk(scores, 100).pool(x))


@pytest.mark.gpu
def test_compiled_training_step_with_dynamic_length() -> None:
    compiled = torch.compile(lambda s, x: soft_topk(s, 64).pool(x), fullgraph=True, dynamic=True)
    for n in (1025, 1500, 2048):
        scores = torch.rand(2, n, device="cuda", requires_grad=True)
        x = torch.randn(2, n, 8, device="cuda", requires_grad=True)
        want = torch.autograd.grad(soft_topk(scores, 64).pool(x).sin().sum(), (scores, x))
        got = torch.autograd.grad(compiled(scores, x).sin().sum(), (scores, x))
        torch.testing.assert_close(got, want)
