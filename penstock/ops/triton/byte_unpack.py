"""Converts bytes in the layout of `packed_layout.py` to floats in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _multiply_chunk(
    acc,  # [ROWS, TOKENS] float32
    data,  # [ROWS, BYTES], one chunk
    x_at,  # [BYTES, TOKENS] pointers to x at the chunk's first column
    is_token,  # [TOKENS]
    scale_ptr, zero_ptr,  # [ROWS] pointers to each row's first quantization group
    value_ptr, first, columns_each, num_groups, in_features,
    TABLE: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    BYTES: tl.constexpr = 64,  # bytes of a chunk
):  # fmt: skip
    """acc + data x, on the tensor cores; `first` is the chunk's first column.

    WHOLE: a chunk has one scale, which then multiplies the sum.
    """
    dtype: tl.constexpr = x_at.dtype.element_ty
    for half in tl.static_range(2 if TABLE else 1):
        at = first + half * BYTES
        column = at + tl.arange(0, BYTES)
        mask = is_token[None, :] if EVEN else is_token[None, :] & (column < in_features)[:, None]
        x = tl.load(x_at + half * BYTES, mask=mask, other=0.0)
        if WHOLE:
            group = tl.minimum(at // columns_each, num_groups - 1)
            scale = tl.load(scale_ptr + group).to(tl.float32)[:, None]
            zeros = (zero_ptr + group)[:, None]
        else:
            group = tl.minimum(column // columns_each, num_groups - 1)
            scale = tl.load(scale_ptr[:, None] + group[None, :]).to(tl.float32)
            zeros = zero_ptr[:, None] + group[None, :]
        if TABLE:
            number = ((data >> (4 * half)) & 15).to(tl.int32)
            table = tl.load(value_ptr + tl.arange(0, 16)).to(dtype)
            weight = tl.gather(table, number.reshape(number.numel), 0).reshape(number.shape)
        elif ZEROS:
            weight = data.to(tl.float32) - tl.load(zeros).to(tl.float32)
        else:
            weight = data.to(tl.float32) - 128.0
        if WHOLE:
            part = tl.dot(weight.to(dtype), x, input_precision="ieee")
            acc += part * scale
        else:
            scaled = (weight.to(tl.float32) * scale).to(dtype)
            acc = tl.dot(scaled, x, acc, input_precision="ieee")
    return acc


@triton.jit
def multiply_bytes(
    acc,  # [ROWS, TOKENS] float32
    weight_ptr, scale_ptr, zero_ptr, value_ptr,
    x_at,  # [TOKENS] pointers to x at the first column
    row,  # [ROWS] int64, rows of the weight
    is_token,  # [TOKENS]
    low, high, in_features, num_bytes, num_groups, columns_each,
    TABLE: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    BYTES: tl.constexpr = 64,  # bytes of a chunk
):  # fmt: skip
    """acc + rows of the weight times x, over chunks [low, high)."""
    byte = tl.arange(0, BYTES)
    source = weight_ptr + row[:, None] * num_bytes + byte[None, :]
    column_at = x_at[None, :] + byte[:, None]
    scales, zeros = scale_ptr + row * num_groups, zero_ptr + row * num_groups
    width: tl.constexpr = 2 * BYTES if TABLE else BYTES
    for chunk in range(low, high):
        if EVEN or TABLE:
            data = tl.load(source + chunk * BYTES)
        else:
            data = tl.load(source + chunk * BYTES, (chunk * BYTES + byte < num_bytes)[None, :], 0)
        acc = _multiply_chunk(
            acc, data, column_at + chunk * width, is_token, scales, zeros, value_ptr, chunk * width,
            columns_each, num_groups, in_features, TABLE, ZEROS, WHOLE, EVEN,
        )  # fmt: skip
    return acc


@triton.jit
def dequantize_bytes_kernel(
    weight_ptr, scale_ptr, zero_ptr, value_ptr, out_ptr, in_features, num_bytes, num_groups,
    columns_each, KIND: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr = 64,
):  # fmt: skip
    """WIDTH bytes of one row as floats [in_features]. Same signature as the kernel for words."""
    TABLE: tl.constexpr = KIND == "table"
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_byte = byte < num_bytes
    data = tl.load(weight_ptr + row * num_bytes + byte, mask=is_byte, other=0)
    for half in tl.static_range(2 if TABLE else 1):
        column = byte
        if TABLE:
            column = byte // BYTES * (2 * BYTES) + half * BYTES + byte % BYTES
        group = tl.minimum(column // columns_each, num_groups - 1)
        scale = tl.load(scale_ptr + row * num_groups + group).to(tl.float32)
        if TABLE:
            number = tl.load(value_ptr + ((data >> (4 * half)) & 15).to(tl.int32)).to(tl.float32)
        elif ZEROS:
            zero = tl.load(zero_ptr + row * num_groups + group).to(tl.float32)
            number = data.to(tl.float32) - zero
        else:
            number = data.to(tl.float32) - 128.0
        value = (number * scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * in_features + column, value, is_byte & (column < in_features))
