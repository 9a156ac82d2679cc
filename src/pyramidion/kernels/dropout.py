"""Dropout by 16 bits an element, for kernels and, on a CPU, for torch: its own draws 64 for each, one after the other.

A rate is a multiple of 1/65536, and what is kept is scaled by exactly that.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

DRAWS = 1 << 16


def threshold(rate: float) -> int:
    """Turn a rate into the number of 65536 draws that are dropped."""
    return round(rate * DRAWS)


def scale(rate: float) -> float:
    """Say by how much what is kept grows, so that the mean stays."""
    return DRAWS / (DRAWS - threshold(rate))


def dropout(x: Tensor, rate: float) -> Tensor:
    """Give x with zeros in the place of some, and the others grown; as torch does it but on a CPU."""
    if not 0 < threshold(rate) < DRAWS or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)
    kept = draws[: x.numel()].view(x.shape) >= threshold(rate) - DRAWS // 2
    return torch.where(kept, x, 0.0).mul_(scale(rate))
