"""The paper's timing tables, whole: every row's training and writing, beside what the paper printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyramidion.bench import peers, report, rows
from pyramidion.bench.models import COMPILED, Bench, named
from pyramidion.bench.peers import Candidate
from pyramidion.bench.report import Column
from pyramidion.bench.rows import OUT_OF_MEMORY, Row, Sheet, Tell
from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.kernels.launching import choose_device
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration
from pyramidion.presets import PRESETS, find, preset

TITLE = "The paper's timing tables"
PARTS = ("rows", "depth")
PAPER_COLUMNS = {"train": "train_s", "write-256": "infer256_s", "write-512": "infer512_s"}
CLAIMS = {"train": 1.8, "write-512": 4.5}  # deep-pyramidion over deep-blockwise, as the abstract says
DEEP = ("deep-blockwise", "deep-pyramidion")
FAMILIES = ("vanilla", "blockwise", "pyramidion 8k → 512")
SPEEDUPS = (
    *(Column("what", "deep-pyramidion over deep-blockwise"), Column("dtype", "numbers")),
    *(Column("blockwise_s", "blockwise, s", "3"), Column("pyramidion_s", "pyramidion, s", "3")),
    *(Column("times", "times faster", ".2f"), Column("paper", "the paper", ".1f")),
)


@dataclass(frozen=True)
class Settings:
    """What to measure. `budget` is the seconds one call may take, `limit` those after which no row is begun.

    dtypes  of numbers, the fastest last; depth is measured in that one alone
    shrink  divides every length and block, for a small machine; 1 is the paper
    width   of every model where it is given, with few words and two decoder layers: to see it work, nothing else
    """

    device: str
    presets: tuple[str, ...]
    parts: tuple[str, ...] = PARTS
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    train_batch: int = 64
    write_batch: int = 8
    target: int = 512
    tokens: tuple[int, ...] = (256, 512)
    depths: tuple[int, ...] = (2, 4, 6, 8, 12, 16)
    compile: bool = False
    repeats: int = 7
    budget: float = 60.0
    limit: float | None = None
    shrink: int = 1
    width: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rows.check(self, train_batch=1, write_batch=1, target=1, tokens=1, depths=2, repeats=1, shrink=1)
        rows.check_names("parts", self.parts, PARTS)
        rows.check_names("dtypes", self.dtypes, tuple(rows.DTYPES))
        for name in self.presets:
            find(name)


def paper_presets() -> tuple[str, ...]:
    """List the presets that the paper has figures of, each once."""
    return tuple(name for name, one in PRESETS.items() if one.paper is not None and one.name == name)


def default_settings(device: str = "auto", *, quick: bool = False, **given: Any) -> Settings:
    """Fill in what suits the device: the paper's shapes on a GPU, an eighth of its lengths on a CPU."""
    device = choose_device(device).type
    usual: dict[str, Any] = {"presets": paper_presets()}
    if device == "cpu":
        usual |= {"shrink": 8, "train_batch": 2, "write_batch": 2, "target": 64, "dtypes": ("float32",), "repeats": 3}
    if quick:
        usual |= {"shrink": 64, "train_batch": 2, "write_batch": 2, "target": 8, "dtypes": ("float32",), "repeats": 2}
        usual |= {"width": 64, "presets": ("row-5", "row-24", *DEEP), "tokens": (4, 8), "depths": (2, 4)}
    return Settings(device=device, **usual | given)


def run(settings: Settings, sheet: Sheet, tell: Tell = lambda *_: None) -> None:
    """Measure every case that has no row yet."""
    with rows.quiet():
        sheet.fill(cases(settings), partial(measure_case, settings=settings), tell)
    sheet.facts["speedups"] = speedups(sheet.rows, settings.tokens)
    sheet.facts["parameters"] = {name: find(name).parameters for name in settings.presets}
    sheet.save()


# --------------------------------------------------------------------------------------------------------------------
# What is measured
# --------------------------------------------------------------------------------------------------------------------


def cases(settings: Settings) -> list[Row]:
    """List the rows of the tables, then those of the figure; the deep pair first, since all quote it."""
    found: list[Row] = []
    names = dict.fromkeys(find(name).name for name in settings.presets)
    ordered = sorted(names, key=lambda name: name not in DEEP)
    fastest = settings.dtypes[-1]
    for dtype in reversed(settings.dtypes):
        if "rows" in settings.parts:
            for name in ordered:
                found += _of_preset(name, dtype, settings)
        if "depth" in settings.parts and dtype == fastest:
            found += _of_depths(dtype, settings)
    shared = {"shrink": settings.shrink, "width": settings.width, "compile": settings.compile}
    return [case | shared for case in found]


def _of_preset(name: str, dtype: str, settings: Settings) -> Iterator[Row]:
    case: Row = {"part": "rows", "preset": name, "dtype": dtype}
    yield case | {"what": "train", "batch": settings.train_batch, "tokens": settings.target}
    for tokens in settings.tokens:
        yield case | {"what": "write", "batch": settings.write_batch, "tokens": tokens}


def _of_depths(dtype: str, settings: Settings) -> Iterator[Row]:
    for depth in settings.depths:
        for family in FAMILIES:
            case: Row = {"part": "depth", "preset": family, "dtype": dtype, "depth": depth, "what": "train"}
            yield case | {"batch": settings.train_batch, "tokens": settings.target}


def depth_config(family: str, depth: int) -> PyramidionConfig:
    """Make an encoder of `depth` layers over 8192 tokens, at the paper's shallow width, with its two decoder layers.

    The Pyramidion is row 21 with two layers, and from three on row 22, its last length repeated.
    """
    name, lengths = {"vanilla": ("row-3", [8192] * depth), "blockwise": ("row-5", [8192] * depth)}.get(
        family, ("row-22", [8192, 2048, *[512] * (depth - 2)])
    )
    changes: dict[str, Any] = {"encoder_lengths": lengths}
    if family == FAMILIES[2] and depth == 2:
        changes = {"encoder_lengths": [2048, 512], "input_length": 8192}
    return preset(name, **changes)


def shrunk(config: PyramidionConfig, factor: int, width: int | None = None) -> PyramidionConfig:
    """Divide the lengths and the blocks, and narrow the model, for a machine that cannot do the paper's."""
    if factor == 1 and width is None:
        return config
    changed = config.to_dict() | {"encoder_lengths": [max(1, n // factor) for n in config.encoder_lengths]}
    if config.input_length is not None:
        changed["input_length"] = config.input_length // factor
    changed |= {"block_size": max(8, config.block_size // factor), "bucket_size": max(4, config.bucket_size // factor)}
    if width is not None:
        changed |= {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 1024, "decoder_layers": 2}
    return PyramidionConfig.from_dict(changed | {"local_window": max(4, config.local_window // factor)})


def measure_case(case: Row, settings: Settings) -> Row:
    """Measure one row."""
    config = depth_config(case["preset"], case["depth"]) if case["part"] == "depth" else preset(case["preset"])
    config = shrunk(config, settings.shrink, settings.width)
    candidate = Candidate(case["preset"], PyramidionForConditionalGeneration, config)
    sizes = (config.entering[0], case["batch"], settings.device, case["dtype"], settings.repeats)
    bench = Bench(candidate, *sizes).within(settings.budget, settings.seed)
    facts: Row = {"n": config.entering[0], "parameters": candidate.parameters()[0]}
    with rows.precision(case["dtype"]):
        if case["what"] == "train":
            return facts | train_scaled(bench, case["tokens"], ("", COMPILED) if settings.compile else ("",))
        usable, _ = peers.attentions(candidate)
        ways = {f"{way}, engine": partial(bench.write, way, case["tokens"], 1, "engine") for way in usable}
        return facts | rows.best_of(ways, settings.device)


def train_scaled(bench: Bench, target: int, hows: Sequence[str]) -> Row:
    """Train on the batch, or on the largest power of two that fits, scaled to the batch and marked so."""
    size = bench.batch
    while True:
        smaller = replace(bench, batch=size)
        usable, _ = peers.attentions(bench.candidate)
        ways = {named(way, how): partial(smaller.train, way, target, how=how) for way in usable for how in hows}
        row = rows.best_of(ways, bench.device)
        if row.get("skipped") != OUT_OF_MEMORY or size == 1:
            break
        size = 1 << (size - 1).bit_length() - 1
    row["measured_batch"] = size
    if size < bench.batch and "skipped" not in row:
        row["scaled"] = bench.batch / size
        row |= {key: row[key] * row["scaled"] for key in ("ms", "lower_ms", "upper_ms")}
    return row


# --------------------------------------------------------------------------------------------------------------------
# Report
# --------------------------------------------------------------------------------------------------------------------


def _key(row: Row) -> str:
    return "train" if row["what"] == "train" else f"write-{row['tokens']}"


def speedups(found: Sequence[Row], tokens: Sequence[int]) -> list[Row]:
    """Compute again what the paper says of deep-pyramidion: how many times faster than deep-blockwise it is."""
    told = []
    for key in ("train", *(f"write-{count}" for count in tokens)):
        for dtype in dict.fromkeys(row["dtype"] for row in found):
            pair = {
                row["preset"]: row["ms"] / 1e3
                for row in found
                if row["part"] == "rows" and _key(row) == key and row["dtype"] == dtype and "ms" in row
            }
            if set(DEEP) <= set(pair):
                what = "training" if key == "train" else f"writing {key.partition('-')[2]} tokens"
                line = {"what": what, "dtype": dtype, "blockwise_s": pair[DEEP[0]], "pyramidion_s": pair[DEEP[1]]}
                told.append(line | {"times": pair[DEEP[0]] / pair[DEEP[1]], "paper": CLAIMS.get(key)})
    return told


def paper_lines(document: Mapping[str, Any]) -> list[Row]:
    """Bring the rows into one line for each preset, the paper's seconds beside ours."""
    lines: dict[str, Row] = {}
    for row in document["rows"]:
        if row["part"] != "rows":
            continue
        one, key = find(row["preset"]), _key(row)
        line = lines.setdefault(one.name, {"preset": one.name, "family": one.family, "lengths": one.lengths})
        if key in PAPER_COLUMNS and one.paper is not None:
            line[f"{key} paper"] = getattr(one.paper, PAPER_COLUMNS[key])
        line[f"{key} {row['dtype']}"] = _seconds(row)
    return [lines[name] for name in paper_presets() if name in lines]


def _seconds(row: Row) -> float | str:
    if "skipped" in row:
        return str(row["skipped"])
    seconds = float(row["ms"]) / 1e3
    return f"{report.three_digits(seconds)} (batch {row['measured_batch']})" if "scaled" in row else seconds


def paper_columns(document: Mapping[str, Any]) -> tuple[Column, ...]:
    """List the columns: for each thing that is timed the paper's and ours in each type of number."""
    columns = [Column("preset", "preset"), Column("family", "family"), Column("lengths", "lengths")]
    settings = document["settings"]
    for key in ("train", *(f"write-{tokens}" for tokens in settings["tokens"])):
        title = "training" if key == "train" else f"@{key.partition('-')[2]}"
        if key in PAPER_COLUMNS:
            columns.append(Column(f"{key} paper", f"{title}, paper", ".2f"))
        columns += [Column(f"{key} {dtype}", f"{title}, {dtype}", "3") for dtype in settings["dtypes"]]
    return tuple(columns)


def depth_lines(document: Mapping[str, Any]) -> list[Row]:
    """Bring the rows of the figure into one line for each depth and type of number, with the gain of pooling."""
    lines: dict[tuple[int, str], Row] = {}
    for row in sorted((row for row in document["rows"] if row["part"] == "depth"), key=lambda row: row["depth"]):
        line = lines.setdefault((row["depth"], row["dtype"]), {"depth": row["depth"], "dtype": row["dtype"]})
        line[row["preset"]] = _seconds(row)
        line[f"{row['preset']} number"] = row.get("ms")
    for line in lines.values():
        ours = line.get(f"{FAMILIES[2]} number")
        for family in FAMILIES[:2]:
            other = line.get(f"{family} number")
            line[f"over {family}"] = other / ours if ours and other else None
    return list(lines.values())


def sections(document: Mapping[str, Any]) -> Iterator[str]:
    """Tell the rows, the speed-ups and the figure."""
    settings = document["settings"]
    shrunken = f" **Every length is divided by {settings['shrink']}.**" if settings["shrink"] > 1 else ""
    shrunken += f" **Every model is of width {settings['width']}.**" if settings["width"] else ""
    yield (
        f"Seconds for a training step of batch {settings['train_batch']} (forward, backward, fused AdamW, "
        f"{settings['target']} tokens of target) and for writing forced tokens greedily in a batch of "
        f"{settings['write_batch']}, encoding included; medians, dropout as in the paper. The paper's: A100s, float32; "
        f"ours: float32 is exact, without TF32. Where the batch does not fit into memory, the largest power of two "
        f"that does was measured and its time scaled to the whole batch: it stands in brackets.{shrunken}"
    )
    if document["speedups"]:
        yield f"## Speed-ups\n\n{report.markdown_table(document['speedups'], SPEEDUPS)}"
    if lines := paper_lines(document):
        yield f"## Rows of the paper\n\n{report.markdown_table(lines, paper_columns(document))}"
    if lines := depth_lines(document):
        columns = [Column("depth", "encoder layers"), Column("dtype", "numbers")]
        columns += [Column(family, f"{family}, s", "3") for family in FAMILIES]
        columns += [Column(f"over {family}", f"times faster than {family}", ".2f") for family in FAMILIES[:2]]
        text = (
            "A training step over 8192 tokens at width 512 with two decoder layers. The Pyramidion is row 21 with two "
            "layers and from three on row 22, its last length repeated. The paper: pooling is faster from 4 layers on, "
            "and up to 3.8 times with 16."
        )
        yield f"## Depth\n\n{text}\n\n{report.markdown_table(lines, tuple(columns))}"


def figures(document: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw training time against depth, and the speed-ups beside the paper's."""
    drawn, settings = [], document["settings"]
    deep = [row for row in document["rows"] if row["part"] == "depth" and "ms" in row]
    if deep:
        drawn.append(
            report.write_lines_figure(
                folder / f"{stem}_depth.png",
                [row | {"numbers": row["dtype"], "model": row["preset"]} for row in deep],
                x="depth",
                y="ms",
                styles="numbers",
                colours="model",
                factor=1e-3,
                log_y=True,
                labels=("encoder layers", f"seconds a training step, batch {settings['train_batch']}"),
                title="Training time against depth",
                note=f"{document['machine']['device']}; {deep[0]['n']} tokens",
            )
        )
    if document["speedups"]:
        drawn.append(_draw_speedups(document, folder / f"{stem}_speedup.png"))
    return drawn


def _draw_speedups(document: Mapping[str, Any], path: Path) -> Path:
    panels: dict[str, list[rows.Bar]] = {}
    claimed = [line for line in document["speedups"] if line["paper"]]
    for line in claimed or document["speedups"]:
        bars = panels.setdefault(line["what"], [("the paper", line["paper"], False)])
        bars.append((line["dtype"], line["times"], True))
    title, note = "Speed-up of deep-pyramidion over deep-blockwise", document["machine"]["device"]
    return rows.write_bars_figure(path, panels, label="times faster", title=title, note=note, form=".2f")
