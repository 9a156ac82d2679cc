"""How kernels go through the rows of a matrix: tiles [r n 8] of some rows, each thread with 8 neighbours of a draw."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidion.kernels.chance import PARTS
from pyramidion.kernels.dropout import scale, threshold
from pyramidion.kernels.launching import launch, processors

LANES = 128  # draws of a row in a tile, where a row is parted into groups of columns


class Tiling(NamedTuple):
    """Say how programs go through rows: so many at a time, until none is left."""

    rows: int  # of a tile
    each: int  # draws of a thread in a row, at most
    crowd: int  # programs of a multiprocessor
    stages: int  # tiles on their way at the same time

    def programs(self, rows: int, groups: int, device: torch.device) -> int:
        """Count the programs that share the rows, where so many groups of columns have their own."""
        return max(1, min(-(-rows // self.rows), self.crowd * processors(device) // groups))

    def options(self, draws: int) -> dict[str, int]:
        """Give what a kernel must know of it, for tiles of so many draws a row."""
        lanes, warps = _power(draws), _power(-(-draws // (32 * self.each)))
        return {"LANES": lanes, "ROWS": self.rows, "STAGES": self.stages, "num_warps": min(16, warps)}


@triton.jit
def tile(start, group, rows, D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Find the rows, draws and numbers [r n 8] of a tile, which of them exist, and whose of 8 each is."""
    row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)[:, None, None]
    lane = group * LANES + tl.arange(0, LANES)[None, :, None]
    part = tl.arange(0, 8)[None, None, :]
    draw = row * (D // 8) + lane
    return row, draw.to(tl.uint32), draw * 8 + part, (row < rows) & (lane < D // 8), part


@triton.jit
def load_row(vector, group, D: tl.constexpr, LANES: tl.constexpr, LOADS: tl.constexpr):
    """Load a vector [1 n 8] of a group of columns, or 0 where there is none."""
    _, _, column, exists, _ = tile(0, group, 1, D, LANES, 1)
    return tl.load(vector + column, mask=exists, other=0.0).to(tl.float32) if LOADS else 0.0


@triton.jit
def store_row(vectors, number, vector, group, D: tl.constexpr, LANES: tl.constexpr):
    """Store a vector [1 n 8] of a group of columns as the row of that number."""
    _, _, column, exists, _ = tile(0, group, 1, D, LANES, 1)
    tl.store(vectors + number * D + column, vector, mask=exists)


def groups_of(d: int) -> tuple[int, int]:
    """Part d columns into groups, and say how many draws each has."""
    lanes = min(LANES, _power(d // PARTS))
    return -(-d // (PARTS * lanes)), lanes


def _power(n: int) -> int:
    """Give the least power of two that is at least n; Triton's own takes ten times as long, at every launch."""
    return 1 << (n - 1).bit_length()


def room_for_sums(tiling: Tiling, x: Tensor) -> Tensor:
    """Make room for what programs of `launch_by_columns` sum over rows: x [... d] -> [programs d]."""
    d = x.shape[-1]
    programs = tiling.programs(x.numel() // d, groups_of(d)[0], x.device)
    return x.new_empty(programs, d, dtype=torch.float32)


def launch_by_columns(
    kernel: Any, tiling: Tiling, first: Tensor, *others: Tensor | None, dropout: float, **options: bool
) -> None:
    """Launch a kernel over groups of the columns of first [... d]; each program goes through rows of one group."""
    d, rows = first.shape[-1], first.numel() // first.shape[-1]
    groups, lanes = groups_of(d)
    launch(
        kernel, (tiling.programs(rows, groups, first.device), groups),
        first, *others, rows, threshold(dropout), scale(dropout), D=d, **tiling.options(lanes), **options,
    )  # fmt: skip
