"""Products with weights of 4 bits: one row of x, tiles of rows, and many, for cuBLAS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops import quantized as plain
from penstock.ops.triton.slabs import multiply_slabs
from penstock.ops.triton.splitting import add_parts, room_for_parts
from penstock.ops.triton.tuning_quantized import TilePlan, w4_plan
from penstock.ops.triton.w4_layout import CHUNK, WORDS, Packed
from penstock.ops.triton.w4_row import one_row
from penstock.ops.triton.w4_unpack import group_of, multiply_chunks, plane_of, scale_to_float


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    x_stride, num_tokens, in_features, out_features, num_chunks, num_groups, chunks_each,
    BIAS: tl.constexpr, FP4: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight with TOKENS rows of x, over one part of the columns."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    is_token, is_row = token < num_tokens, row < out_features
    each = tl.cdiv(num_chunks, SPLITS)
    low = split * each
    high = tl.minimum(low + each, num_chunks)
    # A row that is not there is read as the first: what comes of it is not stored.
    own_row = tl.where(is_row, row, 0).to(tl.int64)
    acc = multiply_chunks(
        tl.zeros([ROWS, TOKENS], tl.float32),
        weight_ptr, scale_ptr, zero_ptr, x_ptr + token.to(tl.int64) * x_stride,
        own_row, is_token, low, high, in_features, num_chunks, num_groups, chunks_each,
        FP4, ZEROS, PARTS, ASM, EVEN,
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
            acc *= tl.load(global_ptr + row, mask=is_row, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, zero_ptr, global_ptr, out_ptr,
    in_features, num_words, num_groups, chunks_each,
    FP4: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Words of one row as floats [in_features]."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_word = word < num_words
    words = tl.load(weight_ptr + row * num_words + word, mask=is_word, other=0)
    chunk = word // 32
    factor = 1.0
    if GLOBAL:
        factor = tl.load(global_ptr + row)
    for plane in tl.static_range(4):
        part = plane * PARTS // 4
        if PARTS == 8:
            part += word % 32 // 16
        group = row * num_groups + group_of(chunk, part, chunks_each, num_groups, PARTS)
        number = plane_of(words, plane, FP4)
        if ZEROS:
            number -= tl.load(zero_ptr + group).to(tl.float32)
        elif not FP4:
            number -= 8.0
        value = number * (scale_to_float(tl.load(scale_ptr + group)) * factor)
        column = chunk * 128 + plane * 32 + word % 32
        mask = is_word & (column < in_features)
        target = out_ptr + row * in_features + column
        tl.store(target, value.to(out_ptr.dtype.element_ty), mask=mask)


def w4_linear(
    x: torch.Tensor,  # [n, in], or what `perm` takes its columns from
    packed: torch.Tensor,  # as `prepare_w4` gives it
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
    return _linear(x, Packed(packed, scales, zeros, group_size), bias)


def fp4_linear(
    x: torch.Tensor,  # [n, in]
    packed: torch.Tensor,  # as `prepare_fp4` gives it
    scales: torch.Tensor,  # [out, in / group_size] uint8 (e8m0) or float8_e4m3fn
    global_scale: torch.Tensor | None,  # [out] float32
    group_size: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference."""
    if packed.dtype != torch.int16:
        return plain.fp4_linear(x, packed, scales, global_scale, group_size, bias)
    weight = Packed(packed, scales, None, group_size, True, global_scale)
    return _linear(x, weight, bias)


def _linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, in_features = x.shape
    out_features = len(weight.words)
    if num_tokens == 0:
        return x.new_empty((0, out_features))
    if num_tokens == 1 and x.element_size() == 2:  # tensor cores have no float32
        return one_row(x, weight, bias)
    plan = w4_plan(num_tokens, out_features, in_features, x.element_size())
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
    """x [n, in] with all of the weight, on the tensor cores."""
    num_tokens, in_features = x.shape
    out_features, num_words = weight.words.shape
    grid = (triton.cdiv(num_tokens, plan.tokens), triton.cdiv(out_features, plan.rows), plan.splits)
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    _tile_kernel[grid](
        x, *weight.operands(out), out if bias is None else bias, out, *room_for_parts(out, grid),
        x.stride(0), num_tokens, in_features, out_features, num_words // WORDS,
        weight.num_groups, weight.chunks_each,
        BIAS=bias is not None, **weight.constants, ASM=x.is_cuda,
        EVEN=in_features % CHUNK == 0, SPLITS=plan.splits, ROWS=plan.rows, TOKENS=plan.tokens,
        num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
    )  # fmt: skip
    return out


def dequantize(weight: Packed, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """[out, in_features] in `dtype`."""
    out_features, num_words = weight.words.shape
    out = torch.empty((out_features, in_features), dtype=dtype, device=weight.words.device)
    words = min(triton.next_power_of_2(num_words), 1024)
    _dequantize_kernel[(out_features, triton.cdiv(num_words, words))](
        *weight.operands(out), out, in_features, num_words, weight.num_groups, weight.chunks_each,
        **weight.constants, WORDS=words, num_warps=4,
    )  # fmt: skip
    return out
