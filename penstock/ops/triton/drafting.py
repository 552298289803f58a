"""Lays out the rows from which the next drafts are computed, one for each request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 256


@triton.jit(do_not_specialize=["index", "num_columns", "max_positions"])
def _draft_rows_kernel(
    slots_ptr, room_ptr, drafted_ptr, token_table_ptr, num_tokens_ptr, block_table_ptr,
    token_ids_ptr, positions_ptr, next_positions_ptr, slot_mapping_ptr, seq_lens_ptr,
    rows_table_ptr, token_stride, table_stride, rows_stride, index, num_columns, max_positions,
    BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per request. Slot -1 is padding, which reads and writes the null block."""
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request)
    is_there = slot >= 0
    num_tokens = tl.load(num_tokens_ptr + slot, mask=is_there, other=1).to(tl.int64)
    position = num_tokens - 1 + index
    room = tl.load(room_ptr + request)
    has_place = is_there & (position < room)
    if FIRST:
        token = tl.load(token_table_ptr + slot * token_stride + position, mask=is_there, other=0)
    else:
        token = tl.load(drafted_ptr + request).to(tl.int32)
    block = tl.load(
        block_table_ptr + slot * table_stride + position // BLOCK_SIZE, mask=has_place, other=0
    ).to(tl.int64)
    place = tl.where(has_place, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    tl.store(token_ids_ptr + request, tl.where(is_there, token, 0))
    tl.store(next_positions_ptr + request, position + 1)
    position = tl.minimum(position, max_positions - 1)
    tl.store(positions_ptr + request, position)
    tl.store(slot_mapping_ptr + request, place)
    tl.store(seq_lens_ptr + request, tl.where(is_there, position + 1, 1).to(tl.int32))
    if FIRST:  # the blocks of all drafts
        offsets = tl.arange(0, CHUNK)
        num_own = tl.where(is_there, (room + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
        end = tl.minimum((position + num_columns) // BLOCK_SIZE + 1, rows_stride)
        for at in range(0, end, CHUNK):
            columns = at + offsets
            # A reused slot has old blocks behind its own, which belong to others by now.
            blocks = tl.load(
                block_table_ptr + slot * table_stride + columns, mask=columns < num_own, other=0
            )
            target = rows_table_ptr + request.to(tl.int64) * rows_stride + columns
            tl.store(target, blocks, mask=columns < end)


def draft_rows(
    slots: torch.Tensor,  # [n] int64; -1 for padding
    room: torch.Tensor,  # [n] int64: positions below have a place in the cache
    drafted: torch.Tensor | None,  # [n] int: the draft before this one; None: the first
    token_table: torch.Tensor,  # [max_num_seqs, width] int32
    num_tokens: torch.Tensor,  # [max_num_seqs] int32
    block_table: torch.Tensor,  # [max_num_seqs, max_blocks] int32
    block_size: int,
    index: int,  # of the draft
    num_rows: int,  # most rows of a request in the loop
    max_positions: int,
    token_ids: torch.Tensor,  # out [n] int32
    positions: torch.Tensor,  # out [n] int64
    next_positions: torch.Tensor,  # out [n] int64: those of the drafts
    slot_mapping: torch.Tensor,  # out [n] int64
    seq_lens: torch.Tensor,  # out [n] int32
    rows_table: torch.Tensor,  # out [n, max_blocks] int32, written with the first draft
) -> None:
    """Rows without a place in the cache use the null block. Their drafts are poor."""
    _draft_rows_kernel[(len(slots),)](
        slots, room, slots if drafted is None else drafted, token_table, num_tokens, block_table,
        token_ids, positions, next_positions, slot_mapping, seq_lens, rows_table,
        token_table.stride(0), block_table.stride(0), rows_table.stride(0), index, num_rows,
        max_positions, BLOCK_SIZE=block_size, FIRST=drafted is None, CHUNK=CHUNK, num_warps=1,
    )  # fmt: skip
