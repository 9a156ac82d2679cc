"""How many representations stand where: the lengths of a configuration, followed through its layers."""

from typing import NamedTuple

from pyramidion.configuration_pyramidion import Pooling, PyramidionConfig


class EncoderSizes(NamedTuple):
    """What one encoder layer computes with, for one document.

    layer    its number, from 1
    n        representations that enter
    m        length of a block
    blocks   as many as hold n; the last one is computed whole
    pooling  what stands behind the layer, None where nothing does
    kept     representations that leave
    """

    layer: int
    n: int
    m: int
    blocks: int
    pooling: Pooling | None
    kept: int

    @property
    def places(self) -> int:
        """Count what projections and feed-forward are computed for: the tokens and the padding of the last block."""
        return self.blocks * self.m


def blocks_of(n: int, m: int) -> tuple[int, int]:
    """Cut n tokens into blocks of m: their length, never above n, and their number."""
    m = min(m, n)
    return m, -(-n // m)


def encoder_sizes(config: PyramidionConfig, length: int | None = None) -> list[EncoderSizes]:
    """Follow a document of `length` tokens, by default the configuration's own, through the encoder.

    A layer that pools cuts to its k what is longer; the others keep what they get.
    """
    n = config.entering[0] if length is None else length
    sizes = []
    for layer in range(len(config.encoder_lengths)):
        m, blocks = blocks_of(n, config.packing)
        pooling = config.poolings.get(layer)
        kept = n if pooling is None else min(n, pooling.k)
        sizes.append(EncoderSizes(layer + 1, n, m, blocks, pooling, kept))
        n = kept
    return sizes


def memory_length(sizes: list[EncoderSizes]) -> int:
    """Count what the decoder attends to; Funnel spreads what it pooled over all tokens again."""
    spread = [size.n for size in sizes if size.pooling is not None and size.pooling.kind == "funnel"]
    return spread[0] if spread else sizes[-1].kept


def copied_length(config: PyramidionConfig, length: int | None = None) -> int:
    """Count what can be copied from: the memory, or what the layer that pools at `copy_length` is given."""
    sizes = encoder_sizes(config, length)
    if config.copy_stage is None:
        return memory_length(sizes)
    return [size for size in sizes if size.pooling is not None][config.copy_stage].n
