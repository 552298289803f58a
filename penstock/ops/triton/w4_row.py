"""One row of x with weights of 4 bits, where memory is what is waited for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.triton.tuning import RowTile
from penstock.ops.triton.tuning_quantized import w4_row_tile
from penstock.ops.triton.w4_layout import CHUNK, Packed

# A word's numbers less 8 times four pairs of x: two at a time in fp16, whose sum is a float32.
# Those in bits 4 to 7 are 16 times as large beside their power of two, 1024.
_MULTIPLY = """{
.reg .b32 high, t, sum, eight, sixteenth, less;
.reg .b16 a, b;
.reg .f32 fa, fb;
mov.b32 eight, 0x64086408;
mov.b32 sixteenth, 0x2C002C00;
mov.b32 less, 0xD480D480;
shr.u32 high, $1, 8;
lop3.b32 t, $1, 0x000F000F, 0x64006400, 0xEA;
sub.f16x2 t, t, eight;
mul.f16x2 sum, t, $2;
lop3.b32 t, $1, 0x00F000F0, 0x64006400, 0xEA;
fma.rn.f16x2 t, t, sixteenth, less;
fma.rn.f16x2 sum, t, $3, sum;
lop3.b32 t, high, 0x000F000F, 0x64006400, 0xEA;
sub.f16x2 t, t, eight;
fma.rn.f16x2 sum, t, $4, sum;
lop3.b32 t, high, 0x00F000F0, 0x64006400, 0xEA;
fma.rn.f16x2 t, t, sixteenth, less;
fma.rn.f16x2 sum, t, $5, sum;
mov.b32 {a, b}, sum;
cvt.f32.f16 fa, a;
cvt.f32.f16 fb, b;
add.f32 $0, fa, fb;
}"""
MULTIPLY = tl.constexpr(_MULTIPLY)


@triton.jit
def _scaled_pair(low, high, factor):
    """Two tensors times factor, as fp16 side by side in an int32."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low * factor, high * factor],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _load_plane(x_ptr, at, in_features, PLANE: tl.constexpr, EVEN: tl.constexpr):
    at += PLANE * 16
    if EVEN:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < in_features, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _one_row_in_halves_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    in_features, out_features, num_words, num_groups, chunks_each,
    BIAS: tl.constexpr, ZEROS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """As `_one_row_kernel`, for scales of whole chunks and x in 16 bits.

    The eight numbers of a word are multiplied in fp16, with their eight of x divided by a power of
    two near the largest that four words have, so that nothing overflows; their sum continues in
    float32. What four words have is one thread's.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < out_features
    own_row = tl.where(is_row, row, 0).to(tl.int64)
    word, chunk = tl.arange(0, 16), tl.arange(0, CHUNKS)
    within = chunk[:, None] * 16 + word[None, :]  # [CHUNKS, 16] words
    source = weight_ptr + own_row[:, None, None] * num_words + within[None, :, :]
    scale_at = own_row[:, None] * num_groups
    x_at = chunk[:, None] * 128 + word[None, :]
    acc = tl.zeros([ROWS, CHUNKS, 4], tl.float32)
    if AHEAD:
        upcoming = _load_words(source, 0, chunk, num_words, EVEN)
    for first in range(0, num_words // 16, CHUNKS):
        if AHEAD:  # the next ones are on their way while these are multiplied
            words = upcoming
            upcoming = _load_words(source, first + CHUNKS, chunk, num_words, False)
        else:
            words = _load_words(source, first, chunk, num_words, EVEN)
        group = tl.minimum((first + chunk) // chunks_each, num_groups - 1)
        scale = tl.load(scale_ptr + scale_at + group[None, :]).to(tl.float32)
        at = first * 128 + x_at
        x0 = _load_plane(x_ptr, at, in_features, 0, EVEN)
        x1 = _load_plane(x_ptr, at, in_features, 1, EVEN)
        x2 = _load_plane(x_ptr, at, in_features, 2, EVEN)
        x3 = _load_plane(x_ptr, at, in_features, 3, EVEN)
        x4 = _load_plane(x_ptr, at, in_features, 4, EVEN)
        x5 = _load_plane(x_ptr, at, in_features, 5, EVEN)
        x6 = _load_plane(x_ptr, at, in_features, 6, EVEN)
        x7 = _load_plane(x_ptr, at, in_features, 7, EVEN)
        largest = tl.maximum(
            tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))),
            tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7))),
        )
        largest = tl.max(largest.reshape(CHUNKS, 4, 4), axis=2)
        power = largest.to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
        inverse = inverse[:, :, None].broadcast_to(CHUNKS, 4, 4).reshape(CHUNKS, 16)
        total = tl.inline_asm_elementwise(
            MULTIPLY, "=f,r,r,r,r,r",
            [
                words,
                _scaled_pair(x0, x4, inverse)[None, :, :],
                _scaled_pair(x1, x5, inverse)[None, :, :],
                _scaled_pair(x2, x6, inverse)[None, :, :],
                _scaled_pair(x3, x7, inverse)[None, :, :],
            ],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        total = tl.sum(total.reshape(ROWS, CHUNKS, 4, 4), axis=3)
        total *= power.to(tl.float32, bitcast=True)[None, :, :]
        if ZEROS:
            zero = tl.load(zero_ptr + scale_at + group[None, :]).to(tl.float32)
            x_total = (x0 + x1) + (x2 + x3) + ((x4 + x5) + (x6 + x7))
            x_total = tl.sum(x_total.reshape(CHUNKS, 4, 4), axis=2)
            total += (8.0 - zero)[:, :, None] * x_total[None, :, :]
        acc += total * scale[:, :, None]
    out = tl.sum(acc.reshape(ROWS, CHUNKS * 4), axis=1)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _load_words(source, first, chunk, num_words, EVEN: tl.constexpr):
    if EVEN:
        words = tl.load(source + first * 16, eviction_policy="evict_first")
    else:
        mask = (first + chunk < num_words // 16)[None, :, None]
        words = tl.load(source + first * 16, mask=mask, other=0, eviction_policy="evict_first")
    return words


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    in_features, out_features, num_words, num_groups, chunks_each,
    BIAS: tl.constexpr, ZEROS: tl.constexpr, PLANES: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight with x. A scale is that of PLANES planes, or of whole chunks.

    Four bits in a mantissa of float32 cost one instruction, and the product another: the power of
    two that they come with, and their zero, are taken off the sum of products, by the sum of x.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < out_features
    own_row = tl.where(is_row, row, 0).to(tl.int64)
    word, chunk = tl.arange(0, 16), tl.arange(0, CHUNKS)
    within = chunk[:, None] * 16 + word[None, :]  # [CHUNKS, 16] words
    source = weight_ptr + own_row[:, None, None] * num_words + within[None, :, :]
    scale_at = own_row[:, None] * num_groups
    x_at = chunk[:, None] * 128 + word[None, :]
    acc = tl.zeros([ROWS, CHUNKS, 16], tl.float32)
    for first in range(0, num_words // 16, CHUNKS):
        if EVEN:
            words = tl.load(source + first * 16, eviction_policy="evict_first")
        else:
            mask = (first + chunk < num_words // 16)[None, :, None]
            words = tl.load(source + first * 16, mask=mask, other=0, eviction_policy="evict_first")
        for part in tl.static_range(8 // PLANES):
            taken = tl.zeros([CHUNKS, 16], tl.float32)
            x_total = tl.zeros([CHUNKS, 16], tl.float32)
            total = tl.zeros([ROWS, CHUNKS, 16], tl.float32)
            for index in tl.static_range(PLANES):
                at = first * 128 + x_at + (part * PLANES + index) * 16
                if EVEN:
                    x = tl.load(x_ptr + at).to(tl.float32)
                else:
                    x = tl.load(x_ptr + at, mask=at < in_features, other=0.0).to(tl.float32)
                if part * PLANES + index < 3:
                    total, taken = _add_plane(total, taken, words << 11, x, part * PLANES + index)
                elif part * PLANES + index < 6:
                    total, taken = _add_plane(
                        total, taken, words >> 1, x, part * PLANES + index - 3
                    )
                else:
                    total, taken = _add_plane(
                        total, taken, words >> 9, x, part * PLANES + index - 5
                    )
                x_total += x
            group = first + chunk
            if PLANES == 8:
                group = group // chunks_each
            else:
                group = group * (8 // PLANES) + part
            group = tl.minimum(group, num_groups - 1)  # what is padding is multiplied with zeros
            scale = tl.load(scale_ptr + scale_at + group[None, :]).to(tl.float32)
            if ZEROS:
                zero = tl.load(zero_ptr + scale_at + group[None, :]).to(tl.float32)
                total -= zero[:, :, None] * x_total[None, :, :]
                total -= taken[None, :, :]
            else:
                total -= (taken + 8.0 * x_total)[None, :, :]
            acc += total * scale[:, :, None]
    out = tl.sum(tl.sum(acc, axis=2), axis=1)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _add_plane(total, taken, words, x, PLACE: tl.constexpr):
    """total + a plane's numbers times x, and what that is too much; PLACE 2 is the mantissa's top.

    Read as a float, 1 with a number in bits 11, 15 or 19 is 1 + number / 4096, / 256 or / 16.
    """
    bits = (words & (15 << (11 + 4 * PLACE))) | 0x3F800000
    weighted = x * (1 << (12 - 4 * PLACE))
    total += bits.to(tl.float32, bitcast=True) * weighted[None, :, :]
    return total, taken + weighted


def one_row(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    tile: RowTile | None = None,
    ahead: bool = False,  # whether weights are loaded while others are multiplied
) -> torch.Tensor:
    """x [1, in] with all of the weight, in floats."""
    out_features, num_words = weight.words.shape
    if tile is None:
        tile, ahead = w4_row_tile(out_features, x.shape[1])
    out = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(out_features, tile.rows),)
    operands = (
        x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        out if bias is None else bias, out,
        x.shape[1], out_features, num_words, weight.num_groups, weight.chunks_each,
    )  # fmt: skip
    settings = {
        "BIAS": bias is not None, "ZEROS": weight.zeros is not None,
        "EVEN": x.shape[1] % (CHUNK * tile.columns) == 0, "ROWS": tile.rows,
        "CHUNKS": tile.columns, **tile.launch._asdict(),
    }  # fmt: skip
    if weight.planes == 8 and x.is_cuda and x.element_size() == 2:
        _one_row_in_halves_kernel[grid](*operands, AHEAD=ahead, **settings)
    else:
        _one_row_kernel[grid](*operands, PLANES=weight.planes, **settings)
    return out
