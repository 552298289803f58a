"""N-gram drafts over the token table: what followed the last tokens when they occurred before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 1024
SPLITS = 8  # programs that share the tokens of a request


@triton.jit
def _match_kernel(
    slots_ptr, token_table_ptr, num_tokens_ptr,
    best_ptr,  # [requests] int64: length of the match * 2**32 + the position after it; 0 before
    token_stride, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The longest match in a share of a request's tokens, the last one of that length."""
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot < 0:
        return
    tokens = token_table_ptr + slot * token_stride
    num_tokens = tl.load(num_tokens_ptr + slot)
    best = tl.zeros([CHUNK], tl.int64)
    for at in range(tl.program_id(1) * CHUNK, num_tokens, tl.num_programs(1) * CHUNK):
        ends = at + tl.arange(0, CHUNK)  # positions after a match
        same = ends < num_tokens
        lengths = tl.zeros([CHUNK], tl.int32)
        back = 1
        num_same = CHUNK
        while (back <= LONGEST) & (num_same > 0):
            same = same & (ends >= back)
            last = tl.load(tokens + tl.maximum(num_tokens - back, 0))
            same = same & (tl.load(tokens + ends - back, mask=same, other=-1) == last)
            lengths += same.to(tl.int32)
            num_same = tl.sum(same.to(tl.int32), axis=0)
            back += 1
        key = (lengths.to(tl.int64) << 32) + ends
        best = tl.maximum(best, tl.where(lengths >= SHORTEST, key, 0))
    found = tl.max(best, axis=0)
    if found > 0:
        tl.atomic_max(best_ptr + request, found)


@triton.jit(do_not_specialize=["num_drafts"])
def _draft_kernel(
    slots_ptr, token_table_ptr, num_tokens_ptr, best_ptr, drafts_ptr, token_stride, num_drafts,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The tokens after the match. If the text ends before, it is taken to repeat itself."""
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot < 0:
        return
    num_tokens = tl.load(num_tokens_ptr + slot)
    best = tl.load(best_ptr + request)
    # Without a match, the last token is repeated: any valid token will do.
    after = tl.where(best > 0, (best & 0xFFFFFFFF).to(tl.int32), num_tokens - 1)
    columns = tl.arange(0, COLUMNS)
    mask = columns < num_drafts
    source = after + columns % (num_tokens - after)
    drafts = tl.load(token_table_ptr + slot * token_stride + source, mask=mask, other=0)
    tl.store(drafts_ptr + request * num_drafts + columns, drafts, mask=mask)
    tl.debug_barrier()  # every thread has read the match
    tl.store(best_ptr + request, 0)


def ngram_drafts(
    slots: torch.Tensor,  # [n] int64; -1 is padding
    token_table: torch.Tensor,  # [max_num_seqs, length] int32
    num_tokens: torch.Tensor,  # [max_num_seqs] int32
    best: torch.Tensor,  # [n] or longer, int64: zero before and after
    num_drafts: int,
    shortest: int,
    longest: int,
) -> torch.Tensor:
    """Drafts [n, num_drafts] int32, as those of `NgramIndex`. Without a match, any tokens."""
    num = len(slots)
    drafts = torch.empty((num, num_drafts), dtype=torch.int32, device=slots.device)
    _match_kernel[(num, SPLITS)](
        slots, token_table, num_tokens, best, token_table.stride(0),
        SHORTEST=shortest, LONGEST=longest, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    _draft_kernel[(num,)](
        slots, token_table, num_tokens, best, drafts, token_table.stride(0), num_drafts,
        COLUMNS=triton.next_power_of_2(num_drafts), num_warps=1,
    )  # fmt: skip
    return drafts
