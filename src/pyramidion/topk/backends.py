"""Say which of the interchangeable implementations serves a tensor."""

import importlib.util
import os

import torch
from torch import Tensor

NAMES = ("auto", "reference", "torch", "triton")
HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, not imported


def interpreted() -> bool:
    """Tell whether Triton kernels run in its interpreter, that is, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def resolve(backend: str, like: Tensor) -> str:
    """Turn `auto` into the fastest backend that serves `like`, and refuse one that cannot.

    The kernels take half and single precision on a GPU; float64 is for checking, and the torch backend serves it.
    """
    if backend not in NAMES:
        raise ValueError(f"`backend` must be one of {', '.join(NAMES)}, got {backend!r}.")
    if backend == "auto":
        fast = like.is_cuda and like.dtype != torch.float64 and torch.version.cuda is not None and HAS_TRITON
        return "triton" if fast else "torch"
    if backend == "triton":
        if not HAS_TRITON:
            raise ValueError("`backend='triton'` needs the package triton, which is not installed.")
        if not like.is_cuda and not interpreted():
            raise ValueError(
                f"`backend='triton'` needs CUDA tensors (or TRITON_INTERPRET=1 to run the kernels slowly on a CPU), "
                f"got a tensor on {like.device}."
            )
        if like.dtype == torch.float64:
            raise ValueError("`backend='triton'` takes float32, bfloat16 or float16, got float64: use 'torch'.")
    return backend
