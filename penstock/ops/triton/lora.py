"""LoRA on a GPU: rows are grouped by adapter slot once per step, and a layer takes two launches.

The first multiplies a layer's inputs with the slots' A (shrink). The second multiplies the result
with their B and adds it to the output in place (expand). Both cover all parts of a fused layer, and
load their weights before they wait for earlier kernels (`overlap`). The host knows nothing of the
grouping, so graphs can be captured. A step of one row needs no tensor cores.

Few rows need only the second: A of all slots lies behind the layer's own matrix (`join`), and one
product computes both. It is as fast as memory, and a launch costs more than reading A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from penstock.ops.lora import AdapterStep, Update
from penstock.ops.triton.linear import linear
from penstock.ops.triton.lora_tiles import DeviceAdapterStep, load_tile
from penstock.ops.triton.overlap import let_next_start, overlap, wait_for_others
from penstock.ops.triton.tuning import lora_expand_tile, lora_joined_rows, lora_shrink_plan

MIN_DOT = 16  # rows and columns of the tensor cores' smallest product
MAX_RANKS = 64  # of an adapter, in one product
MIN_COLUMNS = 32  # of an expand kernel's tile that needs no mask
MAX_JOINED = 2**23  # bytes of A behind a layer's matrix: all are read, whichever slots are used
JOINED_ROWS = 64  # of a matrix with A behind it, or a multiple


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
    slot, count, rows = load_tile(tile_ptr, row_ptr, tile, num_tiles, ROWS)
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
    slot, count, rows = load_tile(tile_ptr, row_ptr, tile, num_tiles, ROWS)
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
    out_features, out_stride, v_stride, num_slots, num_tiles,
    JOINED: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    RANK: tl.constexpr, PADDED: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add a tile's v, summed over the splits, times COLUMNS of one part's B to out [n, out].

    v is what the shrink kernel wrote, or x times A of all slots (JOINED): [n, slots, parts, RANK].
    A slot that has vectors [2, out] multiplies the sum by the first and adds the second. EVEN:
    COLUMNS divides every part.
    """
    let_next_start(OVERLAP)
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot, count, rows = load_tile(tile_ptr, row_ptr, tile, num_tiles, ROWS)
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
    v_row, v_first = tile * ROWS + row, part * PADDED
    if JOINED:
        v_row, v_first = rows, (slot * PARTS + part) * RANK
    v_source = v_ptr + v_row[:, None] * v_stride + v_first + rank[None, :]
    split_stride = num_tiles * ROWS * v_stride
    for at in tl.static_range(0, PADDED, RANKS):
        if at > 0:
            is_rank = (at + rank < own_rank)[:, None]
            b_mask = is_rank if EVEN else is_rank & is_column
            b = tl.load(b_source + at * out_features, mask=b_mask, other=0.0)
        v_mask = is_row & (at + rank < own_rank)[None, :] if JOINED else is_row
        v = tl.load(v_source + at, mask=v_mask, other=0.0)
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
        self._joined: torch.Tensor | None = None  # [rows, in]: the layer's matrix, then A
        self._joined_bias: torch.Tensor | None = None

    def join(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """See `LoraSlots`. Both move to the front of larger tensors, with A behind the matrix."""
        assert weight.shape == (self.out_features, self.a.shape[-1]), "the layer's matrix"
        if weight.dtype != self.a.dtype or self.a.nbytes > MAX_JOINED:
            return
        with torch.inference_mode(weight.is_inference()):  # a parameter stays what it is
            num_rows, end = self.out_features, self.out_features + self.a[..., 0].numel()
            joined = weight.new_zeros(-(-end // JOINED_ROWS) * JOINED_ROWS, weight.shape[1])
            joined[:num_rows].copy_(weight)
            joined[num_rows:end].view_as(self.a).copy_(self.a)
            weight.data, self.a = joined[:num_rows], joined[num_rows:end].view_as(self.a)
            self._joined = joined
            if bias is not None:
                self._joined_bias = bias.new_zeros(len(joined))
                self._joined_bias[:num_rows].copy_(bias)
                bias.data = self._joined_bias[:num_rows]

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
        if self._joined is not None and len(x) <= lora_joined_rows():
            both = linear(x, self._joined, self._joined_bias)
            output, v = both[:, : self.out_features], both[:, self.out_features :]
            return self._expand(v, output, step, is_joined=True)
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
        self,
        v: torch.Tensor,
        output: torch.Tensor,
        step: DeviceAdapterStep,
        is_joined: bool = False,
    ) -> torch.Tensor:
        assert output.stride(1) == 1, "rows may lie apart, their numbers not"
        splits, num_tiles = 1 if is_joined else len(v), step.tiles.shape[1]
        tile = lora_expand_tile(num_tiles * self.out_features, step.tile_rows, self._ranks)
        columns, unit = tile.columns, math.gcd(*self.part_rows)
        if unit % MIN_COLUMNS == 0:
            columns = math.gcd(unit, columns)
        num_blocks = sum(triton.cdiv(rows, columns) for rows in self.part_rows)
        _expand_kernel[(num_tiles, num_blocks)](
            v, self.b, self._sizes, self.vectors, output, self._part_starts, step.rows, step.tiles,
            self.out_features, output.stride(0), v.stride(-2), self.num_slots, num_tiles,
            JOINED=is_joined, PARTS=len(self.part_rows), SPLITS=splits, EVEN=unit % columns == 0,
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
