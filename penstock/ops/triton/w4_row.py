"""One row of x times 4-bit weights, which is bound by memory.

The tensor cores multiply sixteen matrix rows with at least eight columns. Here the columns are
parts of the row: column i is x of the i-th of eight chunks. The words of each chunk are multiplied
with all eight columns, which costs nothing, and one column of the result is used. So eight chunks
share one operand, and their scales form one tensor.

A warp owns eight chunks. Data goes directly from memory to the registers of the tensor cores: loads
order their dimensions so that each thread gets its own part of an operand, eight words or eight
numbers of x at once. Another order would be slower, not wrong.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.triton.overlap import let_next_start, overlap, wait_for_others
from penstock.ops.triton.packed_layout import CHUNK, Packed
from penstock.ops.triton.tuning_quantized import w4_row_warps
from penstock.ops.triton.w4_unpack import base_of, load_groups, scale_to_float, unpack

ROWS = 16
REGISTERS = 168  # per thread, so that twelve warps share an SM; no limit with half planes


@triton.jit
def _to_operand(words, WARPS: tl.constexpr):
    """[2 * 8 * WARPS * 8, 32] as [8 * WARPS, 16, 32]: chunk and warp, row, column.

    The order of a plane's columns changes, because a thread's eight neighbours are separated.
    """
    words = words.reshape(2, 8, WARPS, 8, 4, 2, 2, 2).permute(1, 2, 0, 3, 5, 6, 4, 7)
    return words.reshape(8 * WARPS, 16, 32)


@triton.jit
def _load_x(x_ptr, chunk, num_chunks, in_features, plane: tl.constexpr, MASKED: tl.constexpr):
    """A plane of x for chunks [WARPS * 8, 1], in the order of `_to_operand`: [WARPS, 8, 32]."""
    column = chunk * 128 + plane * 32 + tl.arange(0, 32)[None, :]
    if MASKED == "columns":
        x = tl.load(x_ptr + column, mask=column < in_features, other=0.0)
    elif MASKED == "chunks":
        x = tl.load(x_ptr + column, mask=chunk < num_chunks, other=0.0)
    else:
        x = tl.load(x_ptr + column)
    warps: tl.constexpr = x.shape[0] // 8
    return x.reshape(warps, 8, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(warps, 8, 32)


@triton.jit
def _load_xs(x_ptr, chunk, num_chunks, in_features, MASKED: tl.constexpr):
    return (
        _load_x(x_ptr, chunk, num_chunks, in_features, 0, MASKED),
        _load_x(x_ptr, chunk, num_chunks, in_features, 1, MASKED),
        _load_x(x_ptr, chunk, num_chunks, in_features, 2, MASKED),
        _load_x(x_ptr, chunk, num_chunks, in_features, 3, MASKED),
    )


@triton.jit
def _load_weights(
    source, scale_at, zero_at, first, chunk, own_chunk, num_chunks, chunks_each, num_groups,
    ZEROS: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Words, scales and zeros of the chunks from the first on; zeros past the last."""
    if MASKED == "":
        words = tl.load(source + first * 32, eviction_policy="evict_first")
    else:
        there = first + chunk < num_chunks
        words = tl.load(source + first * 32, mask=there, other=0, eviction_policy="evict_first")
    scales = load_groups(scale_at, first + own_chunk, chunks_each, num_groups, PARTS)
    zeros = scales
    if ZEROS:
        zeros = load_groups(zero_at, first + own_chunk, chunks_each, num_groups, PARTS)
    return words, scales, zeros


@triton.jit
def _part_of_x(xs, half, part: tl.constexpr, step: tl.constexpr, PARTS: tl.constexpr):
    """x of a part's plane, or of half a plane with the other columns zero."""
    if PARTS == 8:
        x = tl.where(half == part % 2, xs[part // 2], 0.0).to(xs[0].dtype)
    else:
        x = xs[part * (4 // PARTS) + step]
    return x


@triton.jit
def _sums_of_x(xs, half, PARTS: tl.constexpr):
    """The sum of x over each part: [WARPS, 8] float32."""
    sums = ()
    for part in tl.static_range(PARTS):
        own = tl.sum(_part_of_x(xs, half, part, 0, PARTS).to(tl.float32), axis=2)
        for step in tl.static_range(1, 4 // PARTS):
            own += tl.sum(_part_of_x(xs, half, part, step, PARTS).to(tl.float32), axis=2)
        sums += (own,)  # type: ignore[assignment]
    return sums


@triton.jit
def _multiply(x, plane, total):
    """total + a plane's numbers [8 WARPS, 16, 32] times x [WARPS, 8, 32], for every chunk."""
    warps: tl.constexpr = x.shape[0]
    operand = x.permute(0, 2, 1)[None, :, :, :].broadcast_to(8, warps, 32, 8)
    return tl.dot(plane, operand.reshape(8 * warps, 32, 8), total, input_precision="ieee")


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr,
    in_features, out_features, num_chunks, num_groups, chunks_each,
    BIAS: tl.constexpr, KIND: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr, OVERLAP: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of the weight times x.

    Integers keep the power of two from their conversion. The sum of x corrects the products for it
    and for the zero point.
    """
    let_next_start(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Words [2 * 8 * WARPS * 8, 32]: half of the rows, chunk, warp, row. So a warp holds eight rows
    # of a chunk at once, and the dimensions that warps do not split are registers.
    index = tl.arange(0, 128 * WARPS)[:, None]
    chunk = index // 8 % WARPS * 8 + index // (8 * WARPS) % 8
    row = tl.program_id(0) * 16 + index // (64 * WARPS) * 8 + index % 8
    # Rows out of range read the first row; their results are not stored.
    row = tl.where(row < out_features, row, 0).to(tl.int64)
    source = weight_ptr + row * (num_chunks * 32) + chunk * 32 + tl.arange(0, 32)[None, :]
    x_chunk = tl.arange(0, 8 * WARPS)[:, None]
    # [WARPS, 16, 8]: the results, whose columns are chunks.
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    is_row = row < out_features
    at_group = tl.where(is_row, row, 0).to(tl.int64)[None, :, None] * num_groups
    scale_at, zero_at = scale_ptr + at_group, zero_ptr + at_group
    column = tl.arange(0, 8)[None, None, :]
    own_chunk = tl.arange(0, WARPS)[:, None, None] * 8 + column
    is_own = tl.arange(0, 8)[:, None, None, None] == column[None, :, :, :]
    half = tl.arange(0, 32) // 4 % 2  # halves of a plane's columns, in the order of `_to_operand`
    acc = tl.zeros([WARPS, 16, 8], tl.float32)
    words, scales, zeros = _load_weights(
        source, scale_at, zero_at, 0, chunk, own_chunk, num_chunks, chunks_each, num_groups,
        ZEROS, PARTS, MASKED,
    )  # fmt: skip
    wait_for_others(OVERLAP)
    xs = _load_xs(x_ptr, x_chunk, num_chunks, in_features, MASKED)
    for first in range(0, num_chunks, 8 * WARPS):
        sums = _sums_of_x(xs, half, PARTS)
        planes = unpack(_to_operand(words, WARPS), None, dtype, KIND == "fp4", ASM)
        for part in tl.static_range(PARTS):
            total = tl.zeros([8 * WARPS, 16, 8], tl.float32)
            for step in tl.static_range((4 + PARTS - 1) // PARTS):
                x = _part_of_x(xs, half, part, step, PARTS)
                total = _multiply(x, planes[part * 4 // PARTS + step], total)
            # Take column i of chunk i.
            own = tl.sum(tl.where(is_own, total.reshape(8, WARPS, 16, 8), 0.0), axis=0)
            if ZEROS:
                own -= (zeros[part].to(tl.float32) + base_of(dtype)) * sums[part][:, None, :]
            elif KIND == "w4":
                own -= (8.0 + base_of(dtype)) * sums[part][:, None, :]
            acc += own * scale_to_float(scales[part])
        # Load everything before the next iteration. Otherwise x would be loaded only when it is
        # needed.
        if first + 8 * WARPS < num_chunks:
            words, scales, zeros = _load_weights(
                source, scale_at, zero_at, first + 8 * WARPS, chunk, own_chunk, num_chunks,
                chunks_each, num_groups, ZEROS, PARTS, MASKED,
            )  # fmt: skip
            next_chunk = first + 8 * WARPS + x_chunk
            xs = _load_xs(x_ptr, next_chunk, num_chunks, in_features, MASKED)
    out = tl.sum(tl.sum(acc, axis=2), axis=0)
    if GLOBAL:
        out *= tl.load(global_ptr + row, mask=is_row, other=0.0)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=is_row)


def one_row(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, warps: int | None = None
) -> torch.Tensor:
    """x [1, in] times the weight: [1, out]."""
    out_features, in_features, num_chunks = len(weight.data), x.shape[1], weight.width
    if warps is None:
        warps = w4_row_warps(out_features, num_chunks)
    masked = "columns" if in_features % CHUNK else "chunks" if num_chunks % (8 * warps) else ""
    out = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(out_features, ROWS),)](
        x, *weight.operands, out if bias is None else bias, out,
        in_features, out_features, *weight.sizes,
        BIAS=bias is not None, **weight.constants, ASM=x.is_cuda, MASKED=masked,
        **overlap(x.device), WARPS=warps, num_warps=warps, num_stages=1,
        maxnreg=REGISTERS if weight.parts < 8 else None,
    )  # fmt: skip
    return out
