"""Say which of the interchangeable implementations serves a tensor."""

import torch
from torch import Tensor

from pyramidion.kernels import launching

NAMES = ("auto", "reference", "torch", "triton")


def resolve(backend: str, like: Tensor) -> str:
    """Turn `auto` into the fastest backend that serves `like`, and refuse one that cannot.

    The kernels take half and single precision on a GPU; float64 is for checking, and the torch backend serves it.
    """
    if backend not in NAMES:
        raise ValueError(f"`backend` must be one of {', '.join(NAMES)}, got {backend!r}.")
    if backend == "auto":
        return "triton" if launching.served(like) else "torch"
    if backend == "triton":
        if not launching.HAS_TRITON:
            raise ValueError("`backend='triton'` needs the package triton, which is not installed.")
        if not like.is_cuda and not launching.interpreted():
            raise ValueError(
                f"`backend='triton'` needs CUDA tensors (or TRITON_INTERPRET=1 to run the kernels slowly on a CPU), "
                f"got a tensor on {like.device}."
            )
        if like.dtype == torch.float64:
            raise ValueError("`backend='triton'` takes float32, bfloat16 or float16, got float64: use 'torch'.")
    return backend
