"""Writing: time a token, through our engine and through transformers' `generate`, and how near the limit that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pyramidion.bench import measure, peers, report, rows
from pyramidion.bench.models import CACHES, Bench, in_order
from pyramidion.bench.peers import Candidate
from pyramidion.bench.report import Column
from pyramidion.bench.rows import Row, Sheet, Tell
from pyramidion.kernels.launching import choose_device

TITLE = "Writing"
WRITERS = ("engine", "transformers")
COLUMNS = (
    *(Column("model", "model"), Column("writer", "written by"), Column("way", "best way")),
    *(Column("ms", "with encoding, ms", "3"), Column("encode_ms", "encoding, ms", "3")),
    *(Column("alone_ms", "without, ms", "3"), Column("token_ms", "ms a token", "3")),
    *(Column("limit_ms", "bandwidth limit, ms a token", "3"), Column("share", "of the limit, %", ".1f", 100)),
    *(Column("ratio", "× ours", ".2f"), Column("gib", "GiB", "3")),
)


@dataclass(frozen=True)
class Settings:
    """What to measure. `budget` is the seconds one call may take, `limit` those after which no row is begun."""

    device: str
    scale: str
    models: tuple[str, ...]
    n: int
    tokens: int
    batches: tuple[int, ...]
    beams: tuple[int, ...] = (1, 2)
    writers: tuple[str, ...] = WRITERS
    caches: tuple[str, ...] = CACHES
    dtype: str = "float32"
    repeats: int = 5
    budget: float = 60.0
    limit: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rows.check(self, n=64, tokens=1, batches=1, beams=1, repeats=1)
        rows.check_names("writers", self.writers, WRITERS)
        rows.check_names("caches", self.caches, CACHES)
        rows.check_names("dtype", (self.dtype,), tuple(rows.DTYPES))
        rows.check_names("models", self.models, peers.names(self.scale))


def default_settings(device: str = "auto", *, quick: bool = False, **given: Any) -> Settings:
    """Fill in what suits the device."""
    device = choose_device(device).type
    usual: dict[str, Any] = {"scale": "small", "n": 4096, "tokens": 64, "batches": (1, 4)}
    if device == "cuda":
        usual = {"scale": "deep", "n": 8192, "tokens": 512, "batches": (1, 8, 32), "dtype": "bfloat16", "repeats": 7}
    if quick:
        usual |= {"scale": "tiny", "n": 256, "tokens": 8, "batches": (1, 2), "repeats": 2}
    usual["models"] = (*peers.names(usual["scale"])[:2], "led")
    return Settings(device=device, **usual | given)


def run(settings: Settings, sheet: Sheet, tell: Tell = lambda *_: None) -> None:
    """Measure every writer, then compare with the bytes that a token must read."""
    with rows.quiet(), rows.precision(settings.dtype):
        sheet.facts["copy_bandwidth"] = bandwidth = measure.copy_bandwidth(settings.device)
        found = [_candidate(name, settings).describe() for name in settings.models]
        sheet.facts["models"] = found
        sheet.fill(cases(settings), partial(measure_case, settings=settings, bandwidth=bandwidth), tell)
    sheet.save()


def _candidate(name: str, settings: Settings) -> Candidate:
    return peers.candidate(name, settings.scale, settings.n, settings.tokens)


def cases(settings: Settings) -> list[Row]:
    """List what is measured; those that are compared with each other follow each other."""
    found = []
    for batch, beams, name in product(settings.batches, settings.beams, settings.models):
        for writer in settings.writers:
            if writer == "engine" and name in peers.PEERS:
                continue
            case = {"model": name, "writer": writer, "batch": batch, "beams": beams, "n": settings.n}
            found.append(case | {"tokens": settings.tokens, "dtype": settings.dtype, "scale": settings.scale})
    return found


def measure_case(case: Row, settings: Settings, bandwidth: float) -> Row:
    """Time writing with encoding, and encoding alone; what writing itself takes is the difference."""
    candidate = _candidate(case["model"], settings)
    sizes = (case["n"], case["batch"], settings.device, settings.dtype, settings.repeats)
    bench = Bench(candidate, *sizes).within(settings.budget, settings.seed)
    usable, _ = peers.attentions(candidate)
    ways: dict[str, Callable[[], Row]] = {}
    writers = ["engine"] if case["writer"] == "engine" else [f"{cache} cache" for cache in settings.caches]
    for attention, writer in product(usable, writers):
        ways[f"{attention}, {writer}"] = partial(bench.write, attention, case["tokens"], case["beams"], writer)
    row = rows.best_of(ways, settings.device)
    if "skipped" in row:
        return row
    rows.free(settings.device)
    encoding = bench.encode(str(row["way"]).partition(",")[0])
    read = step_bytes(candidate, case["n"], case["tokens"], case["batch"], case["beams"], _width(settings.dtype))
    return row | account(row["ms"], encoding["ms"], case["tokens"], read, bandwidth)


def _width(dtype: str) -> int:
    return rows.DTYPES[dtype].itemsize


def account(ms: float, encode_ms: float, tokens: int, read: float, bandwidth: float) -> Row:
    """Take encoding off, and say what share of the bandwidth limit the rest reaches.

    On a busy machine encoding by itself may have taken longer than all: then nothing is said of the rest.
    """
    alone, limit = ms - encode_ms, read / bandwidth * 1e3
    told: Row = {"encode_ms": encode_ms, "bytes_a_token": round(read), "limit_ms": limit}
    if alone <= 0:
        return told
    return told | {"alone_ms": alone, "token_ms": alone / tokens, "share": limit * tokens / alone}


def step_bytes(candidate: Candidate, n: int, tokens: int, batch: int, beams: int, width: int) -> float:
    """Count the bytes that one token must read, on average, if everything is read once.

    The decoder's weights, but for the keys and values of cross-attention, which are computed once; the table of the
    head; the cache of the memory, once a document; that of the tokens so far, once a beam.
    """
    config = candidate.config
    d, layers = config.hidden_size, config.num_hidden_layers if candidate.ours else _decoder_layers(config)
    wide = config.intermediate_size if candidate.ours else getattr(config, "decoder_ffn_dim", None) or config.d_ff
    memory = min(n, config.memory_length) if candidate.ours and config.poolings else n
    weights = layers * (6 * d * d + 2 * d * wide) + config.vocab_size * d
    cached = 2 * layers * d * batch * (memory + beams * (tokens - 1) / 2)
    return width * (weights + cached)


def _decoder_layers(config: Any) -> int:
    return int(getattr(config, "num_decoder_layers", None) or config.decoder_layers)


# --------------------------------------------------------------------------------------------------------------------
# Report
# --------------------------------------------------------------------------------------------------------------------


def _search(beams: int) -> str:
    return "greedy" if beams == 1 else f"beam {beams}"


def parts(document: Mapping[str, Any]) -> dict[tuple[int, int], list[Row]]:
    """Part rows by batch and beams, with the time over that of our engine; in order, whenever each was measured."""
    found: dict[tuple[int, int], list[Row]] = {}
    names = in_order(document["rows"], document["settings"])
    for row in sorted(document["rows"], key=lambda row: (names.index(row["model"]), WRITERS.index(row["writer"]))):
        found.setdefault((row["batch"], row["beams"]), []).append(row)
    ours = f"{document['settings']['scale']}-pyramidion"
    for key, part in found.items():
        base = next((row.get("ms") for row in part if (row["model"], row["writer"]) == (ours, "engine")), None)
        found[key] = [row | ({"ratio": row["ms"] / base} if base and "ms" in row else {}) for row in part]
    return dict(sorted(found.items()))


def sections(document: Mapping[str, Any]) -> Iterator[str]:
    """Tell how long writing takes, batch by batch."""
    settings = document["settings"]
    yield (
        f"{settings['tokens']} tokens, always that many, from documents of {settings['n']:,} tokens; random weights, "
        f"{settings['dtype']}; medians. Without encoding is the difference to encoding alone, measured in the same "
        f"run. The limit is what one token must read if all is read once (the decoder's weights, the head, the cache "
        f"of the memory once a document, that of the tokens so far once a beam) over the copy bandwidth, "
        f"{document['copy_bandwidth'] / 1e9:,.4g} GB/s here. × ours is the time with encoding over that of "
        f"{settings['scale']}-pyramidion through its engine."
    )
    for (batch, beams), found in parts(document).items():
        yield f"## Batch {batch}, {_search(beams)}\n\n{report.markdown_table(found, COLUMNS)}"


def figures(document: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw the time with encoding, one figure for each search, one panel for each batch."""
    settings, found, drawn = document["settings"], parts(document), []
    names = list(dict.fromkeys((row["model"], row["writer"]) for part in found.values() for row in part))
    for beams in dict.fromkeys(beams for _, beams in found):
        panels = {}
        for batch in (batch for batch, width in found if width == beams):
            by_name = {(row["model"], row["writer"]): row.get("ms") for row in found[batch, beams]}
            bars = [(f"{model}, {writer}", by_name.get((model, writer)), writer == "engine") for model, writer in names]
            panels[f"batch {batch}"] = bars
        drawn.append(
            rows.write_bars_figure(
                folder / f"{stem}_{_search(beams).replace(' ', '')}.png",
                panels,
                label="milliseconds",
                title=f"Writing {settings['tokens']} tokens, {_search(beams)}, encoding included",
                note=f"{document['machine']['device']}; {settings['n']:,} tokens in, {settings['dtype']}",
            )
        )
    return drawn
