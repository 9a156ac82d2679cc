"""The decoder in few launches (`kernels.decoding`): the same state and the same search, other kernels.

Where the likeliest token is taken and nothing else is asked, a launch takes it. Otherwise one gives the logits, torch
mixes in what can be copied, and the search chooses as ever.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyramidion.generation.search import Greedy, Search
from pyramidion.generation.step import Block, Decoder, compute_dtype
from pyramidion.kernels import launching
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration

if TYPE_CHECKING:
    from pyramidion.kernels.decoding import Fold

HALF = (torch.bfloat16, torch.float16)
ROWS, KEYS, ALL = 32, 1024, 16384  # texts at once, keys of each, and of all together: seen to be faster on an H200


def serves(model: PyramidionForConditionalGeneration, search: Search, k: int) -> bool:
    """Tell whether the kernels know a model, and are faster at these sizes; in single precision torch is as exact."""
    if not launching.HAS_TRITON:
        return False
    from pyramidion.kernels import decoding

    if not decoding.runs_on(model.device):
        return False
    config, dtype, rows = model.config, compute_dtype(model), search.documents * search.rules.beams
    known = (
        config.activation_function == "relu"
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
            eps=float(self.blocks[0].residuals[0].norm.eps),
        )  # fmt: skip
        self.fold = self._fold()
        self.result = torch.zeros(self.launcher.rows, len(self.head), dtype=self.dtype, device=model.device)

    def refresh(self, model: PyramidionForConditionalGeneration) -> None:
        super().refresh(model)
        for kept, new in zip(self.fold, self._fold(), strict=True):
            kept.copy_(new)

    def _fold(self) -> "Fold":
        """Fold what leads from each layer's own past to the queries of its memory."""
        from pyramidion.kernels.decoding import Fold

        return Fold.of(
            [block.attention_out.tensors() for block in self.blocks],
            [_norms(block)[1 if self.pre else 0] for block in self.blocks],
            [block.cross.tensors() for block in self.blocks],
        )

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
        return self.result if self.copy is None else self.copy(self.launcher.query, self.result)

    def _takes(self) -> bool:
        """Tell whether the search takes the likeliest token and asks for no more."""
        rules = self.search.rules
        more = rules.ngram or rules.banned or rules.repetition != 1.0 or rules.first or rules.last
        return isinstance(self.search, Greedy) and not more and self.copy is None

    def _layers(self, length: int) -> tuple[Tensor, Tensor]:
        """Launch all layers, and give the norm that is left to do.

        Before a sublayer (`pre`) its own norm is taken, and it is added to the stream itself. Else what the sublayer
        before it has left is normalised first, and it is added to that.
        """
        launcher, mask = self.launcher, None if self.mask is None else self.mask[:, 0, 0]
        wide = torch.float32 if self.pre else self.dtype
        launcher.embed(self.embed.weight.detach(), self.table, self.growth, wide, noted=self.pre)
        norm: tuple[Tensor, Tensor] | None = None
        for block, cache, memory, fold in zip(self.blocks, self.cache, self.memory, self.fold.layers(), strict=True):
            own, cross, dense = _norms(block)
            added = (None, None, None) if self.pre else (norm, own, cross)
            launcher.enter(own if self.pre else norm, *block.attention.tensors(), cache, fold, bare=self.pre)
            launcher.look_back(cache[0], cache[1], length)
            launcher.gather(added[0], *block.attention_out.tensors(), fold.mixed)
            launcher.look_up(memory[0], memory[1], fold.shift, mask)
            launcher.gather(added[1], *block.cross_out.tensors())
            launcher.widen(dense if self.pre else cross, *block.widen.tensors())
            launcher.narrow(added[2], *block.narrow.tensors())
            norm = dense
        last = norm if self.norm is None else _pair(self.norm)
        assert last is not None
        return last


def _norms(block: Block) -> list[tuple[Tensor, Tensor]]:
    return [_pair(residual.norm) for residual in block.residuals]


def _pair(norm: Any) -> tuple[Tensor, Tensor]:
    return norm.weight.detach(), norm.bias.detach()


__all__ = ["FusedDecoder", "serves"]
