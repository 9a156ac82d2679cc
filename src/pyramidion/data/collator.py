"""From examples to the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pyramidion.data.store import Example

if TYPE_CHECKING:
    import torch

IGNORED = -100  # what a loss leaves out


@dataclass(frozen=True)
class Collator:
    """Cut, end and pad: a document of n tokens enters as its first `max_source` - 1 and an end, a summary likewise.

    Each tensor is as long as its longest row, that of documents filled up to a multiple of `whole` tokens, that of
    summaries to one of `whole_target`, `max_target` at most. `attention_mask` is 1 for a real token, and with `lean`
    it is left out where all are; labels are padded with -100.
    """

    pad: int = 0
    eos: int = 2
    max_source: int = 8192
    max_target: int = 512
    whole: int = 1
    whole_target: int = 1
    lean: bool = False

    def __post_init__(self) -> None:
        for name in ("max_source", "max_target", "whole", "whole_target"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")

    def __call__(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        """Collate examples of one batch."""
        import torch

        if not examples:
            raise ValueError("`examples` must hold at least one, got none.")
        source, real = self._rows([example.document for example in examples], self.max_source, self.pad, self.whole)
        labels, _ = self._rows(
            [example.summary for example in examples], self.max_target, IGNORED, self.whole_target, cap=self.max_target
        )
        tensors = {"input_ids": source, "attention_mask": real, "labels": labels}
        if self.lean and real.all():
            del tensors["attention_mask"]
        return {name: torch.from_numpy(array) for name, array in tensors.items()}

    def _rows(
        self, rows: Sequence[np.ndarray], longest: int, filler: int, whole: int, cap: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.array([min(len(row), longest - 1) + 1 for row in rows])
        n = -(-lengths.max() // whole) * whole
        n = n if cap is None else min(n, cap)
        filled = np.full((len(rows), n), filler, dtype=np.int64)  # [b n]
        for target, row, length in zip(filled, rows, lengths, strict=True):
            target[: length - 1] = row[: length - 1]
            target[length - 1] = self.eos
        return filled, (np.arange(n) < lengths[:, None]).astype(np.int64)
