"""Verification of drafts in one kernel, and the writing of drafts in another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.verification import SampleRows, Verified


@triton.jit
def _verify_kernel(
    starts_ptr, rows_ptr, slots_ptr, step_tokens_ptr, sampled_ptr, faulted_ptr,
    token_table_ptr, num_tokens_ptr, num_computed_ptr,
    results_ptr,  # [requests, 2 + width]: number of new tokens, whether one is faulted, tokens
    out_slots_ptr, last_rows_ptr, num_accepted_ptr,
    token_stride, width, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per request. Those without samples are padding, and get none."""
    request = tl.program_id(0)
    first = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - first
    columns = tl.arange(0, COLUMNS)
    results = results_ptr + request * (2 + width)
    if count == 0:
        tl.store(results, 0)
        tl.store(results + 1, 0)
        tl.store(out_slots_ptr + request, -1)
        tl.store(last_rows_ptr + request, 0)
        tl.store(num_accepted_ptr + request, 0)
        return
    there = columns < count
    sampled = tl.load(sampled_ptr + first + columns, mask=there, other=0).to(tl.int32)
    # A sample is compared with the token of the next row.
    has_draft = columns + 1 < count
    rows = tl.load(rows_ptr + first + 1 + columns, mask=has_draft, other=0)
    drafts = tl.load(step_tokens_ptr + rows, mask=has_draft, other=-1).to(tl.int32)
    differs = tl.where(has_draft & (sampled == drafts), COLUMNS, columns)
    num_accepted = tl.min(differs, axis=0)
    is_kept = columns <= num_accepted
    faulted = tl.load(faulted_ptr + first + columns, mask=there & is_kept, other=0).to(tl.int32)

    slot = tl.load(slots_ptr + first).to(tl.int64)
    num_tokens = tl.load(num_tokens_ptr + slot)
    num_computed = tl.load(num_computed_ptr + slot)
    table = token_table_ptr + slot * token_stride + num_tokens
    tl.store(table + columns, sampled, mask=is_kept)
    tl.store(results, num_accepted + 1)
    tl.store(results + 1, tl.max(faulted, axis=0))
    tl.store(results + 2 + columns, sampled, mask=is_kept)
    tl.store(out_slots_ptr + request, slot)
    tl.store(last_rows_ptr + request, tl.load(rows_ptr + first).to(tl.int64) + num_accepted)
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.debug_barrier()  # every thread has read the old lengths
    tl.store(num_tokens_ptr + slot, num_tokens + num_accepted + 1)
    tl.store(num_computed_ptr + slot, num_computed - (count - 1 - num_accepted))


@triton.jit(do_not_specialize=["num_drafts", "row_stride", "column_stride"])
def _write_drafts_kernel(
    slots_ptr, drafts_ptr, token_table_ptr, num_tokens_ptr, token_stride, row_stride, column_stride,
    num_drafts, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per request. Slot -1 is padding."""
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot < 0:
        return
    columns = tl.arange(0, COLUMNS)
    mask = columns < num_drafts
    source = drafts_ptr + request * row_stride + columns * column_stride
    drafts = tl.load(source, mask=mask, other=0)
    table = token_table_ptr + slot * token_stride + tl.load(num_tokens_ptr + slot)
    tl.store(table + columns, drafts.to(tl.int32), mask=mask)


def verify_drafts(
    samples: SampleRows,
    sampled: torch.Tensor,
    faulted: torch.Tensor,
    token_table: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    width: int,
) -> Verified:
    """As the reference. Requests without samples are padding: they get no token and slot -1."""
    num, device = len(samples.starts) - 1, sampled.device
    verified = Verified(
        torch.empty((num, 2 + width), dtype=torch.int32, device=device),
        torch.empty(num, dtype=torch.int64, device=device),
        torch.empty(num, dtype=torch.int64, device=device),
        torch.empty(num, dtype=torch.int32, device=device),
    )
    _verify_kernel[(num,)](
        samples.starts, samples.rows, samples.slots, samples.token_ids, sampled,
        faulted.view(torch.int8), token_table, num_tokens, num_computed, verified.results,
        verified.slots, verified.last_rows, verified.num_accepted, token_table.stride(0), width,
        COLUMNS=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return verified


def write_drafts(
    slots: torch.Tensor,  # [n] int64, distinct; -1 is padding
    drafts: torch.Tensor,  # [n, k] int
    token_table: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    """Write each slot's drafts behind its tokens."""
    num, num_drafts = drafts.shape
    _write_drafts_kernel[(num,)](
        slots, drafts, token_table, num_tokens, token_table.stride(0), *drafts.stride(), num_drafts,
        COLUMNS=triton.next_power_of_2(num_drafts), num_warps=1,
    )  # fmt: skip
