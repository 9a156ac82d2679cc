"""Validation: the loss on summaries as they are, and ROUGE of those that the model writes.

What it wrote last is in validation.jsonl in the run's folder, as `pyramidion evaluate --predictions` reads it.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyramidion.data import Collator, TokenStore
from pyramidion.disk import write_whole
from pyramidion.evaluation import rouge
from pyramidion.generation import decoding_options
from pyramidion.generation.engine import generate
from pyramidion.generation.journal import to_line
from pyramidion.generation.loop import forget
from pyramidion.training.recipe import Recipe

Progress = Callable[[int, int, str], None]


class Validation:
    """Score a model on the validation split of a store, the documents shared among all processes."""

    def __init__(self, recipe: Recipe, store: TokenStore, folder: Path, progress: Progress) -> None:
        self.recipe, self.split, self.tokenizer = recipe, store["val"], store.tokenizer()
        limit = recipe.evaluate_limit or len(self.split)
        self.count, self.progress = min(len(self.split), limit), progress
        self.written = folder / "validation.jsonl"
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Give the mean loss of a token, and ROUGE times 100."""
        order = sorted(range(self.count), key=lambda i: int(self.split.document_lengths[i]))[self.rank :: self.world]
        parts = [order[i : i + self.recipe.device_batch] for i in range(0, len(order), self.recipe.device_batch)]
        found: list[tuple[int, str, float, int]] = []  # place, summary, summed loss, tokens
        with torch.autocast(_device(model).type, torch.bfloat16, enabled=self.recipe.bf16):
            for part in parts:
                found += self._batch(model, part)
                self.progress(len(found), len(order), "validating")
        forget(model)  # buffers for writing are room for training
        found = sorted(self._gathered(found))
        texts, references = [text for _, text, _, _ in found], [self.split.summary_text(i) for i in range(self.count)]
        scores = rouge(texts, references)
        if self.rank == 0:
            pairs = enumerate(zip(texts, references, strict=True))
            rows = ({"index": i, "id": self.split[i].id, "prediction": p, "reference": r} for i, (p, r) in pairs)
            write_whole(self.written, "".join(map(to_line, rows)))
        loss = sum(loss for _, _, loss, _ in found) / sum(tokens for _, _, _, tokens in found)
        return {"loss": loss, **{kind: 100 * float(values.mean()) for kind, values in scores.items()}}

    def _batch(self, model: Any, places: Sequence[int]) -> list[tuple[int, str, float, int]]:
        config = model.config
        source = self.recipe.max_source or config.entering[0]
        collate = Collator(
            pad=config.pad_token_id, eos=config.eos_token_id, max_source=source, max_target=self.recipe.max_target
        )
        batch = {key: value.to(_device(model)) for key, value in collate([self.split[i] for i in places]).items()}
        labels = batch.pop("labels")
        logits = model(**batch, labels=labels).logits
        losses = nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").sum(1).tolist()
        del logits
        search = decoding_options(config, **(self.recipe.generation or {}))
        written = generate(model, batch["input_ids"], batch["attention_mask"], search)
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        tokens = (labels >= 0).sum(1).tolist()
        return list(zip(places, texts, losses, tokens, strict=True))

    def _gathered(self, mine: list[Any]) -> list[Any]:
        if self.world == 1:
            return mine
        parts: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(parts, mine)
        return [one for part in parts for one in part]


def validation(recipe: Recipe, store: TokenStore, folder: Path, progress: Progress) -> Validation | None:
    """Make the validation of a run; none where the store has no split for it."""
    return Validation(recipe, store, folder, progress) if "val" in store else None


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
