"""A Selection pools, composes, inverts and refuses, whatever made it."""

import pytest
import torch
from torch import Tensor

from pyramidion import Selection, hard_topk, soft_topk


def by_hand(slots: Tensor, k: int) -> Selection:
    """A Selection that nobody's tournament made: any slots, equal weights, no members table."""
    count = torch.stack([(slots == j).sum(1) for j in range(k)], 1)  # [b k]
    weights = torch.where(slots >= 0, 1 / count.gather(1, slots.clamp(min=0)), 0).double()
    first = torch.stack([(slots == j).double().argmax(1) for j in range(k)], 1)
    return Selection(slots, weights, count > 0, torch.zeros(len(slots), k).double(), first.where(count > 0, -1))


def some(n: int, k: int) -> dict[str, Selection]:
    scores, mask = torch.rand(3, n).double(), torch.rand(3, n) > 0.3
    mask[1] = False
    return {
        "soft": soft_topk(scores, k, mask=mask),
        "hard": hard_topk(scores, k, mask=mask),
        "reference": soft_topk(scores, k, mask=mask, backend="reference"),
        "strided": by_hand((torch.arange(n) * k // n).expand(3, n), k),
        "scattered": by_hand(torch.randint(-1, k, (3, n)), k),
    }


def loops(chosen: Selection, x: Tensor) -> Tensor:
    pooled = torch.zeros(x.shape[0], chosen.k, *x.shape[2:], dtype=x.dtype)
    for b in range(x.shape[0]):
        for i in range(chosen.n):
            if chosen.slots[b, i] >= 0:
                pooled[b, chosen.slots[b, i]] += chosen.weights[b, i] * x[b, i]
    return pooled


KINDS = sorted(some(3, 2))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_pool_is_the_weighted_sum_of_each_slot(kind: str, shape: tuple[int, ...]) -> None:
    chosen = some(17, 5)[kind]
    x = torch.randn(3, 17, *shape).double()
    torch.testing.assert_close(chosen.pool(x), loops(chosen, x))
    torch.testing.assert_close((chosen.dense() @ x.reshape(3, 17, -1)).view(3, 5, *shape), loops(chosen, x))


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_inputs_are_never_looked_at(kind: str) -> None:
    chosen = some(17, 5)[kind]
    x = torch.randn(3, 17, 2).double()
    want = chosen.pool(x)
    assert torch.equal(chosen.pool(x.masked_fill((chosen.slots < 0)[..., None], torch.nan)), want)


def test_a_slot_whose_first_place_is_empty_looks_at_nobody_else() -> None:
    slots, weights = torch.tensor([[-1, 0, 0]]), torch.tensor([[0.0, 0.25, 0.75]])
    one = torch.tensor([[1]])
    chosen = Selection(slots, weights, one > 0, one.float(), one, members=torch.tensor([[[-1, 1, 2]]]))
    x = torch.tensor([[torch.nan, 4.0, 8.0]])
    assert chosen.pool(x).tolist() == [[7.0]]


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_then_is_one_after_the_other(first: str, second: str) -> None:
    one, two = some(23, 11)[first], some(11, 3)[second]
    both, x = one.then(two), torch.randn(3, 23, 2).double()
    torch.testing.assert_close(both.pool(x), two.pool(one.pool(x)))
    torch.testing.assert_close(both.dense(), two.dense() @ one.dense())
    filled = two.mask & one.mask.gather(1, two.winners.clamp(min=0))
    assert torch.equal(
        both.winners.where(filled, -1), one.winners.gather(1, two.winners.clamp(min=0)).where(filled, -1)
    )


def test_three_in_any_grouping() -> None:
    scores = torch.rand(2, 29).double()
    one = soft_topk(scores, 13)
    two = soft_topk(one.scores, 7)
    three = soft_topk(two.scores, 2)
    left, right = one.then(two).then(three), one.then(two.then(three))
    assert torch.equal(left.slots, right.slots)
    torch.testing.assert_close(left.weights, right.weights)
    torch.testing.assert_close(left.dense().sum(-1), torch.ones(2, 2).double())


@pytest.mark.parametrize("kind", KINDS)
def test_unpool_sends_each_slot_back_to_its_inputs(kind: str) -> None:
    chosen, y = some(17, 5)[kind], torch.randn(3, 5, 2).double()
    back = chosen.unpool(y)
    for b in range(3):
        for i in range(17):
            want = y[b, chosen.slots[b, i]] if chosen.slots[b, i] >= 0 else torch.zeros(2).double()
            assert torch.equal(back[b, i], want)
    assert torch.equal(chosen.unpool(y[..., 0]), back[..., 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [4, 512])
def test_gradients_of_pool_are_two_gathers(kind: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidion.topk import selection

    monkeypatch.setattr(selection, "TILE", tile)  # several tiles a document, and a shorter last one
    chosen = some(11, 3)[kind]
    x = torch.randn(3, 11, 2).double().requires_grad_()
    weights = chosen.weights.clone().requires_grad_()
    learned = Selection(chosen.slots, weights, chosen.mask, chosen.scores, chosen.winners, chosen.members)
    grad = torch.randn(3, 3, 2).double()
    got = torch.autograd.grad(learned.pool(x), (x, weights), grad)
    arriving = chosen.unpool(grad)
    torch.testing.assert_close(got[0], arriving * chosen.weights[..., None])
    torch.testing.assert_close(got[1], (arriving * x).sum(-1).detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pool_sums_in_single_precision_at_least(dtype: torch.dtype) -> None:
    scores, x = torch.rand(2, 257), torch.randn(2, 257, 7).to(dtype).requires_grad_()
    chosen = soft_topk(scores, 3)
    pooled = chosen.pool(x)
    exact = chosen.dense().double() @ x.double()
    assert pooled.dtype == dtype
    assert ((pooled - exact).norm() / exact.norm()).item() <= 2 * torch.finfo(dtype).eps
    pooled.sum().backward()
    torch.testing.assert_close(x.grad, chosen.weights[..., None].expand_as(x).to(dtype))


def test_a_second_derivative_is_refused() -> None:
    chosen, x = some(11, 3)["soft"], torch.randn(3, 11, 2).double().requires_grad_()
    weights = chosen.weights.clone().requires_grad_()
    learned = Selection(chosen.slots, weights, chosen.mask, chosen.scores, chosen.winners, chosen.members)
    (grad,) = torch.autograd.grad(learned.pool(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_empty_batch_is_no_error() -> None:
    chosen = soft_topk(torch.rand(0, 7), 3, base=20.0)
    assert chosen.pool(torch.rand(0, 7, 2)).shape == (0, 3, 2)


def test_wrong_tensors_are_refused() -> None:
    chosen = soft_topk(torch.rand(2, 7), 3)
    with pytest.raises(ValueError, match=r"Expected \[b n ...\] with \[b, ·\] = \[2, 7\], got shape \[2, 6, 3\]"):
        chosen.pool(torch.rand(2, 6, 3))
    with pytest.raises(ValueError, match=r"Expected \[b k ...\] with \[b, ·\] = \[2, 3\], got shape \[2, 7\]"):
        chosen.unpool(torch.rand(2, 7))
    with pytest.raises(ValueError, match=r"floating-point tensor, got torch\.int64"):
        chosen.pool(torch.ones(2, 7, dtype=torch.long))
    with pytest.raises(ValueError, match="on cpu, where the Selection is, got meta"):
        chosen.pool(torch.ones(2, 7, device="meta"))
    with pytest.raises(ValueError, match=r"the \(2, 3\) slots of this Selection, got one that selects from \(2, 7\)"):
        chosen.then(chosen)
