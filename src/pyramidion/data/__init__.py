"""Documents and their summaries, from any file to batches: prepared once, then mapped from disk.

    store = TokenStore.open("corpus")              # a folder made by `pyramidion prepare`
    train = store["train"]
    batches = LengthGroupedBatches(train.document_lengths, 8, seed=1)
    collate = Collator(max_source=8192, max_target=512)
    for batch in batches:
        model(**collate([train[i] for i in batch]))

`streams` reads bytes, `formats` and `sources` find records in them, `records` tells good ones from bad, `tokenizer`
turns texts into ids, `writer` writes and `store` reads; `preparation` is the way through all of them, `report` its
account. `objectives` makes of documents alone what a model is pretrained on.
"""

from pyramidion.data.batches import LengthGroupedBatches
from pyramidion.data.collator import Collator
from pyramidion.data.objectives import Exercises
from pyramidion.data.store import Example, Split, TokenStore

__all__ = ["Collator", "Example", "Exercises", "LengthGroupedBatches", "Split", "TokenStore"]
