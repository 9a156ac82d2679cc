"""Multiplications of each part, for one document: the products of matrices, and the pooling.

A product of [a b] with [b c] has a × b × c multiplications, and twice as many floating-point operations. Softmax,
norms, dropout and sorting are not counted, neither here nor by torch's counter.
"""

from pyramidion.complexity.sizes import EncoderSizes, blocks_of
from pyramidion.configuration_pyramidion import PyramidionConfig


def projections(config: PyramidionConfig, size: EncoderSizes) -> int:
    """Count queries, keys, values and output of an encoder layer; LSH has one projection for queries and keys."""
    matrices = 3 if config.attention == "lsh" else 4
    return matrices * size.places * config.hidden_size**2


def feed_forward(config: PyramidionConfig, tokens: int) -> int:
    """Count widening and narrowing."""
    return 2 * tokens * config.hidden_size * config.intermediate_size


def self_attention(config: PyramidionConfig, size: EncoderSizes) -> int:
    """Count what is attended in an encoder layer: query with key, and weights with value."""
    if config.attention == "full":
        return 2 * size.n * size.n * config.hidden_size
    if config.attention == "blockwise":
        return 2 * size.places * size.m * config.hidden_size
    far = _lsh(config, size) if config.attention == "lsh" else _efficient(config, size)
    return far + _local(config, size)


def _efficient(config: PyramidionConfig, size: EncoderSizes) -> int:
    """Count key with value, into the context [e e] of a head, and query with context."""
    far = config.num_attention_heads - config.local_heads
    return 2 * size.places * far * _head_width(config) ** 2


def _lsh(config: PyramidionConfig, size: EncoderSizes) -> int:
    """Count the hashing and the chunks, each with itself and the one before it, in every round.

    Hashing is quadratic in n: the number of directions a token is compared with grows with the document.
    """
    e = _head_width(config)
    rounds = (config.num_attention_heads - config.local_heads) * config.num_hashes
    directions = -(-size.n // (2 * config.bucket_size))
    chunk, chunks = blocks_of(size.n, config.bucket_size)
    return rounds * e * (size.places * directions + 2 * chunks * chunk * 2 * chunk)


def _local(config: PyramidionConfig, size: EncoderSizes) -> int:
    """Count the local heads: each window with itself and its two neighbours."""
    window, windows = blocks_of(size.n, config.local_window)
    return 2 * windows * window * 3 * window * config.local_heads * _head_width(config)


def scoring(config: PyramidionConfig, size: EncoderSizes) -> int:
    """Count the scorer behind a layer; only two of them multiply."""
    scorer = None if size.pooling is None else size.pooling.scorer
    direction = size.n * config.hidden_size
    return {"linear": direction, "nonlinear": direction * config.hidden_size + direction}.get(scorer or "", 0)


def pooling(config: PyramidionConfig, size: EncoderSizes) -> int:
    """Count each pooled vector times its weight. The tournament itself works on single numbers, and is left out.

    torch's counter does not see these: they are no product of matrices.
    """
    if size.pooling is None or size.pooling.kind == "max":
        return 0
    hard = size.pooling.kind in ("hard", "power")
    return (size.kept if hard else size.n) * config.hidden_size


def _head_width(config: PyramidionConfig) -> int:
    return config.hidden_size // config.num_attention_heads
