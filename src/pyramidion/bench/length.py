"""Time and memory of one training step against the length of a document, and the longest that can be trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyramidion.bench import measure, peers, report, rows
from pyramidion.bench.models import Bench, manners, named
from pyramidion.bench.report import Column
from pyramidion.bench.rows import OUT_OF_MEMORY, OVER_BUDGET, Row, Sheet, Skipped, Tell
from pyramidion.kernels.launching import choose_device

TITLE = "One training step against length"
GRAIN = 1024  # tokens by which the longest document is known at best
COLUMNS = (
    *(Column("n", "tokens", ","), Column("ms", "ms", "3"), Column("quartiles", "quartiles, ms")),
    *(Column("per_token", "µs a token", "3"), Column("gib", "GiB", "3"), Column("full_ratio", "full / this", ".2f")),
)
LONGEST = (
    *(Column("model", "model"), Column("n", "longest document, tokens", ","), Column("fails", "fails at", ",")),
    *(Column("seconds_a_step", "seconds a step", "3"), Column("bound", "what ends it")),
)
EVEN = (
    Column("model", "model"),
    Column("time", "faster than full attention from, tokens"),
    Column("memory", "less memory from, tokens"),
)


@dataclass(frozen=True)
class Settings:
    """What to measure. `budget` is the seconds one call may take, `limit` those after which no row is begun."""

    device: str
    scale: str
    forms: tuple[str, ...] = peers.FORMS
    shortest: int = 512
    most: int = 1 << 23
    dtype: str = "float32"
    target: int = 32
    batch: int = 1
    recompute: bool = False
    longest: bool = True
    within: float = 0.1
    repeats: int = 5
    budget: float = 20.0
    limit: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rows.check(self, shortest=64, most=self.shortest, target=1, batch=1, repeats=1, within=0.001)
        rows.check_names("models", self.forms, peers.FORMS)
        rows.check_names("dtype", (self.dtype,), tuple(rows.DTYPES))


def default_settings(device: str = "auto", *, quick: bool = False, **given: Any) -> Settings:
    """Fill in what suits the device."""
    device = choose_device(device).type
    usual: dict[str, Any] = {"scale": "small", "most": 16384, "budget": 10.0, "longest": False, "repeats": 3}
    if device == "cuda":
        usual = {"scale": "deep", "dtype": "bfloat16", "target": 512, "repeats": 7}
    if quick:
        usual |= {"scale": "tiny", "shortest": 64, "most": 2048, "target": 8, "repeats": 2, "budget": 2.0}
    return Settings(device=device, **usual | given)


def run(settings: Settings, sheet: Sheet, tell: Tell = lambda *_: None) -> None:
    """Double the length until it no longer fits, then look for the longest that does."""
    with rows.quiet(), rows.precision(settings.dtype):
        sheet.facts["models"] = [
            {"model": name, "parameters": peers.candidate(name, settings.scale, settings.shortest).parameters()[0]}
            for name in _names(settings)
        ]
        sheet.fill(cases(settings), lambda case: measure_case(case, settings, sheet.rows), tell)
    sheet.facts["break_even"] = summary(sheet.rows, settings)
    sheet.save()


def _names(settings: Settings) -> list[str]:
    return [f"{settings.scale}-{form}" for form in settings.forms]


def cases(settings: Settings) -> list[Row]:
    """List every length for every model, then the search for the longest."""
    shared = {"dtype": settings.dtype, "target": settings.target, "batch": settings.batch, "scale": settings.scale}
    shared |= {"recompute": settings.recompute}
    doublings = range(math.floor(math.log2(settings.most / settings.shortest)) + 1)
    lengths = [settings.shortest << step for step in doublings]
    found = [{"model": name, "n": n, "what": "step"} | shared for n in lengths for name in _names(settings)]
    if settings.longest:
        found += [{"model": name, "what": "longest"} | shared for name in _names(settings)]
    return found


def measure_case(case: Row, settings: Settings, earlier: Sequence[Row]) -> Row:
    """Measure one length, or search for the longest; `earlier` are the rows so far."""
    shared = {key: value for key, value in case.items() if key not in ("n", "what")}
    steps = [row for row in earlier if row["what"] == "step" and shared.items() <= row.items()]
    if case["what"] == "longest":
        return find_longest(case["model"], steps, settings)
    for row in steps:
        refuse_after(row, case["n"], settings)
    bench = bench_of(case["model"], case["n"], settings)
    hows = ("",) if settings.recompute else manners(settings.device)  # what is recomputed cannot be recorded
    ways = {named("sdpa", how): partial(bench.train, "sdpa", settings.target, how=how) for how in hows}
    return rows.best_of(ways, settings.device)


def refuse_after(row: Row, n: int, settings: Settings) -> None:
    """Skip `n` tokens where a shorter document says that they cannot be done."""
    if row["n"] < n and _final(row):
        raise Skipped(f"{_short(row)} at {row['n']} tokens already")
    if row["n"] * 2 != n or "ms" not in row:
        return
    if row["ms"] * 2 > settings.budget * 1e3:
        raise Skipped(f"{OVER_BUDGET} {row['ms'] / 1e3:.2g} s at {row['n']} tokens, twice that is over the budget")
    # A process that takes all of a CPU's memory is killed, so there it is not even tried.
    if settings.device == "cpu" and row["gib"] * 4 > 0.8 * measure.free_memory("cpu") / measure.GIBIBYTE:
        raise Skipped(f"{OUT_OF_MEMORY}: four times the {row['gib']:.1f} GiB of {row['n']} tokens may be needed")


def _final(row: Row) -> bool:
    said = str(row.get("skipped", ""))
    return said.startswith((OUT_OF_MEMORY, OVER_BUDGET, "over budget"))


def _short(row: Row) -> str:
    return OUT_OF_MEMORY if str(row["skipped"]).startswith(OUT_OF_MEMORY) else "over budget"


def bench_of(name: str, n: int, settings: Settings) -> Bench:
    """Put one document of `n` tokens before a model.

    The preset stays as it is: layers that pool cut to its lengths whatever comes, so that k is 512 at any n, and
    documents that are shorter are not pooled.
    """
    candidate = peers.candidate(name, settings.scale, settings.shortest)
    sizes = (n, settings.batch, settings.device, settings.dtype, settings.repeats)
    return Bench(candidate, *sizes, settings.budget, settings.seed, settings.recompute)


# --------------------------------------------------------------------------------------------------------------------
# The longest document
# --------------------------------------------------------------------------------------------------------------------


def find_longest(name: str, steps: Sequence[Row], settings: Settings) -> Row:
    """Bisect between the longest that was measured and the shortest that ran out of memory."""
    fits = max((row["n"] for row in steps if "ms" in row), default=0)
    fails = min((row["n"] for row in steps if row.get("skipped") == OUT_OF_MEMORY), default=None)
    if not fits:
        raise Skipped("no length was measured")
    if fails is None:
        ended = next((row["skipped"] for row in steps if "skipped" in row and row["n"] > fits), None)
        return {"n": fits, "bound": ended or f"the longest that was asked for, `most` = {settings.most}"}
    return bisect(partial(one_step, name, settings=settings), fits, fails, settings.within)


def one_step(name: str, n: int, *, settings: Settings) -> Row:
    """Train one step on `n` tokens, twice, since only the second has all that the optimizer keeps."""
    bench = bench_of(name, n, settings)
    row = rows.attempt(lambda: Bench(**{**bench.__dict__, "repeats": 1}).train("sdpa", settings.target))
    rows.free(settings.device)
    return row


def bisect(step: Any, fits: int, fails: int, within: float) -> Row:
    """Narrow the gap between a length that fits and one that does not to the share `within`."""
    tried: list[Row] = []
    last: Row = {}
    bound = OUT_OF_MEMORY
    while fails - fits > max(GRAIN, within * fits):
        middle = (fits + fails) // 2 // GRAIN * GRAIN
        if middle <= fits:
            break
        row = step(middle)
        tried.append({"n": middle, **{key: row[key] for key in ("ms", "gib", "skipped") if key in row}})
        if "skipped" in row:
            fails, bound = middle, row["skipped"]
        else:
            fits, last = middle, row
    found = {"n": fits, "fails": fails, "bound": bound, "tried": tried}
    return found | ({"seconds_a_step": last["ms"] / 1e3, "gib": last["gib"]} if last else {})


# --------------------------------------------------------------------------------------------------------------------
# Break-even
# --------------------------------------------------------------------------------------------------------------------


def summary(found: Sequence[Row], settings: Settings) -> list[Row]:
    """Say from which length on each model is cheaper than full attention, in time and in memory."""
    steps = [row for row in found if row["what"] == "step" and row["recompute"] == settings.recompute and "ms" in row]
    steps = [row for row in steps if row["scale"] == settings.scale and row["dtype"] == settings.dtype]
    by_model = {name: {row["n"]: row for row in steps if row["model"] == name} for name in _names(settings)}
    full = by_model.pop(f"{settings.scale}-full", {})
    told = []
    for name, own in by_model.items():
        line: Row = {"model": name}
        for what, key in (("time", "ms"), ("memory", "gib")):
            costs = {n: (own[n][key], full[n][key]) for n in sorted(own) if n in full}
            line[f"{what}_n"] = break_even(costs)
            line[what] = _told(line[f"{what}_n"], costs)
        told.append(line)
    return told


def break_even(costs: Mapping[int, tuple[float, float]]) -> float | None:
    """Find the length from which on the first cost stays below the second: None where it does not.

    Between the last length at which it is not and the next, both are taken for powers of n. Where it is below from the
    first length on, that is given: the true one may be shorter.
    """
    lengths = sorted(costs)
    behind = [n for n in lengths if costs[n][0] >= costs[n][1]]
    if not lengths or (behind and behind[-1] == lengths[-1]):
        return None
    if not behind:
        return float(lengths[0])
    low = behind[-1]
    high = lengths[lengths.index(low) + 1]
    gaps = [math.log(costs[n][0] / costs[n][1]) for n in (low, high)]  # from at least 0 to below 0
    share = gaps[0] / (gaps[0] - gaps[1])
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def _told(n: float | None, costs: Mapping[int, tuple[float, float]]) -> str:
    if not costs:
        return "not measured"
    if n is None:
        return f"not up to {max(costs):,}"
    return f"at most {n:,.0f}, the shortest" if n == min(costs) else f"about {n:,.0f}"


# --------------------------------------------------------------------------------------------------------------------
# Report
# --------------------------------------------------------------------------------------------------------------------


def sections(document: Mapping[str, Any]) -> Iterator[str]:
    """Tell the break-even, the longest document, and every length."""
    settings, found = document["settings"], document["rows"]
    activations = "recomputed in the backward pass" if settings["recompute"] else "kept"
    yield (
        f"Forward, backward and fused AdamW on {settings['batch']} document{'s' * (settings['batch'] > 1)}, "
        f"{settings['dtype']}, {settings['target']} tokens of target, activations {activations}; medians. The presets "
        f"stay as they are at every length: a layer that pools cuts to its own length, and a document that is shorter "
        f"is not pooled, so that short lengths show what pooling costs where it does not pay. Full attention is the "
        f"same model with SDPA over all tokens, FlashAttention where torch has it. GiB is the peak with weights and "
        f"optimizer."
    )
    yield f"## Break-even against full attention\n\n{report.markdown_table(document['break_even'], EVEN)}"
    if longest := [row for row in found if row["what"] == "longest"]:
        yield f"## Longest document in one step\n\n{report.markdown_table(longest, LONGEST)}"
    steps = [row for row in found if row["what"] == "step"]
    full = {(row["n"], row["recompute"]): row.get("ms") for row in steps if row["model"].endswith("-full")}
    for model in dict.fromkeys(row["model"] for row in steps):
        lines = [_line(row, full) for row in steps if row["model"] == model]
        yield f"## {model}\n\n{report.markdown_table(sorted(lines, key=lambda row: row['n']), COLUMNS)}"


def _line(row: Row, full: Mapping[tuple[int, bool], float | None]) -> Row:
    if "ms" not in row:
        return row
    other = full.get((row["n"], row["recompute"]))
    told = {"quartiles": f"{report.three_digits(row['lower_ms'])} to {report.three_digits(row['upper_ms'])}"}
    told |= {"per_token": row["ms"] * 1e3 / row["n"]}
    return row | told | ({"full_ratio": other / row["ms"]} if other else {})


def figures(document: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw time and memory against length."""
    settings = document["settings"]
    steps = [row for row in document["rows"] if row["what"] == "step" and "ms" in row]
    steps = [row | {"activations": "recomputed" if row["recompute"] else "kept"} for row in steps]
    if not steps:
        return []
    note = f"{document['machine']['device']}; batch {settings['batch']}, {settings['dtype']}"
    shared: dict[str, Any] = {"x": "n", "styles": "activations", "colours": "model", "note": note, "log_y": True}
    time = ("tokens of the document", "seconds a training step")
    memory = ("tokens of the document", "GiB, peak")
    path = folder / f"{stem}_time.png"
    return [
        report.write_lines_figure(path, steps, y="ms", factor=1e-3, labels=time, title="Time against length", **shared),
        report.write_lines_figure(
            folder / f"{stem}_memory.png", steps, y="gib", labels=memory, title="Memory against length", **shared
        ),
    ]
