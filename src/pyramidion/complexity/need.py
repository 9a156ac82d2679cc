"""What a training step needs of a GPU's memory, and memory as people write it.

A test on a GPU holds what a training step keeps within 6 % of what is counted here, and its peak, without the margin,
within 10 %, for seven rows of the paper in both precisions.
"""

import re
from dataclasses import dataclass

from pyramidion.complexity.activations import FLOAT
from pyramidion.complexity.cost import count
from pyramidion.complexity.parameters import matrix_elements, parameters
from pyramidion.complexity.sizes import encoder_sizes
from pyramidion.configuration_pyramidion import PyramidionConfig
from pyramidion.kernels.loss import ROOM

STATE = 16  # bytes a parameter: weight, gradient and Adam's two moments, all in float32
SHARE, RESERVE = 0.1, 2**30  # the margin: for what the allocator cannot place, and for CUDA's own
UNITS = (
    {"b": 1}
    | {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
    | {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
)


@dataclass(frozen=True)
class Need:
    """Bytes of a training step.

    state        weights, gradients and Adam's moments
    cast         the weights once more in bfloat16, kept by autocast
    activations  what is kept for the backward pass
    passing      the largest that is needed only for a moment: around the loss, or in the backward pass of a layer
    margin       10 % of these, and 1 GiB
    """

    state: int
    cast: int
    activations: int
    passing: int

    @property
    def margin(self) -> int:
        """Leave room for what is not counted."""
        return int(SHARE * (self.state + self.cast + self.activations + self.passing)) + RESERVE

    @property
    def total(self) -> int:
        """Sum them up."""
        return self.state + self.cast + self.activations + self.passing + self.margin


def training_need(
    config: PyramidionConfig, *, length: int | None = None, target: int = 512, batch: int = 1, bytes: int = 2
) -> Need:
    """Estimate what training on `batch` documents at once needs, without checkpointing, on one GPU."""
    kept = count(config, length=length, target=target, batch=batch, bytes=bytes).bytes
    cast = matrix_elements(config) * bytes if bytes < FLOAT else 0
    return Need(STATE * parameters(config), cast, kept, _passing(config, length, target, batch, bytes))


def _passing(config: PyramidionConfig, length: int | None, target: int, batch: int, bytes: int) -> int:
    """Estimate the largest of what is needed for a moment."""
    loss = min(batch * target * config.vocab_size * bytes, ROOM)  # a chunk of the logits
    places = batch * encoder_sizes(config, length)[0].places
    # the gradients before and behind the activation, in the backward pass of a feed-forward network
    layer = places * 2 * config.intermediate_size * bytes
    # or those of the products and of their exponentials, where tokens meet in buckets and in those before
    pairs = places * (config.num_attention_heads - config.local_heads) * config.num_hashes * 2 * config.bucket_size
    return max(loss, layer, 2 * FLOAT * pairs if config.attention == "lsh" else 0)


def parse_memory(text: str) -> int:
    """Read a size of memory in bytes: `80GiB`, `24GB`, `141 GB`."""
    read = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE)
    if read is None or read[2].lower() not in UNITS or float(read[1]) == 0:
        raise ValueError(
            f"`text` must be a size of memory, a number above 0 with its unit, like 80GiB or 24GB, got {text!r}."
        )
    return int(float(read[1]) * UNITS[read[2].lower()])
