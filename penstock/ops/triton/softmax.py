"""The online softmax of attention kernels, and the combination of a sequence's splits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_tile(acc, best, total, s, value, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add one tile of scores [rows, tokens], in base 2, and of values [tokens, dims].

    MASKED: a row may have seen no token yet, so its maximum may be -inf.
    """
    new_best = tl.maximum(best, tl.max(s, axis=1))
    safe = new_best
    if MASKED:
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(best - safe)
    p = tl.exp2(s - safe[:, None])
    total = total * weight + tl.sum(p, axis=1)
    acc = acc * weight[:, None]
    acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc, new_best, total


@triton.jit
def store_part(
    acc,  # [ROWS, DIMS] float32: the result of this split
    lse,  # [ROWS] float32: its softmax weight is 2 ** lse; -inf if it saw no token
    partial_ptr, lse_ptr, arrived_ptr,
    out_at,  # [ROWS, DIMS] pointers
    at_part,  # [ROWS]: where a row's splits begin
    dims, row_mask, mask, split, num_parts, scale, SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store one split. The last program combines all splits, times `scale`."""
    tl.store(lse_ptr + at_part + split, lse, mask=row_mask)
    at_partial = partial_ptr + at_part[:, None] * SIZE + dims[None, :]
    tl.store(at_partial + split * SIZE, acc, mask=mask)
    tl.debug_barrier()  # the whole program has written before one thread reports it
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == num_parts - 1:
        # Other programs' writes are in the L2 cache, maybe not in this SM's L1 cache.
        splits = tl.arange(0, SPLITS)
        shares = tl.load(
            lse_ptr + at_part[:, None] + splits[None, :],
            mask=row_mask[:, None] & (splits < num_parts)[None, :], other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        top = tl.max(tl.where(row_mask[:, None], shares, 0.0), axis=1)
        norm = tl.sum(tl.exp2(shares - top[:, None]), axis=1)
        acc = tl.zeros_like(acc)
        for part in range(num_parts):
            share = tl.load(
                lse_ptr + at_part + part, mask=row_mask, other=float("-inf"), cache_modifier=".cg"
            )
            value = tl.load(at_partial + part * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
            acc += value * tl.exp2(share - top)[:, None]
        out = acc / tl.where(norm == 0.0, 1.0, norm)[:, None] * scale
        tl.store(out_at, out.to(out_at.dtype.element_ty), mask=mask)
        tl.store(arrived_ptr, 0)
