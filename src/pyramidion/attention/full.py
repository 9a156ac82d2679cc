"""Full attention: every token attends to every token of its document."""

from torch import Tensor

from pyramidion.attention.heads import Attend, SelfAttention
from pyramidion.attention.layout import Layout


class FullAttention(SelfAttention):
    """Attend over whole documents: n × n products a head and document, n that of the longest document."""

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (layout.unpack(part).transpose(1, 2) for part in (query, key, value))  # [b h n e]
        mask = None if layout.equal else layout.document_mask[:, None, None]  # [b 1 1 n]
        mixed, weights = attend(query, key, value, mask, dropout=self.rate)  # [b n h e]
        return layout.pack(mixed), weights
