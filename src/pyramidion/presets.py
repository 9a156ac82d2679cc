"""Name every model of the paper, with what the paper got from it, and a few small ones for a CPU.

    model = PyramidionForConditionalGeneration(preset("row-8"))
    print(PRESETS["row-8"].description)

`row-1` to `row-32` are the numbered rows of the paper's tables, `scorer-…` its ablation of scorers, `deep-…` the models
it compares with others. Below, tables come first; what they are turned into follows.
"""

import copy
import difflib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pyramidion.configuration_pyramidion import PyramidionConfig

if TYPE_CHECKING:
    from rich.table import Table

# --------------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------------

Interval = tuple[float, float]


class Family(NamedTuple):
    """What the rows of one architecture share."""

    summary: str
    settings: dict[str, Any]


FAMILIES = {
    "vanilla": Family("Every token attends to every other, and the decoder to all of them.", {}),
    "blockwise": Family("Tokens attend within blocks, and the decoder to all of them.", {}),
    "transpooler": Family(
        "One trainable selection, behind the last encoder layer: the decoder attends to what it keeps.",
        {"pooling": "soft", "scorer": "linear"},
    ),
    "lsh": Family(
        "Tokens attend to similar ones, found by hashing, beside two local heads; the decoder to all of them.",
        {"attention": "lsh", "bucket_size": 64, "num_hashes": 4, "local_heads": 2},
    ),
    "efficient": Family(
        "Tokens read a context of fixed size, beside two local heads; the decoder attends to all of them.",
        {"attention": "efficient", "local_heads": 2},
    ),
    "power": Family("Behind each encoder layer, the tokens that received least attention go.", {"pooling": "power"}),
    "funnel": Family(
        "Neighbours are averaged behind the first layer, and spread to full length again before the decoder.",
        {"pooling": "funnel"},
    ),
    "pyramidion": Family(
        "A trainable selection behind several encoder layers: each goes on with less.",
        {"pooling": "soft", "scorer": "linear"},
    ),
}

Row = tuple[int, str, tuple[int, ...], int | None, float, Interval, float, Interval, float, float, float]

# Lengths: what enters, then what leaves each encoder layer. Block: None where attention has no blocks. ROUGE on arXiv
# with 95 % intervals. Seconds for a training batch of 64 and for writing 256 and 512 tokens in a batch of 8.
# fmt: off
ROWS: tuple[Row, ...] = (
    # row family        lengths                       block R-1   interval      R-2   interval      train @256  @512
    ( 1, "vanilla",     (512, 512, 512),              None, 28.1, (27.8, 28.3),  8.3, (8.1, 8.4),   0.13, 2.05,  4.23),
    ( 2, "vanilla",     (2048, 2048, 2048),           None, 38.2, (37.9, 38.5), 14.0, (13.8, 14.2), 0.60, 2.76,  5.77),
    ( 3, "vanilla",     (8192, 8192, 8192),           None, 41.8, (41.6, 42.1), 16.1, (15.9, 16.4), 4.46, 6.56, 13.27),
    ( 4, "blockwise",   (2048, 2048, 2048),           512,  38.6, (38.3, 38.8), 14.1, (13.9, 14.3), 0.31, 2.58,  5.28),
    ( 5, "blockwise",   (8192, 8192, 8192),           512,  41.9, (41.6, 42.1), 16.7, (16.5, 17.0), 0.85, 5.40, 11.49),
    ( 6, "transpooler", (2048, 2048, 512),            512,  39.1, (38.9, 39.4), 14.6, (14.4, 14.8), 0.54, 2.09,  4.24),
    ( 7, "transpooler", (8192, 8192, 512),            512,  41.8, (41.6, 42.1), 16.4, (16.2, 16.7), 1.44, 2.14,  4.28),
    ( 8, "transpooler", (8192, 8192, 2048),           512,  42.7, (42.4, 43.0), 16.7, (16.5, 16.9), 1.26, 2.71,  5.51),
    ( 9, "lsh",         (512, 512, 512),              None, 28.5, (28.3, 28.7),  7.5, (7.4, 7.6),   0.19, 2.16,  4.27),
    (10, "lsh",         (2048, 2048, 2048),           None, 33.6, (33.4, 33.8), 10.5, (10.4, 10.6), 0.56, 3.01,  5.92),
    (11, "lsh",         (8192, 8192, 8192),           None, 35.7, (35.5, 36.0), 11.2, (11.1, 11.4), 1.69, 0.87, 13.41),
    (12, "efficient",   (512, 512, 512),              None, 28.4, (28.2, 28.6),  7.8, (7.7, 7.9),   0.12, 2.16,  4.20),
    (13, "efficient",   (2048, 2048, 2048),           None, 34.1, (33.9, 34.4), 10.4, (10.3, 10.6), 0.29, 2.98,  5.91),
    (14, "efficient",   (8192, 8192, 8192),           None, 35.0, (34.7, 35.2), 10.8, (10.7, 11.0), 0.82, 6.91, 13.75),
    (15, "power",       (2048, 1024, 512),            512,  35.3, (35.0, 35.5), 12.7, (12.5, 12.9), 1.04, 2.17,  4.28),
    (16, "power",       (8192, 2048, 512),            512,  36.9, (36.6, 37.2), 14.1, (13.9, 14.4), 1.87, 2.71,  5.33),
    (17, "power",       (8192, 4096, 2048),           512,  42.0, (41.7, 42.3), 16.5, (16.3, 16.7), 2.06, 3.57,  6.92),
    (18, "funnel",      (2048, 512, 512),             512,  38.6, (38.3, 38.8), 14.3, (14.1, 14.5), 0.61, 2.07,  4.01),
    (19, "funnel",      (8192, 512, 512),             512,  41.8, (41.6, 42.1), 16.5, (16.3, 16.8), 1.78, 2.08,  4.03),
    (20, "funnel",      (8192, 2048, 2048),           512,  42.0, (41.7, 42.2), 16.4, (16.2, 16.6), 1.53, 2.64,  5.25),
    (21, "pyramidion",  (8192, 2048, 512),            512,  31.1, (30.7, 31.6), 11.5, (11.3, 11.7), 1.07, 2.12,  4.18),
    (22, "pyramidion",  (8192, 8192, 2048, 512),      512,  41.2, (40.9, 41.4), 16.5, (16.3, 16.8), 1.55, 2.12,  4.26),
    (23, "pyramidion",  (8192, 8192, 2048, 512, 128), 512,  37.3, (37.1, 37.6), 14.3, (14.1, 14.5), 1.78, 1.86,  3.74),
    (24, "pyramidion",  (8192, 8192, 4096, 2048),     512,  43.0, (42.7, 43.3), 17.2, (17.0, 17.5), 1.47, 2.69,  5.49),
    (26, "transpooler", (8192, 8192, 8192, 2048),     512,  43.1, (42.8, 43.3), 17.3, (17.0, 17.5), 1.74, 2.73,  5.54),
    (27, "blockwise",   (2048, 2048, 2048),           128,  39.1, (38.8, 39.3), 14.4, (14.2, 14.6), 0.25, 2.51,  5.11),
    (30, "transpooler", (2048, 2048, 512),            128,  38.2, (38.0, 38.4), 14.1, (13.9, 14.3), 0.49, 2.04,  3.99),
    (32, "transpooler", (2048, 2048, 512),            None, 37.1, (36.9, 37.4), 13.7, (13.5, 13.8), 0.82, 2.20,  4.49),
)

# The ablation of scorers: row 6, from 2048 to 512, with another way to choose.
SCORERS: tuple[tuple[str, str, str | None, float, float, str], ...] = (
    # name          pooling scorer       R-1   R-2
    ("nonlinear",    "soft", "nonlinear", 38.9, 14.6, "Row 6 with a hidden layer in the scorer."),
    ("random",       "hard", "random",    32.3, 11.4, "Row 6 with tokens kept at random: what any scorer must beat."),
    ("index",        "hard", "index",     38.2, 13.9, "Row 6 with every fourth token kept, whatever it says."),
    ("embedding",    "soft", "embedding", 37.6, 14.0, "Row 6 with one coordinate of a representation as its score."),
    ("power",        "power", None,       36.9, 13.6, "Row 6 with the tokens kept that received most attention."),
    ("mean-pooling", "mean",  None,       38.1, 13.9, "Row 6 with four neighbours averaged into one."),
    ("max-pooling",  "max",   None,       38.4, 14.2, "Row 6 with the maximum over four neighbours."),
)
# fmt: on

ALIASES = {"row-25": "row-8", "row-28": "row-4", "row-29": "row-2", "row-31": "row-6", "scorer-linear": "row-6"}

TUNED = "The paper does not train it from scratch: it tunes row {} for ten epochs, and that is the training timed."
SPREAD = "The decoder attends to {} tokens, yet is timed below row {}, which attends to as many: perhaps a slip."
NOTES = {
    "row-11": "The paper prints 0.87 s for 256 tokens, below every other row: a slip, by the 13.41 s for 512.",
    "row-15": TUNED.format(4),
    "row-16": TUNED.format(5),
    "row-17": TUNED.format(5),
    "row-18": SPREAD.format(2048, 4),
    "row-19": SPREAD.format(8192, 5),
    "row-20": SPREAD.format(8192, 5),
    "row-21": "The paper prints a training time of 1.07 s in one table and of 1.05 s in another.",
}

DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
SIZED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "decoder_layers")
SIZES = {
    "shallow": (32768, 512, 2048, 8, 2),
    "deep": (32768, 768, 3072, 8, 6),
    "small": (16384, 256, 1024, 4, 2),
    "tiny": (1024, 64, 256, 4, 2),
}


# --------------------------------------------------------------------------------------------------------------------
# Presets
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What the paper got: ROUGE on arXiv, 95 % intervals, seconds on A100s in full precision; None where not printed.

    split       the part of the data that was scored: shallow models on validation, deep ones on test
    train_s     a training batch of 64
    infer256_s  256 forced tokens for a batch of 8; `infer512_s` likewise
    pubmed      ROUGE-1 and ROUGE-2 on PubMed
    """

    rouge1: float
    rouge2: float
    rouge1_interval: Interval | None = None
    rouge2_interval: Interval | None = None
    train_s: float | None = None
    infer256_s: float | None = None
    infer512_s: float | None = None
    pubmed: tuple[float, float] | None = None
    split: str = "validation"


@dataclass(frozen=True, eq=False)
class Preset:
    """One model by name.

    settings  what is passed to PyramidionConfig
    paper     what the paper got, None for models that are not in it
    note      what to know about those figures
    aliases   other names of the same model
    """

    name: str
    family: str
    summary: str
    settings: Mapping[str, Any]
    paper: Figures | None = None
    note: str = ""
    aliases: tuple[str, ...] = ()

    def config(self, **changes: Any) -> PyramidionConfig:
        """Make the configuration, with single settings changed."""
        return PyramidionConfig(**{**copy.deepcopy(dict(self.settings)), **changes})

    @cached_property
    def parameters(self) -> int:
        """Count the parameters, the shared table of embeddings once."""
        from pyramidion.complexity.parameters import parameters  # late: its room knows presets

        return parameters(self.config())

    @property
    def lengths(self) -> str:
        """Write what enters → what leaves each layer, and → what the decoder attends to where that is spread again."""
        config = self.config()
        leaving = list(map(str, config.encoder_lengths))
        if len(leaving) > 3:
            runs = ((length, len(list(same))) for length, same in groupby(leaving))
            leaving = [length if times == 1 else f"{length}×{times}" for length, times in runs]
        spread = f" → {config.memory_length}" if config.memory_length != config.encoder_lengths[-1] else ""
        return f"{config.entering[0]} → {', '.join(leaving)}{spread}"

    @property
    def description(self) -> str:
        """Say what the model is, what the paper got from it, and how to run it."""
        title = f"{self.name} ({self.family})" + (f", also called {_and(self.aliases)}" if self.aliases else "")
        lines = [title, "", self.summary, ""]
        for label, text in self._account():
            lines += _column(label, text)
        return "\n".join([*lines, *USAGE.format(name=self.name).splitlines()])

    def _account(self) -> Iterator[tuple[str, str]]:
        config = self.config()
        yield "lengths", _lengths(config)
        yield "attention", _attention(config)
        if config.poolings:
            yield "pooling", _poolings(config)
        yield "size", _size(config)
        yield "parameters", f"{self.parameters:,}"
        clauses = ["not in it: a model of a size for a CPU"] if self.paper is None else _figures(self.paper)
        yield from zip(["paper", "", ""], clauses, strict=False)
        if self.note:
            yield "note", self.note

    def to_dict(self) -> dict[str, Any]:
        """Give everything about it, ready for JSON."""
        config = self.config()
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "family": self.family,
            "summary": self.summary,
            "lengths": [config.entering[0], *config.encoder_lengths],
            "memory_length": config.memory_length,
            "parameters": self.parameters,
            "settings": copy.deepcopy(dict(self.settings)),
            "paper": None if self.paper is None else asdict(self.paper),
            "note": self.note,
        }


def preset(name: str, **changes: Any) -> PyramidionConfig:
    """Make the configuration of a model by name, with single settings changed: `preset("row-8", vocab_size=8192)`."""
    return find(name).config(**changes)


def find(name: str) -> Preset:
    """Look a preset up, or refuse the name and say which one is nearest."""
    if name not in PRESETS:
        given = str(name).lower()
        begun = [known for known in PRESETS if known.startswith(given)]
        near = difflib.get_close_matches(given, begun or PRESETS, 1, cutoff=0.3)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise ValueError(f"`name` must be one of those that `pyramidion presets` lists, got {name!r}.{hint}")
    return PRESETS[name]


# --------------------------------------------------------------------------------------------------------------------
# From tables to presets
# --------------------------------------------------------------------------------------------------------------------


def _settings(lengths: Sequence[int], block: int | None, size: str, **others: Any) -> dict[str, Any]:
    """Translate a row: what enters is said only where the first layer pools, otherwise it is what leaves it."""
    entering, *leaving = lengths
    settings: dict[str, Any] = {"encoder_lengths": leaving}
    if entering != leaving[0]:
        settings["input_length"] = entering
    settings |= {"attention": "full"} if block is None else {"attention": "blockwise", "block_size": block}
    return settings | others | dict(zip(SIZED, SIZES[size], strict=True)) | dict.fromkeys(DROPOUTS, 0.1)


def _preset(
    name: str, family: str, settings: dict[str, Any], paper: Figures | None = None, summary: str | None = None
) -> Preset:
    aliases = tuple(alias for alias, same in ALIASES.items() if same == name)
    told = FAMILIES[family].summary if summary is None else summary
    return Preset(name, family, told, MappingProxyType(settings), paper, NOTES.get(name, ""), aliases)


def _rows() -> Iterator[Preset]:
    for number, family, lengths, block, rouge1, interval1, rouge2, interval2, train, infer256, infer512 in ROWS:
        settings = _settings(lengths, block, "shallow", **FAMILIES[family].settings)
        paper = Figures(rouge1, rouge2, interval1, interval2, train, infer256, infer512)
        yield _preset(f"row-{number}", family, settings, paper)


def _scorers() -> Iterator[Preset]:
    for name, pooling, scorer, rouge1, rouge2, summary in SCORERS:
        chosen = {"pooling": pooling} if scorer is None else {"pooling": pooling, "scorer": scorer}
        settings = _settings((2048, 2048, 512), 512, "shallow", **chosen)
        yield _preset(f"scorer-{name}", "transpooler", settings, Figures(rouge1, rouge2), summary)


def _deep() -> Iterator[Preset]:
    paper = Figures(46.85, 19.39, train_s=4.85, infer512_s=37.15, split="test")
    yield _preset("deep-blockwise", "blockwise", _settings((8192,) * 7, 512, "deep"), paper)
    paper = Figures(47.15, 19.99, train_s=2.71, infer512_s=8.12, pubmed=(47.81, 21.14), split="test")
    settings = _settings((8192, 8192, 8192, 2048, 512, 512, 512), 512, "deep", **FAMILIES["pyramidion"].settings)
    yield _preset("deep-pyramidion", "pyramidion", settings, paper)


def _small() -> Iterator[Preset]:
    ours = {"pre_norm": True, "decoder_positions": True}  # not the paper's: they learn faster in few steps
    for name, family, lengths, block in (
        ("tiny-pyramidion", "pyramidion", (512, 512, 128, 32), 64),
        ("small-blockwise", "blockwise", (4096,) * 5, 256),
        ("small-transpooler", "transpooler", (4096, 4096, 4096, 4096, 256), 256),
        ("small-pyramidion", "pyramidion", (4096, 4096, 1024, 256, 256), 256),
    ):
        settings = _settings(lengths, block, name.partition("-")[0], **FAMILIES[family].settings, **ours)
        yield _preset(name, family, settings)


def _collect() -> dict[str, Preset]:
    """Put all under their names and aliases, in the paper's order."""
    made = {one.name: one for part in (_rows(), _scorers(), _deep(), _small()) for one in part}
    rows = [f"row-{number}" for number in range(1, 33)]
    names = dict.fromkeys([*rows, "scorer-linear", *made])
    return {name: made[ALIASES.get(name, name)] for name in names}


PRESETS: dict[str, Preset] = _collect()


# --------------------------------------------------------------------------------------------------------------------
# In words
# --------------------------------------------------------------------------------------------------------------------

WIDTH, LABEL = 110, 12
USAGE = """
Python      from pyramidion import PyramidionForConditionalGeneration, preset
            model = PyramidionForConditionalGeneration(preset("{name}"))
shell       pyramidion complexity --preset {name}
"""
LEGEND = (
    "\nlengths: tokens that enter → representations that leave each encoder layer, and → that the decoder attends to, "
    "where those are more. R-1, R-2: the paper's ROUGE on arXiv. train, @256, @512: its seconds for a training batch "
    "of 64 and for writing 256 and 512 tokens in a batch of 8. `pyramidion presets NAME` says more."
)


def _and(parts: Sequence[object]) -> str:
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}" if most else last


def _column(label: str, text: str) -> list[str]:
    """Set a text beside its label, in lines that fit a terminal."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL)


def _lengths(config: PyramidionConfig) -> str:
    spread = " again" if config.memory_length > config.encoder_lengths[-1] else ""
    return (
        f"{config.entering[0]} tokens enter, {_and(config.encoder_lengths)} leave the encoder layers, "
        f"the decoder attends to {config.memory_length}{spread}"
    )


def _size(config: PyramidionConfig) -> str:
    return (
        f"{len(config.encoder_lengths)} encoder and {config.decoder_layers} decoder layers, "
        f"width {config.hidden_size}, {config.num_attention_heads} heads, vocabulary {config.vocab_size}"
    )


def _attention(config: PyramidionConfig) -> str:
    local = f"{config.local_heads} heads of windows of {config.local_window}"
    return {
        "full": "full",
        "blockwise": f"blockwise, blocks of {config.block_size}",
        "lsh": f"lsh, buckets of {config.bucket_size}, {config.num_hashes} hashes, {local}",
        "efficient": f"efficient, {local}",
    }[config.attention]


def _poolings(config: PyramidionConfig) -> str:
    layers: dict[str, list[int]] = {}
    for layer, pooling in config.poolings.items():
        way = f"{pooling.kind} by {pooling.scorer} scores" if pooling.scorer else pooling.kind
        layers.setdefault(way, []).append(layer + 1)
    return ", ".join(f"{way} behind layer{'s' * (len(of) > 1)} {_and(of)}" for way, of in layers.items())


def _figures(paper: Figures) -> Iterator[str]:
    """Tell ROUGE and times, each in one line."""
    first = f"ROUGE-1 {paper.rouge1}{_interval(paper.rouge1_interval)}"
    yield f"{first}, ROUGE-2 {paper.rouge2}{_interval(paper.rouge2_interval)} on arXiv, {paper.split}"
    if paper.pubmed:
        yield f"ROUGE-1 {paper.pubmed[0]}, ROUGE-2 {paper.pubmed[1]} on PubMed, {paper.split}"
    if paper.train_s:
        writing = {256: paper.infer256_s, 512: paper.infer512_s}
        told = {tokens: f"{seconds:.2f} s" for tokens, seconds in writing.items() if seconds}
        written = f"{_and(list(told.values()))} to write {_and(list(told))} tokens for 8"
        yield f"{paper.train_s:.2f} s to train on 64 documents, {written}, on A100s"


def _interval(interval: Interval | None) -> str:
    return f" ({interval[0]} to {interval[1]})" if interval else ""


def rich_table() -> "Table":
    """Lay all presets out in 120 columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption=LEGEND, caption_justify="left")
    for title in ("name", "family", "lengths", "attention", "pooling"):
        table.add_column(title, overflow="fold")
    for title in ("size", "R-1", "R-2", "train", "@256", "@512"):
        table.add_column(title, justify="right", overflow="fold")
    for name, one in PRESETS.items():
        table.add_row(*(_cells(one) if one.name == name else (name, f"= {one.name}")))
    return table


def _cells(one: Preset) -> tuple[str, ...]:
    config = one.config()
    attention = f"block {config.block_size}" if config.attention == "blockwise" else config.attention
    pooling = next((f"{kind} {scorer or ''}".strip() for kind, scorer, _ in config.poolings.values()), "")
    size = f"{one.parameters / 1e6:.1f}M"
    return (one.name, one.family, one.lengths, attention, pooling, size, *_numbers(one.paper))


def _numbers(paper: Figures | None) -> tuple[str, ...]:
    if paper is None:
        return ()
    seconds = (paper.train_s, paper.infer256_s, paper.infer512_s)
    return (str(paper.rouge1), str(paper.rouge2), *(f"{value:.2f}" if value else "" for value in seconds))


__all__ = ["PRESETS", "Figures", "Preset", "find", "preset", "rich_table"]
