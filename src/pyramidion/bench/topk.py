"""Measure the top-k operators against each other: time, memory, likeness to the true top k, and the gradient.

One run compares all methods on the same tensors (appendix "Performance": scores U[0, 1], vectors U[-1, 1]). A method
that cannot be measured at a size is recorded as skipped, with the reason.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pyramidion.bench import measure
from pyramidion.kernels.launching import choose_device
from pyramidion.topk import hard_topk, soft_topk, straight_through_topk
from pyramidion.topk.rivals import RIVALS

PUBLISHED_BASE = 20.0  # the published sharpening: base ** score, for scores between 0 and 1
PAPER_SORTING = {"time_overhead_percent": 7.3, "error_reduction_percent": 45.2}
SLOW = "one call took"
RACERS = ("halving", "halving-unsorted", "halving-sharp", "halving-sharp-unsorted", "vector-rounds")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_SIZES = tuple((n, k) for k in (128, 512) for n in (1024, 2048, 4096, 8192))
GPU_SIZES = (  # with every method; beyond, rivals that hold [b k n] matrices leave no memory for the rest
    *((n, 128) for n in (512, 2048, 8192)),
    *((n, 512) for n in (2048, 8192, 32768)),
    (8192, 2048),
)
DENSE_COPIES = 9  # matrices [b k n] that a rival holds at its peak, backward included; measured: 3.4 to 8.5
QUICK_SIZES = ((256, 32), (512, 32), (256, 64), (512, 64))


@dataclass(frozen=True)
class Settings:
    """What to measure. `budget` is the seconds that one call, forward and backward, may take."""

    device: str = "cpu"
    batch: int = 2
    width: int = 512
    sizes: tuple[tuple[int, int], ...] = CPU_SIZES
    methods: tuple[str, ...] = ()
    dtype: str = "float32"
    budget: float = 1.0
    min_time: float = 0.2
    growth: tuple[int, ...] = tuple(2**i for i in range(10, 18))
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {self.dtype}.")
        if self.budget <= 0:
            raise ValueError(f"`budget` must be a positive number of seconds, got {self.budget:g}.")
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"`methods` must be among {', '.join(METHODS)}, got {', '.join(unknown)}.")


@dataclass(frozen=True)
class Method:
    """One way from n vectors to k: a function (scores [b n], x [b n d], k) -> pooled [b k d], and what it needs.

    dense       True where it writes out matrices [b k n], which decides whether a size is tried
    power_of_2  True where n / k must be a power of two
    """

    pool: Callable[[Tensor, Tensor, int], Tensor]
    dense: bool = False
    power_of_2: bool = False


@dataclass(frozen=True)
class Row:
    """What was measured for one method at one size, or why it was not. Times are in milliseconds, memory in bytes.

    `forward` builds the graph for `backward`; both start from scores and vectors that want a gradient. `captured` times
    are those of the kernels alone, replayed from a CUDA graph: None on a CPU, or where they cannot be captured.
    `extra_memory` is the peak beyond inputs, outputs and gradients. `gradient_share` is the share of the tokens whose
    score receives a gradient, `gradient_variance` its variance over the tokens of a document.
    """

    method: str
    n: int
    k: int
    skipped: str | None = None
    forward_ms: float | None = None
    forward_quartiles_ms: tuple[float, float] | None = None
    forward_host_ms: float | None = None
    backward_ms: float | None = None
    backward_quartiles_ms: tuple[float, float] | None = None
    both_ms: float | None = None
    both_quartiles_ms: tuple[float, float] | None = None
    both_host_ms: float | None = None
    forward_captured_ms: float | None = None
    backward_captured_ms: float | None = None
    both_captured_ms: float | None = None
    repeats: tuple[int, int, int] | None = None
    extra_memory: int | None = None
    nccs: float | None = None
    gradient_share: float | None = None
    gradient_variance: float | None = None


@dataclass(frozen=True)
class Inputs:
    """The tensors that all methods share at one size; `true` holds the vectors of the true top k."""

    scores: Tensor  # [b n]
    x: Tensor  # [b n d]
    g: Tensor  # [b k d] the gradient that arrives: that of sum(pooled * g)
    true: Tensor  # [b k d]
    k: int


def nccs(true: Tensor, chosen: Tensor, *, chunk_bytes: int = 1 << 26) -> float:
    """Normalised Chamfer cosine similarity: for each true vector the most similar chosen one, on average.

    true, chosen [b k d]. The k x k similarities are taken some rows at a time, so that they never fill the memory.
    """
    true, chosen = (torch.nn.functional.normalize(y.detach().float(), dim=-1) for y in (true, chosen))
    rows = max(1, chunk_bytes // (4 * chosen.shape[0] * chosen.shape[1]))
    best = [(part @ chosen.transpose(1, 2)).amax(dim=-1) for part in true.split(rows, dim=1)]
    return torch.cat(best, dim=1).double().mean().item()


def gradient_reach(grad: Tensor, mask: Tensor | None = None) -> tuple[float, float]:
    """Return the share of real tokens whose score has a gradient, and its variance over them, averaged over rows."""
    mask = torch.ones_like(grad, dtype=torch.bool) if mask is None else mask
    rows = [row[real] for row, real in zip(grad.double(), mask, strict=True) if real.any()]
    share = statistics.fmean((row != 0).double().mean().item() for row in rows)
    return share, statistics.fmean(row.var(correction=0).item() for row in rows)


def vector_rounds(scores: Tensor, x: Tensor, k: int) -> Tensor:
    """Play the tournament over the vectors themselves, round by round, batched: what the operator must beat.

    The direct way to write section 4: sort, fetch both sides of every pair, blend them, go on with half. Of four ways
    to fetch, raced forward and backward on a CPU at 8192 -> 512, `index_select` was the fastest: 245 ms, two gathers
    350 ms, one gather and a flip 444 ms. On a GPU they have not been compared.
    """
    b, _, d = x.shape
    while scores.shape[1] > k:
        n = scores.shape[1]
        half = n // 2
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        strong, weak = scores[:, :half], scores[:, half:].flip(1)  # [b half]
        share = torch.sigmoid(strong - weak)
        scores = torch.lerp(weak, strong, share)
        order = order + n * torch.arange(b, device=x.device).unsqueeze(1)  # places in all documents laid end to end
        flat = x.reshape(b * n, d)
        x_strong, x_weak = (
            flat.index_select(0, side.flatten()).view(b, half, d) for side in (order[:, :half], order[:, half:].flip(1))
        )
        x = torch.lerp(x_weak, x_strong, share.unsqueeze(-1).to(x.dtype))  # [b half d]
    return x


def _halving(**options: Any) -> Callable[[Tensor, Tensor, int], Tensor]:
    return lambda scores, x, k: soft_topk(scores, k, **options).pool(x)


def _rival(choose: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    return lambda scores, x, k: choose(scores, k).to(x.dtype) @ x


METHODS: dict[str, Method] = {
    "halving": Method(_halving()),
    "halving-unsorted": Method(_halving(sort=False)),
    "halving-sharp": Method(_halving(base=PUBLISHED_BASE)),
    "halving-sharp-unsorted": Method(_halving(base=PUBLISHED_BASE, sort=False)),
    "straight-through": Method(lambda scores, x, k: straight_through_topk(scores, k).pool(x)),
    "hard": Method(lambda scores, x, k: hard_topk(scores, k).pool(x)),
    "vector-rounds": Method(vector_rounds, power_of_2=True),
}


def _add_rivals() -> None:
    for name, choose in RIVALS.items():
        shown = name.replace("_", "-")
        shown = f"{shown}-dense" if shown in METHODS else shown
        METHODS[shown] = Method(_rival(choose), dense=True)


_add_rivals()


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Read "2048:512,8192:512" as pairs (n, k)."""
    sizes = []
    for part in text.split(","):
        n, colon, k = part.strip().partition(":")
        if not (colon and n.isdecimal() and k.isdecimal() and 1 <= int(k) < int(n)):
            raise ValueError(f"`sizes` must be pairs n:k with 1 <= k < n, such as 8192:512, got {part.strip()!r}.")
        sizes.append((int(n), int(k)))
    return tuple(dict.fromkeys(sizes))


def parse_methods(text: str) -> tuple[str, ...]:
    """Read "halving,hard" as method names; underscores will do for hyphens."""
    names = [part.strip().replace("_", "-") for part in text.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def default_settings(device: str = "auto", *, quick: bool = False, **given: Any) -> Settings:
    """Fill in what was not given: the paper's sizes on a GPU, ones that end within minutes on a CPU."""
    gpu = choose_device(device).type == "cuda"
    defaults: dict[str, Any] = {"device": "cuda" if gpu else "cpu"}
    if gpu:
        defaults |= {"batch": 16, "sizes": GPU_SIZES, "min_time": 0.1, "budget": 0.15}
    if quick:
        defaults |= {"batch": 2, "width": 32, "sizes": QUICK_SIZES, "min_time": 0.005, "growth": (256, 512, 1024)}
        defaults["budget"] = 0.5
    return Settings(**defaults | given)


def make_inputs(settings: Settings, n: int, k: int) -> Inputs:
    """Draw scores, vectors and an arriving gradient, the same for every method and every run."""
    device = torch.device(settings.device)
    dtype = DTYPES[settings.dtype]
    generator = torch.Generator(device).manual_seed(settings.seed)
    b, d = settings.batch, settings.width
    scores = torch.rand(b, n, generator=generator, device=device)
    x = torch.rand(b, n, d, generator=generator, device=device, dtype=dtype).mul_(2).sub_(1)
    g = torch.randn(b, k, d, generator=generator, device=device, dtype=dtype)
    best = scores.topk(k, dim=1).indices
    true = x.gather(1, best.unsqueeze(-1).expand(-1, -1, d))
    return Inputs(scores.requires_grad_(), x.requires_grad_(), g, true, k)


def run(
    settings: Settings, *, tell: Callable[[int, int, str], None] = lambda done, total, what: None
) -> dict[str, Any]:
    """Measure everything `settings` asks for and return it as plain data, ready to be written.

    `tell(done, total, what)` hears of every step before it begins. Backward runs in this thread: what is compared are
    methods, not the waking of another thread.
    """
    with torch.autograd.set_multithreading_enabled(False):
        return _run(settings, tell)


def _run(settings: Settings, tell: Callable[[int, int, str], None]) -> dict[str, Any]:
    names = settings.methods or tuple(METHODS)
    total = len(names) * len(settings.sizes) + 2
    tell(0, total, "copy bandwidth")
    bandwidth = measure.copy_bandwidth(settings.device)
    _prime(names, settings)
    rows: list[Row] = []
    races: list[dict[str, Any] | None] = []
    for n, k in settings.sizes:
        inputs = make_inputs(settings, n, k)
        for name in names:
            tell(1 + len(rows), total, f"{name} {n} → {k}")
            rows.append(measure_method(name, inputs, settings, rows))
        races.append(race_tournaments(inputs, settings, rows))
        del inputs
    held = [race for race in races if race is not None]
    tell(total - 1, total, "growth with n")
    growing = growth(settings)
    tell(total, total, "done")
    return {
        "settings": asdict(settings) | {"methods": list(names)},
        "copy_bandwidth": bandwidth,
        "rows": [asdict(row) for row in rows],
        "limits": limits(rows, settings, bandwidth),
        "races": held,
        "sorting_ablation": sorting_ablation(rows, held),
        "speedup_over_vector_rounds": speedups(held),
        "growth": growing,
    }


def _prime(names: Iterable[str], settings: Settings) -> None:
    """Call every method once on a small input: what is loaded on first use must not count against any of them."""
    inputs = make_inputs(settings, 64, 16)
    for name in names:
        _both(METHODS[name], inputs)


def measure_method(name: str, inputs: Inputs, settings: Settings, rows: Sequence[Row] = ()) -> Row:
    """Measure one method at one size, or say why not; `rows` are the earlier ones of the run."""
    n, k = inputs.scores.shape[1], inputs.k
    try:
        measured = _try(name, inputs, settings, rows)
    except torch.OutOfMemoryError:
        measured = "out of memory"
    if torch.device(settings.device).type == "cuda":  # a captured graph's memory serves no other method
        gc.collect()
        torch.cuda.empty_cache()
    return measured if isinstance(measured, Row) else Row(name, n, k, skipped=measured)


def _try(name: str, inputs: Inputs, settings: Settings, rows: Sequence[Row]) -> Row | str:
    """Measure a method, or return the reason why not."""
    method = METHODS[name]
    reason = _misfit(name, method, inputs, settings, rows)
    if reason is not None:
        return reason
    seconds = _probe(method, inputs, settings)
    if seconds > settings.budget:
        return f"{SLOW} {seconds:.2g} s, the budget is {settings.budget:g} s"
    return _measured(name, method, inputs, settings, slow=seconds > settings.min_time)


def _misfit(name: str, method: Method, inputs: Inputs, settings: Settings, rows: Iterable[Row]) -> str | None:
    """Say why a size is not even tried: a rule of the method, memory, or too slow at a smaller size already."""
    (b, n), k = inputs.scores.shape, inputs.k
    if method.power_of_2 and (n % k or n // k & (n // k - 1)):
        return "n / k must be a power of two"
    needed = 4 * inputs.x.nbytes + (4 * b * k * n * DENSE_COPIES if method.dense else 0)
    free = measure.free_memory(settings.device)
    if needed > 0.8 * free:
        return f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    for row in rows:
        if row.method == name and row.n <= n and row.k <= k and (row.skipped or "").startswith(SLOW):
            return f"over budget at {row.n} → {row.k} already"
    return None


def _probe(method: Method, inputs: Inputs, settings: Settings) -> float:
    """Return the seconds of one call, forward and backward.

    A first call may only be compiling a kernel, so over budget a second one decides, unless on a CPU, where nothing is
    compiled, the first was hopeless.
    """
    seconds = _seconds(lambda: _both(method, inputs), settings.device)
    hopeless = 4 * settings.budget if torch.device(settings.device).type == "cpu" else math.inf
    if settings.budget < seconds < hopeless:
        seconds = _seconds(lambda: _both(method, inputs), settings.device)
    return seconds


def _seconds(fn: Callable[[], object], device: str) -> float:
    began = perf_counter()
    fn()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began


def _both(method: Method, inputs: Inputs) -> tuple[Tensor, ...]:
    """Pool, and send `g` back: the pooled vectors and the gradients of scores and vectors (None: no gradient)."""
    pooled = method.pool(inputs.scores, inputs.x, inputs.k)
    return pooled, *torch.autograd.grad(pooled, (inputs.scores, inputs.x), inputs.g, allow_unused=True)


def _measured(name: str, method: Method, inputs: Inputs, settings: Settings, *, slow: bool) -> Row:
    times = _times(method, inputs, settings, slow=slow)
    torch.manual_seed(settings.seed)  # some rivals draw noise
    pooled, grad_scores, grad_x = _both(method, inputs)
    share, variance = gradient_reach(torch.zeros_like(inputs.scores) if grad_scores is None else grad_scores)
    likeness = nccs(inputs.true, pooled)
    results = [sum(y.nbytes for y in part if y is not None) for part in ((pooled,), (pooled, grad_scores, grad_x))]
    del pooled, grad_scores, grad_x
    forward, both = _steps(method, inputs)
    extra = max(
        measure.peak_extra_memory(step, device=settings.device) - result
        for step, result in zip((forward, both), results, strict=True)
    )
    return Row(
        method=name,
        n=inputs.scores.shape[1],
        k=inputs.k,
        **times,
        extra_memory=extra,
        nccs=likeness,
        gradient_share=share,
        gradient_variance=variance,
    )


def _steps(method: Method, inputs: Inputs) -> tuple[Callable[[], object], Callable[[], object]]:
    return lambda: method.pool(inputs.scores, inputs.x, inputs.k), lambda: _both(method, inputs)


def _times(method: Method, inputs: Inputs, settings: Settings, *, slow: bool) -> dict[str, Any]:
    """Time forward, both, and backward alone on a graph that is kept; a slow method, warm by now, just three times."""
    options: dict[str, Any] = {"repeats": 3, "warmup": 0} if slow else {"min_time": settings.min_time}

    def clock(fn: Callable[[], object]) -> measure.Timing:
        return measure.timeit(fn, device=settings.device, **options)

    kept, wanted = method.pool(inputs.scores, inputs.x, inputs.k), (inputs.scores, inputs.x)
    steps = dict(zip(("forward", "both"), _steps(method, inputs), strict=True))
    steps["backward"] = lambda: torch.autograd.grad(kept, wanted, inputs.g, allow_unused=True, retain_graph=True)
    found: dict[str, Any] = {"repeats": ()}
    for name, step in steps.items():
        timing = clock(step)
        found[f"{name}_ms"] = timing.median * 1e3
        found[f"{name}_quartiles_ms"] = (timing.lower * 1e3, timing.upper * 1e3)
        if name != "backward":
            found[f"{name}_host_ms"] = timing.host * 1e3
        found["repeats"] += (timing.count,)
        replay = None if slow else measure.captured(step, device=settings.device)
        found[f"{name}_captured_ms"] = clock(replay).median * 1e3 if replay else None
    return found


def limits(rows: Sequence[Row], settings: Settings, bandwidth: float) -> list[dict[str, Any]]:
    """Compare `halving`, its kernels alone where they were captured, with the time its bytes need.

    The bytes move at the copy bandwidth of the same run. Forward must read vectors and scores and write the pooled;
    backward must read vectors and the gradient that arrives, and write the gradient of the vectors.
    """
    b, d, item = settings.batch, settings.width, DTYPES[settings.dtype].itemsize
    found = []
    for row in rows:
        taken = [row.forward_captured_ms or row.forward_ms, row.backward_captured_ms or row.backward_ms]
        if row.method != "halving" or taken[0] is None or taken[1] is None:
            continue
        long, short = b * row.n * d * item, b * row.k * d * item
        forward, backward = ((moved / bandwidth * 1e3) for moved in (long + 4 * b * row.n + short, 2 * long + short))
        found.append(
            {
                "n": row.n,
                "k": row.k,
                "forward_limit_ms": forward,
                "forward_ratio": taken[0] / forward,
                "backward_limit_ms": backward,
                "backward_ratio": taken[1] / backward,
            }
        )
    return found


def race_tournaments(inputs: Inputs, settings: Settings, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Run the forms of the tournament against each other, call by call, at a size where they have been measured.

    Ratios of a few percent are asked of them, which two medians taken minutes apart would not bear out.
    """
    n, k = inputs.scores.shape[1], inputs.k
    names = [row.method for row in rows if (row.n, row.k) == (n, k) and row.method in RACERS and row.skipped is None]
    if len(names) < 2:
        return None
    steps = {name: _steps(METHODS[name], inputs) for name in names}
    times = [measure.race({name: steps[name][i] for name in names}, device=settings.device) for i in range(2)]
    forward, both = ({name: timing.median * 1e3 for name, timing in found.items()} for found in times)
    return {"n": n, "k": k, "forward_ms": forward, "both_ms": both}


def sorting_ablation(rows: Sequence[Row], races: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Say what sorting costs and what it brings, on average over the sizes, in percent.

    Cost: how much longer forward takes than without. Gain: how much smaller the error 1 - nCCS is than without.
    """
    error = {(row.method, row.n, row.k): 1 - row.nccs for row in rows if row.nccs is not None}
    found = []
    for name in ("halving", "halving-sharp"):
        other = f"{name}-unsorted"
        held = [race for race in races if {name, other} <= set(race["forward_ms"])]
        if held:
            costs = [100 * (race["forward_ms"][name] / race["forward_ms"][other] - 1) for race in held]
            sizes = [(race["n"], race["k"]) for race in held]
            gains = [100 * (1 - error[name, *size] / error[other, *size]) for size in sizes]
            found.append(
                {
                    "method": name,
                    "time_overhead_percent": statistics.fmean(costs),
                    "error_reduction_percent": statistics.fmean(gains),
                    "sizes": len(held),
                    "paper": PAPER_SORTING,
                }
            )
    return found


def speedups(races: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Say how many times faster `halving` is than the same tournament over vectors, forward and backward together."""
    held = [race for race in races if {"halving", "vector-rounds"} <= set(race["both_ms"])]
    return [
        {"n": race["n"], "k": race["k"], "times": race["both_ms"]["vector-rounds"] / race["both_ms"]["halving"]}
        for race in held
    ]


def growth(settings: Settings) -> dict[str, Any] | None:
    """Time `halving`, forward and backward, for one document that grows, against n log n.

    `exponent` is the slope of log time over log (n log n): at most 1 says no faster than n log n. A fixed cost bends
    the small sizes down, so `last_doubling` is given too: the growth of the last step over that of n log n.
    """
    if len(settings.growth) < 2:
        return None
    k = min(512, min(settings.growth) // 2)
    single = replace(settings, batch=1)
    steps = {n: _steps(METHODS["halving"], make_inputs(single, n, k))[1] for n in settings.growth}
    timings = measure.race({str(n): step for n, step in steps.items()}, device=settings.device)
    seconds = [timings[str(n)].median for n in settings.growth]
    work = [n * math.log2(n) for n in settings.growth]
    slope = statistics.linear_regression([math.log(w) for w in work], [math.log(s) for s in seconds]).slope
    return {
        "k": k,
        "n": list(settings.growth),
        "both_ms": [s * 1e3 for s in seconds],
        "exponent": slope,
        "first_to_last": (seconds[-1] / seconds[0]) / (work[-1] / work[0]),
        "last_doubling": (seconds[-1] / seconds[-2]) / (work[-1] / work[-2]),
    }
