"""One token for every text at once: the decoder's own weights, in few operations, over buffers that stay in place.

Beams of a document share its memory: their queries stand side by side against one set of keys. Their own keys and
values are never moved either. A beam that goes on from another one only notes whose keys are its past
(`Search.origin`), and all beams of a document attend to all keys of that document, masked by these notes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyramidion.compact import ByteMatrix
from pyramidion.generation.search import Search
from pyramidion.kernels.functions import stream
from pyramidion.kernels.launching import unplanned
from pyramidion.modeling_pyramidion import (
    PyramidionCopier,
    PyramidionEncoderOutput,
    PyramidionForConditionalGeneration,
    PyramidionResidual,
    sinusoids,
    through,
)

PRODUCTS = ("attention", "attention_out", "cross", "cross_out", "widen", "narrow")  # of a layer, in order of use
BY_COLUMNS = range(4, 16)  # rows: for these a CPU multiplies slowly by weights whose rows lie together


@dataclass(frozen=True)
class Dense:
    """One or several linear maps of the same input, as one: weight [out in], bias [out]."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Give both."""
        return self.weight, self.bias


def fuse(dtype: torch.dtype, *linears: nn.Linear) -> Dense:
    """Put linear maps side by side; a single one in its own precision stays the module's own memory."""
    weights, biases = [linear.weight.detach() for linear in linears], [linear.bias.detach() for linear in linears]
    if len(linears) == 1:
        return Dense(weights[0].to(dtype), biases[0].to(dtype))
    return Dense(torch.cat(weights).to(dtype), torch.cat(biases).to(dtype))


@dataclass(frozen=True)
class Block:
    """The weights of a decoder layer."""

    attention: Dense  # queries, keys and values
    attention_out: Dense
    cross: Dense  # queries alone
    cross_out: Dense
    widen: Dense
    narrow: Dense
    residuals: tuple[PyramidionResidual, PyramidionResidual, PyramidionResidual]
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype) -> "Block":
        """Read a layer of the model."""
        own, cross, dense = layer.attention, layer.cross_attention, layer.feed_forward
        return cls(
            attention=fuse(dtype, own.query, own.key, own.value),
            attention_out=fuse(dtype, own.out),
            cross=fuse(dtype, cross.query),
            cross_out=fuse(dtype, cross.out),
            widen=fuse(dtype, dense.widen),
            narrow=fuse(dtype, dense.narrow),
            residuals=(layer.attention_residual, layer.cross_attention_residual, layer.feed_forward_residual),
            activation=dense.activation,
        )

    def by_columns(self) -> "Block":
        """Copy the weights so that their columns lie together."""
        turned: dict[str, Any] = {}
        for name, dense in zip(PRODUCTS, self.products(), strict=True):
            turned[name] = replace(dense, weight=by_columns(dense.weight))
        return replace(self, **turned)

    def transform(self, x: Tensor) -> tuple[Tensor, None]:
        """Transform each row of x [r d] by itself."""
        return self.narrow(self.activation(self.widen(x))), None

    def products(self) -> Iterator[Dense]:
        """List the linear maps, in the order of their use."""
        return (getattr(self, name) for name in PRODUCTS)

    def tensors(self) -> Iterator[Tensor]:
        """List the weights that may be copies of the model's."""
        for dense in self.products():
            yield from dense.tensors()


def turns(weight: Tensor, rows: int) -> bool:
    """Tell whether so many rows are multiplied faster by a weight whose columns lie together."""
    return weight.is_cpu and weight.dtype == torch.float32 and rows in BY_COLUMNS


def by_columns(weight: Tensor) -> Tensor:
    """Give the same matrix [out in], with its columns together in memory."""
    return weight.t().contiguous().t()


def projection(table: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """Choose how x [r d] is multiplied by the vocabulary's table [v d], which is most of what a step reads."""
    if (packed := ByteMatrix.of(table)) is not None:
        return packed
    return partial(F.linear, weight=by_columns(table) if turns(table, rows) else table)


def compute_dtype(model: PyramidionForConditionalGeneration) -> torch.dtype:
    """Name the precision of products: that of autocast where it is on, else that of the weights."""
    kind, dtype = model.device.type, model.lm_head.weight.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype


class Copy:
    """Let tokens be copied: the keys of slots [b c e], tokens from their winners on [b c w], their shares [b c]."""

    def __init__(self, model: PyramidionForConditionalGeneration, documents: int, c: int, dtype: torch.dtype) -> None:
        self.look = self.looks(model, dtype)
        place, self.width = {"device": model.device}, model.config.copy_width
        self.keys = torch.zeros(documents, c, self.width, dtype=dtype, **place)
        self.tokens = torch.zeros(documents, c, model.config.copies, dtype=torch.int64, **place)
        self.shares = torch.zeros(documents, c, dtype=torch.promote_types(dtype, torch.float32), **place)

    @staticmethod
    def looks(model: PyramidionForConditionalGeneration, dtype: torch.dtype) -> Dense:
        """Put the copier's query, gate and steps side by side."""
        assert model.copier is not None
        ahead = [] if model.copier.ahead is None else [model.copier.ahead]
        return fuse(dtype, model.copier.query, model.copier.gate, *ahead)

    def read(self, keys: Tensor, tokens: Tensor, shares: Tensor) -> None:
        """Take up documents; the places behind them hold nothing that could be copied."""
        b, c = shares.shape
        self.shares.zero_()
        self.keys[:b, :c], self.tokens[:b, :c], self.shares[:b, :c] = keys, tokens, shares

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Turn logits [r v] for rows x [r d] into the logarithms of all probabilities."""
        e = self.width
        looked = self.look(x).unflatten(0, (len(self.tokens), -1))  # [b beams e+1+w]
        parts = looked[..., :e], looked[..., e : e + 1], looked[..., e + 1 :]
        copying = PyramidionCopier.attend(*parts, self.keys, self.shares)
        return copying.mix(logits.unflatten(0, looked.shape[:2]), self.tokens).flatten(0, 1)


class Decoder:
    """Decode one token for all texts, beside a memory whose keys and values were computed once.

    cache   [L 2 b h t beams e]  keys and values of the texts, by position and the beam that wrote them
    memory  [L 2 b h k e]        keys and values of the documents
    mask    [b 1 1 k]            True for a real representation; None where all are
    blocks, head                 the model's weights, fused
    layers, project              the same, laid out for the rows that are multiplied by them
    """

    def __init__(
        self, model: PyramidionForConditionalGeneration, search: Search, k: int, c: int = 0, *, masked: bool = False
    ) -> None:
        config, dtype, device = model.config, compute_dtype(model), model.device
        documents, beams, capacity = search.documents, search.rules.beams, max(search.rules.limit - 1, 1)
        heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.search, self.dtype, self.heads, self.pre, self.k = search, dtype, heads, config.pre_norm, k
        self.blocks = [Block.of(layer, dtype) for layer in model.model.decoder.layers]
        self.embed, self.norm = model.model.decoder.embed_tokens, model.model.decoder.norm
        self.head = model.lm_head.weight.detach().to(dtype)
        self.copy = None if model.copier is None else Copy(model, documents, c, dtype)
        self.table = None
        if config.decoder_positions:
            self.table = sinusoids(torch.arange(capacity, device=device), config.hidden_size)
            self.table = self.table.to(self.embed.weight.dtype)  # [t d]
        own, other = (2, documents, heads, capacity, beams, width), (2, documents, heads, k, width)
        self.cache = torch.zeros(len(self.blocks), *own, dtype=dtype, device=device)
        self.memory = torch.zeros(len(self.blocks), *other, dtype=dtype, device=device)
        self.mask = torch.ones(documents, 1, 1, k, dtype=torch.bool, device=device) if masked else None

    def refresh(self, model: PyramidionForConditionalGeneration) -> None:
        """Copy the model's weights again into what is not their own memory: they may have been trained since."""
        blocks = (Block.of(layer, self.dtype) for layer in model.model.decoder.layers)
        own = chain([self.head], *(block.tensors() for block in self.blocks))
        fresh = chain([model.lm_head.weight.detach().to(self.dtype)], *(block.tensors() for block in blocks))
        if self.copy is not None:
            own = chain(own, self.copy.look.tensors())
            fresh = chain(fresh, Copy.looks(model, self.dtype).tensors())
        for kept, new in zip(own, fresh, strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)

    def read(self, model: PyramidionForConditionalGeneration, kept: PyramidionEncoderOutput, beams: int = 1) -> None:
        """Project what was kept of documents into keys and values, once; `beams` says how often each is in it."""
        self._lay_out(self.search.documents * self.search.rules.beams)
        assert kept.last_hidden_state is not None
        memory, mask = kept.last_hidden_state[::beams], kept.memory_mask
        if self.copy is not None:
            states, tokens, shares = kept.copy_states, kept.copy_tokens, kept.copy_shares
            assert model.copier is not None
            assert states is not None
            assert tokens is not None
            assert shares is not None
            self.copy.read(model.copier.keys(states[::beams]), tokens[::beams], shares[::beams])
        b, k = memory.shape[:2]
        layers: Any = model.model.decoder.layers
        for layer, cache, kept in zip(layers, self.cache, self.memory, strict=True):
            cache.zero_()
            attention = layer.cross_attention
            for place, project in enumerate((attention.key, attention.value)):
                kept[place, :b, :, :k] = project(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.mask is not None:
            self.mask.fill_(False)
            self.mask[b:] = True  # nothing is read there, but nothing must be undefined either
            self.mask[:b, 0, 0, :k] = True if mask is None else mask[::beams] != 0

    def _lay_out(self, rows: int) -> None:
        """Bring the weights into the form in which so many rows are multiplied fastest: they change no more."""
        self.layers = [block.by_columns() for block in self.blocks] if turns(self.head, rows) else self.blocks
        self.project = projection(self.head, rows)

    def step(self, length: int) -> None:
        """Write one token; the texts have fewer than `length`, start token counted, or as many."""
        with unplanned(self.head.device):
            self.search.choose(self.logits(length), length)

    def logits(self, length: int) -> Tensor:
        """Give the logits [b*beams v] of the next tokens."""
        x = self.embed(self.search.tokens().flatten())  # [r d]
        if self.table is not None:
            x = x + self.table.index_select(0, self.search.position)
        x = x if self.pre else stream(x)
        visible = self.search.visible(length)  # [b 1 beams length*beams]
        for block, cache, memory in zip(self.layers, self.cache, self.memory, strict=True):
            own, cross, dense = block.residuals
            x, _ = through(
                x,
                (own, partial(self._look_back, block=block, cache=cache, visible=visible)),
                (cross, partial(self._look_up, block=block, memory=memory)),
                (dense, block.transform),
                pre_norm=self.pre,
            )
        x = x if self.norm is None else self.norm(x)
        logits = self.project(x)
        return logits if self.copy is None else self.copy(x, logits)

    def _look_back(self, x: Tensor, block: Block, cache: Tensor, visible: Tensor) -> tuple[Tensor, None]:
        """Attend from x [r d] to all that the document's beams have written, as far as it is one's own past."""
        parts = block.attention(x).view(self.search.documents, -1, 3, self.heads, x.shape[-1] // self.heads)
        new = parts[:, :, 1:].permute(2, 0, 3, 1, 4).unsqueeze(3)  # [2 b h 1 beams e]
        cache.index_copy_(3, self.search.position, new)
        length = visible.shape[-1] // parts.shape[1]
        key, value = cache[:, :, :, :length].flatten(3, 4)  # [b h length*beams e]
        return block.attention_out(self._attend(parts[:, :, 0], key, value, visible)), None

    def _look_up(self, x: Tensor, block: Block, memory: Tensor) -> tuple[Tensor, None]:
        """Attend from x [r d] to the memory."""
        query = block.cross(x).view(self.search.documents, -1, self.heads, x.shape[-1] // self.heads)
        return block.cross_out(self._attend(query, memory[0], memory[1], self.mask)), None

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from query [b beams h e] to key and value [b h n e] -> [r d]."""
        mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask)  # [b h beams e]
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


__all__ = ["Decoder", "compute_dtype"]
