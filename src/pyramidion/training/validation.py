"""Validation: the loss on summaries as they are, and ROUGE of those that the model writes.

What it wrote last is in validation.jsonl in the run's folder, as `pyramidion evaluate --predictions` reads it. Where
the objective is another one than summaries, there is the loss alone, each time on the same corrupted documents.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pyramidion.data import Collator, Exercises, TokenStore
from pyramidion.data.objectives import Objective
from pyramidion.disk import write_whole
from pyramidion.evaluation import rouge
from pyramidion.generation import decoding_options
from pyramidion.generation.engine import generate
from pyramidion.generation.journal import to_line
from pyramidion.generation.loop import forget
from pyramidion.training.recipe import SUMMARIES, Recipe

Progress = Callable[[int, int, str], None]


class Scored(NamedTuple):
    """What came of one document: its place, the loss summed over its tokens, how many these are, what was written."""

    place: int
    loss: float
    tokens: int
    text: str | None


class Validation:
    """Score a model on the validation split of a store, the documents shared among all processes."""

    def __init__(
        self, recipe: Recipe, store: TokenStore, folder: Path, progress: Progress, objective: Objective
    ) -> None:
        self.recipe, self.split, self.tokenizer = recipe, store["val"], store.tokenizer()
        self.exercises = Exercises(self.split, objective, recipe.seed)
        self.writes = recipe.objective == SUMMARIES
        limit = recipe.evaluate_limit or len(self.split)
        self.count, self.progress = min(len(self.split), limit), progress
        self.written = folder / "validation.jsonl"
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Give the mean loss of a token, and ROUGE times 100 where summaries are written."""
        order = sorted(range(self.count), key=lambda i: int(self.split.document_lengths[i]))[self.rank :: self.world]
        parts = [order[i : i + self.recipe.device_batch] for i in range(0, len(order), self.recipe.device_batch)]
        found: list[Scored] = []
        with torch.autocast(_device(model).type, torch.bfloat16, enabled=self.recipe.bf16):
            for part in parts:
                found += self._batch(model, part)
                self.progress(len(found), len(order), "validating")
        forget(model)  # buffers for writing are room for training
        found = sorted(self._gathered(found))
        loss = sum(one.loss for one in found) / sum(one.tokens for one in found)
        return {"loss": loss, **(self._rouge([one.text or "" for one in found]) if self.writes else {})}

    def _rouge(self, texts: Sequence[str]) -> dict[str, float]:
        """Score what was written, and keep it."""
        references = [self.split.summary_text(i) for i in range(self.count)]
        scores = rouge(texts, references)
        if self.rank == 0:
            pairs = enumerate(zip(texts, references, strict=True))
            rows = ({"index": i, "id": self.split[i].id, "prediction": p, "reference": r} for i, (p, r) in pairs)
            write_whole(self.written, "".join(map(to_line, rows)))
        return {kind: 100 * float(values.mean()) for kind, values in scores.items()}

    def _batch(self, model: Any, places: Sequence[int]) -> list[Scored]:
        config = model.config
        source = self.recipe.max_source or config.entering[0]
        collate = Collator(
            pad=config.pad_token_id, eos=config.eos_token_id, max_source=source, max_target=self.recipe.max_target
        )
        examples = [self.exercises[0, i] for i in places]  # corrupted alike in every validation
        batch = {key: value.to(_device(model)) for key, value in collate(examples).items()}
        labels = batch.pop("labels")
        logits = model(**batch, labels=labels).logits
        losses = nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").sum(1).tolist()
        del logits
        texts = self._write(model, batch) if self.writes else [None] * len(places)
        return list(map(Scored, places, losses, (labels >= 0).sum(1).tolist(), texts))

    def _write(self, model: Any, batch: dict[str, torch.Tensor]) -> list[str]:
        search = decoding_options(model.config, **(self.recipe.generation or {}))
        written = generate(model, batch["input_ids"], batch["attention_mask"], search)
        texts: list[str] = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        return texts

    def _gathered(self, mine: list[Any]) -> list[Any]:
        if self.world == 1:
            return mine
        parts: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(parts, mine)
        return [one for part in parts for one in part]


def validation(
    recipe: Recipe, store: TokenStore, folder: Path, progress: Progress, objective: Objective
) -> Validation | None:
    """Make the validation of a run; none where the store has no split for it."""
    return Validation(recipe, store, folder, progress, objective) if "val" in store else None


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
