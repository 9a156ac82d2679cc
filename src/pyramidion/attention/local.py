"""Local attention: every token attends to its own window and to the windows beside it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyramidion.attention.heads import Attend, SelfAttention
from pyramidion.attention.layout import Layout


def local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    window: int,
    *,
    attend: Attend,
    dropout: float = 0.0,
) -> Tensor:
    """Attend within three windows: blocks [B m h e] -> [B m h e], 3 × window × n products a head and document.

    A document is cut anew into windows, and a token sees all of its own, the one before and the one after it. The
    windows of a document stand in a row, so three of them are one strided view of the keys, with no copy; a token of
    another document, or none, is masked.
    """
    windows = layout.cut(window)
    w = windows.m
    query, key, value = (recut(part, layout, windows) for part in (query, key, value))  # [W w h e]

    owner = windows.owners.unsqueeze(1).where(windows.mask, -1)  # [W w] -1: nobody
    mask = F.pad(owner.flatten(), (w, w), value=-1).unfold(0, 3 * w, w) == windows.owners.unsqueeze(1)  # [W 3w]

    key, value = (
        F.pad(part.flatten(0, 1), (0, 0, 0, 0, w, w)).unfold(0, 3 * w, w).transpose(-1, -2)  # [W h 3w e]
        for part in (key, value)
    )
    mixed, _ = attend(query.transpose(1, 2), key, value, mask[:, None, None], dropout=dropout)  # [W w h e]
    return recut(mixed, windows, layout)


def recut(x: Tensor, source: Layout, target: Layout) -> Tensor:
    """Cut the blocks of one layout into those of another over the same documents: [B m ...] -> [B' m' ...]."""
    return x if source.m == target.m else target.pack(source.unpack(x))


class LocalHeads(SelfAttention):
    """Give the last heads to a local window, and leave the others to a subclass.

    Attention that is sparse or linear over the whole document misses its neighbourhood; a few local heads make up
    for that (appendix C.1, after Rae and Razavi 2020). There are no weights to return: no head forms them for a whole
    document.

    local_heads  how many heads are local, from none to all
    window       tokens of a window
    """

    def __init__(
        self, width: int, heads: int, *, local_heads: int = 2, window: int = 128, dropout: float = 0.0
    ) -> None:
        super().__init__(width, heads, dropout=dropout)
        if not 0 <= local_heads <= heads:
            raise ValueError(f"`local_heads` must be between 0 and `heads`, got {local_heads} of {heads} heads.")
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}.")
        self.local_heads, self.window = local_heads, window

    def mix(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, attend: Attend) -> tuple[Tensor, None]:
        far, mixed = self.heads - self.local_heads, []
        if far:
            mixed.append(self.reach(query[:, :, :far], key[:, :, :far], value[:, :, :far], layout))  # [B m far e]
        if self.local_heads:
            query, key, value = (part[:, :, far:] for part in (query, key, value))  # [B m near e]
            mixed.append(local(query, key, value, layout, self.window, attend=attend, dropout=self.rate))
        return torch.cat(mixed, 2), None

    def reach(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        """Mix the values [B m h e] of the heads that see the whole document."""
        raise NotImplementedError
