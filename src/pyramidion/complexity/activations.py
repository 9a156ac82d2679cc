"""Bytes that each part of a training step keeps for its backward pass, for one document.

A tensor that two parts read is charged to the first of them. Every term below is one tensor, or several alike. What is
only needed for a moment is not counted here; see `need.py`.
"""

from dataclasses import dataclass

from pyramidion.complexity.sizes import EncoderSizes, blocks_of
from pyramidion.configuration_pyramidion import PyramidionConfig

FLOAT, INDEX, BOOL = 4, 8, 1


@dataclass(frozen=True)
class Precision:
    """How many bytes a number takes, where.

    bytes   of what is multiplied: 4 in float32, 2 under bfloat16 autocast, which leaves norms, softmax, scores and
            the sums of residuals in float32, but for what our kernels compute
    eager   attention with its matrix written out, instead of torch's fused kernels
    device  on `cuda` our kernels serve
    """

    bytes: int = 2
    eager: bool = False
    device: str = "cuda"

    @property
    def cast(self) -> bool:
        """Tell whether what is multiplied is half as wide as float32."""
        return self.bytes < FLOAT

    @property
    def kernels(self) -> bool:
        """Tell whether norms, sums and dropout are ours: what they give is as wide as what is multiplied."""
        return self.device == "cuda"

    def stream(self, config: PyramidionConfig) -> int:
        """Give the bytes of a number between the layers: a sum is kept in float32, a norm of ours is not."""
        return self.bytes if self.kernels and not config.pre_norm else FLOAT

    def inputs(self, elements: int, readers: int) -> int:
        """Keep the input of several products: one tensor, or a copy for each that has to cast it."""
        return elements * self.bytes * (readers if self.cast and not self.kernels else 1)


def dropped(elements: int, rate: float) -> int:
    """Keep which of the numbers a dropout let through."""
    return elements * BOOL if rate > 0 else 0


def embedding(config: PyramidionConfig, tokens: int, how: Precision) -> int:
    """Keep what looking tokens up needs."""
    return tokens * INDEX + dropped(tokens * config.hidden_size, config.dropout)  # token numbers, dropout


def residual(config: PyramidionConfig, tokens: int, how: Precision) -> int:
    """Keep what adding a sublayer and its norm need."""
    d = config.hidden_size
    if how.kernels:
        return tokens * d * how.stream(config) + 2 * tokens * FLOAT  # the sublayer's result, or the sum; its norm's
    return (
        dropped(tokens * d, config.dropout)  # of the sublayer's result
        + tokens * d * FLOAT  # the norm's input: the sum
        + 2 * tokens * FLOAT  # the norm's mean and deviation
    )


def feed_forward(config: PyramidionConfig, tokens: int, how: Precision) -> int:
    """Keep what widening, activation and narrowing need."""
    inner, rate, relu = (
        tokens * config.intermediate_size,
        config.activation_dropout,
        config.activation_function == "relu",
    )
    fused = relu and how.kernels
    copies = 1 if relu and (rate == 0 or fused) else 2
    return (
        how.inputs(tokens * config.hidden_size, 1)  # the input of widening
        + copies * inner * how.bytes  # what the activation remembers; the input of narrowing, if it is another
        + (0 if fused else dropped(inner, rate))
        + residual(config, tokens, how)
    )


def projections(config: PyramidionConfig, size: EncoderSizes, how: Precision) -> int:
    """Keep what the projections of an encoder layer read, and its residual."""
    readers = 2 if config.attention == "lsh" else 3
    return how.inputs(size.places * config.hidden_size, readers) + residual(config, size.places, how)


def self_attention(config: PyramidionConfig, size: EncoderSizes, how: Precision) -> int:
    """Keep what attending in an encoder layer needs, the input of the output's projection included."""
    if config.attention == "full":
        matrix, full = config.num_attention_heads * size.n * size.n, size.places == size.n
        return (
            dot_product(config, size.places, size.places, matrix, size.n, counted(size, how))
            + (not full) * size.n * config.hidden_size * how.bytes  # the result, before it is padded into blocks
        )
    if config.attention == "blockwise":
        matrix = config.num_attention_heads * size.places * size.m
        return dot_product(config, size.places, size.places, matrix, size.places, counted(size, how))
    far = _lsh if config.attention == "lsh" else _efficient
    mixed = size.places * config.hidden_size * how.bytes  # all heads side by side, to be projected
    return far(config, size, how) + _local(config, size, how) + mixed


def counted(size: EncoderSizes, how: Precision) -> Precision:
    """Write the matrix out where a pooler asks what each token receives."""
    asks = size.pooling is not None and "power" in size.pooling[:2]
    return Precision(how.bytes, True, how.device) if asks else how


def dot_product(config: PyramidionConfig, queries: int, keys: int, matrix: int, rows: int, how: Precision) -> int:
    """Keep what dot-product attention needs, where `matrix` counts its weights and `rows` their rows in a head."""
    kept = (2 * queries + 2 * keys) * config.hidden_size * how.bytes  # query and result; key and value
    if not how.eager:
        return kept + config.num_attention_heads * rows * FLOAT  # the logarithm of each row's sum
    return kept + _weights(matrix, config.attention_dropout, how)


def _weights(matrix: int, rate: float, how: Precision) -> int:
    """Keep attention weights that are written out."""
    again = rate > 0 or how.cast
    return (
        matrix * FLOAT  # the softmax
        + dropped(matrix, rate)
        + again * matrix * how.bytes  # the weights that meet the values, if they are others
    )


def _local(config: PyramidionConfig, size: EncoderSizes, how: Precision) -> int:
    """Keep what the local heads need: keys and values are three windows wide, but lie in memory once."""
    if config.local_heads == 0:
        return 0
    window, windows = blocks_of(size.n, config.local_window)
    width = config.local_heads * config.hidden_size // config.num_attention_heads
    tokens = windows * window
    spread = 3 * tokens if how.eager else tokens + 2 * window  # written out, every window has its own copy
    kept = (tokens + 2 * spread) * width * how.bytes  # the result, or written out the queries; key and value
    if how.eager:
        return kept + _weights(config.local_heads * tokens * 3 * window, config.attention_dropout, how)
    return kept + config.local_heads * tokens * FLOAT + 3 * tokens * FLOAT  # sums of rows; who may see whom


def _efficient(config: PyramidionConfig, size: EncoderSizes, how: Precision) -> int:
    """Keep what linear attention needs."""
    e = config.hidden_size // config.num_attention_heads
    far = config.num_attention_heads - config.local_heads
    numbers = size.places * far * e
    seen = config.local_heads > 0 and not how.eager
    return (
        seen * size.places * config.hidden_size * how.bytes  # all queries, if local heads see theirs in place
        + 3 * numbers * FLOAT  # keys without padding, their softmax, the softmax of the queries
        + 3 * numbers * how.bytes  # the same two softmaxes and the values, laid out for the products
        + size.blocks * far * e * e * (FLOAT + how.bytes)  # the context of each block, and of each block's document
    )


def _lsh(config: PyramidionConfig, size: EncoderSizes, how: Precision) -> int:
    """Keep what hashed attention needs."""
    e = config.hidden_size // config.num_attention_heads
    rounds = (config.num_attention_heads - config.local_heads) * config.num_hashes
    chunk, chunks = blocks_of(size.n, config.bucket_size)
    places = chunks * chunk * rounds
    return (
        size.places * config.hidden_size * how.bytes  # queries
        + how.cast * size.places * config.hidden_size * FLOAT  # the same in float32, for their lengths
        + 2 * size.places * config.num_attention_heads * FLOAT  # their lengths, before and after a floor
        + (places + size.places * rounds) * INDEX  # where each token goes, and where it comes back from
        + 5 * places * e * how.bytes  # queries; keys and values of two chunks
        + places * 2 * chunk * FLOAT  # products
        + 2 * places * FLOAT  # sums of their exponentials, and each round's share
        + _weights(places * 2 * chunk, config.attention_dropout, how)
        + size.places * rounds * e * how.bytes  # the result of each round
    )


# Bytes a token: scores and members for the kernels; for plain PyTorch also the tree of meetings, in float64.
TOURNAMENT = {"cuda": FLOAT + INDEX, "cpu": 96}


def scoring(config: PyramidionConfig, size: EncoderSizes, how: Precision) -> int:
    """Keep what scores and tournament need beside what is pooled; nothing flows back through a hard choice."""
    if size.pooling is None or size.pooling.kind not in ("soft", "straight-through"):
        return 0
    hidden = size.n * config.hidden_size * FLOAT if size.pooling.scorer == "nonlinear" else 0
    return hidden + size.n * TOURNAMENT[how.device]


def pooling(config: PyramidionConfig, size: EncoderSizes, how: Precision) -> int:
    """Keep what blending needs."""
    if size.pooling is None:
        return 0
    pooled = size.n * config.hidden_size * how.stream(config)  # the input
    if size.pooling.kind == "max":
        return pooled + size.kept * config.hidden_size * INDEX  # who won each coordinate
    spread = (
        size.kept * config.hidden_size * how.stream(config) if size.pooling.kind == "funnel" else 0
    )  # what is spread again
    return pooled + spread + size.n * (INDEX + FLOAT)  # slots and weights


def decoder_projections(config: PyramidionConfig, target: int, how: Precision) -> int:
    """Keep what the projections of a decoder layer's self-attention read, and its residual."""
    return how.inputs(target * config.hidden_size, 3) + residual(config, target, how)


def decoder_self_attention(config: PyramidionConfig, target: int, how: Precision) -> int:
    """Keep what looking back needs."""
    return dot_product(config, target, target, config.num_attention_heads * target * target, target, how)


def cross_projections(config: PyramidionConfig, target: int, how: Precision) -> int:
    """Keep what the queries to the memory read, and the residual."""
    return how.inputs(target * config.hidden_size, 1) + residual(config, target, how)


def memory_projections(config: PyramidionConfig, memory: int, layer: int, how: Precision) -> int:
    """Keep what keys and values of the memory read: the memory, once for all layers unless each casts it."""
    return how.inputs(memory * config.hidden_size, 2) if layer == 1 or (how.cast and not how.kernels) else 0


def cross_attention(config: PyramidionConfig, target: int, memory: int, how: Precision) -> int:
    """Keep what attending to the memory needs."""
    return dot_product(config, target, memory, config.num_attention_heads * target * memory, target, how)


def output_head(config: PyramidionConfig, target: int, how: Precision) -> int:
    """Keep what the loss needs: it computes its gradients at once; that of the vocabulary is counted with gradients."""
    return target * config.hidden_size * how.bytes  # the gradient of what the vocabulary is compared with


def copying(config: PyramidionConfig, target: int, slots: int, how: Precision) -> int:
    """Keep the query and its input, and for each slot its weight, and which of it is the label.

    Besides, numbers of each token and each step that it may go, and for the slots of every layer that pools before
    their winners and two shares.
    """
    numbers = (7 + 2 * config.copies) * FLOAT
    vectors = (config.hidden_size + config.copy_width) * how.bytes
    pooled = sum(pooling.k for pooling in list(config.poolings.values())[: config.copy_stage])
    return target * (vectors + numbers + slots * (FLOAT + config.copies)) + pooled * (8 + 2 * FLOAT)


def copy_keys(config: PyramidionConfig, slots: int, how: Precision) -> int:
    """Keep the normed slots, their means and deviations, and the keys; the slots themselves the pooling keeps."""
    return slots * (2 * FLOAT + (config.hidden_size + config.copy_width) * how.bytes)


def final_norm(config: PyramidionConfig, tokens: int) -> int:
    """Keep what the last norm of a model that normalises first needs: input, mean and deviation."""
    return tokens * (config.hidden_size + 2) * FLOAT if config.pre_norm else 0
