"""Products with weights that become floats a byte at a time.

A byte is an 8-bit integer (`w8`), or two numbers of 4 bits that are places in a table
(`table`): then byte i of a chunk of 64 bytes holds columns i and 64 + i of 128, so that the
numbers in the same half of neighbouring bytes are neighbouring columns, and x is read as it lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from penstock.ops import quantized as plain
from penstock.ops.triton.slabs import multiply_slabs
from penstock.ops.triton.splitting import add_parts, room_for_parts
from penstock.ops.triton.tuning_quantized import TilePlan, byte_plan

BYTES = 64  # of a chunk
SLAB = 1 << 24  # numbers that are brought into this layout at one time


class ByteWeight(NamedTuple):
    """A matrix [out, in], or one for each expert [experts, out, in]."""

    data: torch.Tensor  # [..., out, bytes] uint8
    scales: torch.Tensor  # [..., out, num_groups] floats
    group_size: int
    zeros: torch.Tensor | None = None  # the same shape, uint8; None: 128
    values: torch.Tensor | None = None  # [16] float32: what numbers of 4 bits stand for

    @property
    def num_bytes(self) -> int:
        return self.data.shape[-1]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-1]

    @property
    def columns_each(self) -> int:
        """That share a scale; where all do, a number that chunks divide."""
        if self.num_groups == 1:
            return max(self.num_bytes * 2 // BYTES, 1) * BYTES
        return self.group_size

    def constants(self, in_features: int) -> dict[str, Any]:
        """What a kernel is compiled for."""
        is_table = self.values is not None
        return {
            "TABLE": is_table, "ZEROS": self.zeros is not None,
            "WHOLE": self.columns_each % BYTES == 0,
            "EVEN": in_features % (2 * BYTES if is_table else BYTES) == 0, "BYTES": BYTES,
        }  # fmt: skip

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        return (
            self.data,
            self.scales,
            self.data if self.zeros is None else self.zeros,
            self.data if self.values is None else self.values,
        )

    def rows(self, start: int, end: int) -> ByteWeight:
        zeros = None if self.zeros is None else self.zeros[start:end]
        return self._replace(data=self.data[start:end], scales=self.scales[start:end], zeros=zeros)


@triton.jit
def _multiply_chunk(
    acc,  # [ROWS, TOKENS] float32
    data,  # [ROWS, BYTES], of one chunk
    x_at,  # [BYTES, TOKENS] pointers to x, of the chunk's first column
    is_token,  # [TOKENS]
    scale_ptr, zero_ptr,  # [ROWS] pointers to each row's first group
    value_ptr, first, columns_each, num_groups, in_features,
    TABLE: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """acc + data x, on the tensor cores; `first` is the chunk's first column.

    WHOLE: a chunk's numbers have one scale, which then multiplies their sum.
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
def multiply_chunks(
    acc,  # [ROWS, TOKENS] float32
    weight_ptr, scale_ptr, zero_ptr, value_ptr,
    x_at,  # [TOKENS] pointers to x, of the first column
    row,  # [ROWS] int64, of the weight
    is_token,  # [TOKENS]
    low, high, in_features, num_bytes, num_groups, columns_each,
    TABLE: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """acc + rows of the weight with x, over chunks [low, high)."""
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
            columns_each, num_groups, in_features, TABLE, ZEROS, WHOLE, EVEN, BYTES,
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, value_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    x_stride, num_tokens, in_features, out_features, num_bytes, num_groups, columns_each,
    BIAS: tl.constexpr, TABLE: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, BYTES: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight with TOKENS rows of x, over one part of the columns."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    is_token, is_row = token < num_tokens, row < out_features
    num_chunks = tl.cdiv(num_bytes, BYTES)
    each = tl.cdiv(num_chunks, SPLITS)
    low = split * each
    high = tl.minimum(low + each, num_chunks)
    # A row that is not there is read as the first: what comes of it is not stored.
    own_row = tl.where(is_row, row, 0).to(tl.int64)
    acc = multiply_chunks(
        tl.zeros([ROWS, TOKENS], tl.float32),
        weight_ptr, scale_ptr, zero_ptr, value_ptr, x_ptr + token.to(tl.int64) * x_stride,
        own_row, is_token, low, high, in_features, num_bytes, num_groups, columns_each,
        TABLE, ZEROS, WHOLE, EVEN, BYTES,
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
        if BIAS:
            acc += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, zero_ptr, value_ptr, out_ptr, in_features, num_bytes, num_groups,
    columns_each, TABLE: tl.constexpr, ZEROS: tl.constexpr, BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """WIDTH bytes of one row as floats [in_features]."""
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


def prepare_table(
    packed: torch.Tensor,  # [..., in / 2] uint8, as the reference has them
) -> torch.Tensor:
    """The numbers in this module's layout: [..., ceil(in / 128) * 64] uint8."""
    rows = packed.reshape(-1, packed.shape[-1])
    in_features = 2 * packed.shape[-1]
    num_bytes = triton.cdiv(in_features, 2 * BYTES) * BYTES
    data = torch.empty((len(rows), num_bytes), dtype=torch.uint8, device=packed.device)
    step = max(SLAB // max(in_features, 1), 1)
    for start in range(0, len(rows), step):
        numbers = plain.unpack_nibbles(rows[start : start + step])
        padded = F.pad(numbers, (0, 2 * num_bytes - in_features))
        halves = padded.view(len(numbers), -1, 2, BYTES)
        data[start : start + step] = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
    return data.view(*packed.shape[:-1], num_bytes)


def table_linear(
    x: torch.Tensor,  # [n, in]
    packed: torch.Tensor,  # as `prepare_table` gives it
    scales: torch.Tensor,  # [out, in / group_size]
    values: torch.Tensor,  # [16] float32
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference."""
    group_size = x.shape[1] // scales.shape[1]
    return linear(x, ByteWeight(packed, scales, group_size, values=values), bias)


def w8_linear(
    x: torch.Tensor,  # [n, in], or what `perm` takes its columns from
    packed: torch.Tensor,  # [out, in] uint8
    scales: torch.Tensor,  # [out, in / group_size]
    zeros: torch.Tensor | None,  # [out, in / group_size] uint8
    group_size: int,
    bias: torch.Tensor | None,
    perm: torch.Tensor | None = None,  # [in] int64
) -> torch.Tensor:
    """As the reference."""
    x = x if perm is None else x[:, perm]
    return linear(x, ByteWeight(packed, scales, group_size, zeros), bias)


def linear(x: torch.Tensor, weight: ByteWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] with all of the weight: [n, out]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, in_features = x.shape
    out_features = len(weight.data)
    if num_tokens == 0:
        return x.new_empty((0, out_features))
    plan = byte_plan(num_tokens, out_features, in_features, x.element_size())
    if plan is not None:
        return run_tiles(x, weight, bias, plan)
    return multiply_slabs(
        x,
        lambda start, end: dequantize(weight.rows(start, end), in_features, x.dtype),
        bias,
        torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device),
    )


def run_tiles(
    x: torch.Tensor, weight: ByteWeight, bias: torch.Tensor | None, plan: TilePlan
) -> torch.Tensor:
    """x [n, in] with all of the weight, on the tensor cores."""
    num_tokens, in_features = x.shape
    out_features = len(weight.data)
    grid = (triton.cdiv(num_tokens, plan.tokens), triton.cdiv(out_features, plan.rows), plan.splits)
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    _tile_kernel[grid](
        x, *weight.operands, out if bias is None else bias, out, *room_for_parts(out, grid),
        x.stride(0), num_tokens, in_features, out_features, weight.num_bytes, weight.num_groups,
        weight.columns_each, BIAS=bias is not None, **weight.constants(in_features),
        SPLITS=plan.splits, ROWS=plan.rows, TOKENS=plan.tokens,
        num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
    )  # fmt: skip
    return out


def dequantize(weight: ByteWeight, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """[out, in_features] in `dtype`."""
    out_features, num_bytes = weight.data.shape
    out = torch.empty((out_features, in_features), dtype=dtype, device=weight.data.device)
    width = min(triton.next_power_of_2(num_bytes), 1024)
    _dequantize_kernel[(out_features, triton.cdiv(num_bytes, width))](
        *weight.operands, out, in_features, num_bytes, weight.num_groups,
        weight.columns_each, TABLE=weight.values is not None, ZEROS=weight.zeros is not None,
        BYTES=BYTES, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out
