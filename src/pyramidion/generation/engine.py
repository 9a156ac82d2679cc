"""What writes: one function from a batch of documents to their summaries, so that another can take its place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from pyramidion.generation.loop import decode
from pyramidion.kernels.launching import unplanned

# model, input_ids [b n], attention_mask [b n], how to search -> tokens [b t], start and padding included
Engine = Callable[[Any, Tensor, Tensor, GenerationConfig], Tensor]


def generate(model: Any, input_ids: Tensor, attention_mask: Tensor, generation: GenerationConfig) -> Tensor:
    """Write with the fast decode loop, and with transformers' own where that is not supported."""
    with unplanned(input_ids.device):
        return decode(model, input_ids, attention_mask, generation)


def generate_plainly(model: Any, input_ids: Tensor, attention_mask: Tensor, generation: GenerationConfig) -> Tensor:
    """Write with transformers' own `generate`."""
    with torch.inference_mode():
        written: Tensor = model.generate(input_ids, attention_mask=attention_mask, generation_config=generation)
    return written


def out_of_memory(error: Exception) -> bool:
    """Tell whether a smaller batch may help."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in said


__all__ = ["Engine", "generate", "generate_plainly", "out_of_memory"]
