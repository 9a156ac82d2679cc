"""Where the time goes: a training step or a text under the profiler, parted by what its kernels are for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pyramidion.bench import measure, peers, report, rows
from pyramidion.bench.models import BEAMS, MEASURES, Bench, manners, named
from pyramidion.bench.peers import Candidate
from pyramidion.bench.report import Column
from pyramidion.bench.rows import Row, Sheet, Tell
from pyramidion.kernels.launching import HAS_TRITON, choose_device
from pyramidion.presets import preset

TITLE = "Where the time goes"
WHAT = ("train", *BEAMS)
DROPOUTS = ("paper", "peers")
IDLE = "nothing"
REST = "the rest"

# What our own kernels are for, by the module they stand in; those of the decoder are told one by one.
PURPOSES = {
    "kernels.cross_entropy": "loss",
    "kernels.decoding": "",
    "kernels.direction": "scores",
    "kernels.embedding": "embedding",
    "kernels.feed_forward": "ReLU, dropout, bias",
    "kernels.residual": "residual sum, dropout, norm",
    "topk.fused": "pooling",
}
# What the kernels of libraries are for, and the operators of torch, which is what a CPU's profile tells of.
LIBRARIES = {
    "chance": r"bernoulli|dropout|::random_$|distribution",
    "searching and sorting": r"log_softmax|LogSoftMax|[Ss]ort|topk|Topk|TopK|argmax|ArgMax|cub::|radix",
    "attention": r"sdpa|fmha|flash|scaled_dot_product|softmax|SoftMax|cudnn::fusion|unpack_cudnn",
    "products": r"nvjet|gemm|xmma|splitK|cublas|mkldnn_linear|::(mm|bmm|addmm|baddbmm|linear|matmul)$",
    "optimizer": r"[Aa]dam|multi_tensor_apply|Optimizer",
    "embedding": r"[Ee]mbedding|compute_grad_weight|partial_segment|partials_per_segment",
    "loss": r"cross_entropy|nll_loss|CrossEntropy",
    "norm": r"layer_norm|LayerNorm",
    "copies and casts": r"copy|Memcpy|Memset|::(to|clone|fill_|zero_|cat|contiguous)$|FillFunctor|CatArray|empty",
    "gathering": r"gather|scatter|index",
    "other elementwise": r"elementwise|reduce|::\w+$",
}
PARTS = (
    *(Column("part", "what"), Column("ms", "ms", "3"), Column("share", "%", ".1f", 100)),
    *(
        Column("launches", "launches", ",d"),
        Column("each", "µs a launch", "3", 1e3),
        Column("own_ms", "by itself, ms", "3"),
    ),
)
LONGEST = (Column("name", "kernel"), Column("part", "what"), *PARTS[1:])
SHOWN = 12  # kernels, of the longest


@dataclass(frozen=True)
class Settings:
    """What to measure. `budget` is the seconds one call may take, `limit` those after which no row is begun.

    dropouts  of training: everywhere, as the paper has it, or only where the peers have it
    """

    device: str
    scale: str
    models: tuple[str, ...]
    n: int
    target: int
    tokens: int
    measures: tuple[str, ...] = WHAT
    train_batches: tuple[int, ...] = (1,)
    write_batches: tuple[int, ...] = (1,)
    dropouts: tuple[str, ...] = DROPOUTS[:1]
    dtype: str = "float32"
    repeats: int = 3
    budget: float = 60.0
    limit: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rows.check(self, n=64, target=1, tokens=1, train_batches=1, write_batches=1, repeats=1)
        rows.check_names("measures", self.measures, WHAT)
        rows.check_names("dropouts", self.dropouts, DROPOUTS)
        rows.check_names("dtype", (self.dtype,), tuple(rows.DTYPES))
        rows.check_names("models", self.models, peers.names(self.scale))


def default_settings(device: str = "auto", *, quick: bool = False, **given: Any) -> Settings:
    """Fill in what suits the device: the paper's deep size on a GPU, a small one on a CPU."""
    device = choose_device(device).type
    usual: dict[str, Any] = {"scale": "small", "n": 4096, "target": 128, "tokens": 64}
    if device == "cuda":
        usual = {"scale": "deep", "n": 8192, "target": 512, "tokens": 512, "dtype": "bfloat16", "repeats": 7}
        usual |= {"train_batches": (64, 8), "write_batches": (8,), "dropouts": DROPOUTS}
    if quick:
        usual |= {"scale": "tiny", "n": 256, "target": 8, "tokens": 8, "repeats": 1}
    usual["models"] = peers.names(usual["scale"])[:1]
    return Settings(device=device, **usual | given)


def run(settings: Settings, sheet: Sheet, tell: Tell = lambda *_: None) -> None:
    """Profile every case."""
    with rows.quiet(), rows.precision(settings.dtype):
        sheet.fill(cases(settings), partial(measure_case, settings=settings), tell)
    sheet.save()


def cases(settings: Settings) -> list[Row]:
    """List what is profiled: each training step in each manner and with each dropout, each search at each batch."""
    found: list[Row] = []
    for name, what in product(settings.models, settings.measures):
        shared = {"model": name, "measure": what, "n": settings.n, "dtype": settings.dtype, "scale": settings.scale}
        if what in BEAMS:
            found += [shared | {"batch": batch, "tokens": settings.tokens} for batch in settings.write_batches]
            continue
        dropouts = settings.dropouts if name not in peers.PEERS else DROPOUTS[1:]
        for batch, dropout, how in product(settings.train_batches, dropouts, manners(settings.device)):
            found.append(shared | {"batch": batch, "tokens": settings.target, "dropout": dropout, "how": how})
    return found


def measure_case(case: Row, settings: Settings) -> Row:
    """Time a case as every benchmark does, then look at one more call."""
    found = peers.candidate(case["model"], settings.scale, case["n"], max(settings.target, settings.tokens))
    if case.get("dropout") == "paper":
        found = Candidate(found.name, found.kind, preset(found.name))
    bench = Bench(found, case["n"], case["batch"], settings.device, settings.dtype, settings.repeats)
    bench = replace(bench, budget=settings.budget, seed=settings.seed, also=partial(profiled, device=settings.device))
    attention = peers.attentions(found)[0][0]
    if case["measure"] in BEAMS:
        writer = "engine" if found.ours else "dynamic cache"
        return bench.write(attention, case["tokens"], BEAMS[case["measure"]], writer)
    return bench.train(attention, case["tokens"], how=case["how"])


# --------------------------------------------------------------------------------------------------------------------
# One call under the profiler
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A kernel's name, and when it began and ended, in any unit."""

    name: str
    start: float
    end: float


def profiled(fn: Callable[[], object], device: str) -> Row:
    """Call once under the profiler: each kernel's launches, its time by itself, and how much longer it made the whole.

    On a GPU kernels overlap, so that their times do not add up. What a kernel adds is its time without those in which
    one ran that ended before it; these times, with those in which nothing ran, are the whole. On a CPU kernels are
    torch's operators without what they call, and nothing is Python.
    """
    gpu = torch.device(device).type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU]
    if gpu:
        torch.cuda.synchronize(device)
    with measure.silent_stderr(), torch.profiler.profile(activities=activities) as profiler:
        began = perf_counter()
        fn()
        if gpu:
            torch.cuda.synchronize(device)
        took = (perf_counter() - began) * 1e3
    return account(list(_spans(profiler))) if gpu else _operators(profiler, took)


def _spans(profiler: torch.profiler.profile) -> Iterator[Span]:
    """List what ran on the GPU, in milliseconds; marks that a program sets are not kernels."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        if event.device_type().name == "CUDA" and not event.is_user_annotation():
            start = event.start_ns() / 1e6
            yield Span(event.name(), start, start + event.duration_ns() / 1e6)


def _operators(profiler: torch.profiler.profile, took: float) -> Row:
    """Sum torch's operators, each without those that it calls."""
    kernels = [
        {"name": event.key, "launches": event.count, "ms": event.self_cpu_time_total / 1e3}
        for event in profiler.key_averages()
        if event.self_cpu_time_total > 0
    ]
    return _told([kernel | {"own_ms": kernel["ms"]} for kernel in kernels], took)


def account(spans: Iterable[Span]) -> Row:
    """Part the time from the first beginning to the last end among kernels: what several share is whose ends first."""
    kernels: dict[str, Row] = {}
    ordered = sorted(spans, key=lambda span: (span.end, span.start))
    taken: list[tuple[float, float]] = []  # apart from each other, the last to end on top
    for span in ordered:
        start, added = span.start, span.end - span.start
        while taken and taken[-1][1] > span.start:
            other = taken.pop()
            added -= other[1] - max(other[0], span.start)
            start = min(start, other[0])
        taken.append((start, span.end))
        kernel = kernels.setdefault(span.name, {"name": span.name, "launches": 0, "ms": 0.0, "own_ms": 0.0})
        for key, more in (("launches", 1), ("ms", added), ("own_ms", span.end - span.start)):
            kernel[key] += more
    return _told(list(kernels.values()), taken[-1][1] - min(span.start for span in ordered) if taken else 0.0)


def _told(kernels: list[Row], whole: float) -> Row:
    """Give kernels, the longest first, and the time of the whole, with what none of them took."""
    kernels.sort(key=lambda kernel: -kernel["ms"])
    idle = max(0.0, whole - sum(kernel["ms"] for kernel in kernels))
    return {"whole_ms": whole, "idle_ms": idle, "kernels": kernels}


# --------------------------------------------------------------------------------------------------------------------
# What kernels are for
# --------------------------------------------------------------------------------------------------------------------


@cache
def own_kernels() -> dict[str, str]:
    """Name what each of our kernels is for; those without a purpose of their own are told by name."""
    found: dict[str, str] = {}
    for place, purpose in PURPOSES.items() if HAS_TRITON else ():
        for name, value in vars(import_module(f"pyramidion.{place}")).items():
            if getattr(getattr(value, "fn", None), "__module__", "").endswith(place):
                found[name] = purpose or name
    return found


def part_of(name: str) -> str:
    """Say what a kernel is for."""
    if name in own_kernels():
        return own_kernels()[name]
    return next((part for part, pattern in LIBRARIES.items() if re.search(pattern, name)), REST)


def parts(row: Row) -> list[Row]:
    """Sum the kernels of a row by what they are for, the longest first, and behind them the time nothing ran."""
    found: dict[str, Row] = {}
    for kernel in row["kernels"]:
        part = found.setdefault(part_of(kernel["name"]), {"launches": 0, "ms": 0.0, "own_ms": 0.0})
        for key in part:
            part[key] += kernel[key]
    lines = [{"part": name, **part} for name, part in sorted(found.items(), key=lambda one: -one[1]["ms"])]
    return [_shared(line, row) for line in [*lines, {"part": IDLE, "ms": row["idle_ms"]}]]


def _shared(line: Row, row: Row) -> Row:
    """Add a line's share of the whole, and what one launch takes."""
    each = {"each": line["ms"] / line["launches"]} if line.get("launches") else {}
    return line | each | {"share": line["ms"] / row["whole_ms"] if row["whole_ms"] else 0.0}


# --------------------------------------------------------------------------------------------------------------------
# Report
# --------------------------------------------------------------------------------------------------------------------


def heading(row: Row) -> str:
    """Name a case."""
    what = MEASURES[row["measure"]]
    if row["measure"] in BEAMS:
        return f"{row['model']}, {row['tokens']} tokens, {what}, batch {row['batch']}"
    return named(f"{row['model']}, {what}, batch {row['batch']}, dropout of the {row['dropout']}", row["how"])


def sections(document: Mapping[str, Any]) -> Iterator[str]:
    """Tell of each case where its time goes, and which kernels took longest."""
    settings = document["settings"]
    yield (
        f"Documents of {settings['n']:,} tokens, {settings['dtype']}, random weights. Each case is timed first, as the "
        f"median of calls without the profiler, and then looked at once. ms is what a kernel added, its time without "
        f"that in which one ran that ended before it, so that all add up to the whole where kernels overlap; *by "
        f"itself* is all of its time. {IDLE.capitalize()} is when no kernel ran; on a CPU, where kernels are torch's "
        f"operators, it is Python."
    )
    for row in _measured(document):
        whole = f"{rows.milliseconds(row['ms'])} without the profiler, {rows.milliseconds(row['whole_ms'])} under it."
        longest = [_shared(kernel | {"part": part_of(kernel["name"])}, row) for kernel in row["kernels"][:SHOWN]]
        lines = [kernel | {"name": f"`{short(kernel['name'])}`"} for kernel in longest]
        yield (
            f"## {heading(row)}\n\n{whole}\n\n{report.markdown_table(parts(row), PARTS)}\n\n"
            f"The longest of {len(row['kernels'])} kernels:\n\n{report.markdown_table(lines, LONGEST)}"
        )
    skipped = [row for row in document["rows"] if "skipped" in row]
    if skipped:
        yield "## Not measured\n\n" + "\n".join(f"- {heading(row)}: {row['skipped']}" for row in skipped)


def short(name: str, most: int = 72) -> str:
    """Cut a kernel's name, which may be a page of templates, and leave no sign that would end a cell."""
    plain = name.replace("|", "/").replace("`", "'")
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def _measured(document: Mapping[str, Any]) -> list[Row]:
    return [row for row in document["rows"] if "kernels" in row]


def figures(document: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw where the time of each case goes, one figure for training and one for writing, our own kernels in colour."""
    drawn = []
    for what, title in (("train", "A training step"), ("write", "Writing")):
        found = [row for row in _measured(document) if (row["measure"] == "train") == (what == "train")]
        if found:
            note = f"{document['machine']['device']}; {document['settings']['n']:,} tokens in, {found[0]['dtype']}"
            path = folder / f"{stem}_{what}.png"
            text = {"label": "milliseconds", "title": f"{title}: where the time goes", "note": note}
            drawn.append(rows.write_bars_figure(path, _panels(found), **text))
    return drawn


def _panels(found: Sequence[Row]) -> dict[str, list[rows.Bar]]:
    """Give each case the same bars, in the order of their sum."""
    each = {heading(row): {line["part"]: line["ms"] for line in parts(row)} for row in found}
    total: dict[str, float] = {}
    for times in each.values():
        for part, ms in times.items():
            total[part] = total.get(part, 0.0) + ms
    order = sorted(total, key=lambda part: -total[part])
    ours = {part_of(kernel["name"]) for row in found for kernel in row["kernels"] if kernel["name"] in own_kernels()}
    return {
        name.replace(", ", "\n"): [(part, times.get(part, 0.0), part in ours) for part in order]
        for name, times in each.items()
    }
