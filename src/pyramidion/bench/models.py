"""Our models beside their peers: a training step, encoding, and writing, in time and memory, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyramidion.bench import peers, report, rows
from pyramidion.bench.peers import Candidate
from pyramidion.bench.report import Column
from pyramidion.bench.rows import Row, Sheet, Skipped, Tell
from pyramidion.generation import engine
from pyramidion.kernels.launching import choose_device
from pyramidion.training.capture import CapturedStep

TITLE = "Models beside their peers"
MEASURES = {"train": "training step", "encode": "encoding", "greedy": "greedy", "beam": "beam 2"}
BEAMS = {"greedy": 1, "beam": 2}
CACHES = ("dynamic", "static")  # of transformers' `generate`; with the static one it compiles what can be compiled
COMPILED, CAPTURED = "compiled", "captured"
FIRST_TOKEN = 3  # below are padding, start and end, in every model
MODELS = (
    Column("model", "model"),
    Column("class", "class of transformers"),
    Column("parameters", "parameters, M", ".1f", 1e-6),
    Column("without_positions", "without tables of positions, M", ".1f", 1e-6),
    Column("attention", "attention"),
)
WAYS = (
    *(Column("model", "model"), Column("measure", "measured"), Column("way", "way"), Column("ms", "ms", "3")),
    *(Column("quartiles", "quartiles, ms"), Column("gib", "GiB", "3"), Column("counts", "")),
)


@dataclass(frozen=True)
class Settings:
    """What to measure. `budget` is the seconds one call may take, `limit` those after which no row is begun.

    target  tokens of a summary in training
    tokens  tokens that are written, always that many
    caches  of peers that are tried; compiling for the static one may take minutes
    """

    device: str
    scale: str
    models: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    measures: tuple[str, ...] = tuple(MEASURES)
    dtype: str = "float32"
    target: int = 32
    tokens: int = 32
    caches: tuple[str, ...] = CACHES
    compile: bool = False
    repeats: int = 5
    budget: float = 30.0
    limit: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rows.check(self, lengths=64, batches=1, target=1, tokens=1, repeats=1)
        rows.check_names("measures", self.measures, tuple(MEASURES))
        rows.check_names("caches", self.caches, CACHES)
        rows.check_names("dtype", (self.dtype,), tuple(rows.DTYPES))
        rows.check_names("models", self.models, peers.names(self.scale))


def default_settings(device: str = "auto", *, quick: bool = False, **given: Any) -> Settings:
    """Fill in what suits the device: the paper's deep size on a GPU, a small one on a CPU."""
    device = choose_device(device).type
    usual: dict[str, Any] = {"scale": "small", "lengths": (1024, 4096), "batches": (1,), "budget": 20.0}
    if device == "cuda":
        usual = {"scale": "deep", "lengths": (2048, 8192, 16384), "batches": (1, 8), "dtype": "bfloat16"}
        usual |= {"target": 512, "tokens": 128, "repeats": 7}
    if quick:
        usual |= {"scale": "tiny", "lengths": (256,), "batches": (2,), "target": 8, "tokens": 8, "repeats": 2}
    usual["models"] = peers.names(usual["scale"])
    return Settings(device=device, **usual | given)


def run(settings: Settings, sheet: Sheet, tell: Tell = lambda *_: None) -> None:
    """Measure every model in every way, one shape after the other."""
    longest = max(settings.lengths)
    with rows.quiet(), rows.precision(settings.dtype):
        found = [_candidate(name, settings, longest).describe() for name in settings.models]
        sheet.facts["models"] = found
        sheet.fill(cases(settings), partial(measure_case, settings=settings), tell)
    sheet.save()


def cases(settings: Settings) -> list[Row]:
    """List what is measured; those that are compared with each other follow each other."""
    found = []
    for n, batch, what, name in product(settings.lengths, settings.batches, settings.measures, settings.models):
        case = {"model": name, "measure": what, "n": n, "batch": batch, "dtype": settings.dtype}
        count = settings.target if what == "train" else 0 if what == "encode" else settings.tokens
        found.append(case | {"tokens": count, "scale": settings.scale, "compile": settings.compile})
    return found


def _candidate(name: str, settings: Settings, n: int) -> Candidate:
    return peers.candidate(name, settings.scale, n, max(settings.target, settings.tokens))


def measure_case(case: Row, settings: Settings) -> Row:
    """Measure one model doing one thing, in each way it can be done."""
    candidate = _candidate(case["model"], settings, case["n"])
    bench = Bench(candidate, case["n"], case["batch"], settings.device, settings.dtype, settings.repeats)
    bench = bench.within(settings.budget, settings.seed)
    usable, _ = peers.attentions(candidate)
    ways: dict[str, Callable[[], Row]] = {}
    for attention in usable:
        if case["measure"] in BEAMS:
            writers = ("engine",) if candidate.ours else tuple(f"{cache} cache" for cache in settings.caches)
            for writer in writers:
                work = partial(bench.write, attention, case["tokens"], BEAMS[case["measure"]], writer)
                ways[f"{attention}, {writer}"] = work
            continue
        for how in manners(settings.device, compiled=settings.compile):
            if case["measure"] == "train":
                ways[named(attention, how)] = partial(bench.train, attention, case["tokens"], how=how)
            elif how != CAPTURED:
                ways[named(attention, how)] = partial(bench.encode, attention, compiled=how == COMPILED)
    return rows.best_of(ways, settings.device)


def manners(device: str, *, compiled: bool = False) -> tuple[str, ...]:
    """List how a step may be done: as it stands, compiled if that is asked for, on a GPU recorded and replayed too."""
    return ("", *((COMPILED,) if compiled else ()), *((CAPTURED,) if device == "cuda" else ()))


def named(attention: str, how: str) -> str:
    """Name a way of doing something."""
    return f"{attention}, {how}" if how else attention


# --------------------------------------------------------------------------------------------------------------------
# One measurement
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """One model and one batch of documents, on which things are done by the clock; `also` looks at them once more."""

    candidate: Candidate
    n: int
    batch: int
    device: str
    dtype: str
    repeats: int
    budget: float = 30.0
    seed: int = 0
    recompute: bool = False
    also: Callable[[Callable[[], object]], Row] | None = None

    def within(self, budget: float, seed: int = 0) -> Bench:
        """Give the same with another budget and seed."""
        return replace(self, budget=budget, seed=seed)

    def train(self, attention: str, target: int, *, how: str = "") -> Row:
        """Time forward, backward and the step of the optimizer, done in one of the `manners`."""
        model = self.candidate.build(self.device, attention, seed=self.seed).train()
        if self.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        ids, labels = self._tokens(self.n), self._tokens(target)
        step = training_step(model, optimizer, ids, labels, rows.DTYPES[self.dtype], how=how)
        held = 3 * peers.module_bytes(model)  # weights, and two moments of each
        return self._clock(step, held, patient=how == COMPILED, warmup=int(how == CAPTURED))

    def encode(self, attention: str, *, compiled: bool = False) -> Row:
        """Time the encoder alone, without a graph."""
        model = self._reader(attention)
        encode = encoding(model, self._tokens(self.n), compiled=compiled)
        return self._clock(encode, peers.module_bytes(model), patient=compiled)

    def write(self, attention: str, tokens: int, beams: int, writer: str) -> Row:
        """Time encoding and writing exactly `tokens` tokens."""
        model = self._reader(attention)
        return self._clock(writing(model, self._tokens(self.n), tokens, beams, writer), peers.module_bytes(model))

    def _reader(self, attention: str) -> Any:
        model = self.candidate.build(self.device, attention, seed=self.seed)
        return model.to(rows.DTYPES[self.dtype]).eval()

    def _tokens(self, count: int) -> Tensor:
        """Draw ids [b count] that are words, the same for every model."""
        generator = torch.Generator().manual_seed(self.seed + count)
        words = self.candidate.config.vocab_size
        return torch.randint(FIRST_TOKEN, words, (self.batch, count), generator=generator).to(self.device)

    def _clock(self, fn: Callable[[], object], held: int, **options: Any) -> Row:
        torch.manual_seed(self.seed)
        row = rows.clock(fn, device=self.device, budget=self.budget, repeats=self.repeats, held=held, **options)
        return row | (self.also(fn) if self.also else {})


def training_step(
    model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor, dtype: torch.dtype, *, how: str = ""
) -> Callable[[], None]:
    """Return one step: forward under autocast, backward, and the optimizer. Documents are full, so no mask is given."""
    forward = torch.compile(model) if how == COMPILED else model
    batch = {"input_ids": ids, "labels": labels}

    def learn(inputs: dict[str, Tensor]) -> Tensor:
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            loss: Tensor = forward(**inputs, use_cache=False).loss
        loss.backward()
        return loss

    recorded = CapturedStep(learn, model.parameters()) if how == CAPTURED else None

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (recorded or learn)(batch)
        if recorded is not None and recorded.refused:
            raise Skipped("its step waits for the device, and cannot be recorded")
        optimizer.step()

    return step


def encoding(model: Any, ids: Tensor, *, compiled: bool = False) -> Callable[[], object]:
    """Return the encoder's call."""
    encoder = model.get_encoder()
    encoder = torch.compile(encoder) if compiled else encoder

    def encode() -> object:
        with torch.no_grad():
            return encoder(input_ids=ids)

    return encode


def forced(tokens: int, beams: int, **options: Any) -> Any:
    """Ask for exactly `tokens` tokens: the end is suppressed until then."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, num_beams=beams, do_sample=False, use_cache=True, **options
    )


def writing(model: Any, ids: Tensor, tokens: int, beams: int, writer: str) -> Callable[[], None]:
    """Return the call that writes: through our engine, or transformers' `generate` with one cache or the other."""
    mask = torch.ones_like(ids)
    generation = forced(tokens, beams, **({"cache_implementation": "static"} if writer == "static cache" else {}))

    def transformers() -> Tensor:
        with torch.inference_mode():
            written: Tensor = model.generate(ids, attention_mask=mask, generation_config=generation)
        return written

    def write() -> None:
        written = engine.generate(model, ids, mask, generation) if writer == "engine" else transformers()
        if written.shape != (ids.shape[0], tokens + 1):  # the start token stands first
            raise Skipped(f"it wrote {written.shape[1] - 1} tokens where {tokens} were forced")

    return write


# --------------------------------------------------------------------------------------------------------------------
# Report
# --------------------------------------------------------------------------------------------------------------------


def sections(document: Mapping[str, Any]) -> Iterator[str]:
    """Tell what was measured, shape by shape."""
    settings = document["settings"]
    yield (
        f"Random weights, matched size. Training step: forward, backward and fused AdamW, {settings['target']} tokens "
        f"of target, {_precision(settings)}, the same dropout for all (LongT5's also within attention and "
        f"feed-forward). Encoding: without gradient. Greedy and beam 2: {settings['tokens']} tokens, always that many, "
        f"encoding included; ours through its engine, peers through `generate`. The same documents for all, full ones "
        f"without padding; medians after a warm-up. × is the time over that of {settings['scale']}-pyramidion, GiB the "
        f"peak with weights and optimizer. Each model counts in its best way; all ways tried stand at the end."
    )
    for (n, batch), found in shapes(document["rows"]).items():
        table = report.markdown_table(pivot(found, settings), pivot_columns(measures(document["rows"])))
        yield f"## {n:,} tokens, batch {batch}\n\n{table}"
    yield f"## Models\n\n{report.markdown_table([_told(model) for model in document['models']], MODELS)}"
    yield f"## Every way tried\n\n{report.markdown_table(list(ways(document['rows'])), WAYS)}"


def _precision(settings: Mapping[str, Any]) -> str:
    return "bfloat16 autocast" if settings["dtype"] == "bfloat16" else str(settings["dtype"])


def _told(model: Mapping[str, Any]) -> Row:
    refused = "; ".join(f"no {way}: {reason}" for way, reason in model["refused"].items())
    return {**model, "attention": f"{', '.join(model['attentions'])} ({refused})"}


def shapes(found: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """Part rows by length and batch."""
    parted: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(found, key=lambda row: (row["n"], row["batch"])):
        parted.setdefault((row["n"], row["batch"]), []).append(row)
    return parted


def measures(found: Sequence[Row]) -> list[str]:
    """List what rows are about, those of an earlier run included, as it is always listed."""
    return [what for what in MEASURES if any(row["measure"] == what for row in found)]


def pivot_columns(measured: Sequence[str]) -> tuple[Column, ...]:
    """List the columns of one shape: for each thing measured its time, its ratio and its memory."""
    columns = [Column("model", "model")]
    for what in measured:
        title = MEASURES[what]
        columns += [Column(what, f"{title}, ms", "3"), Column(f"{what}_ratio", "×", ".2f")]
        columns += [Column(f"{what}_gib", "GiB", "3")]
    return tuple(columns)


def pivot(found: Sequence[Row], settings: Mapping[str, Any]) -> list[Row]:
    """Bring the rows of one shape into one line for each model; what was skipped says why in its place."""
    base = {row["measure"]: row.get("ms") for row in found if row["model"] == f"{settings['scale']}-pyramidion"}
    lines: dict[str, Row] = {name: {"model": name} for name in in_order(found, settings)}
    for row in found:
        line, what = lines[row["model"]], row["measure"]
        if "skipped" in row:
            line[what] = row["skipped"]
            continue
        line |= {what: row["ms"], f"{what}_gib": row["gib"]}
        if base.get(what):
            line[f"{what}_ratio"] = row["ms"] / base[what]
    return list(lines.values())


def in_order(found: Sequence[Row], settings: Mapping[str, Any]) -> list[str]:
    """List the models that rows are about, those of an earlier run included, as they are always listed."""
    seen = {row["model"] for row in found}
    return [name for name in peers.names(settings["scale"]) if name in seen]


def ways(found: Sequence[Row]) -> Iterator[Row]:
    """List every way that was tried, and mark the one that counts."""
    for row in found:
        for way in row.get("ways", ()):
            where = f"{MEASURES[row['measure']]}, {row['n']:,} tokens, batch {row['batch']}"
            line = {"model": row["model"], "measure": where, **way}
            if "ms" in way:
                line["quartiles"] = f"{report.three_digits(way['lower_ms'])} to {report.three_digits(way['upper_ms'])}"
                line["counts"] = "counts" if way["way"] == row.get("way") else ""
            yield line


def figures(document: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw the time of each thing measured, at the largest batch, one panel for each length."""
    settings, found = document["settings"], document["rows"]
    batch, names = max((row["batch"] for row in found), default=0), in_order(found, settings)
    drawn = []
    for what in measures(found):
        panels = {}
        for (n, size), part in shapes([row for row in found if row["measure"] == what]).items():
            if size == batch:
                by_model = {row["model"]: row.get("ms") for row in part}
                panels[f"{report.thousands(n)} tokens"] = [(name, by_model.get(name), _ours(name)) for name in names]
        if panels:
            drawn.append(_draw(document, folder / f"{stem}_{what}.png", what, batch, panels))
    return drawn


def _ours(name: str) -> bool:
    return name not in peers.PEERS


def _draw(document: Mapping[str, Any], path: Path, what: str, batch: int, panels: Any) -> Path:
    settings = document["settings"]
    title = {"train": "One training step", "encode": "Encoding"}.get(what, f"Writing {settings['tokens']} tokens")
    how = f", {MEASURES[what]}" if what in BEAMS else ""
    note = f"{document['machine']['device']}; batch {batch}, {_precision(settings)}{how}"
    return rows.write_bars_figure(path, panels, label="milliseconds", title=title, note=note)


def settings_dict(settings: Any) -> dict[str, Any]:
    """Give settings as JSON has them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()}
