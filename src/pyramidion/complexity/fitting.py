"""Lengths that fit: how much of a long document can go through the layers on a given GPU."""

from collections.abc import Iterator
from dataclasses import dataclass

from pyramidion.complexity.cost import count
from pyramidion.complexity.need import Need, training_need
from pyramidion.configuration_pyramidion import PyramidionConfig

LEAST = 128  # representations that must be left: the smallest bottleneck of the paper
MOST = 2**26  # tokens of a document that are tried


@dataclass(frozen=True)
class Suggestion:
    """One way to fit.

    config           with the lengths
    need             what training needs
    multiplications  of a forward pass
    factor           by how much each layer that pools shortens; 1: none pools
    earlier          by how many layers pooling is earlier than it was
    """

    config: PyramidionConfig
    need: Need
    multiplications: int
    factor: int
    earlier: int

    @property
    def lengths(self) -> list[int]:
        """List what leaves each encoder layer."""
        return self.config.encoder_lengths


@dataclass(frozen=True)
class Fit:
    """What fits.

    suggestions  the least pooling first; none where nothing fits
    smallest     of all that were tried, the one that needs least
    given        what the configuration needs as it is
    longest      tokens of the longest document that fits as it is; 0: none does
    """

    suggestions: list[Suggestion]
    smallest: Suggestion
    given: Need
    longest: int


def fit(
    config: PyramidionConfig,
    memory_bytes: int,
    length: int,
    *,
    batch: int = 1,
    bytes: int = 2,
    target: int = 512,
    most: int = 5,
) -> Fit:
    """Suggest lengths with which training on documents of `length` tokens fits into `memory_bytes`.

    Depth and pooling layers stay as they are; each of these layers cuts to a half, a fourth, an eighth and so on, all
    alike. Where no such schedule fits, or few do, pooling moves to earlier layers. The least pooling comes first.
    """
    if memory_bytes < 1:
        raise ValueError(f"`memory_bytes` must be at least 1, got {memory_bytes}.")
    options = {"batch": batch, "bytes": bytes, "target": target}
    given = training_need(config, length=length, **options)
    tried = [
        Suggestion(
            shorter,
            training_need(shorter, length=length, **options),
            count(shorter, length=length, target=target, batch=batch).multiplications,
            factor,
            earlier,
        )
        for shorter, factor, earlier in schedules(config, length)
    ]
    return Fit(
        [one for one in tried if one.need.total <= memory_bytes][:most],
        min(tried, key=lambda one: one.need.total),
        given,
        longest_document(config, memory_bytes, **options),
    )


def schedules(config: PyramidionConfig, length: int) -> Iterator[tuple[PyramidionConfig, int, int]]:
    """Try less and less: the configuration for documents of `length`, the factor of each pooling, layers moved."""
    layers = list(config.poolings)
    if not layers:
        yield _with_lengths(config, length, [], 1), 1, 0
        layers = [len(config.encoder_lengths) - 1]
    for earlier in range(layers[0] + 1):
        factor = 2
        while factor == 2 or length >= LEAST * factor ** len(layers):
            yield _with_lengths(config, length, [layer - earlier for layer in layers], factor), factor, earlier
            factor *= 2


def _with_lengths(config: PyramidionConfig, length: int, layers: list[int], factor: int) -> PyramidionConfig:
    """Change the lengths of a configuration; what pools keeps its kind and its scorer, in order."""
    lengths, n = [], length
    for layer in range(len(config.encoder_lengths)):
        n = -(-n // factor) if layer in layers else n
        lengths.append(n)
    changes = {"input_length": length, "encoder_lengths": lengths}
    pools = [
        layer for layer, (before, after) in enumerate(zip([length, *lengths], lengths, strict=False)) if after < before
    ]
    for setting, used in (("pooling", "kind"), ("scorer", "scorer")):
        if isinstance(getattr(config, setting), list):
            kinds = [getattr(pooling, used) for pooling in config.poolings.values()]
            placed = dict(zip(layers, kinds, strict=True))
            changes[setting] = [placed[layer] if layer in pools else None for layer in range(len(lengths))]
        elif setting == "scorer" and not pools:
            changes["scorer"] = None
    return type(config)(**{**config.to_diff_dict(), **changes})


def longest_document(
    config: PyramidionConfig, memory_bytes: int, *, batch: int = 1, bytes: int = 2, target: int = 512
) -> int:
    """Find how many tokens a document may have to be trained on with the lengths as they are."""

    def fits(length: int) -> bool:
        need = training_need(config, length=length, batch=batch, bytes=bytes, target=target)
        return need.total <= memory_bytes

    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:  # `low` fits, `high` does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
