"""What a configuration costs: multiplications and bytes kept, by part and layer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pyramidion.complexity import activations as kept
from pyramidion.complexity import multiplications as products
from pyramidion.complexity.activations import Precision
from pyramidion.complexity.sizes import copied_length, encoder_sizes, memory_length
from pyramidion.configuration_pyramidion import PyramidionConfig

ENCODER = (
    "encoder projections",
    "encoder self-attention",
    "encoder feed-forward",
    "scoring",
    "pooling",
)
DECODER = (
    "decoder projections",
    "decoder self-attention",
    "cross projections",
    "memory projections",
    "cross-attention",
    "decoder feed-forward",
    "output head",
    "keys to copy by",
    "copying",
)
ONCE = ("memory projections", "keys to copy by")  # of a document, however much is written about it
PARTS = ("embedding", *ENCODER, *DECODER)
IMPLEMENTATIONS = ("sdpa", "eager")
DEVICES = ("cuda", "cpu")


class Row(NamedTuple):
    """What one part costs in one layer, counted from 1, or beside all layers: None."""

    part: str
    layer: int | None
    multiplications: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """Rows, and sums over them. `2 * products` is what torch's counter of floating-point operations says."""

    rows: tuple[Row, ...]

    @property
    def multiplications(self) -> int:
        """Sum all multiplications."""
        return sum(row.multiplications for row in self.rows)

    @property
    def products(self) -> int:
        """Sum those of products of matrices: all but the pooling's."""
        return sum(row.multiplications for row in self.rows if row.part != "pooling")

    @property
    def bytes(self) -> int:
        """Sum what is kept for the backward pass."""
        return sum(row.bytes for row in self.rows)

    def of(self, *parts: str, layer: int | None = None) -> "Cost":
        """Take the rows of some parts, of all layers or of one."""
        for part in parts:
            if part not in PARTS:
                raise ValueError(f"`parts` must be among {', '.join(PARTS)}, got {part!r}.")
        return Cost(tuple(row for row in self.rows if row.part in parts and layer in (None, row.layer)))

    @property
    def encoder(self) -> "Cost":
        """Take the encoder's rows, but not looking tokens up, which multiplies nothing."""
        return self.of(*ENCODER)

    @property
    def decoder(self) -> "Cost":
        """Take the decoder's rows, the output head among them."""
        return self.of(*DECODER)


@dataclass(frozen=True)
class Generation:
    """What writing costs: `once` for encoder and memory, `written` for all tokens, one at a time with a cache."""

    once: Cost
    written: Cost
    tokens: int

    @property
    def multiplications(self) -> int:
        """Sum both."""
        return self.once.multiplications + self.written.multiplications

    @property
    def per_token(self) -> float:
        """Average over the tokens; later ones look back on more."""
        return self.written.multiplications / self.tokens


def count(
    config: PyramidionConfig,
    *,
    length: int | None = None,
    target: int = 512,
    batch: int = 1,
    bytes: int = 2,
    implementation: str = "sdpa",
    device: str = "cuda",
) -> Cost:
    """Count a forward pass, and what it keeps for the backward pass, by arithmetic alone.

    Every document has `length` tokens, by default as many as the configuration is for, and a target of `target`.
    Counted is what the model computes: the last block of a document whole, and the decoder's self-attention with the
    masked half of its matrix. `bytes`, `implementation` and `device` change only the bytes kept; see `Precision`.
    """
    _check(length, target, batch)
    how = _precision(bytes, implementation, device)
    rows = [*_encoder_rows(config, length, how), *_decoder_rows(config, length, target, how)]
    return _times(rows, batch)


def count_generation(
    config: PyramidionConfig, *, length: int | None = None, target: int = 512, batch: int = 1
) -> Generation:
    """Count writing `target` tokens one at a time: token i looks back on i, and each at the whole memory.

    Keys and values are kept in a cache, so those of the memory are computed once. No bytes are kept for a backward
    pass.
    """
    _check(length, target, batch)
    how = Precision()
    decoder = list(_decoder_rows(config, length, target, how))
    once = [*_encoder_rows(config, length, how), *(row for row in decoder if row.part in ONCE)]
    looked_back = 2 * config.hidden_size * target * (target + 1) // 2  # nothing is masked: it is not there yet
    written = [
        row._replace(multiplications=looked_back) if row.part == "decoder self-attention" else row
        for row in decoder
        if row.part not in ONCE
    ]
    return Generation(_times(_bare(once), batch), _times(_bare(written), batch), target * batch)


def _bare(rows: list[Row]) -> list[Row]:
    return [row._replace(bytes=0) for row in rows]


def _encoder_rows(config: PyramidionConfig, length: int | None, how: Precision) -> Iterator[Row]:
    sizes = encoder_sizes(config, length)
    yield Row("embedding", None, 0, kept.embedding(config, sizes[0].places, how))
    for size in sizes:
        layer, tokens = size.layer, size.places
        yield Row("encoder projections", layer, products.projections(config, size), kept.projections(config, size, how))
        attended = kept.self_attention(config, size, how)
        yield Row("encoder self-attention", layer, products.self_attention(config, size), attended)
        transformed = kept.feed_forward(config, tokens, how)
        yield Row("encoder feed-forward", layer, products.feed_forward(config, tokens), transformed)
        if size.pooling is not None:
            yield Row("scoring", layer, products.scoring(config, size), kept.scoring(config, size, how))
            yield Row("pooling", layer, products.pooling(config, size), kept.pooling(config, size, how))


def _decoder_rows(config: PyramidionConfig, length: int | None, target: int, how: Precision) -> Iterator[Row]:
    d, memory = config.hidden_size, memory_length(encoder_sizes(config, length))
    square = target * d * d
    normed = kept.final_norm(config, memory) + kept.final_norm(config, target)
    yield Row("embedding", None, 0, kept.embedding(config, target, how) + normed)
    for layer in range(1, config.decoder_layers + 1):
        read = kept.memory_projections(config, memory, layer, how)
        looked_up = kept.cross_attention(config, target, memory, how)
        yield Row("decoder projections", layer, 4 * square, kept.decoder_projections(config, target, how))
        looked_back = kept.decoder_self_attention(config, target, how)
        yield Row("decoder self-attention", layer, 2 * target * target * d, looked_back)
        yield Row("cross projections", layer, 2 * square, kept.cross_projections(config, target, how))
        yield Row("memory projections", layer, 2 * memory * d * d, read)
        yield Row("cross-attention", layer, 2 * target * memory * d, looked_up)
        transformed = kept.feed_forward(config, target, how)
        yield Row("decoder feed-forward", layer, products.feed_forward(config, target), transformed)
    yield Row("output head", None, target * d * config.vocab_size, kept.output_head(config, target, how))
    if config.copies:
        steps, e, slots = config.copies if config.copies > 1 else 0, config.copy_width, copied_length(config, length)
        if config.copy_length is not None:
            yield Row("keys to copy by", None, slots * d * e, kept.copy_keys(config, slots, how))
        looked = target * (e + 1 + steps) * d + target * slots * e
        yield Row("copying", None, looked, kept.copying(config, target, slots, how))


def _times(rows: Iterable[Row], batch: int) -> Cost:
    return Cost(tuple(Row(row.part, row.layer, batch * row.multiplications, batch * row.bytes) for row in rows))


def _check(length: int | None, target: int, batch: int) -> None:
    for name, value in {"length": length, "target": target, "batch": batch}.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")


def _precision(bytes: int, implementation: str, device: str) -> Precision:
    if bytes not in (2, 4):
        raise ValueError(f"`bytes` must be 2, for bfloat16 autocast, or 4, for float32, got {bytes}.")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"`implementation` must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}.")
    if device not in DEVICES:
        raise ValueError(f"`device` must be one of {', '.join(DEVICES)}, got {device!r}.")
    return Precision(bytes, implementation == "eager", device)
