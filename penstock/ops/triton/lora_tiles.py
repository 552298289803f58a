"""The rows of a step grouped by adapter slot on a GPU, in tiles that kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.ops.lora import AdapterStep
from penstock.ops.triton.tuning import lora_rows

GROUPED_AT_ONCE = 8192  # rows times slots


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_tiles"])
def _group_kernel(
    slot_ptr, row_ptr, start_ptr, tile_ptr, num_rows, num_slots, num_tiles,
    TILE_ROWS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: count the rows of each slot, then place them in order."""
    slot = tl.arange(0, SLOTS)
    chunk = tl.arange(0, CHUNK)
    counts = tl.zeros([SLOTS], tl.int32)
    for first in range(0, num_rows, CHUNK):
        own = tl.load(slot_ptr + first + chunk, mask=first + chunk < num_rows, other=-1)
        counts += tl.sum((own[:, None] == slot[None, :]).to(tl.int32), axis=0)
    counts = tl.where(slot < num_slots, counts, 0)
    ends = tl.cumsum(counts, axis=0)
    starts = ends - counts
    tl.store(start_ptr + slot, starts, mask=slot < num_slots)
    tl.store(start_ptr + num_slots, tl.sum(counts, axis=0))
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    tile_starts = tl.cumsum(tiles, axis=0) - tiles
    for index in range(tl.max(tiles, axis=0)):
        mask = index < tiles
        target = tile_ptr + tile_starts + index
        tl.store(target, slot, mask=mask)
        tl.store(target + num_tiles, starts + index * TILE_ROWS, mask=mask)
        rows = tl.minimum(counts - index * TILE_ROWS, TILE_ROWS)
        tl.store(target + 2 * num_tiles, rows, mask=mask)
    for first in range(tl.sum(tiles, axis=0), num_tiles, SLOTS):  # unused
        mask = first + slot < num_tiles
        for field in tl.static_range(3):
            target = tile_ptr + field * num_tiles + first + slot
            tl.store(target, tl.zeros([SLOTS], tl.int32), mask=mask)
    for first in range(0, num_rows, CHUNK):
        row = first + chunk
        own = tl.load(slot_ptr + row, mask=row < num_rows, other=-1)
        is_own = (own[:, None] == slot[None, :]).to(tl.int32)  # [CHUNK, SLOTS]
        # The rows of its slot up to this one, this chunk's and those before.
        at = starts[None, :] + tl.cumsum(is_own, axis=0) - 1
        target = tl.sum(at * is_own, axis=1)
        tl.store(row_ptr + target, row, mask=(own >= 0) & (own < num_slots))
        starts += tl.sum(is_own, axis=0)


@dataclass(frozen=True)
class DeviceAdapterStep(AdapterStep):
    """Rows and tiles are known once `group` has run. A tile has rows of one slot."""

    tile_rows: int  # at most
    tiles: torch.Tensor  # [3, num_tiles] int32: slot, first of `rows`, number of rows; 0 if unused

    @classmethod
    def empty(cls, slots: torch.Tensor, num_slots: int) -> DeviceAdapterStep:
        """For rows whose slots will be in `slots`. Allocates as many tiles as they could need."""
        num_rows = len(slots)
        tile_rows = lora_rows(num_rows)
        num_used = min(num_rows, num_slots)
        num_tiles = num_used + (num_rows - num_used) // tile_rows
        return cls(
            slots=slots,
            rows=slots.new_empty(num_rows),
            starts=slots.new_empty(num_slots + 1),
            tile_rows=tile_rows,
            tiles=slots.new_empty(3, num_tiles),
        )

    def group(self) -> DeviceAdapterStep:
        """Group the rows by their slots, in one launch."""
        num_rows, num_slots = len(self.slots), len(self.starts) - 1
        padded = triton.next_power_of_2(num_slots)
        chunk = min(max(GROUPED_AT_ONCE // padded, 16), max(triton.next_power_of_2(num_rows), 16))
        _group_kernel[(1,)](
            self.slots, self.rows, self.starts, self.tiles,
            num_rows, num_slots, self.tiles.shape[1],
            TILE_ROWS=self.tile_rows, SLOTS=padded, CHUNK=chunk, num_warps=8,
        )  # fmt: skip
        return self

    def only(self, num_rows: int) -> DeviceAdapterStep:
        return group_rows(self.slots.new_zeros(num_rows), 1)

    def take(self, rows: torch.Tensor | slice) -> DeviceAdapterStep:
        """The step of these rows alone."""
        if isinstance(rows, slice) and rows == slice(0, len(self.slots)):
            return self
        return group_rows(self.slots[rows], len(self.starts) - 1)


def group_rows(slots: torch.Tensor, num_slots: int) -> DeviceAdapterStep:
    """See `penstock.ops.lora`. The host does not wait."""
    return DeviceAdapterStep.empty(slots, num_slots).group()


@triton.jit
def load_tile(tile_ptr, row_ptr, tile, num_tiles, ROWS: tl.constexpr):
    """A tile's slot, number of rows (0: unused) and rows [ROWS].

    The grouping is many kernels old, and is read past the L1 cache: nothing waits for it.
    """
    count = tl.load(tile_ptr + 2 * num_tiles + tile, cache_modifier=".cg")
    slot = tl.load(tile_ptr + tile, cache_modifier=".cg").to(tl.int64)
    first = tl.load(tile_ptr + num_tiles + tile, cache_modifier=".cg")
    row = tl.arange(0, ROWS)
    rows = tl.load(row_ptr + first + row, mask=row < count, other=0, cache_modifier=".cg")
    return slot, count, rows.to(tl.int64)
