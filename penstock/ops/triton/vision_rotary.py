"""Rotary positions of a vision tower's queries and keys, in place, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_rows_kernel(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_stride, key_stride, num_heads,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one row: of the queries, or of the keys."""
    row = tl.program_id(0).to(tl.int64)
    columns, heads = tl.arange(0, WIDTH), tl.arange(0, HEADS)
    is_column = columns < HALF
    cos = tl.load(cos_ptr + row * HALF + columns, mask=is_column, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + columns, mask=is_column, other=0.0)[None, :]
    if tl.program_id(1) == 0:
        base = query_ptr + row * query_stride
    else:
        base = key_ptr + row * key_stride
    at = base + heads[:, None] * (2 * HALF) + columns[None, :]
    mask = (heads < num_heads)[:, None] & is_column[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = first.dtype
    first = first.to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(at + HALF, (second * cos + first * sin).to(dtype), mask=mask)


def rotate_rows(
    query: torch.Tensor,  # [n, num_heads, head_dim], heads dense
    key: torch.Tensor,
    cos: torch.Tensor,  # [n, 1, head_dim / 2] float32
    sin: torch.Tensor,
) -> None:
    """Rotate dimensions i and i + head_dim / 2 together in float32, in place."""
    n, num_heads, head_dim = query.shape
    half = head_dim // 2
    _rotate_rows_kernel[(n, 2)](
        query, key, cos.contiguous(), sin.contiguous(), query.stride(0), key.stride(0), num_heads,
        HALF=half, WIDTH=triton.next_power_of_2(half), HEADS=triton.next_power_of_2(num_heads),
    )  # fmt: skip
