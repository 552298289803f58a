"""Products with weights in the layout of `packed_layout.py`: one row of x, a few, or many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops import quantized as plain
from penstock.ops.triton.byte_unpack import dequantize_bytes_kernel, multiply_bytes
from penstock.ops.triton.packed_layout import Packed
from penstock.ops.triton.slabs import multiply_slabs
from penstock.ops.triton.splitting import add_parts, room_for_parts
from penstock.ops.triton.tuning_quantized import TilePlan, byte_plan, w4_plan
from penstock.ops.triton.w4_row import one_row
from penstock.ops.triton.w4_unpack import dequantize_words_kernel, multiply_words


@triton.jit
def count_chunks(width, KIND: tl.constexpr):
    """Chunks of a row with the given `Packed.width`."""
    return width if KIND == "w4" or KIND == "fp4" else tl.cdiv(width, 64)


@triton.jit
def multiply_chunks(
    acc,  # [ROWS, TOKENS] float32
    weight_ptr, scale_ptr, zero_ptr, extra_ptr,
    x_at,  # [TOKENS] pointers to x at the first column
    row,  # [ROWS] int64, rows of the weight
    is_token,  # [TOKENS]
    low, high, in_features, width, num_groups, group_width,
    KIND: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc + rows of a `Packed` weight times x, over chunks [low, high)."""
    if KIND == "w4" or KIND == "fp4":
        acc = multiply_words(
            acc, weight_ptr, scale_ptr, zero_ptr, x_at, row, is_token, low, high,
            in_features, width, num_groups, group_width, KIND == "fp4", ZEROS, PARTS, ASM, EVEN,
        )  # fmt: skip
    else:
        acc = multiply_bytes(
            acc, weight_ptr, scale_ptr, zero_ptr, extra_ptr, x_at, row, is_token, low, high,
            in_features, width, num_groups, group_width, KIND == "table", ZEROS, PARTS == 1, EVEN,
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, extra_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    x_stride, num_tokens, in_features, out_features, width, num_groups, group_width,
    BIAS: tl.constexpr, KIND: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight times TOKENS rows of x, over one split of the columns."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    is_token, is_row = token < num_tokens, row < out_features
    num_chunks = count_chunks(width, KIND)
    each = tl.cdiv(num_chunks, SPLITS)
    low = split * each
    high = tl.minimum(low + each, num_chunks)
    # Rows out of range read the first row; their results are not stored.
    own_row = tl.where(is_row, row, 0).to(tl.int64)
    acc = multiply_chunks(
        tl.zeros([ROWS, TOKENS], tl.float32),
        weight_ptr, scale_ptr, zero_ptr, extra_ptr, x_ptr + token.to(tl.int64) * x_stride,
        own_row, is_token, low, high, in_features, width, num_groups, group_width,
        KIND, ZEROS, PARTS, EVEN, ASM,
    )  # fmt: skip
    acc = acc.T
    offset = token.to(tl.int64)[:, None] * out_features + row[None, :]
    mask = is_token[:, None] & is_row[None, :]
    done = True
    if SPLITS > 1:
        arrived = arrived_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        stride = num_tokens.to(tl.int64) * out_features
        acc, done = add_parts(acc, partial_ptr, arrived, offset, stride, mask, split, SPLITS)
    if done:
        if GLOBAL:
            acc *= tl.load(extra_ptr + row, mask=is_row, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


def w4_linear(
    x: torch.Tensor,  # [n, in], or the source of `perm`
    packed: torch.Tensor,  # from `prepare_w4`
    scales: torch.Tensor,  # [out, in / group_size]
    zeros: torch.Tensor | None,  # [out, in / group_size] uint8
    group_size: int,
    bias: torch.Tensor | None,
    bits: int = 4,
    perm: torch.Tensor | None = None,  # [in] int64
) -> torch.Tensor:
    """As the reference."""
    if packed.dtype != torch.int16:
        return plain.w4_linear(x, packed, scales, zeros, group_size, bias, bits, perm)
    x = x if perm is None else x[:, perm]
    return linear(x, Packed(packed, scales, zeros, group_size), bias)


def fp4_linear(
    x: torch.Tensor,  # [n, in]
    packed: torch.Tensor,  # from `prepare_fp4`
    scales: torch.Tensor,  # [out, in / group_size] uint8 (e8m0) or float8_e4m3fn
    global_scale: torch.Tensor | None,  # [out] float32
    group_size: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference."""
    if packed.dtype != torch.int16:
        return plain.fp4_linear(x, packed, scales, global_scale, group_size, bias)
    return linear(x, Packed(packed, scales, None, group_size, "fp4", global_scale), bias)


def table_linear(
    x: torch.Tensor,  # [n, in]
    packed: torch.Tensor,  # from `prepare_table`
    scales: torch.Tensor,  # [out, in / group_size]
    values: torch.Tensor,  # [16] float32
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference."""
    group_size = x.shape[1] // scales.shape[1]
    return linear(x, Packed(packed, scales, None, group_size, "table", values), bias)


def w8_linear(
    x: torch.Tensor,  # [n, in], or the source of `perm`
    packed: torch.Tensor,  # [out, in] uint8
    scales: torch.Tensor,  # [out, in / group_size]
    zeros: torch.Tensor | None,  # [out, in / group_size] uint8
    group_size: int,
    bias: torch.Tensor | None,
    perm: torch.Tensor | None = None,  # [in] int64
) -> torch.Tensor:
    """As the reference."""
    x = x if perm is None else x[:, perm]
    return linear(x, Packed(packed, scales, zeros, group_size, "w8"), bias)


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] times the weight: [n, out]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, in_features = x.shape
    out_features = len(weight.data)
    if num_tokens == 0:
        return x.new_empty((0, out_features))
    if num_tokens == 1 and weight.is_words and x.element_size() == 2:  # tensor cores lack float32
        return one_row(x, weight, bias)
    choose = w4_plan if weight.is_words else byte_plan
    plan = choose(num_tokens, out_features, in_features, x.element_size())
    if plan is not None:
        return run_tiles(x, weight, bias, plan)
    return multiply_slabs(
        x,
        lambda start, end: dequantize(weight.rows(start, end), in_features, x.dtype),
        bias,
        torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device),
    )


def run_tiles(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, plan: TilePlan
) -> torch.Tensor:
    """x [n, in] times the weight, on the tensor cores."""
    num_tokens, in_features = x.shape
    out_features = len(weight.data)
    grid = (triton.cdiv(num_tokens, plan.tokens), triton.cdiv(out_features, plan.rows), plan.splits)
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    _tile_kernel[grid](
        x, *weight.operands, out if bias is None else bias, out, *room_for_parts(out, grid),
        x.stride(0), num_tokens, in_features, out_features, *weight.sizes,
        BIAS=bias is not None, **weight.constants, ASM=x.is_cuda,
        EVEN=weight.is_even(in_features), SPLITS=plan.splits, ROWS=plan.rows, TOKENS=plan.tokens,
        num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
    )  # fmt: skip
    return out


def dequantize(weight: Packed, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize to [out, in_features] in `dtype`."""
    out_features, size = weight.data.shape
    out = torch.empty((out_features, in_features), dtype=dtype, device=weight.data.device)
    kernel = dequantize_words_kernel if weight.is_words else dequantize_bytes_kernel
    at_once = min(triton.next_power_of_2(size), 1024)
    kernel[(out_features, triton.cdiv(size, at_once))](
        *weight.operands, out, in_features, size, weight.num_groups, weight.group_width,
        **weight.constants, WIDTH=at_once, num_warps=4,
    )  # fmt: skip
    return out
