"""Blockwise attention: every token attends to the tokens of its own block (section 3.1)."""

from torch import Tensor

from pyramidion.attention.heads import Attend, SelfAttention
from pyramidion.attention.layout import Layout


class BlockwiseAttention(SelfAttention):
    """Attend within blocks of m tokens, the last one of a document shorter: m × n products a head and document.

    The blocks are the batch, so nothing is left to do: a layout has no blocks of padding alone.
    """

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # [B h m e]
        mask = None if layout.full else layout.keys[:, None, None]  # [B 1 1 m]
        return attend(query, key, value, mask, dropout=self.rate)  # [B m h e]
