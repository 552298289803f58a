"""Converts GGUF weights in the layout of `gguf_layout.py` to floats in registers.

All kernels use `load_weights`, `scales` and `values` (or `fraction`). Types differ in the bits of a
number and in how scales are stored. A number becomes a float without a conversion: in the mantissa
of 1, it is the fractional part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.triton.gguf_grid_decode import grid_scale, grid_words, is_grid

ONE = 0x3F800000  # 1.0 as an int32


@triton.constexpr_function
def num_parts(low: int, group: int) -> int:
    """Sub-blocks that the columns of a quad span."""
    return max(128 // low // group, 1)


@triton.jit
def load_weights(
    words_ptr, high_ptr, first_ptr, second_ptr, third_ptr,
    row, is_row, word, quad, first_quad, in_features,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Words [R, C], their high bits aligned to them, and the fields of the scales, part by part.

    Rows are [R, 1] int64. Words [1, C] are counted from quad `first_quad` on, and so is `quad` [1,
    C or C / 4], whose scales are loaded. Outside of the rows and past their end, everything is 0.
    Without high bits, the words are returned again.
    """
    num_quads = in_features * LOW // 128
    at = first_quad * 4 + word
    num_own = tl.where(is_row, num_quads, 0)
    is_word = at < num_own * 4
    if is_grid(KIND):  # `high_ptr` is the table
        words = grid_words(
            words_ptr, high_ptr, second_ptr, third_ptr, row, num_own, word, first_quad,
            in_features, KIND,
        )  # fmt: skip
    else:
        words = tl.load(words_ptr + row * (num_quads * 4) + at, mask=is_word, other=0)
    high = words
    if HIGH > 0:
        SHARED: tl.constexpr = LOW // HIGH  # quads per four words; first_quad is a multiple of it
        source = high_ptr + row * (tl.cdiv(num_quads, SHARED) * 4) + first_quad // SHARED * 4
        high = tl.load(source + word // (4 * SHARED) * 4 + word % 4, mask=is_word, other=0)
        high = high >> (word // 4 % SHARED * HIGH)
    own = first_quad + quad
    is_quad = own < num_own
    fields = ()
    for part in tl.static_range(num_parts(LOW, GROUP)):
        fields += (
            _load_fields(
                first_ptr, second_ptr, third_ptr, row, own, is_quad, in_features, part,
                KIND, LOW, GROUP,
            ),
        )  # type: ignore[assignment]  # fmt: skip
    return words, high, fields


@triton.jit
def _shifted(bits, by: tl.constexpr):
    if by >= 0:
        result = bits << by
    else:
        result = bits >> (-by)
    return result


@triton.jit
def fraction(words, high, one, plane: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """1 + a plane's numbers / `unit(plane)`, float32.

    All fields of one byte are in the mantissa; only the mask separates them. `one` is `ONE` as a
    run-time value: as a constant, the compiler would reload it and the masks again and again.
    """
    BASE: tl.constexpr = 13 if HIGH > 0 else 15
    EACH: tl.constexpr = 8 // LOW
    SHIFT: tl.constexpr = BASE - plane // EACH * 8
    AT: tl.constexpr = BASE + plane % EACH * LOW
    bits = (_shifted(words, SHIFT) & (((1 << LOW) - 1) << AT)) | one
    if HIGH > 0:
        bits = bits | (_shifted(high, SHIFT + LOW) & (((1 << HIGH) - 1) << (AT + LOW)))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def unit(plane: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The number that 1 stands for in `fraction`."""
    BASE: tl.constexpr = 13 if HIGH > 0 else 15
    AT: tl.constexpr = BASE + plane % (8 // LOW) * LOW
    return tl.full([], 1 << (23 - AT), tl.float32)


@triton.jit
def look_up(words, plane: tl.constexpr, TABLE: tl.constexpr):
    """Map a plane's 4-bit numbers to values, float32. TABLE holds the values + 128 as bytes.

    The table is not in memory: a load would change how words are distributed over threads.
    """
    FIRST: tl.constexpr = (TABLE & 0xFFFFFFFF) - ((TABLE & 0x80000000) << 1)  # as an int32
    SECOND: tl.constexpr = ((TABLE >> 32) & 0xFFFFFFFF) - (((TABLE >> 32) & 0x80000000) << 1)
    THIRD: tl.constexpr = ((TABLE >> 64) & 0xFFFFFFFF) - (((TABLE >> 64) & 0x80000000) << 1)
    FOURTH: tl.constexpr = ((TABLE >> 96) & 0xFFFFFFFF) - (((TABLE >> 96) & 0x80000000) << 1)
    number = _shifted(words, -4 * plane) & 15
    low = tl.where(number < 4, FIRST, SECOND)
    high = tl.where(number < 12, THIRD, FOURTH)
    packed = tl.where(number < 8, low, high)
    return _float((packed >> ((number & 3) * 8)) & 255) - 128.0


@triton.jit
def values(
    words, high, scale, offset, one, plane: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """A plane's weights, float32."""
    if TABLE != 0:
        result = look_up(words, plane, TABLE) * scale
    else:
        size = unit(plane, LOW, HIGH)
        result = (fraction(words, high, one, plane, LOW, HIGH) * size - (size + ZERO)) * scale
    if OFFSET:
        result += offset
    return result


@triton.jit
def _float(small):
    """An integer below 2^23 as float32."""
    return (small | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _halves(pair):
    """The two float16 in an int32."""
    low = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _load(source, mask):
    """Load; 0 where the mask is false. None: no mask."""
    if mask is None:
        result = tl.load(source)
    else:
        result = tl.load(source, mask=mask, other=0)
    return result


@triton.jit
def _load_bits(ptr, row, group, mask, num_groups, WIDTH: tl.constexpr):
    """Bytes with fields of WIDTH bits, and the shift of the sub-block's field."""
    EACH: tl.constexpr = 8 // WIDTH
    packed = _load(ptr + row * (num_groups // EACH) + group // EACH, mask)
    return packed.to(tl.int32) >> (group % EACH * WIDTH)


@triton.jit
def _load_fields(
    first_ptr, second_ptr, third_ptr, row, quad, mask, in_features,
    part: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The fields that `scales` needs, of the sub-blocks with one part of the quads."""
    SPAN: tl.constexpr = 128 // LOW  # columns of a quad
    if GROUP >= SPAN:
        group = quad // (GROUP // SPAN)
    else:
        group = quad * (SPAN // GROUP) + part
    return load_fields(first_ptr, second_ptr, third_ptr, row, group, mask, in_features, KIND, GROUP)


@triton.jit
def load_fields(
    first_ptr, second_ptr, third_ptr, row, group, mask, in_features,
    KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The fields that `scales` needs: three of them, the first repeated if a kind has fewer."""
    EACH: tl.constexpr = 256 // GROUP  # sub-blocks of a quantization block
    if KIND == "half" or KIND == "pair" or KIND == "exponent":
        num_groups = in_features // GROUP
        first = _load(first_ptr + row * num_groups + group, mask)
    else:
        num_groups = in_features // 256 * EACH
        block = row * (in_features // 256) + group // EACH
        first = _load(first_ptr + block, mask)
    at = row * num_groups + group
    second, third = first, first
    if KIND == "bytes" or KIND == "nibbles" or KIND == "six bits, minima":
        second = _load(second_ptr + at, mask)
    if KIND == "six bits" or KIND == "IQ2_XS" or KIND == "IQ2_S" or KIND == "IQ3_S":
        second = _load_bits(second_ptr, row, group, mask, num_groups, 4)
    if KIND == "IQ2_XXS" or KIND == "IQ3_XXS" or KIND == "IQ1_S":
        second = _load(second_ptr + at, mask)
    if KIND == "IQ1_M":  # the shift of its three bits in the first field
        second = (group % EACH // 4 * 16 + group % 4 * 3).to(tl.int64)
    if KIND == "six bits":
        third = _load_bits(third_ptr, row, group, mask, num_groups, 2)
    if KIND == "six bits, minima":
        third = _load_bits(third_ptr, row, group, mask, num_groups, 4)
    return first, second, third


@triton.jit
def load_two(
    first_ptr, second_ptr, third_ptr, row, group, in_features,
    KIND: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`load_fields` of even sub-blocks and of their successors. Shared fields are loaded once."""
    mask = None
    if MASKED:
        mask = group * GROUP < in_features
    a = load_fields(first_ptr, second_ptr, third_ptr, row, group, mask, in_features, KIND, GROUP)
    if KIND == "bytes" or KIND == "six bits, minima":
        at = row * (in_features // 256 * (256 // GROUP)) + group + 1
        second = _load(second_ptr + at, mask)
        b = (a[0], second, a[2] >> 4 if KIND == "six bits, minima" else a[2])
    else:
        if MASKED:
            mask = (group + 1) * GROUP < in_features
        b = load_fields(
            first_ptr, second_ptr, third_ptr, row, group + 1, mask, in_features, KIND, GROUP
        )
    return a, b


@triton.jit
def scales(fields, KIND: tl.constexpr):
    """Scales of sub-blocks, and the offsets to add afterwards (`Layout.offset`), float32."""
    first, second, third = fields
    if KIND == "half" or KIND == "whole":
        scale = first.to(tl.float32)
        offset = scale
    elif KIND == "pair":
        scale, offset = _halves(first)
    elif KIND == "exponent":  # a power of two with bias 128, because the numbers are doubled
        exponent = first.to(tl.int32)
        bits = tl.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        offset = scale
    elif KIND == "bytes":
        scale = first.to(tl.float32) * second.to(tl.float32)
        offset = scale
    elif KIND == "six bits":
        scale = first.to(tl.float32) * (_float((second & 15) | ((third & 3) << 4)) - 32.0)
        offset = scale
    elif KIND == "nibbles":
        both = second.to(tl.int32)
        scale, offset = _halves(first)
        scale = scale * _float(both & 15)
        offset = -(offset * _float(both >> 4))
    elif is_grid(KIND):
        scale = grid_scale(fields, KIND)
        offset = scale
    else:  # six bits, minima
        both = second.to(tl.int32)
        scale, offset = _halves(first)
        scale = scale * _float(both & 63)
        offset = -(offset * _float((both >> 6) | ((third & 15) << 2)))
    return scale, offset
