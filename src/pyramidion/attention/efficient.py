"""Efficient attention: a document as one e × e context that every query reads (Shen et al. 2021)."""

import torch
from torch import Tensor

from pyramidion.attention.layout import Layout
from pyramidion.attention.local import LocalHeads


class EfficientAttention(LocalHeads):
    """Attend linearly: the softmax of the keys over the tokens, that of the query over its features.

    Each of the e features of a key is a distribution over the document, and the context holds what each of them finds
    there; a query weighs the features. That is e × n products a head and document. No weights are formed between
    tokens, so dropout is for the local heads alone.
    """

    def reach(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        return efficient(query, key, value, layout)


def efficient(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Mix values through one context a document: blocks [B m h e] -> [B m h e].

    The softmax over a document is taken block by block: each block's context, weighted by the block's share of the
    document's sum of exponentials. So only real blocks are computed, and no sum is in less than float32.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key.to(wide).masked_fill(~layout.keys[..., None, None], -torch.inf)  # [B m h e]
    context = torch.einsum("bmhe,bmhf->bhef", key.softmax(1).to(value.dtype), value)  # of each block

    blocks = layout.of_blocks()
    total = blocks.unpack(key.logsumexp(1).unsqueeze(1))  # [b blocks h e]
    share = total.masked_fill(~blocks.document_mask[..., None, None], -torch.inf).softmax(1)  # [b blocks h e]
    context = (share.unsqueeze(-1) * blocks.unpack(context.unsqueeze(1))).sum(1).to(value.dtype)  # [b h e f]

    query = query.softmax(-1, dtype=wide).to(value.dtype)
    return torch.einsum("bmhe,bhef->bmhf", query, context.index_select(0, layout.owners))
