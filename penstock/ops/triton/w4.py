"""Products with weights of 4 bits, laid out by `w4_layout.py`, which become floats in registers.

A number becomes a float without a conversion: put into the mantissa of a power of two, it is added
to that power.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops import quantized as plain
from penstock.ops import reference
from penstock.ops.triton.splitting import add_parts
from penstock.ops.triton.tuning_quantized import W4Plan, w4_plan
from penstock.ops.triton.w4_layout import CHUNK, Packed
from penstock.ops.triton.w4_row import one_row

SLAB = 1 << 27  # numbers that become floats at one time, for cuBLAS

# Two words to eight pairs of floats, each pair less `zero`: the numbers of a plane stand 16 bits
# apart once the words' halves are brought together.
_UNPACK = """{
.reg .b32 low, high, t;
prmt.b32 low, $8, $9, 0x5410;
prmt.b32 high, $8, $9, 0x7632;
""" + "".join(
    f"shr.b32 t, {half}, {4 * (plane % 4)};\n"
    f"lop3.b32 t, t, 0x000F000F, MAGIC, 0xEA;\n"
    f"sub.TYPE ${plane}, t, $10;\n"
    for plane, half in enumerate(["low"] * 4 + ["high"] * 4)
) + "}"  # fmt: skip
UNPACK_BF16 = tl.constexpr(_UNPACK.replace("MAGIC", "0x43004300").replace("TYPE", "bf16x2"))
UNPACK_FP16 = tl.constexpr(_UNPACK.replace("MAGIC", "0x64006400").replace("TYPE", "f16x2"))
UNPACK_REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r")


@triton.jit
def _plane(words, zero, plane: tl.constexpr, dtype: tl.constexpr, FP4: tl.constexpr):
    """A plane's numbers less their zero; `zero` has the power of two added that they come with.

    e2m1 has the bits of a larger type, but for the bias of its exponent, once they stand right.
    """
    number = (words >> (4 * plane)) & 15
    sign, rest = number & 8, number & 7
    if dtype == tl.bfloat16:
        if FP4:
            bits = ((sign << 12) | (rest << 6)).to(tl.int16)
            result = bits.to(tl.bfloat16, bitcast=True) * tl.full([], 2.0**126, tl.bfloat16)
        else:
            result = (number | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - zero
    elif dtype == tl.float16:
        if FP4:
            bits = ((sign << 12) | (rest << 9)).to(tl.int16)
            result = bits.to(tl.float16, bitcast=True) * tl.full([], 2.0**14, tl.float16)
        else:
            result = (number | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - zero
    else:
        if FP4:
            result = ((sign << 28) | (rest << 22)).to(tl.float32, bitcast=True) * (2.0**126)
        else:
            result = number.to(tl.float32) - zero
    return result


@triton.jit
def _base(dtype: tl.constexpr):
    return 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0


@triton.jit
def unpack(words, zero, dtype: tl.constexpr, FP4: tl.constexpr, ASM: tl.constexpr):
    """All eight planes of words [A, B], each [A, B]; zero [A, B] as `_plane` wants it."""
    if ASM and not FP4 and dtype == tl.bfloat16:
        planes = tl.inline_asm_elementwise(
            UNPACK_BF16, UNPACK_REGISTERS, [words, zero],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM and not FP4 and dtype == tl.float16:
        planes = tl.inline_asm_elementwise(
            UNPACK_FP16, UNPACK_REGISTERS, [words, zero],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                   tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        planes = (
            _plane(words, zero, 0, dtype, FP4), _plane(words, zero, 1, dtype, FP4),
            _plane(words, zero, 2, dtype, FP4), _plane(words, zero, 3, dtype, FP4),
            _plane(words, zero, 4, dtype, FP4), _plane(words, zero, 5, dtype, FP4),
            _plane(words, zero, 6, dtype, FP4), _plane(words, zero, 7, dtype, FP4),
        )  # fmt: skip
    return planes


@triton.jit
def _load_scale(at):
    """As float32; bytes are exponents of two, biased by 127."""
    scale = tl.load(at)
    if at.dtype.element_ty == tl.uint8:
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = scale.to(tl.float32)
    return result


@triton.jit
def multiply_chunk(
    acc,  # [ROWS, TOKENS] float32
    words,  # [ROWS, 16] int32, of one chunk
    x_at,  # [16, TOKENS] pointers to x, of the chunk's first plane
    is_token,  # [TOKENS]
    scale_ptr, zero_ptr,  # [ROWS] pointers to each row's first group
    chunk, chunks_each, num_groups, in_features,
    FP4: tl.constexpr, ZEROS: tl.constexpr, PLANES: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """acc + words x: plane by plane on the tensor cores, each group's sum scaled by itself."""
    dtype: tl.constexpr = x_at.dtype.element_ty
    base = _base(dtype)
    if ZEROS and PLANES < 8:  # each part has zeros of its own
        zero = tl.full(words.shape, base, tl.float32).to(dtype)
    elif ZEROS:
        zero = tl.load(zero_ptr + tl.minimum(chunk // chunks_each, num_groups - 1))
        zero = (tl.zeros(words.shape, tl.float32) + zero.to(tl.float32)[:, None] + base).to(dtype)
    else:
        zero = tl.full(words.shape, base + 8.0, tl.float32).to(dtype)
    planes = unpack(words, zero, dtype, FP4, ASM)
    for part in tl.static_range(8 // PLANES):
        group = chunk // chunks_each if PLANES == 8 else chunk * (8 // PLANES) + part
        group = tl.minimum(group, num_groups - 1)  # what is padding is multiplied with zeros
        total = tl.zeros(acc.shape, tl.float32)
        if ZEROS and PLANES < 8:
            own = tl.load(zero_ptr + group).to(dtype)
        for index in tl.static_range(PLANES):
            plane = planes[part * PLANES + index]
            if ZEROS and PLANES < 8:
                plane = plane - own[:, None]
            if EVEN:
                x = tl.load(x_at + (part * PLANES + index) * 16, mask=is_token[None, :], other=0.0)
            else:
                at = chunk * 128 + (part * PLANES + index) * 16 + tl.arange(0, 16)
                mask = is_token[None, :] & (at < in_features)[:, None]
                x = tl.load(x_at + (part * PLANES + index) * 16, mask=mask, other=0.0)
            total = tl.dot(plane, x, total, input_precision="ieee")
        acc += total * _load_scale(scale_ptr + group)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    x_stride, num_tokens, in_features, out_features, num_words, num_groups, chunks_each,
    BIAS: tl.constexpr, FP4: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr,
    PLANES: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight with TOKENS rows of x, over one part of the columns."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    is_token, is_row = token < num_tokens, row < out_features
    num_chunks = num_words // 16
    each = tl.cdiv(num_chunks, SPLITS)
    low = split * each
    high = tl.minimum(low + each, num_chunks)
    word = tl.arange(0, 16)
    # A row that is not there is read as the first: what comes of it is not stored.
    own_row = tl.where(is_row, row, 0).to(tl.int64)
    source = weight_ptr + own_row[:, None] * num_words + word[None, :]
    x_at = x_ptr + token.to(tl.int64)[None, :] * x_stride + word[:, None]
    scales, zeros = scale_ptr + own_row * num_groups, zero_ptr + own_row * num_groups
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for chunk in range(low, high):
        words = tl.load(source + chunk * 16)
        acc = multiply_chunk(
            acc, words, x_at + chunk * 128, is_token, scales, zeros, chunk, chunks_each,
            num_groups, in_features, FP4, ZEROS, PLANES, ASM, EVEN,
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
    FP4: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr, PLANES: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Words of one row as floats [in_features]."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_word = word < num_words
    words = tl.load(weight_ptr + row * num_words + word, mask=is_word, other=0)
    chunk = word // 16
    factor = 1.0
    if GLOBAL:
        factor = tl.load(global_ptr + row)
    for part in tl.static_range(8 // PLANES):
        group = chunk // chunks_each if PLANES == 8 else chunk * (8 // PLANES) + part
        group = tl.minimum(group, num_groups - 1)
        scale = _load_scale(scale_ptr + row * num_groups + group) * factor
        zero = tl.full([WORDS], 8.0, tl.float32)
        if ZEROS:
            zero = tl.load(zero_ptr + row * num_groups + group).to(tl.float32)
        for index in tl.static_range(PLANES):
            number = _plane(words, zero, part * PLANES + index, tl.float32, FP4)
            column = chunk * 128 + (part * PLANES + index) * 16 + word % 16
            value = (number * scale).to(out_ptr.dtype.element_ty)
            mask = is_word & (column < in_features)
            tl.store(out_ptr + row * in_features + column, value, mask=mask)


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
    if packed.dtype != torch.int32:
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
    if packed.dtype != torch.int32:
        return plain.fp4_linear(x, packed, scales, global_scale, group_size, bias)
    weight = Packed(packed, scales, None, group_size, True, global_scale)
    return _linear(x, weight, bias)


def _linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, in_features = x.shape
    out_features = len(weight.words)
    if num_tokens == 0:
        return x.new_empty((0, out_features))
    if num_tokens == 1 and not weight.is_fp4:
        return one_row(x, weight, bias)
    plan = w4_plan(num_tokens, out_features, in_features)
    if plan is not None:
        return run_tiles(x, weight, bias, plan)
    slab = max(SLAB // in_features, 1)
    if slab >= out_features:
        return reference.linear(x, dequantize(weight, in_features, x.dtype), bias)
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    for start in range(0, out_features, slab):
        end = min(start + slab, out_features)
        floats = dequantize(weight.rows(start, end), in_features, x.dtype)
        out[:, start:end] = reference.linear(x, floats, None if bias is None else bias[start:end])
    return out


def run_tiles(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    plan: W4Plan,
    asm: bool | None = None,  # None: where there is a GPU
) -> torch.Tensor:
    """x [n, in] with all of the weight, on the tensor cores."""
    num_tokens, in_features = x.shape
    out_features, num_words = weight.words.shape
    grid = (triton.cdiv(num_tokens, plan.tokens), triton.cdiv(out_features, plan.rows), plan.splits)
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    partial = arrived = out
    if plan.splits > 1:
        shape = (plan.splits, num_tokens, out_features)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=x.device)
    _tile_kernel[grid](
        x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        out if weight.global_scale is None else weight.global_scale,
        out if bias is None else bias, out, partial, arrived,
        x.stride(0), num_tokens, in_features, out_features, num_words,
        weight.num_groups, weight.chunks_each,
        BIAS=bias is not None, **weight.constants, ASM=x.is_cuda if asm is None else asm,
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
        weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        out if weight.global_scale is None else weight.global_scale, out,
        in_features, num_words, weight.num_groups, weight.chunks_each,
        **weight.constants, WORDS=words, num_warps=4,
    )  # fmt: skip
    return out
