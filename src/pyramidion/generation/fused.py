"""The decoder in few launches (`kernels.decoding`): the same state and the same search, other kernels.

Where the likeliest token is taken and nothing else is asked, a launch takes it. Otherwise one gives the logits, and the
search chooses as ever.
"""

from typing import Any

import torch
from torch import Tensor

from pyramidion.generation.search import Greedy, Search
from pyramidion.generation.step import Decoder, compute_dtype
from pyramidion.kernels import launching
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration

HALF = (torch.bfloat16, torch.float16)
ROWS, KEYS, ALL = 32, 1024, 16384  # texts at once, keys of each, and of all together: seen to be faster on an H200


def serves(model: PyramidionForConditionalGeneration, search: Search, k: int) -> bool:
    """Tell whether the kernels know a model, and are faster at these sizes; in single precision torch is as exact."""
    if not launching.HAS_TRITON or not (model.device.type == "cuda" or launching.interpreted()):
        return False
    from pyramidion.kernels import decoding

    config, dtype, rows = model.config, compute_dtype(model), search.documents * search.rules.beams
    known = (
        config.activation_function == "relu"
        and not config.copies
        and search.rules.limit > 1
        and decoding.serves(dtype, config.hidden_size, config.num_attention_heads)
    )
    faster = dtype in HALF and rows <= ROWS and k <= KEYS and rows * k <= ALL
    return known and (faster or launching.interpreted())


class FusedDecoder(Decoder):
    """Decode by launches that do all between two products at once."""

    def __init__(
        self, model: PyramidionForConditionalGeneration, search: Search, k: int, c: int = 0, *, masked: bool = False
    ) -> None:
        from pyramidion.kernels.decoding import Launcher

        super().__init__(model, search, k, c, masked=masked)
        config = model.config
        self.growth = config.hidden_size**0.5
        self.launcher = Launcher(
            search.running, search.origin, search.position, len(self.head),
            d=config.hidden_size, heads=self.heads, inner=config.intermediate_size, dtype=self.dtype,
            eps=float(self.blocks[0].residuals[0].norm.eps), pre=self.pre,
        )  # fmt: skip
        self.result = torch.zeros(self.launcher.rows, len(self.head), dtype=self.dtype, device=model.device)

    def step(self, length: int) -> None:
        if not self._takes():
            super().step(length)
            return
        search: Any = self.search
        rules = search.rules
        self.launcher.take(
            self._layers(length), self.head, search.done, search.live, search.steps, search.ending,
            ends=bool(rules.ends), filler=rules.filler, floor=rules.floor,
        )  # fmt: skip

    def logits(self, length: int) -> Tensor:
        self.search.tokens()  # notes whose keys are written
        self.launcher.logits(self._layers(length), self.head, self.result)
        return self.result

    def _takes(self) -> bool:
        """Tell whether the search takes the likeliest token and asks for no more."""
        rules = self.search.rules
        more = rules.ngram or rules.repetition != 1.0 or rules.first or rules.last
        return isinstance(self.search, Greedy) and not more

    def _layers(self, length: int) -> tuple[Tensor, Tensor]:
        """Launch all layers, and give the norm that is left to do."""
        launcher, mask = self.launcher, None if self.mask is None else self.mask[:, 0, 0]
        launcher.embed(self.embed.weight.detach(), self.table, self.growth, torch.float32 if self.pre else self.dtype)
        norm: tuple[Tensor, Tensor] | None = None
        for block, cache, memory in zip(self.blocks, self.cache, self.memory, strict=True):
            own, cross, dense = (_pair(residual.norm) for residual in block.residuals)
            product = block.attention
            launcher.enter(own if self.pre else norm, product.weight, product.bias, launcher.query, cache=cache)
            launcher.attend(cache[0], cache[1], length=length)
            launcher.gather(block.attention_out.weight, block.attention_out.bias)
            launcher.enter(cross if self.pre else own, block.cross.weight, block.cross.bias, launcher.query)
            launcher.attend(memory[0], memory[1], mask=mask)
            launcher.gather(block.cross_out.weight, block.cross_out.bias)
            product = block.widen
            launcher.enter(dense if self.pre else cross, product.weight, product.bias, launcher.hidden, relu=True)
            launcher.narrow(block.narrow.weight, block.narrow.bias)
            norm = dense
        last = norm if self.norm is None else _pair(self.norm)
        assert last is not None
        return last


def _pair(norm: Any) -> tuple[Tensor, Tensor]:
    return norm.weight.detach(), norm.bias.detach()


__all__ = ["FusedDecoder", "serves"]
