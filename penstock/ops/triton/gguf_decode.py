"""GGUF blocks, laid out by `gguf_layout.py`, become floats in registers.

All kernels go through `load_words`, `number` and `load_scales`: what differs between types is how
many bits a number has, and how scales are stored. A number becomes a float without a conversion:
put into the mantissa of 1, it is a fraction beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_words(
    words_ptr, high_ptr, row, word, first_quad, num_quads,
    LOW: tl.constexpr, HIGH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Words [R, C] of rows [R, 1] from quad `first_quad` on, and their high bits, aligned to them.

    `word` [1, C] counts from 0. What lies past a row's end is 0. Without high bits, words again.
    """
    at = first_quad * 4 + word
    if EVEN:
        words = tl.load(words_ptr + row * (num_quads * 4) + at)
    else:
        is_word = at < num_quads * 4
        words = tl.load(words_ptr + row * (num_quads * 4) + at, mask=is_word, other=0)
    high = words
    if HIGH > 0:
        SHARED: tl.constexpr = LOW // HIGH  # quads of four words; first_quad is a multiple of it
        source = high_ptr + row * (tl.cdiv(num_quads, SHARED) * 4) + first_quad // SHARED * 4
        source += word // (4 * SHARED) * 4 + word % 4
        if EVEN:
            high = tl.load(source)
        else:
            high = tl.load(source, mask=is_word, other=0)
        high = high >> (word // 4 % SHARED * HIGH)
    return words, high


@triton.jit
def _shifted(bits, by: tl.constexpr):
    if by >= 0:
        result = bits << by
    else:
        result = bits >> (-by)
    return result


@triton.jit
def fraction(words, high, plane: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """1 + a plane's numbers / `unit(plane)`, float32.

    Fields of one byte are in the mantissa at one time: only the mask tells them apart.
    """
    BASE: tl.constexpr = 13 if HIGH > 0 else 15
    EACH: tl.constexpr = 8 // LOW
    SHIFT: tl.constexpr = BASE - plane // EACH * 8
    AT: tl.constexpr = BASE + plane % EACH * LOW
    bits = (_shifted(words, SHIFT) & (((1 << LOW) - 1) << AT)) | 0x3F800000
    if HIGH > 0:
        bits = bits | (_shifted(high, SHIFT + LOW) & (((1 << HIGH) - 1) << (AT + LOW)))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def unit(plane: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """What 1 is as a number in `fraction`."""
    BASE: tl.constexpr = 13 if HIGH > 0 else 15
    AT: tl.constexpr = BASE + plane % (8 // LOW) * LOW
    return tl.full([], 1 << (23 - AT), tl.float32)


@triton.jit
def look_up(words, plane: tl.constexpr, TABLE: tl.constexpr):
    """What a plane's numbers of 4 bits stand for, float32. TABLE has them as bytes of four int32.

    Not in memory: a load would spread words over threads in another way.
    """
    number = _shifted(words, -4 * plane) & 15
    low = tl.where(number < 4, TABLE[0], TABLE[1])
    high = tl.where(number < 12, TABLE[2], TABLE[3])
    packed = tl.where(number < 8, low, high)
    return _float((packed >> ((number & 3) * 8)) & 255) - 128.0


@triton.jit
def values(
    words, high, scale, offset, plane: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """A plane's weights, float32."""
    if TABLE != 0:
        result = look_up(words, plane, TABLE) * scale
    else:
        size = unit(plane, LOW, HIGH)
        result = (fraction(words, high, plane, LOW, HIGH) * size - (size + ZERO)) * scale
    if OFFSET:
        result += offset
    return result


@triton.jit
def group_of(quad, part: tl.constexpr, LOW: tl.constexpr, GROUP: tl.constexpr):
    """The group that has a quad's planes of this part."""
    SPAN: tl.constexpr = 128 // LOW  # columns of a quad
    if GROUP >= SPAN:
        result = quad // (GROUP // SPAN)
    else:
        result = quad * (SPAN // GROUP) + part
    return result


@triton.jit
def _float(small):
    """A number below 2^23 as float32."""
    return (small | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _halves(pair):
    """The two float16 of an int32."""
    low = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _load_bits(ptr, row, group, num_groups, WIDTH: tl.constexpr):
    """Fields of WIDTH bits, 8 / WIDTH of them in a byte."""
    EACH: tl.constexpr = 8 // WIDTH
    packed = tl.load(ptr + row * (num_groups // EACH) + group // EACH).to(tl.int32)
    return (packed >> (group % EACH * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def load_scales(
    first_ptr, second_ptr, third_ptr, row, group, num_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Scales of groups, and what is added after them (`Layout.offset`), float32.

    Row and group are of shapes that go together; a group past the last is read as the last.
    """
    group = tl.minimum(group, num_groups - 1)
    at = row * num_groups + group
    EACH: tl.constexpr = 256 // GROUP  # groups of a block
    block = row * (num_groups // EACH) + group // EACH
    if KIND == "half":
        scale = tl.load(first_ptr + at).to(tl.float32)
        offset = scale
    elif KIND == "whole":
        scale = tl.load(first_ptr + block).to(tl.float32)
        offset = scale
    elif KIND == "pair":
        scale, offset = _halves(tl.load(first_ptr + at))
    elif KIND == "exponent":  # a power of two, biased by 128: numbers are doubled
        exponent = tl.load(first_ptr + at).to(tl.int32)
        bits = tl.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        offset = scale
    elif KIND == "bytes":
        number = tl.load(second_ptr + at).to(tl.float32)
        scale = tl.load(first_ptr + block).to(tl.float32) * number
        offset = scale
    elif KIND == "six bits":
        low = _load_bits(second_ptr, row, group, num_groups, 4)
        high = _load_bits(third_ptr, row, group, num_groups, 2)
        number = _float(low | (high << 4)) - 32.0
        scale = tl.load(first_ptr + block).to(tl.float32) * number
        offset = scale
    elif KIND == "nibbles":
        both = tl.load(second_ptr + at).to(tl.int32)
        scale, offset = _halves(tl.load(first_ptr + block))
        scale = scale * _float(both & 15)
        offset = -(offset * _float(both >> 4))
    else:  # six bits, minima
        both = tl.load(second_ptr + at).to(tl.int32)
        least = _load_bits(third_ptr, row, group, num_groups, 4)
        scale, offset = _halves(tl.load(first_ptr + block))
        scale = scale * _float(both & 63)
        offset = -(offset * _float((both >> 6) | (least << 2)))
    return scale, offset
