"""Converts words of four 4-bit numbers, in the layout of `packed_layout.py`, to floats.

An integer becomes a float without a conversion: in the mantissa of a power of two, it is added to
that power. The power is subtracted later, together with the zero point. e2m1 bits, shifted into
place, are those of a larger type except for the exponent bias.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _program(steps: list[str]) -> str:
    """PTX for two words in $4. It gives a pair of floats of each plane in $0 to $3."""
    return "{\n.reg .b32 s, t, c, n;\n" + "".join(steps) + "}"


def _shift(name: str, by: int) -> str:
    """PTX that shifts $4 into `name`, to the left, or to the right if `by` is negative."""
    return f"{'shl' if by > 0 else 'shr'}.b32 {name}, $4, {abs(by)};\n"


def _integers(magic: int, last: str) -> str:
    """`last` processes t, the numbers of a plane in the mantissa of `magic`."""
    return _program(
        [
            _shift("t", -4 * plane)
            + f"lop3.b32 t, t, 0x000F000F, {magic:#x}, 0xEA;\n"  # (t & ...) | magic
            + last.format(out=f"${plane}", less=f"${5 + plane}")
            for plane in range(4)
        ]
    )


def _floats(kind: str, exponent_at: int, factor: int) -> str:
    """The three bits below the sign go to `exponent_at`. `factor` corrects the bias."""
    mask = 7 << exponent_at
    return _program(
        [f"mov.b32 c, {factor:#x};\nmov.b32 n, 0x80008000;\n"]
        + [
            _shift("s", 12 - 4 * plane)
            + _shift("t", exponent_at - 4 * plane)
            + "and.b32 s, s, n;\n"
            + f"lop3.b32 t, t, {mask | mask << 16:#x}, s, 0xEA;\n"
            + f"fma.rn.{kind} ${plane}, t, c, n;\n"
            for plane in range(4)
        ]
    )


# In bfloat16 the result is 128 + number, in float16 1024 + number.
PLAIN_BF16 = tl.constexpr(_integers(0x43004300, "mov.b32 {out}, t;\n"))
PLAIN_FP16 = tl.constexpr(_integers(0x64006400, "mov.b32 c, 0x64006400;\nsub.f16x2 {out}, t, c;\n"))
LESS_BF16 = tl.constexpr(
    _integers(0x43004300, "mov.b32 c, 0x3F803F80;\nfma.rn.bf16x2 {out}, t, c, {less};\n")
)
LESS_FP16 = tl.constexpr(_integers(0x64006400, "add.f16x2 {out}, t, {less};\n"))
FLOATS_BF16 = tl.constexpr(_floats("bf16x2", 6, 0x7E807E80))  # 2^126
FLOATS_FP16 = tl.constexpr(_floats("f16x2", 9, 0x74007400))  # 2^14
LESS_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")
PLAIN_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r")


@triton.jit
def base_of(dtype: tl.constexpr):
    """The excess of integers if nothing is subtracted."""
    return 128.0 if dtype == tl.bfloat16 else 0.0


@triton.jit
def _less_of(zero, dtype: tl.constexpr):
    """The correction of numbers in a mantissa, to be added in float32."""
    base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0
    return -base - zero


@triton.jit
def plane_of(words, plane: tl.constexpr, FP4: tl.constexpr):
    """The numbers of a plane in float32."""
    number = (words.to(tl.int32) >> (4 * plane)) & 15
    if FP4:
        bits = ((number & 8) << 28) | ((number & 7) << 22)
        result = bits.to(tl.float32, bitcast=True) * (2.0**126)
    else:
        result = number.to(tl.float32)
    return result


@triton.jit
def _slow_plane(words, less, plane: tl.constexpr, dtype: tl.constexpr, FP4: tl.constexpr):
    result = plane_of(words, plane, FP4)
    if not FP4:
        if less is None:
            result += base_of(dtype)
        else:
            result += less[plane].to(tl.float32) - _less_of(0.0, dtype)
    return result.to(dtype)


@triton.jit
def _run(program: tl.constexpr, registers: tl.constexpr, arguments, dtype: tl.constexpr):
    """Run a PTX program, which gives four planes."""
    kind = dtype.value  # the type itself, not a constexpr of it
    return tl.inline_asm_elementwise(
        program, registers, arguments, dtype=(kind, kind, kind, kind), is_pure=True, pack=2
    )


@triton.jit
def unpack(words, less, dtype: tl.constexpr, FP4: tl.constexpr, ASM: tl.constexpr):
    """The four planes of words [..., 32], each of that shape, in `dtype`.

    `less` corrects integers: four tensors like the result, one per plane, from `_less_of`. If it is
    None, integers exceed their value by `base_of`.
    """
    if ASM and dtype != tl.float32:
        is_bf16: tl.constexpr = dtype == tl.bfloat16
        if FP4:
            planes = _run(FLOATS_BF16 if is_bf16 else FLOATS_FP16, PLAIN_REGISTERS, [words], dtype)
        elif less is None:
            planes = _run(PLAIN_BF16 if is_bf16 else PLAIN_FP16, PLAIN_REGISTERS, [words], dtype)
        else:
            planes = _run(
                LESS_BF16 if is_bf16 else LESS_FP16, LESS_REGISTERS,
                [words, less[0], less[1], less[2], less[3]], dtype,
            )  # fmt: skip
    else:
        planes = (
            _slow_plane(words, less, 0, dtype, FP4),
            _slow_plane(words, less, 1, dtype, FP4),
            _slow_plane(words, less, 2, dtype, FP4),
            _slow_plane(words, less, 3, dtype, FP4),
        )
    return planes


@triton.jit
def _load_planes(
    at,  # [32, TOKENS] pointers to the first plane's columns of x
    is_token, columns_left, EVEN: tl.constexpr,
):  # fmt: skip
    """A chunk's columns of x, by plane."""
    mask = is_token[None, :]
    left = columns_left - tl.arange(0, 32)[:, None]
    return (
        tl.load(at, mask=mask if EVEN else mask & (left > 0), other=0.0),
        tl.load(at + 32, mask=mask if EVEN else mask & (left > 32), other=0.0),
        tl.load(at + 64, mask=mask if EVEN else mask & (left > 64), other=0.0),
        tl.load(at + 96, mask=mask if EVEN else mask & (left > 96), other=0.0),
    )


@triton.jit
def group_of(chunk, part, chunks_each, num_groups, PARTS: tl.constexpr):
    """The quantization group of a chunk's part.

    Padding gets the last one, and is multiplied by zeros.
    """
    group = chunk // chunks_each if PARTS == 1 else chunk * PARTS + part
    return tl.minimum(group, num_groups - 1)


@triton.jit
def load_groups(at, chunk, chunks_each, num_groups, PARTS: tl.constexpr):
    """The scales or zeros of each part of a chunk, as a tuple."""
    groups = ()
    for part in tl.static_range(PARTS):
        own = tl.load(at + group_of(chunk, part, chunks_each, num_groups, PARTS))
        groups += (own,)  # type: ignore[assignment]
    return groups


@triton.jit
def scale_to_float(scale):
    """A scale as float. Bytes are exponents of two with bias 127."""
    if scale.dtype == tl.uint8:
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = scale.to(tl.float32)
    return result


@triton.jit
def _less(
    words, zeros, half, plane: tl.constexpr,
    dtype: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The `less` of one plane for `unpack`."""
    if ZEROS:
        zero = tl.expand_dims(zeros[plane * PARTS // 4], -1)
        if PARTS == 8:
            zero = tl.where(half == 0, zero, tl.expand_dims(zeros[plane * 2 + 1], -1))
        less = tl.broadcast_to(_less_of(zero.to(tl.float32), dtype).to(dtype), words.shape)
    else:
        less = tl.full(words.shape, _less_of(8.0, dtype), dtype)
    return less


@triton.jit
def _multiply_chunk(
    acc,  # [ROWS, TOKENS] float32
    words,  # [ROWS, 32] int16
    xs,  # four of [32, TOKENS]: the rows of x, by plane
    scales,  # PARTS of [ROWS]
    zeros,  # as scales, if ZEROS
    half,  # [32]: the half of a plane that a word is in, 0 or 1
    FP4: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc + words x, plane by plane on the tensor cores.

    Each quantization group's sum is scaled.
    """
    dtype: tl.constexpr = xs[0].dtype
    less = None
    if not FP4:
        less = (
            _less(words, zeros, half, 0, dtype, ZEROS, PARTS),
            _less(words, zeros, half, 1, dtype, ZEROS, PARTS),
            _less(words, zeros, half, 2, dtype, ZEROS, PARTS),
            _less(words, zeros, half, 3, dtype, ZEROS, PARTS),
        )
    planes = unpack(words, less, dtype, FP4, ASM)
    for part in tl.static_range(PARTS):
        total = tl.zeros(acc.shape, tl.float32)
        if PARTS == 8:  # half a plane: the other columns of x are zero
            x = tl.where((half == part % 2)[:, None], xs[part // 2], 0.0)
            total = tl.dot(planes[part // 2], x.to(dtype), total, input_precision="ieee")
        else:
            for index in tl.static_range(4 // PARTS):
                total = tl.dot(
                    planes[part * (4 // PARTS) + index], xs[part * (4 // PARTS) + index], total,
                    input_precision="ieee",
                )  # fmt: skip
        acc += total * tl.expand_dims(scale_to_float(scales[part]), -1)
    return acc


@triton.jit
def multiply_words(
    acc,  # [ROWS, TOKENS] float32
    weight_ptr, scale_ptr, zero_ptr,
    x_at,  # [TOKENS] pointers to x at the first column
    row,  # [ROWS] int64, rows of the weight
    is_token,  # [TOKENS]
    low, high, in_features, num_chunks, num_groups, chunks_each,
    FP4: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """acc + rows of the weight times x, over chunks [low, high)."""
    word = tl.arange(0, 32)
    source = weight_ptr + row[:, None] * (num_chunks * 32) + word[None, :]
    plane_at = x_at[None, :] + word[:, None]
    scale_at, zero_at = scale_ptr + row * num_groups, zero_ptr + row * num_groups
    for chunk in range(low, high):
        words = tl.load(source + chunk * 32)
        xs = _load_planes(plane_at + chunk * 128, is_token, in_features - chunk * 128, EVEN)
        scales = load_groups(scale_at, chunk, chunks_each, num_groups, PARTS)
        zeros = load_groups(zero_at, chunk, chunks_each, num_groups, PARTS) if ZEROS else scales
        acc = _multiply_chunk(acc, words, xs, scales, zeros, word // 16, FP4, ZEROS, PARTS, ASM)
    return acc


@triton.jit
def dequantize_words_kernel(
    weight_ptr, scale_ptr, zero_ptr, global_ptr, out_ptr,
    in_features, num_words, num_groups, chunks_each,
    KIND: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Dequantize words of one row to floats [in_features]."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
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
        number = plane_of(words, plane, KIND == "fp4")
        if ZEROS:
            number -= tl.load(zero_ptr + group).to(tl.float32)
        elif KIND == "w4":
            number -= 8.0
        value = number * (scale_to_float(tl.load(scale_ptr + group)) * factor)
        column = chunk * 128 + plane * 32 + word % 32
        mask = is_word & (column < in_features)
        target = out_ptr + row * in_features + column
        tl.store(target, value.to(out_ptr.dtype.element_ty), mask=mask)
