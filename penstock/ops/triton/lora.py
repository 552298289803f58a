"""LoRA on a GPU: rows are grouped by adapter slot once per step, and a layer takes two launches.

The first multiplies a layer's inputs with the slots' A (shrink). The second multiplies the result
with their B and adds it to the output in place (expand). Both cover all parts of a fused layer, and
load their weights before they wait for earlier kernels (`overlap`). The host knows nothing of the
grouping, so graphs can be captured. A step of one row needs no tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.ops.lora import AdapterStep, Update
from penstock.ops.triton.overlap import let_next_start, overlap, wait_for_others
from penstock.ops.triton.tuning import lora_expand_tile, lora_rows, lora_shrink_plan

GROUPED_AT_ONCE = 8192  # rows times slots
MIN_DOT = 16  # rows and columns of the tensor cores' smallest product
MAX_RANKS = 64  # of an adapter, in one product
MIN_COLUMNS = 32  # of an expand kernel's tile that needs no mask


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
        return DeviceAdapterStep.empty(self.slots.new_zeros(num_rows), 1).group()

    def take(self, rows: torch.Tensor | slice) -> DeviceAdapterStep:
        """The step of these rows alone."""
        if isinstance(rows, slice) and rows == slice(0, len(self.slots)):
            return self
        return DeviceAdapterStep.empty(self.slots[rows], len(self.starts) - 1).group()


@triton.jit
def _tile(tile_ptr, row_ptr, tile, num_tiles, ROWS: tl.constexpr):
    """A tile's slot, number of rows (0: unused) and rows [ROWS].

    The grouping is many kernels old, and is read past the L1 cache: nothing waits for it.
    """
    count = tl.load(tile_ptr + 2 * num_tiles + tile, cache_modifier=".cg")
    slot = tl.load(tile_ptr + tile, cache_modifier=".cg").to(tl.int64)
    first = tl.load(tile_ptr + num_tiles + tile, cache_modifier=".cg")
    row = tl.arange(0, ROWS)
    rows = tl.load(row_ptr + first + row, mask=row < count, other=0, cache_modifier=".cg")
    return slot, count, rows.to(tl.int64)


@triton.jit(do_not_specialize=["num_tiles"])
def _shrink_kernel(
    x_ptr, a_ptr, rank_ptr, out_ptr, row_ptr, tile_ptr,
    in_features, x_stride, num_tiles, depth_each,
    RANK: tl.constexpr, PADDED: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, LOOP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile's x times RANKS rows of one part's A, over `depth_each` inputs (LOOP: above DEPTH).

    out [splits, tiles, ROWS, parts, PADDED] float32; rows that the tile does not have are left out
    """
    let_next_start(OVERLAP)
    tile = tl.program_id(0)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)  # of all parts' ranks
    split = tl.program_id(2)
    slot, count, rows = _tile(tile_ptr, row_ptr, tile, num_tiles, ROWS)
    rank = chunk * RANKS % PADDED + tl.arange(0, RANKS)
    part, parts = chunk * RANKS // PADDED, chunks * RANKS // PADDED
    own_rank = tl.where(count > 0, tl.load(rank_ptr + slot, cache_modifier=".cg"), 0)
    is_rank = (rank < own_rank)[:, None]
    is_row = (tl.arange(0, ROWS) < count)[:, None]
    depth = tl.arange(0, DEPTH)
    first = split * depth_each
    last = tl.minimum(first + depth_each, in_features)
    a_source = a_ptr + ((slot * parts + part) * RANK + rank)[:, None] * in_features + depth[None, :]
    x_source = x_ptr + rows[:, None] * x_stride + depth[None, :]
    is_depth = (first + depth < last)[None, :]
    a = tl.load(a_source + first, mask=is_rank & is_depth, other=0.0)
    wait_for_others(OVERLAP)
    if own_rank <= 0:
        return
    x = tl.load(x_source + first, mask=is_row & is_depth, other=0.0)
    acc = _shrunk(x, a, tl.zeros([ROWS, RANKS], tl.float32), ROWS)
    if LOOP:
        for at in range(first + DEPTH, last, DEPTH):
            is_depth = (at + depth < last)[None, :]
            a = tl.load(a_source + at, mask=is_rank & is_depth, other=0.0)
            x = tl.load(x_source + at, mask=is_row & is_depth, other=0.0)
            acc = _shrunk(x, a, acc, ROWS)
    row = (split * num_tiles + tile) * ROWS + tl.arange(0, ROWS)
    target = out_ptr + row.to(tl.int64)[:, None] * (parts * PADDED) + part * PADDED + rank[None, :]
    tl.store(target, acc, mask=is_row)


@triton.jit
def _shrunk(x, a, acc, ROWS: tl.constexpr):
    """acc [ROWS, RANKS] + x [ROWS, DEPTH] a [RANKS, DEPTH]^T."""
    if ROWS == 1:
        return acc + tl.sum(x.to(tl.float32) * a.to(x.dtype).to(tl.float32), axis=1)[None, :]
    return tl.dot(x, a.to(x.dtype).T, acc, input_precision="ieee")


@triton.jit
def _expanded(v, b, out, ROWS: tl.constexpr):
    """out [ROWS, COLUMNS] + v [ROWS, RANKS] b [RANKS, COLUMNS]."""
    if ROWS == 1:
        return out + tl.sum(tl.trans(v).to(tl.float32) * b.to(tl.float32), axis=0)[None, :]
    return tl.dot(v, b, out, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tiles", "num_tokens"])
def _gather_kernel(
    token_ptr, a_ptr, rank_ptr, out_ptr, row_ptr, tile_ptr, num_tokens, num_tiles,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of a token embedding's A, in place of a product: out [tiles, ROWS, PADDED]."""
    tile = tl.program_id(0)
    slot, count, rows = _tile(tile_ptr, row_ptr, tile, num_tiles, ROWS)
    row, rank = tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_row = row < count
    token = tl.load(token_ptr + rows, mask=is_row, other=0).to(tl.int64)
    mask = is_row[:, None] & (rank < tl.load(rank_ptr + slot))[None, :]
    source = a_ptr + (slot * num_tokens + token)[:, None] * RANK + rank[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (tile * ROWS + row)[:, None] * PADDED + rank[None, :], a)


@triton.jit(do_not_specialize=["num_tiles", "num_slots"])
def _expand_kernel(
    v_ptr, b_ptr, rank_ptr, vector_ptr, out_ptr, part_ptr, row_ptr, tile_ptr,
    out_features, out_stride, num_slots, num_tiles,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
    PADDED: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add a tile's v, summed over the splits, times COLUMNS of one part's B to out [n, out].

    A slot that has vectors [2, out] multiplies the sum by the first and adds the second. EVEN:
    COLUMNS divides every part.
    """
    let_next_start(OVERLAP)
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot, count, rows = _tile(tile_ptr, row_ptr, tile, num_tiles, ROWS)
    part, first, end, before = 0, 0, 0, 0
    for index in tl.static_range(PARTS):
        begin = tl.load(part_ptr + index)
        stop = tl.load(part_ptr + index + 1)
        blocks = tl.cdiv(stop - begin, COLUMNS)
        if (block >= before) & (block < before + blocks):
            part, end = index, stop
            first = begin + (block - before) * COLUMNS
        before += blocks
    if EVEN:
        first = block * COLUMNS  # the same, and the compiler sees that it is a multiple
    column = first + tl.arange(0, COLUMNS)
    is_column = (column < end)[None, :]
    rank = tl.arange(0, RANKS)
    own_rank = tl.where(count > 0, tl.load(rank_ptr + slot, cache_modifier=".cg"), 0)
    has_vectors = tl.load(rank_ptr + num_slots + slot, cache_modifier=".cg")
    is_changed = (own_rank > 0) | ((count > 0) & (has_vectors != 0))
    b_source = b_ptr + (slot * RANK + rank)[:, None] * out_features + column[None, :]
    is_rank = (rank < own_rank)[:, None]
    b = tl.load(b_source, mask=is_rank if EVEN else is_rank & is_column, other=0.0)
    wait_for_others(OVERLAP)
    if not is_changed:
        return
    row = tl.arange(0, ROWS)
    is_row = (row < count)[:, None]
    mask = is_row if EVEN else is_row & is_column
    target = out_ptr + rows[:, None] * out_stride + column[None, :]
    out = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    type: tl.constexpr = out_ptr.dtype.element_ty
    v_source = (
        v_ptr + (tile * ROWS + row)[:, None] * (PARTS * PADDED) + part * PADDED + rank[None, :]
    )
    split_stride = num_tiles * (ROWS * PARTS * PADDED)
    for at in tl.static_range(0, PADDED, RANKS):
        if at > 0:
            is_rank = (at + rank < own_rank)[:, None]
            b_mask = is_rank if EVEN else is_rank & is_column
            b = tl.load(b_source + at * out_features, mask=b_mask, other=0.0)
        v = tl.load(v_source + at, mask=is_row, other=0.0)
        for split in tl.static_range(1, SPLITS):
            v += tl.load(v_source + at + split * split_stride, mask=is_row, other=0.0)
        out = _expanded(v.to(type), b.to(type), out, ROWS)
    if has_vectors:
        vector = vector_ptr + slot * 2 * out_features + column[None, :]
        out *= tl.load(vector, mask=is_column, other=0.0)
        out += tl.load(vector + out_features, mask=is_column, other=0.0)
    tl.store(target, out.to(type), mask=mask)


class DeviceLoraSlots:
    """The adapters of one linear layer, in memory that never moves: see `LoraSlots`."""

    def __init__(
        self,
        num_slots: int,
        in_features: int,
        part_rows: Sequence[int],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.part_rows = tuple(part_rows)
        self.out_features = sum(part_rows)
        self.max_rank = max_rank
        self._padded_rank = max(triton.next_power_of_2(max_rank), MIN_DOT)
        self._ranks = min(self._padded_rank, MAX_RANKS)
        shape = (num_slots, len(part_rows), max_rank, in_features)
        self.a = torch.zeros(shape, dtype=dtype, device=device)
        self.b = torch.zeros((num_slots, max_rank, self.out_features), dtype=dtype, device=device)
        # By slot: the rank, and whether it has vectors. A slot without an adapter has rank 0.
        self.ranks, self._has_vectors = self._sizes = torch.zeros(
            (2, num_slots), dtype=torch.int32, device=device
        )
        # By slot: DoRA's multipliers, and what is added after them.
        self.vectors = torch.empty(
            (num_slots, 2, self.out_features), dtype=torch.float32, device=device
        )
        starts = torch.tensor([0, *self.part_rows]).cumsum(0)
        self._part_starts = starts.to(torch.int32).to(device)

    def place(self, slot: int, update: Update) -> None:
        """See `LoraSlots`. The host does not wait for the device."""
        parts = [part for part in update if part is not None]
        rank = max((len(part.b) for part in parts), default=0)
        has_vectors = any(part.multiplier is not None or part.shift is not None for part in parts)
        self.ranks[slot] = rank
        self._has_vectors[slot] = has_vectors
        if has_vectors:
            self.vectors[slot, 0] = 1.0
            self.vectors[slot, 1] = 0.0
        start = 0
        for index, part in enumerate(update):
            columns = slice(start, start + self.part_rows[index])
            start += self.part_rows[index]
            own = 0 if part is None else len(part.b)
            # A part of a lower rank, or without an update.
            self.a[slot, index, own:rank] = 0.0
            self.b[slot, own:rank, columns] = 0.0
            if part is None:
                continue
            self._place_a(slot, index, part.a)
            self.b[slot, :own, columns].copy_(part.b, non_blocking=True)
            if part.multiplier is not None:
                self.vectors[slot, 0, columns].copy_(part.multiplier, non_blocking=True)
            if part.shift is not None:
                self.vectors[slot, 1, columns].copy_(part.shift, non_blocking=True)

    def _place_a(self, slot: int, part: int, a: torch.Tensor) -> None:
        self.a[slot, part, : len(a)].copy_(a, non_blocking=True)

    def run(
        self, x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], step: AdapterStep
    ) -> torch.Tensor:
        """See `LoraSlots`. The first kernel follows one that lets it load its weights early."""
        assert isinstance(step, DeviceAdapterStep), "the rows are grouped on the device"
        v = self._shrink(x, step)
        return self._expand(v, product(x), step)

    def add(self, x: torch.Tensor, output: torch.Tensor, step: AdapterStep) -> torch.Tensor:
        """Change the rows of output [n, out] that have an adapter, in place. x is [n, in]."""
        assert isinstance(step, DeviceAdapterStep), "the rows are grouped on the device"
        return self._expand(self._shrink(x, step), output, step)

    def _shrink(self, x: torch.Tensor, step: DeviceAdapterStep) -> torch.Tensor:
        assert x.stride(1) == 1, "rows may lie apart, their numbers not"
        num_tiles, in_features = step.tiles.shape[1], x.shape[1]
        chunks = len(self.part_rows) * self._padded_rank // self._ranks
        plan = lora_shrink_plan(
            num_tiles * chunks, in_features, step.tile_rows, self._ranks, x.element_size()
        )
        # Every split gets whole loop steps.
        depth_each = triton.cdiv(in_features, plan.splits * plan.depth) * plan.depth
        v = self._room(plan.splits, step)
        _shrink_kernel[(num_tiles, chunks, plan.splits)](
            x, self.a, self.ranks, v, step.rows, step.tiles,
            in_features, x.stride(0), num_tiles, depth_each,
            RANK=self.max_rank, PADDED=self._padded_rank, RANKS=self._ranks, ROWS=step.tile_rows,
            DEPTH=plan.depth, LOOP=depth_each > plan.depth, **overlap(x.device),
            num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
        )  # fmt: skip
        return v

    def _room(self, splits: int, step: DeviceAdapterStep) -> torch.Tensor:
        """For the result of the shrink kernel."""
        width = len(self.part_rows) * self._padded_rank
        shape = (splits, step.tiles.shape[1], step.tile_rows, width)
        return torch.empty(shape, dtype=torch.float32, device=step.tiles.device)

    def _expand(
        self, v: torch.Tensor, output: torch.Tensor, step: DeviceAdapterStep
    ) -> torch.Tensor:
        assert output.stride(1) == 1, "rows may lie apart, their numbers not"
        splits, num_tiles = v.shape[:2]
        tile = lora_expand_tile(num_tiles * self.out_features, step.tile_rows, self._ranks)
        columns, unit = tile.columns, math.gcd(*self.part_rows)
        if unit % MIN_COLUMNS == 0:
            columns = math.gcd(unit, columns)
        num_blocks = sum(triton.cdiv(rows, columns) for rows in self.part_rows)
        _expand_kernel[(num_tiles, num_blocks)](
            v, self.b, self._sizes, self.vectors, output, self._part_starts, step.rows, step.tiles,
            self.out_features, output.stride(0), self.num_slots, num_tiles,
            PARTS=len(self.part_rows), SPLITS=splits, EVEN=unit % columns == 0,
            RANK=self.max_rank, PADDED=self._padded_rank, RANKS=self._ranks, ROWS=step.tile_rows,
            COLUMNS=columns,
            **overlap(v.device), num_warps=tile.launch.num_warps, num_stages=1,
        )  # fmt: skip
        return output


class DeviceEmbeddingSlots(DeviceLoraSlots):
    """The adapters of a token embedding: A [num_tokens, rank] is looked up by token."""

    def __init__(
        self,
        num_slots: int,
        num_tokens: int,
        part_rows: Sequence[int],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(num_slots, 0, part_rows, max_rank, dtype, device)
        self.tokens = torch.zeros((num_slots, num_tokens, max_rank), dtype=dtype, device=device)

    def _place_a(self, slot: int, part: int, a: torch.Tensor) -> None:
        self.tokens[slot, :, : a.shape[1]].copy_(a, non_blocking=True)

    def add(self, x: torch.Tensor, output: torch.Tensor, step: AdapterStep) -> torch.Tensor:
        """Change the rows of output [n, hidden] that have an adapter. x [n] are token ids."""
        assert isinstance(step, DeviceAdapterStep), "the rows are grouped on the device"
        v = self._room(1, step)
        _gather_kernel[(step.tiles.shape[1],)](
            x, self.tokens, self.ranks, v, step.rows, step.tiles,
            self.tokens.shape[1], step.tiles.shape[1],
            RANK=self.max_rank, PADDED=self._padded_rank, ROWS=step.tile_rows, num_warps=1,
        )  # fmt: skip
        return self._expand(v, output, step)


# The ops.
lora_slots = DeviceLoraSlots
embedding_slots = DeviceEmbeddingSlots
