"""A matrix times one row or a few, where cuBLAS leaves much of the bandwidth unused.

One row needs no tensor cores. A few rows, as of a request with its drafts, do, and each program
reads its part of the matrix through a deep pipeline. More rows go to cuBLAS.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from penstock.ops import reference
from penstock.ops.triton.overlap import begin, overlap
from penstock.ops.triton.tuning import MAX_FEW_ROWS, FewRowsTile, few_rows_tile, row_tile


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, in_features, out_features,
    BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight times x. Products are summed across threads once, at the end."""
    begin(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    row_mask = rows < out_features
    source = weight_ptr + rows.to(tl.int64)[:, None] * in_features + columns[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, in_features, BLOCK):
        mask = at + columns < in_features
        weight = tl.load(
            source + at, mask=row_mask[:, None] & mask[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        x = tl.load(x_ptr + at + columns, mask=mask, other=0.0)
        acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(acc, axis=1)
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, in_features, out_features, out_stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """COLUMNS rows of the weight, the left operand, times all rows of x."""
    begin(OVERLAP)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows, inner = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    # Programs at the edge read the last row again instead of none: no load has a mask.
    at_weight = tl.minimum(columns, out_features - 1).to(tl.int64)[:, None] * in_features
    source = weight_ptr + at_weight + inner[None, :]
    x_source = x_ptr + rows[:, None] * in_features + inner[None, :]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in tl.range(0, in_features, DEPTH, num_stages=STAGES):
        weight = tl.load(source + at, eviction_policy="evict_first")
        x = tl.load(x_source + at, mask=rows[:, None] < num_rows, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc)
    column_mask = columns < out_features
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=column_mask, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    target = out_ptr + rows.to(tl.int64)[None, :] * out_stride + columns[:, None]
    mask = column_mask[:, None] & (rows < num_rows)[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [n, in] @ weight [out, in]^T + bias; in `out` [n, out] if given."""
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    if not 0 < num_rows <= MAX_FEW_ROWS or not weight.is_contiguous() or not x.is_contiguous():
        return reference.linear(x, weight, bias, out)
    few = _tile(x, weight, out) if num_rows > 1 else None
    if num_rows > 1 and few is None:
        return reference.linear(x, weight, bias, out)
    if out is None:
        out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if few is not None:
        _few_rows_kernel[(triton.cdiv(out_features, few.columns),)](
            x, weight, weight if bias is None else bias, out, num_rows, in_features, out_features,
            out.stride(0), BIAS=bias is not None, ROWS=MAX_FEW_ROWS, COLUMNS=few.columns,
            DEPTH=few.depth, STAGES=few.launch.num_stages, **overlap(x.device),
            num_warps=few.launch.num_warps, num_stages=few.launch.num_stages,
        )  # fmt: skip
        return out
    tile = row_tile(in_features)
    _one_row_kernel[(triton.cdiv(out_features, tile.rows),)](
        x, weight, weight if bias is None else bias, out, in_features, out_features,
        BIAS=bias is not None, ROWS=tile.rows, BLOCK=tile.columns, **overlap(x.device),
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
    return out


def _tile(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> FewRowsTile | None:
    """How to multiply a few rows; None if cuBLAS does it."""
    if x.element_size() != 2 or x.dtype != weight.dtype:
        return None  # exact float32 products would not use the tensor cores
    if x.device.type == "cuda" and not _has_large_tiles(x.device):
        return None
    tile = few_rows_tile(weight.shape[0])
    fits = weight.shape[1] % tile.depth == 0 and (out is None or out.stride(1) == 1)
    return tile if fits else None


@functools.cache
def _has_large_tiles(device: torch.device) -> bool:
    """Whether the tiles, which are measured on Hopper, fit into shared memory."""
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"]) >= 200 * 1024
