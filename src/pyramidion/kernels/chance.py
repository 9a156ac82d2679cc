"""Dropout inside a kernel: who is kept is decided anew from a seed whenever it is asked, so that no mask is stored.

One draw of Philox (4 x 32 bits, 7 rounds) decides for 8 neighbours by 16 bits each. A thread reads just these in one
access, so nobody draws twice. `dropout` says what a rate is then.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 8  # neighbours that share a draw


@triton.jit
def keeps(seed, draw, part, threshold):
    """Decide which elements stay: those of `part` [1 1 8], 0 to 7, of each `draw` [r n 1] -> [r n 8]."""
    one, two, three, four = tl.randint4x(seed, draw, n_rounds=7)
    pair = part // 2
    word = tl.where(pair == 0, one, tl.where(pair == 1, two, tl.where(pair == 2, three, four)))
    bits = (word.to(tl.uint32, bitcast=True) >> ((part % 2) * 16).to(tl.uint32)) & 0xFFFF
    return bits.to(tl.int32) >= threshold


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed [1] from torch's generator of that device, without waiting for it."""
    return torch.randint(1 << 62, (1,), device=device)
