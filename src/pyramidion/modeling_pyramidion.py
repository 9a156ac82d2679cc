"""The model family in transformers' idiom: an encoder that goes on with less, a decoder that attends to what is left.

Read `PyramidionEncoder.encode` first: it is the paper's figure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from pyramidion import compact
from pyramidion.attention import (
    BlockwiseAttention,
    EfficientAttention,
    FullAttention,
    Layout,
    LSHAttention,
    PaddedLayout,
    SelfAttention,
)
from pyramidion.attention.heads import eager, received
from pyramidion.attention.layout import shapes_decide
from pyramidion.configuration_pyramidion import Pooling, PyramidionConfig
from pyramidion.kernels.functions import (
    add,
    add_and_norm,
    add_norm,
    embed,
    multiply,
    multiply_and_activate,
    norm,
    place,
    unwatched,
)
from pyramidion.kernels.loss import linear_cross_entropy
from pyramidion.pooling import Pooler, StridedPooler, make_pooler
from pyramidion.topk import Selection, hard_topk

# --------------------------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class PyramidionEncoderOutput(BaseModelOutput):
    """What leaves the encoder: the memory, and on request the account of it.

    last_hidden_state  [b k d]  the memory; a document with fewer representations has its own first
    memory_mask        [b k]    True for a real one, None where all are. It travels with the memory, because `generate`
                                knows only the mask of the source
    copy_states        [b c d]  what can be copied from, with `copies`: the memory, or what is left at `copy_length`
    copy_tokens        [b c w]  the token that won each of these slots and those behind it in the document, as many as
                                `copies` says; where the document ends before, the winner again
    copy_shares        [b c]    how much of its slot the winner holds, 0 where there is none
    hidden_states      what enters the first layer and leaves each one, [b n d] each, with `output_hidden_states`
    attentions         weights of each layer, over blocks [B h m m] or documents [b h n n], with `output_attentions`
    selections         the Selection of each layer that pools, with `output_selections`; the first one starts from
                       the source tokens, padding included
    selection          their composition: for each source token its slot in the memory, and its weight there. Where
                       vectors are spread again (Funnel), that of the residual path: each token has its own slot
    """

    memory_mask: Tensor | None = None
    copy_states: Tensor | None = None
    copy_tokens: Tensor | None = None
    copy_shares: Tensor | None = None
    selections: tuple[Selection, ...] | None = None
    selection: Selection | None = None


@dataclass
class PyramidionModelOutput(Seq2SeqModelOutput):
    """transformers' Seq2SeqModelOutput, with the encoder's account."""

    memory_mask: Tensor | None = None
    copy_states: Tensor | None = None
    copy_tokens: Tensor | None = None
    copy_shares: Tensor | None = None
    encoder_selections: tuple[Selection, ...] | None = None
    encoder_selection: Selection | None = None


@dataclass
class PyramidionLMOutput(Seq2SeqLMOutput):
    """transformers' Seq2SeqLMOutput, with the encoder's account."""

    memory_mask: Tensor | None = None
    copy_states: Tensor | None = None
    copy_tokens: Tensor | None = None
    copy_shares: Tensor | None = None
    encoder_selections: tuple[Selection, ...] | None = None
    encoder_selection: Selection | None = None


@dataclass
class PyramidionClassifierOutput(SequenceClassifierOutput):
    """transformers' SequenceClassifierOutput, with the encoder's account."""

    selections: tuple[Selection, ...] | None = None
    selection: Selection | None = None


# --------------------------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------------------------


class PyramidionEmbedding(nn.Embedding):
    """Look tokens up, and scale them to the size of the positions added to them."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.embedding_dim**0.5


def enter(
    side: "PyramidionEncoder | PyramidionDecoder", source: Tensor, table: Tensor | None, places: Tensor | None
) -> Tensor:
    """Embed tokens [...] for the first layer, or take vectors [... d]; table and places are those of `embed`."""
    rate, narrow = side.config.dropout if side.training else 0.0, not side.config.pre_norm
    options: dict[str, Any] = {"table": table, "places": places, "dropout": rate, "narrow": narrow}
    embedding = side.embed_tokens
    if source.is_floating_point():
        return place(source, **options)
    if type(embedding) is not PyramidionEmbedding or not unwatched(embedding):
        return place(embedding(source), **options)
    factor = embedding.embedding_dim**0.5
    return embed(source, embedding.weight, padding=embedding.padding_idx, factor=factor, **options)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Encode positions [...] as sines and cosines [... width] of falling frequency, in float32."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, device=positions.device) * -(torch.log(torch.tensor(1e4)) / half))
    angle = positions.unsqueeze(-1).float() * frequency  # [... half]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class PyramidionNorm(nn.LayerNorm):
    """Normalise by itself, or together with the sum in front of it."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, eps=self.eps)

    def of_sum(self, x: Tensor, change: Tensor, shift: Tensor | None, dropout: float) -> Tensor:
        """Normalise x + dropout(change + shift)."""
        return add_norm(x, change, self.weight, self.bias, shift=shift, dropout=dropout, eps=self.eps)

    def and_sum(self, x: Tensor, change: Tensor, shift: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
        """Give x + dropout(change + shift), and its norm."""
        return add_and_norm(x, change, self.weight, self.bias, shift=shift, dropout=dropout, eps=self.eps)


class PyramidionResidual(nn.Module):
    """Add a sublayer to its input, with the norm behind the sum (the paper) or in front of the sublayer."""

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__()
        self.norm = PyramidionNorm(config.hidden_size)
        self.rate = config.dropout

    @property
    def dropout(self) -> float:
        """Give the share of a sublayer's result to drop now."""
        return self.rate if self.training else 0.0


# What a sublayer gives: all of it; or that without its bias, the bias, and what it started from, for the sum.
Change = Tensor | tuple[Tensor, Tensor | None, Tensor]
Sublayer = Callable[[Tensor], tuple[Change, Any]]


def through(x: Tensor, *steps: tuple[PyramidionResidual, Sublayer], pre_norm: bool) -> tuple[Tensor, list[Any]]:
    """Go through the sublayers of a layer, each with its residual connection; give also what they say beside.

    Where norms stand first, each is computed together with the sum before it.
    """
    extras = []
    normed = steps[0][0].norm(x) if pre_norm else x
    for number, (residual, sublayer) in enumerate(steps):
        change, extra = sublayer(normed)
        extras.append(extra)
        change, shift, start = change if isinstance(change, tuple) else (change, None, normed)
        if not pre_norm:
            x = normed = residual.norm.of_sum(start, change, shift, residual.dropout)
        elif number + 1 < len(steps):
            x, normed = steps[number + 1][0].norm.and_sum(x, change, shift, residual.dropout)
        else:
            x = add(x, change, shift=shift, dropout=residual.dropout)
    return x, extras


def bare(module: nn.Module, *inputs: Any, **options: Any) -> Sublayer:
    """Make a sublayer of a module; one of ours leaves its last bias to the sum, unless somebody else looks on."""
    ours = isinstance(module, SelfAttention | PyramidionDecoderAttention | PyramidionFeedForward)
    if ours and unwatched(module):
        options["bare"] = True
    return lambda x: module(x, *inputs, **options)


class PyramidionFeedForward(nn.Module):
    """Transform each token by itself."""

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.hidden_size, config.intermediate_size)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation, self.relu = ACT2FN[config.activation_function], config.activation_function == "relu"
        self.dropout = config.activation_dropout

    def forward(self, x: Tensor, *, bare: bool = False) -> tuple[Change, None]:
        """Transform x [... d]; `bare` leaves the bias of the last product to the caller, and gives x too."""
        rate = self.dropout if self.training else 0.0
        x, wide = multiply_and_activate(x, self.widen, self.activation, relu=self.relu, dropout=rate)
        _, (out, shift) = multiply(wide, self.narrow, bare=bare)
        return ((out, shift, x) if bare else out), None


def attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Serve `attn_implementation="eager"` with our own function, in the form of transformers'."""
    return eager(query, key, value, mask, dropout=options.get("dropout", 0.0))


def attend(
    module: "PyramidionEncoderLayer | PyramidionDecoderAttention",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attend by `attn_implementation`: `heads.eager`, in whatever way this machine does it fastest.

    mask  bool [b 1 1 n], True for a real key, or a mask made by transformers for the same implementation
    """
    implementation = module.config._attn_implementation or "eager"
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        if "flash" in implementation:
            mask = mask[:, 0, 0]  # [b n]
        elif "flex" in implementation:
            shape = query.transpose(1, 2).flatten(2)  # [b q d]: only its shape and device are read
            mask = create_bidirectional_mask(
                module.config, shape, mask[:, 0, 0], key.transpose(1, 2).flatten(2), allow_is_bidirectional_skip=False
            )
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, attend_eagerly)
    mixed, weights = interface(module, query, key, value, mask, dropout=dropout, scaling=query.shape[-1] ** -0.5)
    return mixed, weights


# --------------------------------------------------------------------------------------------------------------------
# Encoder
# --------------------------------------------------------------------------------------------------------------------

PIECE = 1 << 16  # tokens that a layer computes at once where it keeps nothing of them


def make_attention(config: PyramidionConfig, layer: int) -> SelfAttention:
    """Build the self-attention that the configuration names; every layer hashes in its own way."""
    width, heads, dropout = config.hidden_size, config.num_attention_heads, config.attention_dropout
    if config.attention == "full":
        return FullAttention(width, heads, dropout=dropout)
    if config.attention == "blockwise":
        return BlockwiseAttention(width, heads, dropout=dropout)
    local = {"local_heads": config.local_heads, "window": config.local_window}
    if config.attention == "lsh":
        hashing = {"bucket": config.bucket_size, "hashes": config.num_hashes, "seed": layer}
        return LSHAttention(width, heads, dropout=dropout, **hashing, **local)
    return EfficientAttention(width, heads, dropout=dropout, **local)


class PyramidionEncoderLayer(GradientCheckpointingLayer):
    """Attend and transform, over blocks [B m d]."""

    is_causal = False

    def __init__(self, config: PyramidionConfig, layer: int, *, counted: bool) -> None:
        super().__init__()
        self.config = config
        self.counted = counted  # a pooler asks what each token receives, so the attention matrix is written out
        self.attention = make_attention(config, layer)
        self.attention_residual = PyramidionResidual(config)
        self.feed_forward = PyramidionFeedForward(config)
        self.feed_forward_residual = PyramidionResidual(config)

    def forward(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        way = eager if self.counted else partial(attend, self)
        x, (weights, _) = through(
            x,
            (self.attention_residual, bare(self.attention, layout, attend=way)),
            (self.feed_forward_residual, bare(self.feed_forward)),
            pre_norm=self.config.pre_norm,
        )
        return x, weights


class PyramidionPreTrainedModel(PreTrainedModel):
    """What transformers should know about the family."""

    config: PyramidionConfig
    config_class = PyramidionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PyramidionEncoderLayer", "PyramidionDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    def __init__(self, config: PyramidionConfig, *args: Any, **kwargs: Any) -> None:
        config.check()
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does; weights that `pyramidion compact` wrote are expanded on the way."""
        file = compact.find(pretrained_model_name_or_path, kwargs)
        if file is None:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return compact.load(file, cls, super().from_pretrained, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Start as Vaswani et al. did: vectors of length about 1 in the table, Glorot's bounds elsewhere."""
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=module.embedding_dim**-0.5)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def repool(self, **changes: Any) -> Self:
        """Return the same model with other pooling, its weights copied, scorers that it lacks fresh.

        Such is the conversion to PoWER (appendix, "PoWER-BERT"): train a blockwise model, then
        `model.repool(pooling="power", input_length=2048, encoder_lengths=[1024, 512])`, and fine-tune that. The same
        with a checkpoint: `from_pretrained(path, pooling="power", ...)`.
        """
        converted = type(self)(PyramidionConfig.from_dict({**self.config.to_dict(), **changes}))
        missing, unexpected = converted.load_state_dict(self.state_dict(), strict=False)
        strange = [name for name in (*missing, *unexpected) if ".poolers." not in name]
        if strange:
            raise ValueError(f"`repool` must change the pooling alone, got {changes}, which touches {strange[0]}.")
        return converted.to(self.device, self.dtype).train(self.training)


@dataclass
class _Trace:
    """Collect what a caller may ask for while the encoder runs."""

    states: list[Tensor] | None
    attentions: list[Tensor] | None
    selections: list[Selection]
    copied: tuple[Tensor, Layout] | None = None

    def record(self, layout: Layout, x: Tensor, weights: Tensor | None = None) -> None:
        """Keep what leaves a layer, if asked."""
        if self.states is not None:
            self.states.append(layout.unpack(x))
        if self.attentions is not None and weights is not None:
            self.attentions.append(weights)


class PyramidionEncoder(PyramidionPreTrainedModel):
    """Encode documents, with fewer representations behind each layer that pools, into a memory of k."""

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__(config)
        self.embed_tokens = PyramidionEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.poolers = nn.ModuleDict(
            {str(layer): _pooler(config, pooling) for layer, pooling in config.poolings.items()}
        )
        self.layers = nn.ModuleList(
            PyramidionEncoderLayer(config, layer, counted=getattr(self.pooler_of(layer), "wants_attention", False))
            for layer in range(len(config.encoder_lengths))
        )
        self.norm = PyramidionNorm(config.hidden_size) if config.pre_norm else None
        self.spreads = any(pooling.kind == "funnel" for pooling in config.poolings.values())
        self.post_init()

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_selections: bool = False,
        **_: Any,
    ) -> PyramidionEncoderOutput:
        """Encode `input_ids` [b n], or `inputs_embeds` [b n d], where `attention_mask` [b n] is not 0.

        Padding may stand on either side, or anywhere: only real tokens are looked at, counted and computed.
        """
        source = _one_of(input_ids, inputs_embeds)
        tokens, layout = self._enter(source, attention_mask)  # [b n ...]
        trace = _Trace([] if output_hidden_states else None, [] if output_attentions else None, [])
        chosen = partial(self._account, source, attention_mask, layout.n, trace.selections)
        entered, (memory, layout) = layout, self.encode(tokens, layout, trace)  # [b k d]
        return PyramidionEncoderOutput(
            last_hidden_state=memory,
            hidden_states=None if trace.states is None else tuple(trace.states),
            attentions=None if trace.attentions is None else tuple(trace.attentions),
            memory_mask=None if layout.equal else layout.document_mask,
            **self._winners(tokens, entered, trace.copied or (memory, layout), trace.selections),
            **(chosen() if output_selections else {}),
        )

    def encode(self, tokens: Tensor, layout: Layout, trace: _Trace) -> tuple[Tensor, Layout]:
        """Attend, score, select, pool, and go on with less: tokens [b n ...] -> memory [b k d] and who is in it."""
        x = self._embed(layout.pack(tokens), layout)  # [B m d]
        trace.record(layout, x)
        whole = None  # what the first pooling starts from
        for number, layer in enumerate(self.layers):
            x, weights = self._layer(layer, x, layout, whole=trace.attentions is not None)
            if (pooler := self.pooler_of(number)) is not None:
                whole = (layout.unpack(x), layout) if whole is None else whole
                if len(trace.selections) == self.config.copy_stage:
                    trace.copied = layout.unpack(x), layout
                x, layout, selection = self._pool(pooler, x, layout, weights)  # [B m d], fewer blocks
                trace.selections.append(selection)
            trace.record(layout, x, weights)
        memory = layout.unpack(x)  # [b k d]
        if self.spreads and whole is not None:
            x, layout = whole
            memory = _compose(trace.selections).unpool(memory) + x  # [b n d]
        return (memory if self.norm is None else self.norm(memory)), layout

    def _layer(self, layer: Any, x: Tensor, layout: Layout, *, whole: bool) -> tuple[Tensor, Tensor | None]:
        """Compute a layer over blocks x [B m d]: at once, or some after the others where nothing of it is kept.

        Blocks do not see each other. So where activations are recomputed in backward, or no gradient is asked for, a
        layer needs room for few of them at a time, and the longest document is decided by what stands between layers.
        """
        count = max(1, PIECE // layout.m)
        if torch.compiler.is_compiling() or layout.blocks <= count:
            return layer(x, layout)
        kept = torch.is_grad_enabled() and not (layer.gradient_checkpointing and self.training)
        if kept or whole or layer.counted or self.config.attention != "blockwise":
            return layer(x, layout)
        pieces = enumerate(x.split(count))
        return torch.cat([layer(piece, layout.part(turn * count, count))[0] for turn, piece in pieces]), None

    def pooler_of(self, layer: int) -> Pooler | StridedPooler | None:
        """Give the pooler behind a layer. Only layers that pool have one: an unused scorer breaks training on many."""
        found: Any = self.poolers[str(layer)] if str(layer) in self.poolers else None  # noqa: SIM401, it has no get
        return found

    def _enter(self, source: Tensor, mask: Tensor | None) -> tuple[Tensor, Layout]:
        """Bring the real tokens of each document to the front, and lay them out in blocks."""
        if shapes_decide():
            return _sorted(source, mask, self.config.packing)
        front, lengths = _real_first(source, mask)
        return front, Layout(lengths, self.config.packing, source.device)

    def _embed(self, tokens: Tensor, layout: Layout) -> Tensor:
        table = sinusoids(torch.arange(layout.n, device=tokens.device), self.config.hidden_size)  # [n d]
        places = layout.positions(torch.arange(1, layout.n + 1, device=tokens.device))  # [B m], 0 behind the end
        return enter(self, tokens, table, places)  # [B m d]

    def _pool(
        self, pooler: Pooler | StridedPooler, x: Tensor, layout: Layout, weights: Tensor | None
    ) -> tuple[Tensor, Layout, Selection]:
        mask = None if layout.equal else layout.document_mask
        pooled = pooler(layout.unpack(x), mask, self._received(weights, layout) if pooler.wants_attention else None)
        shorter = layout.shorten(pooled.x.shape[1])
        return shorter.pack(pooled.x[:, : shorter.n]), shorter, pooled.selection

    def _received(self, weights: Tensor | None, layout: Layout) -> Tensor:
        """Sum the attention that each token received: weights over blocks or documents -> [b n]."""
        assert weights is not None
        if self.config.attention == "full":
            return received(weights, layout.document_mask)
        return layout.unpack(received(weights, layout.mask))

    def _winners(
        self, tokens: Tensor, entered: Layout, left: tuple[Tensor, Layout], selections: Sequence[Selection]
    ) -> dict[str, Any]:
        """Say what can be copied: the slots that are left, which token [b n] won each, and how much of it that holds.

        Nothing where a model does not copy, or was given vectors instead of tokens.
        """
        if not self.config.copies or tokens.is_floating_point():
            return {}
        states, layout = left
        places, shares = self.reach(selections, entered.document_mask)
        places = places[:, : layout.n]
        return {
            "copy_states": states,
            "copy_tokens": tokens.gather(1, places.flatten(1)).unflatten(1, places.shape[1:]),
            "copy_shares": shares[:, : layout.n].masked_fill(~layout.document_mask, 0),
        }

    def reach(self, selections: Sequence[Selection], mask: Tensor) -> tuple[Tensor, Tensor]:
        """Say which of the tokens [b n], real ones first, can be copied from each slot [b c w], and its share [b c]."""
        shares = torch.ones(mask.shape, device=mask.device)
        places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        for selection in () if self.spreads else selections[: self.config.copy_stage]:
            winners = selection.winners.clamp(min=0)  # [b k]
            shares = shares.gather(1, winners) * selection.weights.gather(1, winners)
            places = places.gather(1, winners)
        places = places.unsqueeze(2)
        behind = places + torch.arange(self.config.copies, device=mask.device)  # [b c w]
        return torch.where(behind < mask.sum(1)[:, None, None], behind, places), shares

    def _account(
        self, source: Tensor, mask: Tensor | None, longest: int, selections: list[Selection]
    ) -> dict[str, Any]:
        """Say where the source tokens went: the selections from them on, and the composition of all."""
        real = None if mask is None else mask.to(source.device) != 0
        arrival = hard_topk(torch.zeros(source.shape[:2], device=source.device), longest, mask=real)
        chosen = [arrival.then(selections[0]), *selections[1:]] if selections else []
        return {
            "selections": tuple(chosen),
            "selection": arrival if self.spreads or not chosen else _compose(chosen),
        }


def _pooler(config: PyramidionConfig, pooling: Pooling) -> Pooler | StridedPooler:
    return make_pooler(
        pooling.kind,
        pooling.k,
        config.hidden_size,
        scorer=pooling.scorer,
        temperature=config.pool_temperature,
        base=config.pool_base,
        sort=config.pool_sort,
        index=config.scorer_dimension,
    )


def _compose(selections: Sequence[Selection]) -> Selection:
    return reduce(lambda first, second: first.then(second), selections)


def _one_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Take token numbers [b n] or their vectors [b n d], whichever is given."""
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, got {given}.")
    source = input_ids if inputs_embeds is None else inputs_embeds
    assert source is not None
    if source.ndim != (2 if inputs_embeds is None else 3) or 0 in source.shape:
        name, form = ("input_ids", "[b n]") if inputs_embeds is None else ("inputs_embeds", "[b n d]")
        raise ValueError(f"`{name}` must be {form} with at least one token, got shape {list(source.shape)}.")
    return source


def _real_first(source: Tensor, mask: Tensor | None) -> tuple[Tensor, list[int]]:
    """Bring the real tokens of each document to the front, and count them on the host.

    It is the one place where the encoder waits for the device, before any work is queued; without a mask it does not.
    """
    b, n = source.shape[:2]
    if mask is None:
        return source, [n] * b
    real = _real(source, mask)
    count = real.sum(1, keepdim=True)  # [b 1]
    front = torch.arange(n, device=source.device) < count  # [b n]
    *lengths, in_place = torch.cat([count.flatten(), (real == front).all().view(1)]).tolist()
    if min(lengths) < 1:
        row = lengths.index(0)
        raise ValueError(f"`attention_mask` must mark at least one token of every document, got none in row {row}.")
    if not in_place:
        source = _take(source, _order(real))
    source = source.masked_fill(~_wide(front, source), 0)  # whatever padding held: an unknown token, a NaN
    return source[:, : max(lengths)], lengths


def _sorted(source: Tensor, mask: Tensor | None, m: int) -> tuple[Tensor, Layout]:
    """Do the same in a graph, where nothing can be asked: the real tokens are counted on the device.

    A document without any is not refused there.
    """
    b, n = source.shape[:2]
    if mask is None:
        layout = PaddedLayout(torch.full((b,), n, device=source.device), n, m, equal=True)
        return source.index_select(1, torch.arange(layout.n, device=source.device)), layout
    real = _real(source, mask)
    layout = PaddedLayout(real.sum(1), n, m, equal=False)
    order = _order(real).index_select(1, torch.arange(layout.n, device=source.device))  # as long as whole blocks
    return _take(source, order).masked_fill(~_wide(layout.document_mask, source), 0), layout


def _real(source: Tensor, mask: Tensor) -> Tensor:
    if mask.shape != source.shape[:2]:
        raise ValueError(f"`attention_mask` must be [b n] = {[*source.shape[:2]]}, got shape {list(mask.shape)}.")
    return mask.to(source.device) != 0


def _order(real: Tensor) -> Tensor:
    return real.int().argsort(dim=1, descending=True, stable=True)  # [b n]


def _take(source: Tensor, order: Tensor) -> Tensor:
    index = _wide(order, source)
    return source.gather(1, index.expand(-1, -1, *source.shape[2:]))


def _wide(x: Tensor, source: Tensor) -> Tensor:
    return x.view(*x.shape, *[1] * (source.ndim - 2))


# --------------------------------------------------------------------------------------------------------------------
# Decoder
# --------------------------------------------------------------------------------------------------------------------


class PyramidionDecoderAttention(nn.Module):
    """Attend to the tokens so far, or to the memory; keys and values of both are kept in a cache."""

    def __init__(self, config: PyramidionConfig, layer: int, *, is_causal: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.layer_idx, self.is_causal = config, layer, is_causal
        self.heads, self.dropout = config.num_attention_heads, config.attention_dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        *,
        bare: bool = False,
    ) -> tuple[Change, Tensor | None]:
        """Attend from x [b t d] to itself, or to the memory [b k d], which the cache then holds for good.

        bare  leave the bias of the last product to the caller, and give x too
        """
        own = (self.key, self.value) if memory is None else ()
        x, query, *pair = self._project(x, self.query, *own)  # [b h t e]
        key, value = self._look_back(pair[0], pair[1], cache) if memory is None else self._look_up(memory, cache)
        dropout = self.dropout if self.training else 0.0
        mixed, weights = attend(self, query, key, value, mask, dropout=dropout)  # [b t h e]
        _, (out, shift) = multiply(mixed.flatten(2), self.out, bare=bare)
        return ((out, shift, x) if bare else out), weights

    def _project(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        """Give x, and of each layer linear(x) parted into heads: [b h n e]."""
        x, *heads = multiply(x, *linears)
        return [x, *(product.unflatten(-1, (self.heads, -1)).transpose(1, 2) for product, _ in heads)]

    def _look_back(self, key: Tensor, value: Tensor, cache: EncoderDecoderCache | None) -> tuple[Tensor, Tensor]:
        return (key, value) if cache is None else cache.self_attention_cache.update(key, value, self.layer_idx)

    def _look_up(self, memory: Tensor, cache: EncoderDecoderCache | None) -> tuple[Tensor, Tensor]:
        if cache is None:
            _, key, value = self._project(memory, self.key, self.value)
            return key, value
        kept = cache.cross_attention_cache
        if not cache.is_updated.get(self.layer_idx):
            kept.update(*self._project(memory, self.key, self.value)[1:], self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return kept.layers[self.layer_idx].keys, kept.layers[self.layer_idx].values


class PyramidionDecoderLayer(GradientCheckpointingLayer):
    """Look back, look into the memory, transform."""

    def __init__(self, config: PyramidionConfig, layer: int) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = PyramidionDecoderAttention(config, layer, is_causal=True)
        self.attention_residual = PyramidionResidual(config)
        self.cross_attention = PyramidionDecoderAttention(config, layer, is_causal=False)
        self.cross_attention_residual = PyramidionResidual(config)
        self.feed_forward = PyramidionFeedForward(config)
        self.feed_forward_residual = PyramidionResidual(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
    ) -> Tensor:
        x, _ = through(
            x,
            (self.attention_residual, bare(self.attention, mask, cache=past_key_values)),
            (self.cross_attention_residual, bare(self.cross_attention, memory_mask, memory, cache=past_key_values)),
            (self.feed_forward_residual, bare(self.feed_forward)),
            pre_norm=self.pre_norm,
        )
        return x


class PyramidionDecoder(PyramidionPreTrainedModel):
    """Write, attending to a memory of k representations."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": PyramidionDecoderLayer,
        "attentions": OutputRecorder(PyramidionDecoderAttention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(PyramidionDecoderAttention, index=1, layer_name="cross_attention"),
    }

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__(config)
        self.embed_tokens = PyramidionEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(PyramidionDecoderLayer(config, layer) for layer in range(config.decoder_layers))
        self.norm = PyramidionNorm(config.hidden_size) if config.pre_norm else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Read `input_ids` [b t] beside the memory `encoder_hidden_states` [b k d] and its mask [b k]."""
        if encoder_hidden_states is None:
            raise ValueError("`encoder_hidden_states` must be the memory [b k d], got None.")
        source = _one_of(input_ids, inputs_embeds)
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        past = past_key_values.self_attention_cache if isinstance(past_key_values, EncoderDecoderCache) else None
        places = table = None
        if self.config.decoder_positions:
            number = torch.arange(source.shape[1], device=source.device)
            table = sinusoids(number + (0 if past is None else past.get_seq_length()), self.config.hidden_size)  # [t d]
            places = (number + 1).expand(source.shape[:2])
        x = enter(self, source, table, places)  # [b t d]
        mask = create_causal_mask(self.config, x, attention_mask, past)
        memory_mask = None if encoder_attention_mask is None else encoder_attention_mask[:, None, None] != 0
        for layer in self.layers:
            x = layer(x, encoder_hidden_states, mask, memory_mask, past_key_values=past_key_values)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x if self.norm is None else self.norm(x), past_key_values=past_key_values
        )


# --------------------------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------------------------


class PyramidionCopier(nn.Module):
    """Copy from the document: attend to slots with one head, and take a slot's winner or a token behind it.

    A token is written by the head over the vocabulary, or copied. `forward` says how likely it is to be copied, and
    from which slot; what is left of 1 is for the vocabulary. Of a slot that is a blend, only the winner's share can be
    copied. How far behind the winner the token is that is copied, `ahead` says for all slots alike: so a phrase of
    which one word is kept can be gone along.

    The slots are those of the memory, whose vectors are the keys, or those of an earlier layer, and have keys then.
    """

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__()
        self.query = nn.Linear(config.hidden_size, config.copy_width)
        self.gate = nn.Linear(config.hidden_size, 1)
        self.ahead = nn.Linear(config.hidden_size, config.copies) if config.copies > 1 else None
        self.norm, self.key = None, None
        if config.copy_length is not None:
            self.norm = PyramidionNorm(config.hidden_size)
            self.key = nn.Linear(config.hidden_size, config.copy_width)

    def forward(self, x: Tensor, states: Tensor, shares: Tensor) -> "Copying":
        """Say what x [b t d] copies from slots [b c d] of which the winners hold `shares` [b c]."""
        steps = x[..., :0] if self.ahead is None else self.ahead(x)
        return self.attend(self.query(x), self.gate(x), steps, self.keys(states), shares)

    def keys(self, states: Tensor) -> Tensor:
        """Give what queries are compared with: slots [b c d] -> [b c e]."""
        return states if self.norm is None or self.key is None else self.key(self.norm(states))

    @staticmethod
    def attend(query: Tensor, gate: Tensor, steps: Tensor, keys: Tensor, shares: Tensor) -> "Copying":
        """Do the same with the query [b t e], and the logits of the gate [b t 1] and of steps [b t w] at hand.

        The only step has no logit. Probabilities are in float32, or in float64 where the query is.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query @ keys.transpose(1, 2).to(query.dtype)).to(wide) * keys.shape[-1] ** -0.5  # [b t c]
        scores = scores.masked_fill((shares == 0).unsqueeze(1), torch.finfo(wide).min)
        ahead = F.pad(steps, (0, int(not steps.shape[-1]))).softmax(-1, dtype=wide)
        return Copying(scores.softmax(-1), shares.to(wide), gate.to(wide).sigmoid(), ahead)


class Copying(NamedTuple):
    """How likely tokens are copied, and from where.

    slots   [b t c]  to which slot a token looks
    shares  [b c]    how much of the slot can be copied
    gate    [b t 1]  whether it is copied at all
    ahead   [b t w]  how far behind the slot's winner; over slots and over steps, all sum to 1
    """

    slots: Tensor
    shares: Tensor
    gate: Tensor
    ahead: Tensor

    @property
    def each(self) -> Tensor:
        """Give the probability of each way to copy: [b t c w]."""
        return (self.slots * self.shares.unsqueeze(1) * self.gate).unsqueeze(-1) * self.ahead.unsqueeze(-2)

    def mix(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Give the logarithms of all probabilities [b t v]: of logits [b t v], and of copying tokens [b c w]."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        each = self.each.flatten(-2).to(wide)  # [b t c*w]
        written = logits.softmax(-1, dtype=wide) * (1 - each.sum(-1, keepdim=True))
        places = tokens.flatten(1).unsqueeze(1).expand(each.shape)
        return written.scatter_add(-1, places, each).clamp(min=torch.finfo(wide).tiny).log()

    def of_labels(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Give for labels [b t] the logarithms [b*t] of what is not copied, and of copying just that label.

        Slots may be many. So the gate, which is the same for all, comes last, and steps are looked at one by one.
        """
        least, gate = torch.finfo(self.slots.dtype), self.gate.squeeze(-1)
        held = self.slots * self.shares.unsqueeze(1)  # [b t c]
        rest = 1 - gate * held.sum(-1)  # [b t]
        found = torch.zeros_like(rest)
        for step, words in enumerate(tokens.unbind(2)):
            same = words.unsqueeze(1) == labels.unsqueeze(2)
            found = found + self.ahead[..., step] * torch.where(same, held, 0).sum(-1)
        return rest.clamp(min=least.eps).log().flatten(), (found * gate).clamp(min=least.tiny).log().flatten()


class PyramidionEncoderModel(PyramidionPreTrainedModel):
    """Encode long documents into few representations: the encoder by itself."""

    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]  # noqa: RUF012

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__(config)
        self.shared = PyramidionEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.encoder = PyramidionEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: PyramidionEmbedding) -> None:
        self.shared = self.encoder.embed_tokens = value

    def forward(self, *args: Any, **kwargs: Any) -> PyramidionEncoderOutput:
        """Do what `PyramidionEncoder.forward` does."""
        return self.encoder(*args, **kwargs)


class PyramidionModel(PyramidionPreTrainedModel):
    """Encode, pool and decode, without a head."""

    _tied_weights_keys = {  # noqa: RUF012
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__(config)
        self.shared = PyramidionEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.encoder = PyramidionEncoder(config)
        self.decoder = PyramidionDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: PyramidionEmbedding) -> None:
        self.shared = self.encoder.embed_tokens = self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: PyramidionEncoderOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_selections: bool = False,
        **kwargs: Any,
    ) -> PyramidionModelOutput:
        """Read `input_ids` [b n] where `attention_mask` is not 0, and `decoder_input_ids` [b t] beside what was kept.

        With `encoder_outputs` from the encoder nothing is encoded again; `attention_mask`, which is the source's, is
        then not looked at: the memory's mask is in them.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids,
                attention_mask,
                inputs_embeds,
                output_selections=output_selections,
                return_dict=True,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, PyramidionEncoderOutput):
            raise ValueError(
                f"`encoder_outputs` must be what the encoder returned, with the mask of its memory, "
                f"got {type(encoder_outputs).__name__}."
            )
        memory = encoder_outputs
        written = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=memory.last_hidden_state,
            encoder_attention_mask=memory.memory_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return PyramidionModelOutput(
            last_hidden_state=written.last_hidden_state,
            past_key_values=written.past_key_values,
            decoder_hidden_states=written.hidden_states,
            decoder_attentions=written.attentions,
            cross_attentions=written.cross_attentions,
            encoder_last_hidden_state=memory.last_hidden_state,
            encoder_hidden_states=memory.hidden_states,
            encoder_attentions=memory.attentions,
            memory_mask=memory.memory_mask,
            copy_states=memory.copy_states,
            copy_tokens=memory.copy_tokens,
            copy_shares=memory.copy_shares,
            encoder_selections=memory.selections,
            encoder_selection=memory.selection,
        )


class PyramidionForConditionalGeneration(PyramidionPreTrainedModel, GenerationMixin):
    """Write a text about a long one: training with `labels`, writing with `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}  # noqa: RUF012

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__(config)
        self.model = PyramidionModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.copier = PyramidionCopier(config) if config.copies else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: PyramidionEncoderOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_selections: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        label_smoothing: float = 0.0,
        output_logits: bool | None = None,
        **kwargs: Any,
    ) -> PyramidionLMOutput:
        """Give the logits [b t v] of each next token, and the loss where `labels` [b t] are not -100.

        The loss is computed a chunk of tokens at a time, so that training never holds all logits. They are therefore
        None while training with labels, unless `output_logits` asks for them.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs: PyramidionModelOutput = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache,
            output_selections,
            return_dict=True,
            **kwargs,
        )
        x, loss = outputs.last_hidden_state, None  # [b t d]
        copying, tokens = self._copying(x, outputs)
        if labels is not None:  # they stand one step behind the input already
            labels = labels.to(x.device)
            ways = (None, None) if copying is None else copying.of_labels(tokens, labels)
            loss = linear_cross_entropy(
                x.flatten(0, 1),
                self.lm_head.weight,
                labels.flatten(),
                count=num_items_in_batch,
                smoothing=label_smoothing,
                written=ways[0],
                copied=ways[1],
            )
        if output_logits is None:
            output_logits = labels is None or not self.training
        logits = self.lm_head(x) if output_logits else None  # [b t v]
        if logits is not None and copying is not None:
            logits = copying.mix(logits, tokens)
        return PyramidionLMOutput(
            loss=loss, logits=logits, **{name: value for name, value in outputs.items() if name != "last_hidden_state"}
        )

    def _copying(self, x: Tensor, outputs: PyramidionModelOutput) -> tuple["Copying | None", Any]:
        """Say what x [b t d] copies, and the tokens [b c w] that can be."""
        if self.copier is None:
            return None, None
        states, tokens, shares = outputs.copy_states, outputs.copy_tokens, outputs.copy_shares
        if states is None or tokens is None or shares is None:
            raise ValueError(
                "`input_ids` must be given to a model that copies, or `encoder_outputs` that came of them: "
                "this memory holds no tokens."
            )
        return self.copier(x, states, shares), tokens

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels [b t] right behind the start token, padding where they are -100."""
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)


class PyramidionForSequenceClassification(PyramidionPreTrainedModel):
    """Classify a long document by the mean of what was kept of it."""

    def __init__(self, config: PyramidionConfig) -> None:
        super().__init__(config)
        self.model = PyramidionEncoderModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_selections: bool = False,
        **kwargs: Any,
    ) -> PyramidionClassifierOutput:
        """Give the logits [b labels], and the loss where `labels` [b] are given."""
        kept: PyramidionEncoderOutput = self.model(
            input_ids, attention_mask, inputs_embeds, output_selections=output_selections, return_dict=True, **kwargs
        )
        mask = kept.memory_mask
        memory = kept.last_hidden_state  # [b k d]
        if mask is None:
            mean = memory.mean(1)
        else:
            mean = memory.masked_fill(~mask.unsqueeze(-1), 0).sum(1) / mask.sum(1, keepdim=True)  # [b d]
        logits = self.classifier(F.dropout(mean, self.config.dropout, self.training))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return PyramidionClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=kept.hidden_states,
            attentions=kept.attentions,
            selections=kept.selections,
            selection=kept.selection,
        )


AutoConfig.register("pyramidion", PyramidionConfig)
AutoModel.register(PyramidionConfig, PyramidionModel)
AutoModelForTextEncoding.register(PyramidionConfig, PyramidionEncoderModel)
AutoModelForSeq2SeqLM.register(PyramidionConfig, PyramidionForConditionalGeneration)
AutoModelForSequenceClassification.register(PyramidionConfig, PyramidionForSequenceClassification)

__all__ = [
    "PyramidionEncoderModel",
    "PyramidionForConditionalGeneration",
    "PyramidionForSequenceClassification",
    "PyramidionModel",
    "PyramidionPreTrainedModel",
]
