"""Which device computes, whether kernels serve it, and how they are started."""

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, not imported


def interpreted() -> bool:
    """Tell whether Triton kernels run in its interpreter, that is, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def served(x: Tensor) -> bool:
    """Tell whether the kernels are the fastest way for a tensor: half or single precision on a GPU."""
    return x.is_cuda and x.dtype != torch.float64 and torch.version.cuda is not None and HAS_TRITON


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: Any, **options: Any) -> None:
    """Launch on the device of the first argument: Triton takes the current one, which another GPU may be."""
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            kernel[grid](first, *arguments, **options)
    else:
        kernel[grid](first, *arguments, **options)


@functools.cache
def processors(device: torch.device) -> int:
    """Count the multiprocessors: at least as many programs run at the same time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def unplanned(device: torch.device) -> AbstractContextManager[Any]:
    """Attend by torch's own kernels on a GPU, not by cuDNN's.

    cuDNN makes a plan for each new shape, which takes the host 8 ms forward and 10 ms backward. Where lengths differ
    most shapes are new at first: on one H200, steps 13 to 24 of a small model on articles took 266 ms each, and 96 by
    torch's kernels, of which the device is busy for 73.
    """
    return sdpa_kernel(UNPLANNED) if device.type == "cuda" else nullcontext()


def choose_device(name: str) -> torch.device:
    """Name the device: `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"`device` must be auto, cpu or cuda, got {name!r}.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` must be one that this machine has, got {name!r}, and there is no GPU.")
    return device
