"""Write with transformers' own loop, and tell after each token what there is so far.

The fast loop leaves the host out of its steps, so that nobody can look on. transformers' loop asks after each step
whether to stop, and shows what it has: here that question is where it is looked at, and where it is ended early. The
tokens are the same.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

from pyramidion.generation.engine import Engine

EVERY = 0.1  # seconds between two looks


class Stopped(Exception):
    """Say that nobody wants what is being written any more."""


class Onlooker(StoppingCriteria):
    """Stop nothing by itself; tell how many tokens there are and what the leading text is."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, tell: Callable[[dict[str, Any]], None], stop: threading.Event
    ) -> None:
        self.tokenizer, self.tell, self.stop = tokenizer, tell, stop
        self.looked = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        """Look at the first row, which leads."""
        if self.stop.is_set():
            raise Stopped
        now = time.monotonic()
        if now - self.looked >= EVERY:
            self.looked = now
            text = self.tokenizer.decode(input_ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            whole = str(text).strip().rstrip("\ufffd")  # half a character at the end
            self.tell({"stage": "writing", "tokens": input_ids.shape[1] - 1, "text": whole})
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def watching(
    tokenizer: PreTrainedTokenizerFast, tell: Callable[[dict[str, Any]], None], stop: threading.Event
) -> Engine:
    """Make an engine that tells what it writes, for one document at a time, and raises `Stopped` when told to stop."""

    def write(model: Any, input_ids: Tensor, attention_mask: Tensor, generation: GenerationConfig) -> Tensor:
        if stop.is_set():
            raise Stopped
        tell({"stage": "encoding", "tokens": int(attention_mask.sum())})
        watched = {"stopping_criteria": StoppingCriteriaList([Onlooker(tokenizer, tell, stop)])}
        with torch.inference_mode():
            written: Tensor = model.generate(
                input_ids, attention_mask=attention_mask, generation_config=generation, **watched
            )
        return written

    return write


__all__ = ["Onlooker", "Stopped", "watching"]
