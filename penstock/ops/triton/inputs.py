"""Builds a step's inputs on the device from the runner's tables.

The host sends the requests of a step and their numbers of tokens. Tokens, positions, cache slots
and lengths are computed here. Therefore a step can be launched before the host knows the tokens of
the previous step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 256


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _prepare_kernel(
    query_starts_ptr, slots_ptr,  # [num_requests + 1], [num_requests] int32; slot -1 is padding
    token_table_ptr, num_computed_ptr, block_table_ptr,
    token_ids_ptr, positions_ptr, token_slots_ptr, slot_mapping_ptr, seq_lens_ptr, rows_table_ptr,
    token_stride, table_stride, rows_stride, num_rows, num_requests,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, ADVANCE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per request, and one for the padding rows, which use the null block."""
    request = tl.program_id(0)
    offsets = tl.arange(0, CHUNK)
    start = tl.load(query_starts_ptr + request)
    if request == num_requests:
        for at in range(start, num_rows, CHUNK):
            rows = at + offsets
            mask = rows < num_rows
            tl.store(slot_mapping_ptr + rows, tl.zeros([CHUNK], tl.int64), mask=mask)
            if TOKENS:
                tl.store(token_ids_ptr + rows, tl.zeros([CHUNK], tl.int32), mask=mask)
                tl.store(positions_ptr + rows, tl.zeros([CHUNK], tl.int64), mask=mask)
                tl.store(token_slots_ptr + rows, tl.full([CHUNK], -1, tl.int64), mask=mask)
        return
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot < 0:
        tl.store(seq_lens_ptr + request, 0)
        return
    count = tl.load(query_starts_ptr + request + 1) - start
    computed = tl.load(num_computed_ptr + slot)
    seq_len = computed + count
    tl.store(seq_lens_ptr + request, seq_len)
    for at in range(0, count, CHUNK):
        index = at + offsets
        mask = index < count
        positions = computed + index
        rows = start + index
        block = tl.load(
            block_table_ptr + slot * table_stride + positions // BLOCK_SIZE, mask=mask, other=0
        ).to(tl.int64)
        tl.store(slot_mapping_ptr + rows, block * BLOCK_SIZE + positions % BLOCK_SIZE, mask=mask)
        if TOKENS:
            tokens = tl.load(token_table_ptr + slot * token_stride + positions, mask=mask, other=0)
            tl.store(token_ids_ptr + rows, tokens, mask=mask)
            tl.store(positions_ptr + rows, positions.to(tl.int64), mask=mask)
            tl.store(token_slots_ptr + rows, tl.zeros([CHUNK], tl.int64) + slot, mask=mask)
    num_blocks = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    for at in range(0, num_blocks, CHUNK):
        columns = at + offsets
        mask = columns < num_blocks
        blocks = tl.load(block_table_ptr + slot * table_stride + columns, mask=mask, other=0)
        tl.store(rows_table_ptr + request.to(tl.int64) * rows_stride + columns, blocks, mask=mask)
    if ADVANCE:
        tl.debug_barrier()  # every thread has read the old value
        tl.store(num_computed_ptr + slot, seq_len)


@triton.jit(do_not_specialize=["num_rows"])
def _sample_rows_kernel(
    logits_rows_ptr, token_slots_ptr, positions_ptr, slots_out_ptr, positions_out_ptr, num_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_rows
    rows = tl.load(logits_rows_ptr + index, mask=mask, other=-1)
    there = rows >= 0
    slots = tl.load(token_slots_ptr + rows, mask=there, other=-1)
    positions = tl.load(positions_ptr + rows, mask=there, other=-1) + 1
    tl.store(slots_out_ptr + index, slots, mask=mask)
    tl.store(positions_out_ptr + index, positions, mask=mask)


@triton.jit(do_not_specialize=["num"])
def _append_tokens_kernel(
    slots_ptr, tokens_ptr, token_table_ptr, num_tokens_ptr, token_stride, num, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + index, mask=index < num, other=-1).to(tl.int64)
    mask = slots >= 0
    tokens = tl.load(tokens_ptr + index, mask=mask, other=0).to(tl.int32)
    lengths = tl.load(num_tokens_ptr + slots, mask=mask, other=0)
    tl.store(token_table_ptr + slots * token_stride + lengths, tokens, mask=mask)
    tl.debug_barrier()  # every thread has read the old length
    tl.store(num_tokens_ptr + slots, lengths + 1, mask=mask)


@triton.jit(do_not_specialize=["num"])
def _write_blocks_kernel(where_ptr, table_ptr, table_stride, num, BLOCK: tl.constexpr):
    """where [3, num]: slots, columns, blocks."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num
    slots = tl.load(where_ptr + index, mask=mask, other=0).to(tl.int64)
    columns = tl.load(where_ptr + num + index, mask=mask, other=0)
    blocks = tl.load(where_ptr + 2 * num + index, mask=mask, other=0)
    tl.store(table_ptr + slots * table_stride + columns, blocks, mask=mask)


@triton.jit(do_not_specialize=["num_new"])
def _write_requests_kernel(
    packed_ptr,  # [num_new, 5]: slot, index of first token, tokens, prompt, computed; then tokens
    token_table_ptr, num_tokens_ptr, num_prompt_ptr, num_computed_ptr, token_stride, num_new,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per new request."""
    row = packed_ptr + tl.program_id(0) * 5
    slot = tl.load(row).to(tl.int64)
    source = packed_ptr + num_new * 5 + tl.load(row + 1)
    num_tokens = tl.load(row + 2)
    tl.store(num_tokens_ptr + slot, num_tokens)
    tl.store(num_prompt_ptr + slot, tl.load(row + 3))
    tl.store(num_computed_ptr + slot, tl.load(row + 4))
    for at in range(0, num_tokens, CHUNK):
        columns = at + tl.arange(0, CHUNK)
        mask = columns < num_tokens
        tokens = tl.load(source + columns, mask=mask)
        tl.store(token_table_ptr + slot * token_stride + columns, tokens, mask=mask)


def prepare_rows(
    query_starts: torch.Tensor,  # [num_requests + 1] int32
    slots: torch.Tensor,  # [num_requests] int32; -1 for padding, at the end
    token_table: torch.Tensor,  # [max_num_seqs, width] int32
    num_computed: torch.Tensor,  # [max_num_seqs] int32
    block_table: torch.Tensor,  # [max_num_seqs, max_blocks] int32
    block_size: int,
    token_ids: torch.Tensor,  # out [num_rows] int32
    positions: torch.Tensor,  # out [num_rows] int64
    token_slots: torch.Tensor,  # out [num_rows] int64; -1 for padding
    slot_mapping: torch.Tensor,  # out [num_rows] int64
    seq_lens: torch.Tensor,  # out [num_requests] int32
    rows_table: torch.Tensor,  # out [num_requests, max_blocks] int32
    *,
    tokens: bool,
    advance: bool,
) -> None:
    """Lay out a step for one KV group: `tokens` for the first group, `advance` for the last."""
    num_requests = len(slots)
    _prepare_kernel[(num_requests + 1,)](
        query_starts, slots, token_table, num_computed, block_table,
        token_ids, positions, token_slots, slot_mapping, seq_lens, rows_table,
        token_table.stride(0), block_table.stride(0), rows_table.stride(0),
        len(token_ids), num_requests,
        BLOCK_SIZE=block_size, TOKENS=tokens, ADVANCE=advance, CHUNK=CHUNK, num_warps=1,
    )  # fmt: skip


def sample_rows(
    logits_rows: torch.Tensor,  # [n] int32; -1 for padding
    token_slots: torch.Tensor,  # [num_rows] int64
    positions: torch.Tensor,  # [num_rows] int64
    slots_out: torch.Tensor,  # [n] or longer, int64
    positions_out: torch.Tensor,
) -> None:
    """The slot of each logits row and the position of its next token; -1 and 0 for padding."""
    num = len(logits_rows)
    if num:
        _sample_rows_kernel[(triton.cdiv(num, 128),)](
            logits_rows, token_slots, positions, slots_out, positions_out, num, BLOCK=128
        )


def append_tokens(
    slots: torch.Tensor, tokens: torch.Tensor, token_table: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Append one token [n] to each of the distinct slots [n]; slot -1 is padding."""
    num = len(slots)
    if num:
        _append_tokens_kernel[(triton.cdiv(num, 128),)](
            slots, tokens, token_table, num_tokens, token_table.stride(0), num, BLOCK=128
        )


def write_blocks(where: torch.Tensor, block_table: torch.Tensor) -> None:
    """where [3, n] int32: slot, column and block of each new entry."""
    num = where.shape[1]
    _write_blocks_kernel[(triton.cdiv(num, 128),)](
        where, block_table, block_table.stride(0), num, BLOCK=128
    )


def write_requests(
    packed: torch.Tensor,  # int32: num_new rows of 5, then their tokens
    num_new: int,
    token_table: torch.Tensor,
    num_tokens: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_computed: torch.Tensor,
) -> None:
    """Add requests to the tables. The kernel names the fields of a row."""
    _write_requests_kernel[(num_new,)](
        packed, token_table, num_tokens, num_prompt_tokens, num_computed,
        token_table.stride(0), num_new, CHUNK=CHUNK,
    )  # fmt: skip
