"""Documents as blocks: the batch that encoder layers compute, without blocks that hold only padding."""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


class Layout:
    """Cut documents of given lengths into blocks of m tokens, and leave out the blocks that hold none.

    A batch of documents [b n ...], each with its tokens first, becomes blocks [B m ...], where B counts only the
    blocks with at least one token. Whatever works on single tokens or within a block then costs what the real tokens
    cost, and blockwise attention is plain attention over a batch of blocks. Where every document fills the same
    number of blocks, packing is a view.

    The lengths are numbers on the host, so building a layout never waits for a device.

    lengths  tokens of each document, at least 1
    m        tokens of a block; no more than the longest document needs
    """

    def __init__(self, lengths: Sequence[int], m: int, device: torch.device | str = "cpu") -> None:
        assert min(lengths) >= 1
        assert m >= 1
        self.lengths = tuple(lengths)
        self.device = torch.device(device)
        self.b, self.n = len(self.lengths), max(self.lengths)
        self.m = min(m, self.n)
        self.per_document = -(-self.n // self.m)  # blocks of the longest document
        self.blocks = sum(-(-length // self.m) for length in self.lengths)  # B

        self._others: dict[int, Layout] = {self.m: self}

    def __repr__(self) -> str:
        return f"Layout(b={self.b}, n={self.n}, m={self.m}, blocks={self.blocks} of {self.b * self.per_document})"

    @property
    def aligned(self) -> bool:
        """Tell whether no block is left out, so that packing moves nothing."""
        return self.blocks == self.b * self.per_document

    @property
    def full(self) -> bool:
        """Tell whether no place in any block is padding."""
        return sum(self.lengths) == self.blocks * self.m

    @property
    def equal(self) -> bool:
        """Tell whether all documents are equally long, so that [b n] holds no padding."""
        return min(self.lengths) == self.n

    def cut(self, m: int) -> "Layout":
        """Cut the same documents into blocks of m tokens: the same Layout whenever it is asked for again."""
        m = min(m, self.n)
        if m not in self._others:
            self._others[m] = Layout(self.lengths, m, self.device)
        return self._others[m]

    def _send(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers).to(self.device, non_blocking=True)  # without waiting for the device

    @cached_property
    def counts(self) -> Tensor:
        """Count the tokens of each document: [b]."""
        return self._send(self.lengths)

    @cached_property
    def owners(self) -> Tensor:
        """Name the document of each block: [B]."""
        return self.rows // self.per_document

    @cached_property
    def rows(self) -> Tensor:
        """Number the kept blocks [B] among all b * per_document of them."""
        kept = [
            document * self.per_document + block
            for document, length in enumerate(self.lengths)
            for block in range(-(-length // self.m))
        ]
        return self._send(kept)

    @cached_property
    def mask(self) -> Tensor:
        """Mark the real tokens of each block: [B m]."""
        return self.pack(self.document_mask)

    @cached_property
    def document_mask(self) -> Tensor:
        """Mark the real tokens of each document: [b n]."""
        return torch.arange(self.n, device=self.device) < self.counts.unsqueeze(1)

    def pack(self, x: Tensor) -> Tensor:
        """Cut documents [b n ...] into blocks [B m ...]."""
        tail = self.per_document * self.m - self.n
        if tail:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, tail))
        cut = x.reshape(self.b * self.per_document, self.m, *x.shape[2:])
        return cut if self.aligned else cut.index_select(0, self.rows)

    def unpack(self, x: Tensor) -> Tensor:
        """Join blocks [B m ...] to documents [b n ...], zeros where a document has ended by a whole block."""
        if not self.aligned:
            x = x.new_zeros(self.b * self.per_document, *x.shape[1:]).index_copy(0, self.rows, x)
        return x.reshape(self.b, self.per_document * self.m, *x.shape[2:])[:, : self.n]

    def positions(self, table: Tensor) -> Tensor:
        """Lay a table of positions [n ...], the same for every document, out as blocks [B m ...]."""
        tail = self.per_document * self.m - self.n
        cut = F.pad(table, (0, 0) * (table.ndim - 1) + (0, tail)).reshape(self.per_document, self.m, *table.shape[1:])
        if self.b == 1:
            return cut
        return cut.index_select(0, self.rows % self.per_document)
