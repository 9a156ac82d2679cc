"""Self-attention of the encoder: one file each, one signature, blocks in and blocks out."""

from pyramidion.attention.blockwise import BlockwiseAttention
from pyramidion.attention.efficient import EfficientAttention
from pyramidion.attention.full import FullAttention
from pyramidion.attention.heads import SelfAttention
from pyramidion.attention.layout import Layout, PaddedLayout
from pyramidion.attention.lsh import LSHAttention

__all__ = [
    "BlockwiseAttention",
    "EfficientAttention",
    "FullAttention",
    "LSHAttention",
    "Layout",
    "PaddedLayout",
    "SelfAttention",
]
