"""Documents as blocks: the batch that encoder layers compute, without blocks that hold only padding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FIXED: ContextVar[bool] = ContextVar("fixed", default=False)


@contextmanager
def counted_on_device() -> Iterator[None]:
    """Lay documents out by a `PaddedLayout` meanwhile: what is computed then depends on shapes, and not on lengths."""
    before = _FIXED.set(True)
    try:
        yield
    finally:
        _FIXED.reset(before)


def shapes_decide() -> bool:
    """Tell whether what is computed may depend on shapes alone: in a compiled graph, or in one that is recorded."""
    return torch.compiler.is_compiling() or _FIXED.get()


def kept(compute: Callable[[Any], Tensor]) -> Any:
    """Compute a property once. The library's own way takes a lock, which a compiled graph does not know."""
    name = compute.__name__

    def get(self: Any) -> Tensor:
        if name not in self._kept:
            self._kept[name] = compute(self)
        found: Tensor = self._kept[name]
        return found

    return property(get, doc=compute.__doc__)


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
        self.size, self.m = m, min(m, self.n)
        self.per_document = -(-self.n // self.m)  # blocks of the longest document
        self.blocks = sum(-(-length // self.m) for length in self.lengths)  # B
        self._others: dict[int, Layout] = {self.m: self}
        self._kept: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return f"Layout(b={self.b}, n={self.n}, m={self.m}, blocks={self.blocks} of {self.b * self.per_document})"

    @property
    def tail(self) -> int:
        """Count the places behind the end of the longest document."""
        return self.per_document * self.m - self.n

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

    def part(self, first: int, count: int) -> "Part":
        """Look at some blocks alone: all that attention within blocks needs."""
        return Part(self.full, None if self.full else self.keys[first : first + count])

    def shorten(self, k: int) -> "Layout":
        """Lay the same documents out when each has at most k tokens left."""
        return Layout([min(length, k) for length in self.lengths], self.size, self.device)

    def of_blocks(self) -> "Layout":
        """Take each block for a token."""
        return Layout([-(-length // self.m) for length in self.lengths], 1, self.device)

    @kept
    def starts(self) -> Tensor:
        """Number the first block of each document: [b]."""
        counts = [-(-length // self.m) for length in self.lengths]
        return self._send([0, *accumulate(counts[:-1])])

    def _send(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers).to(self.device, non_blocking=True)  # without waiting for the device

    @kept
    def counts(self) -> Tensor:
        """Count the tokens of each document: [b]."""
        return self._send(self.lengths)

    @kept
    def owners(self) -> Tensor:
        """Name the document of each block: [B]."""
        return self.rows // self.per_document

    @kept
    def rows(self) -> Tensor:
        """Number the kept blocks [B] among all b * per_document of them."""
        kept = [
            document * self.per_document + block
            for document, length in enumerate(self.lengths)
            for block in range(-(-length // self.m))
        ]
        return self._send(kept)

    @kept
    def mask(self) -> Tensor:
        """Mark the real tokens of each block: [B m]."""
        return self.pack(self.document_mask)

    @property
    def keys(self) -> Tensor:
        """Mark the tokens of each block that can be attended to: [B m], at least one in each."""
        marks: Tensor = self.mask
        return marks

    @kept
    def document_mask(self) -> Tensor:
        """Mark the real tokens of each document: [b n]."""
        return torch.arange(self.n, device=self.device) < self.counts.unsqueeze(1)

    def pack(self, x: Tensor) -> Tensor:
        """Cut documents [b n ...] into blocks [B m ...]."""
        if self.tail:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, self.tail))
        cut = x.reshape(self.b * self.per_document, self.m, *x.shape[2:])
        return cut if self.aligned else cut.index_select(0, self.rows)

    def unpack(self, x: Tensor) -> Tensor:
        """Join blocks [B m ...] to documents [b n ...], zeros where a document has ended by a whole block."""
        if not self.aligned:
            x = x.new_zeros(self.b * self.per_document, *x.shape[1:]).index_copy(0, self.rows, x)
        joined = x.reshape(self.b, self.per_document * self.m, *x.shape[2:])
        return joined[:, : self.n] if self.tail else joined

    def positions(self, table: Tensor) -> Tensor:
        """Lay a table of positions [n ...], the same for every document, out as blocks [B m ...]."""
        table = F.pad(table, (0, 0) * (table.ndim - 1) + (0, self.tail)) if self.tail else table
        cut = table.reshape(self.per_document, self.m, *table.shape[1:])
        if self.b == 1:
            return cut
        return cut.index_select(0, self.rows % self.per_document)


@dataclass(frozen=True)
class Part:
    """Some blocks of a layout: whether they hold no padding, and else who can be attended to [B m]."""

    full: bool
    keys: Tensor | None


class PaddedLayout(Layout):
    """Cut documents into blocks where only the device knows their lengths: no block is left out.

    A compiled or recorded graph cannot depend on numbers that change with every batch. So every document has as many
    blocks as the longest one, and a graph serves all batches; documents of like length in a batch make up for it.

    counts  [b]  tokens of each document
    n       the most that a document may have
    equal   whether all have as many
    """

    def __init__(self, counts: Tensor, n: int, m: int, *, equal: bool) -> None:
        self.device, self.b = counts.device, counts.shape[0]
        self.size, self.m = m, m if n > m else n  # asked, not computed: a graph then knows that number
        self.per_document = n // self.m + (1 if n % self.m else 0)
        self.n = n if n % self.m else self.per_document * self.m  # the same, and a graph knows how many blocks that is
        self.blocks = self.b * self.per_document
        self._equal, self._kept = equal, {"counts": counts}

    def __repr__(self) -> str:
        return f"PaddedLayout(b={self.b}, n={self.n}, m={self.m}, blocks={self.blocks})"

    @property
    def aligned(self) -> bool:
        return True

    @property
    def full(self) -> bool:
        return self._equal and self.n % self.m == 0

    @property
    def equal(self) -> bool:
        return self._equal

    def cut(self, m: int) -> "PaddedLayout":
        return PaddedLayout(self.counts, self.n, m, equal=self._equal)

    def shorten(self, k: int) -> "PaddedLayout":
        return PaddedLayout(self.counts.clamp(max=k), k if self.n > k else self.n, self.size, equal=self._equal)

    def of_blocks(self) -> "PaddedLayout":
        return PaddedLayout((self.counts + (self.m - 1)) // self.m, self.per_document, 1, equal=self._equal)

    @kept
    def keys(self) -> Tensor:
        """Let blocks without a token have one, which nobody asks about: a softmax over nothing is not a number."""
        return self.mask | ((torch.arange(self.m, device=self.device) == 0) & ~self.mask[:, :1])

    @kept
    def starts(self) -> Tensor:
        return torch.arange(self.b, device=self.device) * self.per_document

    @kept
    def rows(self) -> Tensor:
        return torch.arange(self.blocks, device=self.device)
