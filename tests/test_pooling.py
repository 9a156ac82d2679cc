"""Scorers score what they say, poolers keep what they say, and padding and neighbours change nothing."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pyramidion.pooling import POOLINGS, Pooled, Pooler, StridedPooler, make_pooler, windows
from pyramidion.scoring import (
    SCORERS,
    EmbeddingScorer,
    IndexScorer,
    LinearScorer,
    NonlinearScorer,
    PowerScorer,
    RandomScorer,
    ranks,
)
from pyramidion.topk import Selection, hard_topk, soft_topk, straight_through_topk

D = 7
SELECTS = ("soft", "hard", "straight-through")
PAIRS = [(p, s) for p in POOLINGS for s in (SCORERS if p in SELECTS else (None,))]
SIZES = [(1, 1), (1, 3), (2, 5), (7, 7), (11, 3), (12, 4), (13, 12), (23, 1), (31, 5), (64, 16)]  # n, k


def holes(n: int) -> Tensor:
    """Masks of one length: none, scattered, left and right padding, a single token, nobody."""
    place = torch.arange(n)
    masks = [place >= 0, torch.rand(n) > 0.4, place >= n // 3, place < n - n // 3, place == n // 2, place < 0]
    return torch.stack(masks)  # [6 n]


def make(pooling: str, scorer: str | None = None, k: int = 5, **options: float) -> nn.Module:
    return make_pooler(pooling, k, D, scorer=scorer, **options).eval()  # type: ignore[arg-type]


def build(name: str, k: int = 5) -> nn.Module:
    pooler = make("soft", name, k)
    assert isinstance(pooler.scorer, SCORERS[name])
    return pooler.scorer


# --------------------------------------------------------------------------------------------------------------------
# Scorers
# --------------------------------------------------------------------------------------------------------------------


def scramble(word: int) -> int:
    """The hash of the random scorer, in Python's integers."""
    word = (word + 0x9E3779B9) % 2**32
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    word = (word ^ word >> 15) * 0x735A2D97 % 2**32
    return word ^ word >> 15


def dot(a: list[float], b: list[float]) -> float:
    return sum(one * other for one, other in zip(a, b, strict=True))


def score_by_loops(scorer: nn.Module, x: Tensor, mask: Tensor, received: Tensor) -> list[dict[int, float]]:
    """Score one real token after another in plain Python, as the definitions read: row -> {token: score}."""
    weights = {name: value.tolist() for name, value in scorer.named_parameters()}
    result = []
    for row in range(len(x)):
        real = [i for i in range(x.shape[1]) if mask[row, i]]
        scores = {}
        for rank, i in enumerate(real):
            e = x[row, i].tolist()
            if isinstance(scorer, LinearScorer):
                scores[i] = dot(e, weights["linear.weight"][0]) + weights["linear.bias"][0]
            elif isinstance(scorer, NonlinearScorer):
                inner = zip(weights["inner.weight"], weights["inner.bias"], strict=True)
                hidden = [math.tanh(dot(e, w) + b) for w, b in inner]
                scores[i] = dot(hidden, weights["outer.weight"][0]) + weights["outer.bias"][0]
            elif isinstance(scorer, PowerScorer):
                scores[i] = received[row, i].item()
            elif isinstance(scorer, EmbeddingScorer):
                scores[i] = e[scorer.index]
            elif isinstance(scorer, RandomScorer):
                scores[i] = (scramble(scramble(rank) ^ scramble(scorer.seed)) >> 8) / 2**24
            elif isinstance(scorer, IndexScorer):
                scores[i] = float(rank * scorer.k % len(real) < scorer.k)
        result.append(scores)
    return result


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 7), (17, 5), (16, 4)])
def test_scorers_are_their_definitions(name: str, n: int, k: int) -> None:
    scorer, mask = build(name, k).double(), holes(n)
    x, received = torch.randn(6, n, D).double(), torch.rand(6, n).double()
    scores = scorer(x, mask, received)
    assert scores.shape == (6, n)
    for row, want in enumerate(score_by_loops(scorer, x, mask, received)):
        for i, value in want.items():
            assert scores[row, i].item() == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert torch.equal(scorer(x, None, received), scorer(x, torch.ones_like(mask), received))


def test_ranks_are_places_among_the_real_tokens() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    assert ranks(mask, mask).tolist() == [[-1, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5], [-1] * 6]
    assert ranks(None, torch.rand(2, 3, 5)).tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_single_precision_whatever_surrounds_them(name: str) -> None:
    scorer, mask = build(name), holes(17)
    x, received = torch.randn(6, 17, D).bfloat16(), torch.rand(6, 17).bfloat16()
    want = scorer(x.float(), mask, received.float())
    assert want.dtype == torch.float32
    assert torch.equal(scorer(x, mask, received), want)
    with torch.autocast("cpu", torch.bfloat16):
        for y, r in ((x, received), (x.float(), received.float())):
            assert torch.equal(scorer(y, mask, r), want)
            assert scorer(y, mask, r).dtype == torch.float32
    assert scorer.double()(x.double(), mask, received.double()).dtype == torch.float64
    halved = scorer.bfloat16()(x, mask, received)  # the parameters rounded, the arithmetic not
    assert halved.dtype == torch.float32
    assert torch.equal(halved, scorer.float()(x.float(), mask, received.float()))


@pytest.mark.parametrize("name", ["linear", "nonlinear"])
def test_half_precision_makes_no_ties(name: str) -> None:
    scorer, x = SCORERS[name](64), torch.randn(1, 2048, 64).bfloat16()
    scores = scorer(x)
    assert scores.unique().numel() > 2000
    assert scores.bfloat16().unique().numel() < 1200  # what it would be


def test_scorers_work_where_there_is_no_autocast() -> None:
    assert LinearScorer(D).to("meta")(torch.empty(2, 3, D, device="meta")).shape == (2, 3)


def spread(rows: Tensor, place: list[int], n: int) -> tuple[Tensor, Tensor]:
    """Put rows [b r ...] at the given places of length n, garbage elsewhere, and say where."""
    wide = torch.full((rows.shape[0], n, *rows.shape[2:]), 1e4, dtype=rows.dtype)
    wide[:, place] = rows
    mask = torch.zeros(rows.shape[0], n, dtype=torch.bool)
    mask[:, place] = True
    return wide, mask


LAYOUTS = [list(range(4, 15)), list(range(11)), [0, 2, 3, 7, 8, 9, 10, 14, 15, 17, 18]]  # left, right padding, holes


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["random", "index"])
def test_random_and_index_depend_only_on_the_rank(name: str, training: bool) -> None:
    scorer = build(name).train(training)

    def score(x: Tensor, mask: Tensor | None) -> Tensor:
        torch.manual_seed(1)
        return scorer(x, mask)

    want = score(torch.randn(3, 11, D), None)
    for place in LAYOUTS:
        x, mask = spread(torch.randn(3, 11, D), place, 19)
        assert torch.equal(score(x, mask)[:, place], want)


def test_random_is_fixed_in_evaluation_and_fresh_in_training() -> None:
    x = torch.zeros(3, 997, D)
    scorer = RandomScorer(seed=3).eval()
    fixed = scorer(x)
    state = torch.get_rng_state()
    assert torch.equal(scorer(x), fixed)
    assert torch.equal(torch.get_rng_state(), state)  # evaluation draws nothing
    assert torch.equal(fixed[0], fixed[1])
    assert torch.equal(RandomScorer(seed=3).eval()(x), fixed)
    assert not torch.equal(RandomScorer(seed=4).eval()(x), fixed)
    scorer.train()
    first, second = scorer(x), scorer(x)
    rows = torch.cat((fixed[:1], first, second))
    for one, other in itertools.combinations(rows, 2):
        assert (one == other).float().mean() < 0.01
        assert torch.corrcoef(torch.stack((one, other)))[0, 1].abs() < 0.12  # nearly four standard deviations
    torch.manual_seed(5)
    again = scorer(x)
    torch.manual_seed(5)
    assert torch.equal(scorer(x), again)  # torch's generator decides


def test_random_is_uniform() -> None:
    x = torch.zeros(8, 4099, 1)
    for scores in (RandomScorer().eval()(x[:1]), RandomScorer().train()(x)):
        assert scores.min() >= 0
        assert scores.max() < 1
        share = torch.histc(scores, 16, 0, 1) / scores.numel()
        assert (share * 16 - 1).abs().max() < 4 * (16 / scores.numel()) ** 0.5
        flat = scores.flatten()
        assert torch.corrcoef(torch.stack((flat[:-1], flat[1:])))[0, 1].abs() < 4 / flat.numel() ** 0.5
        assert scores[0].unique().numel() >= 4096  # 24 bits: hardly a tie


@pytest.mark.parametrize(("stride", "k"), [(1, 5), (4, 8), (3, 7), (11, 1)])
def test_index_is_every_sth_token(stride: int, k: int) -> None:
    scores = IndexScorer(k)(torch.zeros(1, stride * k, D))
    assert scores[0].nonzero().flatten().tolist() == list(range(0, stride * k, stride))
    kept = hard_topk(scores, k)
    assert kept.winners[0].tolist() == list(range(0, stride * k, stride))


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_index_chooses_k_evenly_at_any_length(n: int, k: int) -> None:
    mask = holes(n)
    scores = IndexScorer(k)(torch.zeros(6, n, D), mask)
    for row in range(6):
        length = int(mask[row].sum())
        assert scores[row].sum() == min(k, length)
        assert not scores[row][~mask[row]].any()
        gaps = scores[row][mask[row]].nonzero().flatten().diff()
        assert gaps.numel() == 0 or gaps.max() - gaps.min() <= 1


# --------------------------------------------------------------------------------------------------------------------
# Poolers
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("select", SELECTS)
def test_a_pooler_scores_selects_and_pools(select: str, scorer: str) -> None:
    options = {} if select == "hard" else {"temperature": 0.7, "base": 3.0, "sort": False}
    pooler = make(select, scorer, temperature=0.7, base=3.0, sort=False)
    x, received, mask = torch.randn(6, 23, D), torch.rand(6, 23), holes(23)
    pooled = pooler(x, mask, received)
    scores = pooler.scorer(x, mask, received)
    choose = {"soft": soft_topk, "hard": hard_topk, "straight-through": straight_through_topk}[select]
    want = choose(scores, 5, mask=mask, **options)  # type: ignore[operator]
    for name in ("slots", "weights", "mask", "scores", "winners", "members"):
        assert torch.equal(getattr(pooled.selection, name), getattr(want, name)), name
    assert torch.equal(pooled.x, want.pool(x))
    assert torch.equal(pooled.mask, want.mask)


def window_by_loops(x: Tensor, mask: Tensor, k: int, reduce: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Pool neighbours document by document, slot by slot, coordinate by coordinate."""
    b, n, d = x.shape
    pooled = torch.zeros(b, min(k, n), d, dtype=x.dtype)
    slots, weights = torch.full((b, n), -1), torch.zeros(b, n, dtype=x.dtype)
    winners = torch.full((b, min(k, n)), -1)
    for row in range(b):
        real = [i for i in range(n) if mask[row, i]]
        for rank, i in enumerate(real):
            slots[row, i] = rank * min(k, len(real)) // len(real)
        for j in range(min(k, len(real))):
            window = [i for i in real if slots[row, i] == j]
            for c in range(d):
                values = [x[row, i, c].item() for i in window]
                best = window[values.index(max(values))]
                pooled[row, j, c] = max(values) if reduce == "max" else sum(values) / len(values)
                for i in window:
                    weights[row, i] += (i == best) / d if reduce == "max" else 1 / len(values) / d
            shares = [round(weights[row, i].item() * d) for i in window]
            winners[row, j] = window[shares.index(max(shares))] if reduce == "max" else window[0]
    return pooled, {"slots": slots, "weights": weights, "mask": winners >= 0, "winners": winners}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_strided_pooling_is_its_loops(n: int, k: int, reduce: str, ties: bool) -> None:
    x, mask = torch.randn(6, n, D).double(), holes(n)
    x = x.round() if ties else x
    want, account = window_by_loops(x, mask, k, reduce)
    pooled = StridedPooler(k, reduce=reduce)(x.masked_fill(~mask[..., None], torch.nan), mask)
    torch.testing.assert_close(pooled.x, want)
    for name, value in account.items():
        torch.testing.assert_close(getattr(pooled.selection, name), value, msg=name)
    assert torch.equal(pooled.mask, pooled.selection.mask)
    assert torch.equal(pooled.selection.scores, torch.zeros(6, min(k, n)).double())
    every = StridedPooler(k, reduce=reduce)(x)
    full = StridedPooler(k, reduce=reduce)(x, torch.ones_like(mask))
    assert torch.equal(every.x, full.x)
    for name, value in vars(every.selection).items():
        assert torch.equal(value, getattr(full.selection, name)), name


def test_strided_pooling_at_the_papers_stride() -> None:
    x = torch.randn(2, 4 * 9, D)
    torch.testing.assert_close(StridedPooler(9)(x).x, nn.functional.avg_pool1d(x.mT, 4).mT)
    assert torch.equal(StridedPooler(9, reduce="max")(x).x, nn.functional.max_pool1d(x.mT, 4).mT)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_the_table_of_members_inverts_the_slots(n: int, k: int) -> None:
    selection = windows(torch.randn(6, n, D), k, mask=holes(n))
    assert selection.members is not None
    assert selection.members.shape == (6, min(k, n), math.ceil(n / min(k, n)))
    for row in range(6):
        for j in range(selection.k):
            listed = [i for i in selection.members[row, j].tolist() if i >= 0]
            assert listed == (selection.slots[row] == j).nonzero().flatten().tolist()


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_gradients_of_strided_pooling(reduce: str) -> None:
    x, mask = torch.randn(6, 13, 3).double().requires_grad_(), holes(13)
    pooler = StridedPooler(5, reduce=reduce)
    torch.autograd.gradcheck(lambda y: pooler(y, mask).x, (x,))
    torch.autograd.gradcheck(lambda y: pooler(y).x, (x,))


def test_the_gradient_of_the_maximum_goes_to_the_coordinates_that_won() -> None:
    x = torch.tensor([[[1.0, 5.0], [1.0, 2.0], [0.0, 9.0]]]).requires_grad_()
    pooled = StridedPooler(1, reduce="max")(x)
    assert pooled.x.tolist() == [[[1.0, 9.0]]]
    (grad,) = torch.autograd.grad(pooled.x, x, torch.tensor([[[10.0, 20.0]]]))
    assert grad.tolist() == [[[10.0, 0.0], [0.0, 0.0], [0.0, 20.0]]]  # of two equal, the earlier
    assert pooled.selection.weights.tolist() == [[0.5, 0.0, 0.5]]
    assert pooled.selection.winners.tolist() == [[0]]
    assert not pooled.selection.weights.requires_grad


@pytest.mark.parametrize("scorer", ["linear", "nonlinear", "embedding"])
@pytest.mark.parametrize("base", [None, 3.0])
def test_gradients_of_soft_pooling(scorer: str, base: float | None) -> None:
    pooler = make_pooler("soft", 2, D, scorer=scorer, base=base).double()
    names = [name for name, _ in pooler.named_parameters()]
    x, mask = torch.randn(6, 5, D).double().requires_grad_(), holes(5)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(pooler, dict(zip(names, values, strict=True)), (x, mask)).x

    torch.autograd.gradcheck(run, (x, *pooler.parameters()))


# --------------------------------------------------------------------------------------------------------------------
# What holds for every pooler
# --------------------------------------------------------------------------------------------------------------------


def exact(pooling: str, scorer: str | None, k: int = 5) -> nn.Module:
    """A pooler whose scores take no rounding on `grid`, in whatever order they are summed."""
    pooler = make(pooling, scorer, k)
    for value in pooler.parameters():
        value.data = (value * 16).round() / 16
    return pooler


def grid(*shape: int) -> Tensor:
    return torch.randint(-32, 32, shape) / 16


@pytest.mark.parametrize(("pooling", "scorer"), PAIRS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_the_account_is_whole(pooling: str, scorer: str | None, n: int, k: int) -> None:
    pooler, mask = make(pooling, scorer, k), holes(n)
    x, received = torch.randn(6, n, D), torch.rand(6, n)
    for given in (mask, None):
        pooled = pooler(x, given, received)
        assert isinstance(pooled, Pooled)
        selection, real = pooled.selection, torch.ones_like(mask) if given is None else given
        length = real.sum(1)
        assert pooled.x.shape == (6, min(k, n), D)
        assert pooled.mask.dtype == torch.bool
        assert torch.equal(pooled.mask, torch.arange(min(k, n)) < length.clamp(max=k)[:, None])  # filled come first
        assert selection.weights.dtype == selection.scores.dtype == torch.float32
        torch.testing.assert_close(selection.dense().sum(-1), pooled.mask.float())
        assert (selection.slots[~real] == -1).all()
        if pooling not in ("hard", "straight-through", "power"):
            assert (selection.slots[real] >= 0).all()
        kept = selection.winners.where(pooled.mask, n + torch.arange(min(k, n)))
        assert (kept.diff(dim=1) > 0).all()  # order is kept
        assert not pooled.x[~pooled.mask].any()
        for row in range(6):
            if length[row] <= k:  # all are kept, as they are
                assert torch.equal(pooled.x[row, : length[row]], x[row, real[row]])


@pytest.mark.parametrize(("pooling", "scorer"), PAIRS)
def test_padding_and_neighbours_change_nothing(pooling: str, scorer: str | None) -> None:
    pooler = exact(pooling, scorer)
    bits = scorer != "nonlinear"  # its hyperbolic tangents do round
    same: Callable[[Tensor, Tensor], None] = (
        (lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0)) if bits else torch.testing.assert_close
    )
    x, received = grid(3, 11, D), torch.rand(3, 11)
    want = pooler(x, None, received)
    for place in LAYOUTS:
        wide, mask = spread(x, place, 19)
        wide_received, _ = spread(received, place, 19)
        got = pooler(wide, mask, wide_received)
        same(got.x, want.x)
        same(got.selection.weights[:, place], want.selection.weights)
        same(got.selection.scores, want.selection.scores)
        assert torch.equal(got.selection.slots[:, place], want.selection.slots)
        assert torch.equal(got.selection.winners, torch.tensor(place)[want.selection.winners])
        beside = torch.cat((grid(2, 19, D), wide)), torch.cat((holes(19)[[0, 5]], mask))
        among = pooler(*beside, torch.cat((torch.rand(2, 19), wide_received)))
        same(among.x[2:], want.x)
        assert torch.equal(among.selection.slots[2:], got.selection.slots)
    for row in range(3):
        same(pooler(x[row : row + 1], None, received[row : row + 1]).x, want.x[row : row + 1])


@pytest.mark.parametrize(("pooling", "scorer"), PAIRS)
def test_gradients_reach_every_trainable_parameter(pooling: str, scorer: str | None) -> None:
    pooler = make_pooler(pooling, 3, D, scorer=scorer, base=1.5).train()
    x, mask = torch.randn(6, 17, D, requires_grad=True), holes(17)
    pooler(x, mask, torch.rand(6, 17)).x.square().sum().backward()
    assert x.grad is not None
    assert x.grad[mask].any()
    assert not x.grad[~mask].any()
    learns = pooling in ("soft", "straight-through") and scorer in ("linear", "nonlinear")
    assert any(p.requires_grad for p in pooler.parameters()) == learns
    for name, parameter in pooler.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name


def test_hard_freezes_its_scorer() -> None:
    hard, soft = Pooler(LinearScorer(D), 3, select="hard"), Pooler(LinearScorer(D), 3)
    assert [p.requires_grad for p in hard.parameters()] == [False, False]
    assert [p.requires_grad for p in soft.parameters()] == [True, True]
    x = torch.randn(2, 11, D, requires_grad=True)
    hard(x).x.sum().backward()
    assert x.grad is not None
    assert x.grad.sum(-1).bool().sum() == 6


def test_straight_through_is_hard_in_value_and_soft_in_slope() -> None:
    scorer, x = LinearScorer(D), torch.randn(2, 16, D)
    through = Pooler(scorer, 4, select="straight-through")(x).x
    grads = torch.autograd.grad(through.sum(), tuple(scorer.parameters()))
    assert torch.equal(through, hard_topk(scorer(x), 4).pool(x))
    assert grads[0].any()


@pytest.mark.parametrize(("pooling", "scorer"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_precision_of_x_is_kept(pooling: str, scorer: str | None, dtype: torch.dtype) -> None:
    pooler, x, received = make(pooling, scorer), torch.randn(3, 17, D).to(dtype), torch.rand(3, 17)
    plain = pooler(x, None, received)
    with torch.autocast("cpu", torch.bfloat16):
        cast = pooler(x, None, received)
    assert plain.x.dtype == cast.x.dtype == dtype
    assert torch.equal(plain.x, cast.x)
    assert torch.equal(plain.selection.weights, cast.selection.weights)
    wide = torch.float32 if pooling == "power" or scorer == "power" else torch.promote_types(dtype, torch.float32)
    assert plain.selection.weights.dtype == plain.selection.scores.dtype == wide


def test_selections_compose_over_poolers() -> None:
    x, mask = torch.randn(6, 29, D), holes(29)
    for one, two in itertools.product(PAIRS, repeat=2):
        if "max" in (one[0], two[0]) or "power" in (*one, *two):
            continue
        first = make(*one, k=11)(x, mask)
        second = make(*two, k=3)(first.x, first.mask)
        whole = first.selection.then(second.selection)
        torch.testing.assert_close(whole.pool(x), second.x)
        assert torch.equal(whole.mask, second.mask)


# --------------------------------------------------------------------------------------------------------------------
# By name, in a graph, in a model, on a device
# --------------------------------------------------------------------------------------------------------------------


def test_poolings_by_name() -> None:
    for pooling in SELECTS:
        pooler = make_pooler(pooling, 3, D)
        assert isinstance(pooler, Pooler)
        assert isinstance(pooler.scorer, LinearScorer)
        assert (pooler.select, pooler.wants_attention) == (pooling, False)
        assert make_pooler(pooling, 3, D, scorer="power").wants_attention
    power = make_pooler("power", 3, D)
    assert isinstance(power, Pooler)
    assert (power.select, power.wants_attention) == ("hard", True)
    for pooling, reduce in (("mean", "mean"), ("max", "max"), ("funnel", "mean")):
        strided = make_pooler(pooling, 3, D)
        assert isinstance(strided, StridedPooler)
        assert (strided.k, strided.reduce, strided.wants_attention) == (3, reduce, False)
    chosen = [make("soft", "random", seed=9).scorer.seed, make("hard", "embedding", index=6).scorer.index]
    assert [*chosen, make("hard", "index", k=4).scorer.k] == [9, 6, 4]
    shown = repr(make("soft", "random", k=3, temperature=0.5, seed=9)) + repr(StridedPooler(4, reduce="max"))
    for part in ("k=3", "select='soft'", "temperature=0.5", "seed=9", "k=4", "reduce='max'"):
        assert part in shown


def test_power_keeps_what_was_attended_to() -> None:
    received = torch.tensor([[0.1, 3.0, 0.2, 2.0, 9.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    x = torch.randn(1, 5, D)
    pooled = make_pooler("power", 2, D)(x, mask, received)
    assert torch.equal(pooled.x, x[:, [1, 3]])


class Stack(nn.Module):
    """Somebody else's encoder: torch's own layers, one pooler between them."""

    def __init__(self, pooler: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.pooler, self.head = pooler, nn.Linear(16, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layers[0](x, src_key_padding_mask=~mask)
        x, mask, _ = self.pooler(x, mask)
        x = self.layers[1](x, src_key_padding_mask=~mask)
        return self.head(x.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True))[:, 0]


@pytest.mark.parametrize("pooling", ["soft", "straight-through", "mean", "max"])
def test_a_pooler_trains_inside_a_plain_encoder(pooling: str) -> None:
    model = Stack(make_pooler(pooling, 4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        x, mask = torch.randn(16, 23, 16), torch.arange(23) < torch.randint(2, 24, (16, 1))
        target = torch.rand(16) * 2 - 1
        x[:, 1, 0], x[:, 1, 1] = 6, 6 * target  # one token knows; coordinate 0 says which
        loss = nn.functional.mse_loss(model(x, mask), target)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


TRACED = [("soft", "linear"), ("straight-through", "nonlinear"), ("hard", "random"), ("hard", "index")]
TRACED += [("soft", "embedding"), ("power", None), ("mean", None), ("max", None)]


@pytest.mark.slow
@pytest.mark.parametrize(("pooling", "scorer"), TRACED)
def test_a_pooler_is_one_graph(pooling: str, scorer: str | None) -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    pooler = make(pooling, scorer)
    compiled = torch.compile(pooler, fullgraph=True, dynamic=True, backend=count)
    for n in (11, 13, 19):
        x, received, mask = torch.randn(6, n, D), torch.rand(6, n), holes(n)
        got, want = compiled(x, mask, received), pooler(x, mask, received)
        torch.testing.assert_close(got.x, want.x)
        assert isinstance(got.selection, Selection)
        assert torch.equal(got.selection.slots, want.selection.slots)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("pooling", "scorer"), [("soft", "nonlinear"), ("soft", "random"), ("mean", None), ("max", None)]
)
def test_a_pooler_trains_in_a_graph(pooling: str, scorer: str | None) -> None:
    torch._dynamo.reset()
    pooler = make(pooling, scorer)
    compiled = torch.compile(pooler, fullgraph=True, backend="aot_eager")
    x, mask = torch.randn(6, 17, D, requires_grad=True), holes(17)
    inputs = (x, *pooler.parameters())
    want = torch.autograd.grad(pooler(x, mask).x.sin().sum(), inputs)
    got = torch.autograd.grad(compiled(x, mask).x.sin().sum(), inputs)
    torch.testing.assert_close(got, want)
    if scorer == "random":
        pooler.train()
        with torch.autocast("cpu", torch.bfloat16):
            assert not torch.equal(compiled(x, mask).x, compiled(x, mask).x)  # fresh in a graph too


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("pooling", "scorer"), PAIRS)
def test_a_device_agrees_and_is_never_waited_for(pooling: str, scorer: str | None, training: bool) -> None:
    pooler, x, received, mask = exact(pooling, scorer), grid(6, 101, D), torch.rand(6, 101), holes(101)
    pooler.train(training)

    def run(device: str) -> tuple[Pooled, Tensor]:
        torch.manual_seed(3)
        given = x.detach().to(device).requires_grad_()
        moved = (given, mask.to(device), received.to(device))
        pooler.to(device)
        if device == "cuda":
            pooler(*moved)  # kernels are built
            torch.manual_seed(3)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            pooled = pooler(*moved)
            pooled.x.square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert given.grad is not None
        return pooled, given.grad

    (want, want_grad), (got, got_grad) = run("cpu"), run("cuda")
    torch.testing.assert_close(got.x.cpu(), want.x)
    torch.testing.assert_close(got_grad.cpu(), want_grad, rtol=1e-4, atol=1e-5)
    for name in ("slots", "mask", "winners"):
        assert torch.equal(getattr(got.selection, name).cpu(), getattr(want.selection, name))


X = torch.randn(2, 5, D)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Pooler(PowerScorer(), 0), "`k` must be at least 1, got 0."),
    (lambda: Pooler(PowerScorer(), True), "`k` must be a whole number, got True."),
    (lambda: Pooler(PowerScorer(), 2.0), "`k` must be a whole number, got 2.0."),  # type: ignore[arg-type]
    (
        lambda: Pooler(PowerScorer(), 1, select="top"),
        "`select` must be one of soft, hard, straight-through, got 'top'.",
    ),
    (lambda: Pooler(PowerScorer(), 1, temperature=0), "`temperature` must be a positive number, got 0."),
    (lambda: Pooler(PowerScorer(), 1, base=1.0), "`base` must be a number above 1, .* got 1.0."),
    (lambda: StridedPooler(-1), "`k` must be at least 1, got -1."),
    (lambda: StridedPooler(1, reduce="min"), "`reduce` must be one of mean, max, got 'min'."),
    (lambda: LinearScorer(0), "`width` must be at least 1, got 0."),
    (lambda: NonlinearScorer(0), "`width` must be at least 1, got 0."),
    (lambda: IndexScorer(0), "`k` must be at least 1, got 0."),
    (lambda: EmbeddingScorer(-1), "`index` must be at least 0, got -1."),
    (lambda: RandomScorer(-1), "`seed` must be at least 0, got -1."),
    (lambda: make_pooler("avg", 1, D), "`pooling` must be one of soft, hard, .* funnel, got 'avg'."),
    (lambda: make_pooler("soft", 1, D, scorer="best"), "`scorer` must be one of linear, .* index, got 'best'."),
    (lambda: make_pooler("soft", 1, D, scorer=""), "`scorer` must be one of linear, .* index, got ''."),
    (lambda: make_pooler("soft", 1, D, scorer="embedding", index=D), "`index` must be below the width, 7, got 7."),
    *(
        (lambda p=p: make_pooler(p, 1, D, scorer="linear"), f"`scorer` must be None with .* '{p}', .* got 'linear'.")
        for p in ("power", "mean", "max", "funnel")
    ),
    (lambda: make_pooler("power", 2, D)(X), "`received` must be the attention each token received, .* got None."),
    (
        lambda: make_pooler("power", 2, D)(X, None, torch.rand(2, 4)),
        r"must have shape \[2, 5\] as x has, got \[2, 4\].",
    ),
    *(
        (lambda a=a, p=p: make_pooler(p, 2, D)(*a), m)
        for p in ("soft", "mean")
        for a, m in [
            ((X[0],), r"`x` must be floating point \[b n d\], got torch.float32 of shape \[5, 7\]."),
            ((X.long(),), r"`x` must be floating point \[b n d\], got torch.int64"),
            ((X[:, :0],), r"`x` must hold at least one token a row, got shape \[2, 0, 7\]."),
            ((X, torch.ones(2, 5)), "`mask` must be a bool tensor, True for a real token, got torch.float32."),
            ((X, torch.ones(2, 4).bool()), r"`mask` must have the shape \[2, 5\] of x, got \[2, 4\]."),
        ]
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_input_is_refused_with_rule_and_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_an_empty_batch_is_no_error() -> None:
    for pooling, scorer in PAIRS:
        pooled = make(pooling, scorer, k=3)(torch.rand(0, 7, D), torch.ones(0, 7).bool(), torch.rand(0, 7))
        assert pooled.x.shape == (0, 3, D)
