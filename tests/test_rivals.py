"""Each rival against the shared contract, and against its own definition written as plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyramidion.topk.rivals import (
    RIVALS,
    iterative_softmax,
    lapsum,
    neuralsort,
    optimal_transport,
    perturbed,
    softsort,
    straight_through,
    subset_sampling,
)

B, N, K = 3, 11, 5
SMOOTH = [name for name in RIVALS if name not in ("perturbed", "straight_through")]
SHARP = {
    "iterative_softmax": {"temperature": 1e-5},
    "subset_sampling": {"temperature": 1e-3},
    "optimal_transport": {"epsilon": 1e-3},
    "softsort": {"temperature": 1e-3},
    "neuralsort": {"temperature": 1e-3},
    "lapsum": {"alpha": 1e-3},
    "perturbed": {"sigma": 1e-4},
    "straight_through": {},
}
every_rival = pytest.mark.parametrize("name", RIVALS)
every_smooth_rival = pytest.mark.parametrize("name", SMOOTH)


def choose(name: str, scores: Tensor, k: int, mask: Tensor | None = None, **options: object) -> Tensor:
    """Call a rival by name with its noise off, or the same at each call."""
    if name == "subset_sampling":
        options = {"noise": False, **options}
    if name == "perturbed":
        options = {"generator": torch.Generator().manual_seed(7), **options}
    return RIVALS[name](scores, k, mask=mask, **options)


def random_scores(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ladder(b: int, n: int) -> Tensor:
    """Scores 0 to 1 in equal steps, in a random order: no two are near each other."""
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(n, generator=generator) for _ in range(b)]).double() / n


def some_mask() -> Tensor:
    """Documents of eleven, seven and two real tokens, none of the holes at the same place."""
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, [0, 3, 4, 10]] = False
    mask[2, [0, 1, 2, 4, 5, 6, 7, 9, 10]] = False
    return mask


def hard_rows(scores: Tensor, k: int) -> np.ndarray:
    rows = np.zeros((len(scores), k, scores.shape[1]))
    for b, document in enumerate(scores.tolist()):
        best = sorted(range(len(document)), key=lambda i: (-document[i], i))
        for j, i in enumerate(best[:k]):
            rows[b, j, i] = 1
    return rows


def softmax(logits: list[float]) -> np.ndarray:
    shares = np.exp(np.array(logits) - max(logits))
    return shares / shares.sum()


def laplace(x: float) -> float:
    return 0.5 * math.exp(x) if x <= 0 else 1 - 0.5 * math.exp(-x)


# The contract


@every_rival
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_are_shares_of_the_real_tokens(name: str, data: st.DataObject) -> None:
    b, n, k = (data.draw(st.integers(1, most)) for most in (3, 13, 17))
    flags = data.draw(st.lists(st.booleans(), min_size=b * n, max_size=b * n))
    mask = torch.tensor(flags).view(b, n)
    choice = choose(name, random_scores(b, n).masked_fill(~mask, torch.nan), k, mask)
    assert choice.shape == (b, k, n)
    assert (choice >= 0).all()
    assert (choice.masked_select(~mask[:, None]) == 0).all()
    expected = (torch.arange(k) < mask.sum(1, keepdim=True)).double()
    torch.testing.assert_close(choice.sum(-1), expected, rtol=0, atol=1e-9)


@every_rival
def test_what_stands_at_a_masked_token_is_never_read(name: str) -> None:
    scores, mask = random_scores(B, N), some_mask()
    results, gradients = [], []
    for filler in (0.0, 1e9, torch.nan, torch.inf, -torch.inf):
        leaf = scores.masked_fill(~mask, filler).requires_grad_()
        choice = choose(name, leaf, K, mask)
        (choice * random_scores(B, K, N, seed=1)).sum().backward()
        results.append(choice.detach())
        gradients.append(leaf.grad)
    for choice, gradient in zip(results, gradients, strict=True):
        assert torch.equal(choice, results[0])
        assert torch.equal(gradient, gradients[0])
        assert (gradient[~mask] == 0).all()


@every_rival
def test_padding_and_neighbours_change_nothing(name: str) -> None:
    options = SHARP[name] if name == "perturbed" else {}  # its noise depends on the shape; here it is too small to tell
    scores = ladder(B, N)
    alone = choose(name, scores[1:2], K, **options)
    padded = torch.cat([torch.full((B, 2), torch.nan), scores, torch.full((B, 4), torch.nan)], 1)
    mask = torch.zeros(B, N + 6, dtype=torch.bool)
    mask[:, 2:-4] = True
    together = choose(name, padded, K, mask, **options)[1:2, :, 2:-4]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@every_rival
def test_more_rows_than_tokens(name: str) -> None:
    options = {"iterations": 1000} if name == "optimal_transport" else {}
    scores, mask = random_scores(2, 3), torch.tensor([[True, True, True], [False, True, True]])
    wide = choose(name, scores, 7, mask, **options)
    assert (wide[0, 3:] == 0).all()
    assert (wide[1, 2:] == 0).all()
    torch.testing.assert_close(wide[:, :3], choose(name, scores, 3, mask, **options), rtol=0, atol=1e-12)
    one = choose(name, scores[:, :1].requires_grad_(), 2)
    torch.testing.assert_close(one, torch.tensor([[[1.0], [0.0]]] * 2, dtype=torch.float64), rtol=0, atol=1e-12)
    one.sum().backward()


@every_rival
def test_a_document_without_tokens_gets_zeros_and_a_zero_gradient(name: str) -> None:
    scores = torch.full((1, N), torch.nan, dtype=torch.float64, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        choice = choose(name, scores, K, torch.zeros(1, N, dtype=torch.bool))
        choice.sum().backward()
    assert (choice == 0).all()
    assert (scores.grad == 0).all()


@every_rival
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_gradient_is_finite_and_not_zero(name: str, scale: float) -> None:
    scores = (scale * random_scores(B, N, dtype=torch.float32)).requires_grad_()
    choice = choose(name, scores, K)
    (choice * random_scores(B, K, N, seed=1)).sum().backward()
    torch.testing.assert_close(choice.sum(-1), torch.ones(B, K), rtol=0, atol=1e-5)
    assert scores.grad.isfinite().all()
    assert scale > 1 or (scores.grad.abs().sum(1) > 1e-3).all()


@every_smooth_rival
def test_equal_scores_share_equally(name: str) -> None:
    scores = torch.zeros(2, 7, dtype=torch.float64, requires_grad=True)
    choice = choose(name, scores, 4)
    choice.select(2, 0).sum().backward()
    torch.testing.assert_close(choice, torch.full_like(choice, 1 / 7), rtol=0, atol=1e-9)
    assert scores.grad.isfinite().all()


@every_rival
def test_permuting_the_scores_permutes_the_columns(name: str) -> None:
    options = SHARP[name] if name == "perturbed" else {}
    scores, order = ladder(B, N), torch.randperm(N, generator=torch.Generator().manual_seed(5))
    direct = choose(name, scores, K, **options)[:, :, order]
    torch.testing.assert_close(choose(name, scores[:, order], K, **options), direct, rtol=0, atol=1e-12)


@every_rival
@pytest.mark.parametrize("k", [1, 5, N])
def test_the_sharp_limit_is_the_hard_top_k(name: str, k: int) -> None:
    scores = ladder(B, N)
    choice = choose(name, scores, k, **SHARP[name])
    np.testing.assert_allclose(choice, hard_rows(scores, k), atol=1e-6)


@every_smooth_rival
def test_gradients_by_finite_differences(name: str) -> None:
    options = {"iterations": 150} if name == "optimal_transport" else {}
    width = {"lapsum": "alpha", "optimal_transport": "epsilon"}.get(name, "temperature")
    mask = some_mask()[1:, :]

    def rows(scores: Tensor) -> Tensor:
        return choose(name, scores.where(mask, torch.nan), 3, mask, **{width: 0.7}, **options)

    assert torch.autograd.gradcheck(rows, (random_scores(2, N).requires_grad_(),), eps=1e-6, atol=1e-6)


@every_rival
def test_low_precision_is_computed_in_float32(name: str) -> None:
    scores = random_scores(B, N).bfloat16()
    choice = choose(name, scores, K)
    assert choice.dtype == torch.float32
    torch.testing.assert_close(choice, choose(name, scores.float(), K), rtol=0, atol=0)


@every_smooth_rival
def test_float32_follows_float64(name: str) -> None:
    scores = random_scores(2, 997, dtype=torch.float32)
    options = {"iterations": 20} if name == "optimal_transport" else {}
    single = choose(name, scores, 31, **options)
    torch.testing.assert_close(single.sum(-1), torch.ones(2, 31), rtol=0, atol=1e-5)
    torch.testing.assert_close(single.double(), choose(name, scores.double(), 31, **options), rtol=0, atol=1e-4)


@pytest.mark.gpu
@every_rival
def test_the_gpu_agrees(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    options = SHARP[name] if name == "perturbed" else {}
    results, mask = [], some_mask()
    for device in ("cpu", "cuda"):
        if name == "perturbed":
            options["generator"] = torch.Generator(device).manual_seed(7)
        leaf = ladder(B, N).to(device).requires_grad_()
        choice = choose(name, leaf, K, mask.to(device), **options)
        (choice * random_scores(B, K, N, seed=1).to(device)).sum().backward()
        results.append((choice.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-9)
    if name != "perturbed":
        torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-7)


@every_rival
def test_bad_input_is_refused(name: str) -> None:
    rival, scores = RIVALS[name], random_scores(B, N)
    with pytest.raises(ValueError, match="`k` must be at least 1, got 0"):
        rival(scores, 0)
    with pytest.raises(ValueError, match=r"`scores` must be \[b n\].*got shape \(11,\)"):
        rival(scores[0], K)
    with pytest.raises(ValueError, match=r"`scores` must be \[b n\].*got shape \(3, 0\)"):
        rival(scores[:, :0], K)
    with pytest.raises(ValueError, match=r"`scores` must be floating point, got torch.int64"):
        rival(scores.long(), K)
    with pytest.raises(ValueError, match="`mask` must be bool"):
        rival(scores, K, mask=torch.ones(B, N))
    with pytest.raises(ValueError, match=r"`mask` must be bool of shape \(3, 11\), got torch.bool of shape \(3, 7\)"):
        rival(scores, K, mask=torch.ones(B, 7, dtype=torch.bool))
    for option in SHARP[name] or {"temperature": 0}:
        with pytest.raises(ValueError, match=f"`{option}` must be positive, got 0"):
            rival(scores, K, **{option: 0})


# Each by its definition


@pytest.mark.parametrize(
    ("rival", "distance"), [(softsort, lambda x: abs(x) / 0.3), (iterative_softmax, lambda x: x * x / 0.3)]
)
def test_softmax_of_the_distance_to_each_sorted_score(rival, distance) -> None:
    scores, mask = random_scores(B, N), some_mask()
    choice = rival(scores, K, mask=mask, temperature=0.3)
    for b in range(B):
        tokens = [i for i in range(N) if mask[b, i]]
        values = [scores[b, i].item() for i in tokens]
        for j, best in enumerate(sorted(values, reverse=True)[:K]):
            np.testing.assert_allclose(choice[b, j, tokens], softmax([-distance(best - s) for s in values]), atol=1e-12)


def test_neuralsort_by_its_table_of_distances() -> None:
    scores, mask = 3 + random_scores(B, N), some_mask()
    choice = neuralsort(scores, K, mask=mask, temperature=1.7)
    for b in range(B):
        tokens = [i for i in range(N) if mask[b, i]]
        values = [scores[b, i].item() for i in tokens]
        m = len(values)
        for j in range(1, min(K, m) + 1):
            logits = [((m + 1 - 2 * j) * s - sum(abs(s - other) for other in values)) / 1.7 for s in values]
            np.testing.assert_allclose(choice[b, j - 1, tokens], softmax(logits), atol=1e-11)


def test_neuralsort_keeps_its_digits_when_scores_stand_far_from_zero() -> None:
    scores = 100 + random_scores(2, 997, dtype=torch.float32)
    torch.testing.assert_close(neuralsort(scores, 31).double(), neuralsort(scores.double(), 31), rtol=0, atol=1e-4)


@pytest.mark.parametrize("alpha", [3e-3, 0.2, 5.0])
def test_lapsum_by_bisection(alpha: float) -> None:
    scores, mask = random_scores(B, N), some_mask()
    scores[0, 3] = scores[0, 7]  # a tie
    choice = lapsum(scores, K, mask=mask, alpha=alpha)
    for b in range(B):
        tokens = [i for i in range(N) if mask[b, i]]
        values = [scores[b, i].item() for i in tokens]
        previous = np.zeros(len(values))
        for j in range(1, min(K, len(values)) + 1):
            low, high = min(values) - 100 * alpha, max(values) + 100 * alpha
            while high - low > 1e-13:
                middle = (low + high) / 2
                if middle in (low, high):
                    break
                total = sum(laplace((s - middle) / alpha) for s in values)
                low, high = (middle, high) if total > j else (low, middle)
            degrees = np.array([laplace((s - low) / alpha) for s in values])
            if j == len(values):
                degrees = np.ones(j)
            np.testing.assert_allclose(choice[b, j - 1, tokens], degrees - previous, atol=1e-9)
            previous = degrees
    assert (choice.sum(1) <= 1 + 1e-12).all()


def test_lapsum_keeps_its_digits_when_scores_crowd_far_from_zero() -> None:
    scores = 100 + 0.01 * random_scores(2, 997, dtype=torch.float32)
    choice = lapsum(scores, 31, alpha=0.003)
    torch.testing.assert_close(choice.sum(-1), torch.ones(2, 31), rtol=0, atol=1e-5)
    torch.testing.assert_close(choice.double(), lapsum(scores.double(), 31, alpha=0.003), rtol=0, atol=1e-6)


def test_optimal_transport_by_plain_sinkhorn() -> None:
    scores, epsilon = random_scores(2, N), 0.9
    choice = optimal_transport(scores, 3, epsilon=epsilon, iterations=1000)
    for b in range(2):
        bins, tokens = np.array([1, 1, 1, N - 3]) / N, np.ones(N) / N
        kernel = np.zeros((N, 4))
        for i in range(N):
            for j in range(4):
                kernel[i, j] = math.exp(-((scores[b, i].item() - (3 - j)) ** 2) / epsilon)
        v = np.ones(4)
        for _ in range(3000):
            u = tokens / (kernel @ v)
            v = bins / (kernel.T @ u)
        plan = u[:, None] * kernel * v
        np.testing.assert_allclose(plan.sum(1), tokens, atol=1e-12)
        np.testing.assert_allclose(choice[b], N * plan[:, :3].T, atol=1e-9)
    assert (choice.sum(1) <= 1 + 1e-9).all()  # no token ships more than it has


def test_optimal_transport_ships_whole_documents_when_the_bins_suffice() -> None:
    mask = some_mask()
    choice = optimal_transport(random_scores(B, N), 7, mask=mask, epsilon=0.7, iterations=1000)
    torch.testing.assert_close(choice.sum(1)[1:], mask[1:].double(), rtol=0, atol=1e-9)


def test_subset_sampling_by_loops() -> None:
    scores, temperature = random_scores(B, N), 0.4
    choice = subset_sampling(scores, K, temperature=temperature, noise=False)
    for b in range(B):
        keys = scores[b].tolist()
        for j in range(K):
            row = softmax([key / temperature for key in keys])
            np.testing.assert_allclose(choice[b, j], row, atol=1e-12)
            keys = [key + math.log(1 - share) for key, share in zip(keys, row, strict=True)]


def test_subset_sampling_draws_without_replacement_by_weight() -> None:
    weights = np.array([0.35, 0.3, 0.2, 0.1, 0.05])
    scores = torch.tensor(weights).log().expand(5003, 5)
    choice = subset_sampling(scores, 2, temperature=1e-3, generator=torch.Generator().manual_seed(0))
    first, second = choice.argmax(-1).T.numpy()
    assert (first != second).all()
    frequencies = [np.bincount(draws, minlength=5) / len(draws) for draws in (first, second)]
    after = [sum(weights[i] * weights[j] / (1 - weights[i]) for i in range(5) if i != j) for j in range(5)]
    np.testing.assert_allclose(frequencies[0], weights, atol=0.03)
    np.testing.assert_allclose(frequencies[1], after, atol=0.03)


def test_subset_sampling_repeats_with_its_generator_only() -> None:
    draws = [subset_sampling(random_scores(B, N), K, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_perturbed_is_the_mean_of_hard_rows() -> None:
    scores, samples, sigma = random_scores(B, N), 17, 0.5
    choice = perturbed(scores, K, sigma=sigma, samples=samples, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(B, samples, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mean = sum(hard_rows(scores + sigma * noise[:, sample], K) for sample in range(samples)) / samples
    np.testing.assert_allclose(choice, mean, atol=1e-12)


def test_perturbed_pair_is_a_normal_distribution_function() -> None:
    """Of two tokens the first wins with probability Phi(x), x = (s_0 - s_1) / (sigma sqrt 2)."""
    scores, sigma = torch.tensor([[0.3, -0.2]], dtype=torch.float64, requires_grad=True), 0.8
    choice = perturbed(scores, 1, sigma=sigma, samples=200_003, generator=torch.Generator().manual_seed(0))
    choice[0, 0, 0].backward()
    x = 0.5 / (sigma * math.sqrt(2))
    density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi) / (sigma * math.sqrt(2))
    assert choice[0, 0, 0].item() == pytest.approx((1 + math.erf(x / math.sqrt(2))) / 2, abs=0.01)
    np.testing.assert_allclose(scores.grad[0], [density, -density], atol=0.015)


def test_perturbed_gradient_by_differences_of_the_expectation() -> None:
    n, k, step, samples = 5, 2, 0.1, 100_003
    scores, upstream = random_scores(1, n), random_scores(k, n, seed=1)

    def expectation(point: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(4)
        return (perturbed(point, k, sigma=0.5, samples=samples, generator=generator)[0] * upstream).sum()

    leaf = scores.clone().requires_grad_()
    expectation(leaf).backward()
    for i in range(n):
        shift = torch.zeros_like(scores)
        shift[0, i] = step
        slope = (expectation(scores + shift) - expectation(scores - shift)) / (2 * step)
        assert leaf.grad[0, i].item() == pytest.approx(slope.item(), abs=0.04)
    assert leaf.grad.abs().max() > 0.2


def test_straight_through_is_exactly_hard_and_differentiates_as_softsort() -> None:
    scores, mask, upstream = random_scores(B, N), some_mask(), random_scores(B, K, N, seed=1)
    leaves = [scores.clone().requires_grad_() for _ in range(2)]
    choice = straight_through(leaves[0], K, mask=mask, temperature=0.3)
    (choice * upstream).sum().backward()
    (softsort(leaves[1], K, mask=mask, temperature=0.3) * upstream).sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    lowest = scores.masked_fill(~mask, -torch.inf)
    expected = torch.tensor(hard_rows(lowest, K)) * (torch.arange(K) < mask.sum(1, keepdim=True))[:, :, None]
    assert torch.equal(choice, expected)


def test_straight_through_gives_ties_to_the_earlier_position() -> None:
    scores = torch.randint(3, (2, 997), generator=torch.Generator().manual_seed(0)).float()
    np.testing.assert_array_equal(straight_through(scores, 401), hard_rows(scores, 401))


def test_straight_through_is_hard_to_the_bit_in_float32() -> None:
    scores = random_scores(2, 997, dtype=torch.float32)
    assert straight_through(scores, 31, temperature=0.7).unique().tolist() == [0, 1]


def test_the_gradients_of_noisy_scores_reach_every_winner() -> None:
    """Noise must not cut the graph: the sampled subset differentiates as the noise-free one of the same keys."""
    scores = random_scores(B, N).requires_grad_()
    drawn = subset_sampling(scores, K, temperature=0.5, generator=torch.Generator().manual_seed(1))
    waits = torch.empty(B, N, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    keys = (scores.detach() - waits.log()).requires_grad_()
    same = subset_sampling(keys, K, temperature=0.5, noise=False)
    torch.testing.assert_close(drawn, same, rtol=0, atol=1e-12)
    for rows in (drawn, same):
        (rows * random_scores(B, K, N, seed=2)).sum().backward()
    torch.testing.assert_close(scores.grad, keys.grad, rtol=0, atol=1e-9)
