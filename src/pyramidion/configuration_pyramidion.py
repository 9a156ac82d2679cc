"""The one configuration of the family: lengths, attention, pooling, scorer, and the sizes."""

import difflib
import math
from dataclasses import field, fields
from typing import Any, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from pyramidion.pooling import POOLINGS
from pyramidion.scoring import SCORERS

ATTENTIONS = ("full", "blockwise", "lsh", "efficient")
SCORED = ("soft", "hard", "straight-through")  # the poolings that take a scorer
LARGEST_BLOCK = 2**20
GRANULE = 64

# What transformers itself passes or saves besides the declared fields.
FOREIGN = {
    *GenerationConfig().to_dict(),
    *("attn_implementation", "experts_implementation", "output_attentions", "num_labels", "name_or_path"),
    *("torch_dtype", "model_type", "tokenizer_class", "task_specific_params", "quantization_config", "auto_map"),
}


class Pooling(NamedTuple):
    """What stands behind one encoder layer: how it pools, what scores, and how many go on."""

    kind: str
    scorer: str | None
    k: int


@strict
class PyramidionConfig(PreTrainedConfig):
    r"""
    Describe any model of the paper, and any combination of its parts.

    The default is DeepPyramidion: six encoder layers that leave 8192, 8192, 2048, 512, 512 and 512 representations.

    Args:
        encoder_lengths: How many representations leave each encoder layer. A length below the one before means that
            the layer pools. Longer documents are welcome: a layer that pools cuts them to its length, the others
            keep what they get. Documents that are shorter already are not pooled.
        input_length: The number of tokens that enter, where the first layer pools; otherwise the first length.
        attention: `full`, `blockwise` (blocks of `block_size`), `lsh` (buckets of `bucket_size`, `num_hashes` rounds)
            or `efficient`. The last two have `local_heads` heads that see windows of `local_window` tokens.
        pooling: `soft` (the trainable tournament), `hard`, `straight-through`, `power` (attention received, hard),
            `mean` and `max` of neighbours, or `funnel` (mean, spread again before the decoder). One for all layers
            that pool, or a list with one for each layer and None where a layer does not pool.
        scorer: `linear` (the default), `nonlinear`, `power`, `embedding`, `random` or `index`, for the first three
            poolings. One, or a list like that of `pooling`.
        pool_temperature, pool_base, pool_sort: How sharp a meeting of two is, and whether candidates are sorted
            before a round; see `pyramidion.soft_topk`.
        scorer_dimension: The coordinate that the `embedding` scorer reads.
        pre_norm: Normalise before each sublayer instead of after it, as the paper does.
        decoder_positions: Add sinusoids to the decoder's input. The paper adds none: the memory carries positions.
        copies: Let a token be copied out of the document as well as written: the one that won a slot of the memory, by
            the share that it holds there, or one behind it. How many tokens can be copied from each slot on: 1 is the
            winner alone, 0 nothing. The scorer then learns to keep what is worth copying. Not in the paper.
        copy_length: Copy from what a layer that pools is given, where that are so many representations at full input,
            up to every token of the document; or from the memory, if that has as many. They are looked at by one head
            of usual width, once a token. By default it is the memory, by its whole width.

    The other arguments mean what they mean in every transformer.

    Example:

    ```python
    >>> from pyramidion import PyramidionConfig, PyramidionForConditionalGeneration

    >>> config = PyramidionConfig(encoder_lengths=[4096, 1024, 256], hidden_size=256, num_attention_heads=4)
    >>> model = PyramidionForConditionalGeneration(config)
    ```"""

    model_type = "pyramidion"
    keys_to_ignore_at_inference = [  # noqa: RUF012, transformers' own name and form
        "past_key_values",
        "memory_mask",
        "copy_states",
        "copy_tokens",
        "copy_shares",
    ]
    attribute_map = {"d_model": "hidden_size", "num_hidden_layers": "decoder_layers"}  # noqa: RUF012

    vocab_size: int = 32768
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_attention_heads: int = 8
    encoder_lengths: list[int] = field(default_factory=lambda: [8192, 8192, 2048, 512, 512, 512])
    input_length: int | None = None
    decoder_layers: int = 6
    attention: str = "blockwise"
    block_size: int = 512
    bucket_size: int = 64
    num_hashes: int = 4
    local_heads: int = 2
    local_window: int = 128
    pooling: str | list[str | None] = "soft"
    scorer: str | list[str | None] | None = None
    pool_temperature: float = 1.0
    pool_base: float | None = None
    pool_sort: bool = True
    scorer_dimension: int = 0
    activation_function: str = "relu"
    pre_norm: bool = False
    decoder_positions: bool = False
    copies: int = 0
    copy_length: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    use_cache: bool = True
    pad_token_id: int = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 1
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        super().__post_init__(**kwargs)
        self.check()

    @property
    def entering(self) -> list[int]:
        """List how many representations enter each encoder layer."""
        first = self.encoder_lengths[0] if self.input_length is None else self.input_length
        return [first, *self.encoder_lengths[:-1]]

    @property
    def packing(self) -> int:
        """Give the tokens of a block; where attention is not blockwise, blocks only serve to leave padding out."""
        return self.block_size if self.attention == "blockwise" else GRANULE

    @property
    def memory_length(self) -> int:
        """Give the number of representations that the decoder attends to, at full input."""
        spreads = any(pooling.kind == "funnel" for pooling in self.poolings.values())
        return self.entering[0] if spreads else self.encoder_lengths[-1]

    @property
    def copy_width(self) -> int:
        """Give the width of the vectors by which it is decided what is copied: those of the memory, or of one head."""
        return self.hidden_size if self.copy_length is None else self.hidden_size // self.num_attention_heads

    @property
    def copy_stage(self) -> int | None:
        """Count the layers that pool before what can be copied from is left; None where that is the memory."""
        lengths = [self.entering[layer] for layer in self.poolings]
        return lengths.index(self.copy_length) if self.copy_length in lengths else None

    @property
    def poolings(self) -> dict[int, Pooling]:
        """Say for each layer that pools how it does."""
        found = {}
        for layer, (before, k) in enumerate(zip(self.entering, self.encoder_lengths, strict=True)):
            if k < before:
                kind, scorer = self._of_layer("pooling", layer), self._of_layer("scorer", layer)
                if scorer is None and kind in SCORED:
                    scorer = "linear"
                found[layer] = Pooling(str(kind), scorer, k)
        return found

    def _of_layer(self, setting: str, layer: int) -> str | None:
        value: str | list[str | None] | None = getattr(self, setting)
        return value[layer] if isinstance(value, list) else value

    def _refuse_unknown(self, given: dict[str, Any]) -> None:
        known = {field.name for field in fields(self)} | set(self.attribute_map) | FOREIGN
        for name, value in given.items():
            if name not in known and not name.startswith("_"):
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean `{near[0]}`?" if near else ""
                raise ValueError(f"`{name}` is not a setting of PyramidionConfig, got {value!r}.{hint}")

    def check(self) -> None:
        """Refuse settings that are unknown or contradict each other, with the rule and the value.

        Models call it again, because `from_pretrained` changes single settings after the configuration was made.
        """
        self._check_sizes()
        self._check_lengths()
        self._check_names("pooling", POOLINGS)
        self._check_names("scorer", tuple(SCORERS))
        self._check_layers("pooling")
        self._check_layers("scorer")
        for layer, pooling in self.poolings.items():
            self._check_pooling(layer, pooling)
        kinds = {pooling.kind for pooling in self.poolings.values()}
        if "funnel" in kinds and len(kinds) > 1:
            raise ValueError(f"`pooling` must be funnel in every layer that pools or in none, got {self.pooling!r}.")
        self._check_copying("funnel" in kinds)

    def _check_copying(self, spreads: bool) -> None:
        if self.copies < 0:
            raise ValueError(f"`copies` must be at least 0, got {self.copies}.")
        if self.copy_length is None:
            return
        lengths = [*(self.entering[layer] for layer in self.poolings), self.encoder_lengths[-1]]
        if not self.copies or spreads or self.copy_length not in lengths:
            allowed = lengths if self.copies and not spreads else []
            choice = " or ".join(["None", *(str(length) for length in dict.fromkeys(allowed))])
            raise ValueError(
                f"`copy_length` must be {choice}: as many as a layer that pools is given or the memory has, in a model "
                f"that copies and does not spread what was pooled, got {self.copy_length}."
            )

    def _check_sizes(self) -> None:
        counted = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "decoder_layers")
        for name in (*counted, "block_size", "bucket_size", "num_hashes", "local_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"`hidden_size` must be a multiple of `num_attention_heads`, "
                f"got {self.hidden_size} and {self.num_attention_heads}."
            )
        if self.hidden_size % 2:
            raise ValueError(f"`hidden_size` must be even, for sines and cosines, got {self.hidden_size}.")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"`attention` must be one of {', '.join(ATTENTIONS)}, got {self.attention!r}.")
        if self.block_size > LARGEST_BLOCK:
            raise ValueError(f"`block_size` must be at most 2^20 = {LARGEST_BLOCK}, got {self.block_size}.")
        if not 0 <= self.local_heads <= self.num_attention_heads:
            raise ValueError(
                f"`local_heads` must be between 0 and `num_attention_heads` = {self.num_attention_heads}, "
                f"got {self.local_heads}."
            )
        if not 0 <= self.scorer_dimension < self.hidden_size:
            raise ValueError(
                f"`scorer_dimension` must be between 0 and `hidden_size` - 1 = {self.hidden_size - 1}, "
                f"got {self.scorer_dimension}."
            )
        if not 0 < self.pool_temperature < math.inf:
            raise ValueError(f"`pool_temperature` must be a positive number, got {self.pool_temperature}.")
        if not self.tie_word_embeddings:
            raise ValueError("`tie_word_embeddings` must be True: encoder, decoder and head share a table, got False.")
        if self.pool_base is not None and not 1 < self.pool_base < math.inf:
            raise ValueError(f"`pool_base` must be a number above 1, got {self.pool_base}.")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 0 and below 1, got {getattr(self, name)}.")

    def _check_lengths(self) -> None:
        if not self.encoder_lengths or min(self.encoder_lengths) < 1:
            raise ValueError(
                f"`encoder_lengths` must give at least one layer, each with at least 1 representation, "
                f"got {self.encoder_lengths}."
            )
        entering = self.entering
        if entering[0] < 1:
            raise ValueError(f"`input_length` must be at least 1, got {self.input_length}.")
        for layer, (before, after) in enumerate(zip(entering, self.encoder_lengths, strict=True)):
            if after > before:
                raise ValueError(
                    f"`encoder_lengths` must not grow: {before} representations enter layer {layer + 1} "
                    f"and {after} would leave it, got input {entering[0]} and {self.encoder_lengths}."
                )

    def _check_names(self, setting: str, allowed: tuple[str, ...]) -> None:
        value: str | list[str | None] | None = getattr(self, setting)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in allowed:
                raise ValueError(f"`{setting}` must be one of {', '.join(allowed)}, got {name!r}.")
        layers = len(self.encoder_lengths)
        if isinstance(value, list) and len(value) != layers:
            raise ValueError(f"`{setting}` must name one for each of the {layers} encoder layers, got {value}.")

    def _check_layers(self, setting: str) -> None:
        value, pools = getattr(self, setting), self.poolings
        if not isinstance(value, list):
            if value is not None and setting == "scorer" and not pools:
                raise ValueError(f"`scorer` must be None where no layer pools, got {value!r}.")
            return
        for layer, name in enumerate(value):
            change = f"from {self.entering[layer]} to {self.encoder_lengths[layer]} representations"
            if name is not None and layer not in pools:
                raise ValueError(
                    f"`{setting}` must be None for a layer that does not pool: layer {layer + 1} goes {change}, "
                    f"got {name!r}."
                )
            if name is None and layer in pools and setting == "pooling":
                raise ValueError(f"`pooling` must say how layer {layer + 1} goes {change}, got None.")

    def _check_pooling(self, layer: int, pooling: Pooling) -> None:
        if pooling.scorer is not None and pooling.kind not in SCORED:
            raise ValueError(
                f"`scorer` must be None with `pooling` {pooling.kind!r}, which does not score by one, "
                f"got {pooling.scorer!r} for layer {layer + 1}."
            )
        if "power" in pooling[:2] and self.attention not in ("full", "blockwise"):
            raise ValueError(
                f"`power` must have an attention matrix to sum, which `attention` 'full' and 'blockwise' have, "
                f"got {self.attention!r}."
            )


__all__ = ["PyramidionConfig"]
