"""Which examples stand in which batch: shuffled, yet of like length, so that little is padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np


class LengthGroupedBatches(Sequence[list[int]]):
    """List the batches of an epoch: a function of `seed` and `epoch` alone, so that to resume is to skip.

    Examples are shuffled, taken `groups` steps at a time, sorted by length within these, and cut into steps, which are
    shuffled again. A step is one batch for each of `world` ranks, dealt out in turn, so that lengths are alike on all.

    Every example appears once in an epoch, and every rank has equally many batches, none of them empty: the last step
    is dealt out as far as it goes, and if it has fewer examples than ranks, the step before lends it some. Only where
    nothing can be lent (`batch_size` 1, or fewer examples than ranks) is an example repeated on a rank that has none.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch_size: int,
        *,
        seed: int,
        epoch: int = 0,
        groups: int = 50,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        for name, number in {"batch_size": batch_size, "groups": groups, "world": world}.items():
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}.")
        if not 0 <= rank < world:
            raise ValueError(f"`rank` must be from 0 to {world - 1}, got {rank}.")
        if not len(lengths):
            raise ValueError("`lengths` must hold at least one, got none.")
        if seed < 0:
            raise ValueError(f"`seed` must be at least 0, got {seed}.")
        self.lengths, self.batch_size = np.asarray(lengths), batch_size
        self.seed, self.groups, self.rank, self.world = seed, groups, rank, world
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to another epoch: the same examples in another order."""
        if epoch < 0:
            raise ValueError(f"`epoch` must be at least 0, got {epoch}.")
        self.epoch = epoch
        self._steps = self._order()

    def _order(self) -> list[np.ndarray]:
        """Sort within groups of steps, cut into steps, shuffle these; an incomplete one stays last."""
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(len(self.lengths))
        step = self.batch_size * self.world
        for start in range(0, len(order), step * self.groups):
            group = order[start : start + step * self.groups]
            group[:] = group[np.argsort(-self.lengths[group].astype(np.int64), kind="stable")]
        full = len(order) // step
        steps = [order[i * step : (i + 1) * step] for i in random.permutation(full)]
        return _even(steps, order[full * step :], self.world)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batch: list[int] = self._steps[index][self.rank :: self.world].tolist()
        return batch

    def __iter__(self) -> Iterator[list[int]]:
        return (self[i] for i in range(len(self)))


def _even(steps: list[np.ndarray], rest: np.ndarray, world: int) -> list[np.ndarray]:
    """Append the incomplete step so that no rank goes without an example in it."""
    lacking = world - len(rest)
    if len(rest) == 0:
        return steps
    if lacking > 0 and steps and len(steps[-1]) - lacking >= world:
        *steps, lender = steps
        return [*steps, lender[:-lacking], np.concatenate([lender[-lacking:], rest])]
    if lacking > 0:
        rest = np.concatenate([rest, np.resize(rest, lacking)])
    return [*steps, rest]
