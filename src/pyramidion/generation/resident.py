"""The decoder as one launch (`kernels.decoding`): weights packed layer by layer, and steps that need no host.

Where the likeliest token is taken and nothing else is asked, many tokens are one launch. Otherwise a launch gives the
logits, and the search chooses as ever.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyramidion.generation.search import Greedy, Search
from pyramidion.generation.step import PRODUCTS, Block, Decoder, Dense, compute_dtype
from pyramidion.kernels import launching
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration

KINDS = ("weight", "bias")


def serves(model: PyramidionForConditionalGeneration, search: Search) -> bool:
    """Tell whether the launch knows a model and its sizes."""
    config, dtype = model.config, compute_dtype(model)
    if not launching.HAS_TRITON or not (model.device.type == "cuda" or launching.interpreted()):
        return False
    from pyramidion.kernels import decoding

    rows = search.documents * search.rules.beams
    fits = decoding.serves(dtype, rows, config.hidden_size, config.num_attention_heads)
    return fits and config.activation_function == "relu" and search.rules.limit > 1


class ResidentDecoder(Decoder):
    """Decode by launches whose programs stay for whole steps."""

    def __init__(
        self, model: PyramidionForConditionalGeneration, search: Search, k: int, *, masked: bool = False
    ) -> None:
        from pyramidion.kernels.decoding import Step, Texts, Weights

        super().__init__(model, search, k, masked=masked)
        config, layers, inner = model.config, len(self.blocks), model.config.intermediate_size
        self.blocks, matrices, biases = pack(self.blocks)
        self.norms = self._norms(model)
        weights = Weights(
            self.embed.weight.detach(), self.table, matrices, biases, self.norms, self.head,
            layers, config.num_attention_heads, inner, config.hidden_size**0.5, self._eps(), config.pre_norm,
        )  # fmt: skip
        mask = None if self.mask is None else self.mask[:, 0, 0]
        texts = Texts(search.running, search.origin, search.position, self.cache, self.memory, mask)
        self.launcher = Step(weights, texts)
        self.ends = _ends(search)

    def refresh(self, model: PyramidionForConditionalGeneration) -> None:
        super().refresh(model)
        self.norms.copy_(self._norms(model))

    def logits(self, length: int) -> Tensor:
        self.search.tokens()  # notes whose keys are written
        return self.launcher.logits()

    @property
    def strides(self) -> bool:
        return self.ends is not None

    def stride(self, turns: int) -> None:
        assert self.ends is not None
        self.launcher.take(turns, self.ends)

    def _eps(self) -> float:
        return float(self.blocks[0].residuals[0].norm.eps)

    def _norms(self, model: PyramidionForConditionalGeneration) -> Tensor:
        """Give gains and offsets in the order of use [3*L+1 2 d]; behind a sum, nothing is used at first."""
        own: list[Any] = [residual.norm for block in self.blocks for residual in block.residuals]
        pairs = [torch.stack([norm.weight, norm.bias]).detach().float() for norm in own]
        last = model.model.decoder.norm
        if self.pre and last is not None:
            return torch.stack([*pairs, torch.stack([last.weight, last.bias]).detach().float()])
        return torch.stack([torch.zeros_like(pairs[0]), *pairs])


def pack(blocks: list[Block]) -> tuple[list[Block], Tensor, Tensor]:
    """Put the weights of each layer into one row -> blocks that look into it, matrices [L ...], biases [L ...]."""
    matrices, biases = (_rows([block.parts(kind) for block in blocks]) for kind in KINDS)
    pairs = zip(blocks, zip(matrices, biases, strict=True), strict=True)
    return [replace(block, **_views(block, rows)) for block, rows in pairs], matrices, biases


def _rows(layers: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.cat([part.flatten() for part in parts]) for parts in layers])


def _views(block: Block, rows: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Look at the rows with a layer's weights, and with its biases, as at the products they belong to."""
    products = list(block.products())
    sizes = ([part.numel() for part in block.parts(kind)] for kind in KINDS)
    cut = [row.split(parts) for row, parts in zip(rows, sizes, strict=True)]
    return {
        name: Dense(weight.view_as(dense.weight), bias)
        for name, dense, weight, bias in zip(PRODUCTS, products, *cut, strict=True)
    }


def _ends(search: Search) -> Any:
    """Give what taking the likeliest token needs, or None where a rule asks for more."""
    from pyramidion.kernels.decoding import Ends

    rules = search.rules
    if not isinstance(search, Greedy) or rules.ngram or rules.repetition != 1.0 or rules.first or rules.last:
        return None
    ends = bool(rules.ends)
    return Ends(search.done, search.live, search.steps, search.ending, rules.filler, rules.floor, ends)


__all__ = ["ResidentDecoder", "serves"]
