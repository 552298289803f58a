"""The softmax of attention kernels: tile by tile, and put together from parts of a sequence."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_tile(acc, best, total, s, value, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One more tile of scores [rows, tokens], in base 2, and of values [tokens, dims].

    MASKED: a row may not have seen any token yet: then there is nothing to compare with.
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
    acc,  # [ROWS, DIMS] float32: this part's result
    lse,  # [ROWS] float32: its share of the softmax is 2 ** lse; -inf where it saw nothing
    partial_ptr, lse_ptr, arrived_ptr,
    out_at,  # [ROWS, DIMS] pointers
    at_part,  # [ROWS]: where a row's parts begin
    dims, row_mask, mask, split, num_parts, scale, SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Keep one part. The program that comes last puts them together, times `scale`."""
    tl.store(lse_ptr + at_part + split, lse, mask=row_mask)
    at_partial = partial_ptr + at_part[:, None] * SIZE + dims[None, :]
    tl.store(at_partial + split * SIZE, acc, mask=mask)
    tl.debug_barrier()  # the whole program has written before one thread says so
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == num_parts - 1:
        # What other programs wrote is in the L2 cache, perhaps not in this processor's own.
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
