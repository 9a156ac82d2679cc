"""The paper's Table 1: time complexity of attention, as formulas and as numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from pyramidion.complexity.cost import count
from pyramidion.configuration_pyramidion import PyramidionConfig

DEEP = (8192, 8192, 8192, 2048, 512, 512)  # what enters DeepPyramidion's encoder layers


@dataclass(frozen=True)
class Sizes:
    """The letters of Table 1, at the sizes of the paper's deep models.

    n, d, t  tokens, width, target; `layers` is the paper's l
    m        tokens one attends to in a block; `bucket` is that of LSH, with `hashes` rounds, its h (appendix)
    r        rank of Linformer's factorization: our choice, the paper gives none
    k        representations that are kept
    entering what enters each layer of an encoder that pools, from which the effective number of layers c follows
    """

    layers: int = 6
    n: int = 8192
    d: int = 768
    t: int = 512
    m: int = 512
    bucket: int = 64
    hashes: int = 4
    r: int = 256
    k: int = 512
    entering: tuple[int, ...] = DEEP

    @property
    def c(self) -> float:
        """Count layers of full length that cost as much, where attention is linear in the length: Pyramidion's c."""
        return sum(self.entering) / self.n

    @property
    def c_quadratic(self) -> float:
        """Count them where attention is quadratic in the length: PoWER's c."""
        return sum(length**2 for length in self.entering) / self.n**2


@dataclass(frozen=True)
class TableRow:
    """One row of Table 1.

    self_attention, cross_attention    the formulas as printed; None where the paper has a dash
    self_value, cross_value            their values
    self_counted, cross_counted        what this library's model multiplies; None where it has no such model
    note                               what to know about it
    """

    model: str
    self_attention: str
    cross_attention: str | None
    self_value: float
    cross_value: int | None
    self_counted: int | None = None
    cross_counted: int | None = None
    note: str = ""


Formula = tuple[str, str, Callable[[Sizes], float], str | None, dict[str, object] | None, str]

PRINTED = "l × t × n × d"
SHORT = "l × t × k × d"

# Model, formula and value of self-attention, formula of cross-attention, settings of our model, note.
FORMULAS: tuple[Formula, ...] = (
    ("Vanilla", "l × n × n × d", lambda s: s.layers * s.n * s.n * s.d, PRINTED, {"attention": "full"}, ""),
    ("Sparse", "l × m × n × d", lambda s: s.layers * s.m * s.n * s.d, PRINTED, {}, ""),
    ("Linformer", "l × n × r × d", lambda s: s.layers * s.n * s.r * s.d, None, None, "r = 256 is our choice"),
    (
        "LSH",
        "l × mh × n × d",
        lambda s: s.layers * s.bucket * s.hashes * s.n * s.d,
        None,
        {"attention": "lsh"},
        "m = 64, h = 4; ours also attends to the chunk before, hashes, and has 2 local heads",
    ),
    (
        "Efficient",
        "l × n × d × d",
        lambda s: s.layers * s.n * s.d * s.d,
        None,
        {"attention": "efficient"},
        "as if of one head of width d; ours has 6 of width d / 8, and 2 local ones",
    ),
    (
        "PoWER",
        "c × n × n × d",
        lambda s: s.c_quadratic * s.n * s.n * s.d,
        None,
        {"attention": "full", "pooling": "power", "pools": True},
        "c = {c_quadratic:.3f}, by the lengths of Pyramidion",
    ),
    ("Transpooler", "l × m × n × d", lambda s: s.layers * s.m * s.n * s.d, SHORT, {"pools": "last"}, ""),
    (
        "Pyramidion",
        "c × m × n × d",
        lambda s: s.c * s.m * s.n * s.d,
        SHORT,
        {"pools": True},
        "c = {c:.3f}, by what enters the layers",
    ),
)


def table(sizes: Sizes | None = None) -> list[TableRow]:
    """Evaluate Table 1. What is counted beside it has two products where the paper counts one, so twice as much."""
    s = Sizes() if sizes is None else sizes
    rows = []
    for model, formula, value, cross, settings, note in FORMULAS:
        crossed = None if cross is None else s.layers * s.t * (s.n if cross == PRINTED else s.k) * s.d
        note = note.format(c=s.c, c_quadratic=s.c_quadratic)
        attended, looked_up = (None, None) if settings is None else _counted(s, dict(settings))
        rows.append(TableRow(model, formula, cross, value(s), crossed, attended, looked_up, note))
    return rows


def _counted(s: Sizes, settings: dict[str, object]) -> tuple[int, int]:
    """Count self-attention and cross-attention of our model of the same sizes."""
    pools = settings.pop("pools", None)
    lengths = [*([s.n] * (s.layers - 1)), s.k if pools else s.n]
    if pools is True:
        lengths = [*s.entering[1:], s.k]
    sizes: dict[str, object] = {"hidden_size": s.d, "decoder_layers": s.layers, "block_size": s.m}
    sizes |= {"bucket_size": s.bucket, "num_hashes": s.hashes, "input_length": s.n, "encoder_lengths": lengths}
    cost = count(PyramidionConfig(**{**sizes, **settings}), target=s.t)
    return cost.of("encoder self-attention").multiplications, cost.of("cross-attention").multiplications
