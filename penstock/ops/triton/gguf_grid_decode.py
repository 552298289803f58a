"""Converts IQ1, IQ2 and IQ3 weights to words of four 8-bit numbers, in registers.

The result has the layout of Q8_0 in `gguf_layout.py`: the fields of a quad's words are numbers +
128. The other kernels continue from there. Two octets (`ops/gguf_grids.py`) form a quad, so a
thread loads their indexes and signs once for its four words.

A table entry for 8 columns is two int32: bytes (0, 4, 2, 6), and bytes (1, 5, 3, 7), which are
already halves of words. An entry for 4 columns is one int32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def is_grid(kind: str) -> bool:
    """Whether this module decodes a kind of scales. Its types are kinds of their own."""
    return kind.startswith("IQ")


@triton.jit
def grid_words(
    words_ptr, table_ptr, second_ptr, third_ptr, row, num_own, word, first_quad, in_features,
    KIND: tl.constexpr,
):  # fmt: skip
    """Words as `load_weights` returns them: [R, C] of rows [R, 1], or [C] of one row.

    `num_own` is the number of quads of each row.
    """
    own = tl.arange(0, word.numel // 4)
    if len(word.shape) == 2:
        own = own[None, :]
    quad = first_quad + own
    mask = quad < num_own
    octet = row * (in_features // 8) + quad * 2
    a_even, a_odd, a_signs = _load_octet(
        words_ptr, table_ptr, second_ptr, third_ptr, octet, mask, KIND
    )
    b_even, b_odd, b_signs = _load_octet(
        words_ptr, table_ptr, second_ptr, third_ptr, octet + 1, mask, KIND
    )
    # Spread 16 bits, one per column, to the low nibbles of four bytes: columns 4 f to 4 f + 3 in
    # byte f.
    signs = a_signs | (b_signs << 8)
    signs = (signs | (signs << 8)) & 0x00FF00FF
    signs = (signs | (signs << 4)) & 0x0F0F0F0F
    word_0 = _signed((a_even & 0xFFFF) | (b_even << 16), signs, 0, KIND)
    word_1 = _signed((a_odd & 0xFFFF) | (b_odd << 16), signs, 1, KIND)
    word_2 = _signed(((a_even >> 16) & 0xFFFF) | ((b_even >> 16) << 16), signs, 2, KIND)
    word_3 = _signed(((a_odd >> 16) & 0xFFFF) | ((b_odd >> 16) << 16), signs, 3, KIND)
    joined = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))  # word 2 i + j at [.., i, j]
    if len(word.shape) == 2:
        words = joined.reshape(joined.shape[0], word.numel)
    else:
        words = joined.reshape(word.numel)
    return words


@triton.jit
def _load_octet(
    words_ptr, table_ptr, second_ptr, third_ptr, octet, mask, KIND: tl.constexpr
):  # fmt: skip
    """The table entry of 8 columns, without signs, and one sign bit per column."""
    of_four = octet % 4
    if KIND == "IQ2_XXS" or KIND == "IQ3_XXS":
        packed = tl.load(second_ptr + octet // 4, mask=mask, other=0)
        signs = _eight_signs((packed >> (of_four * 7).to(tl.int32)) & 127)
    if KIND == "IQ3_XXS" or KIND == "IQ3_S":
        first = tl.load(words_ptr + octet * 2, mask=mask, other=0).to(tl.int32)
        second = tl.load(words_ptr + octet * 2 + 1, mask=mask, other=0).to(tl.int32)
        if KIND == "IQ3_S":
            block = third_ptr + octet // 32 * 40
            high = tl.load(block + octet % 32 // 4, mask=mask, other=0).to(tl.int32)
            high = high >> (of_four * 2).to(tl.int32)
            first = first | ((high & 1) << 8)
            second = second | ((high & 2) << 7)
            signs = tl.load(block + 8 + octet % 32, mask=mask, other=0).to(tl.int32)
        low = tl.load(table_ptr + first, mask=mask, other=0)
        high = tl.load(table_ptr + second, mask=mask, other=0)
        even = (low & 0x00FF00FF) | ((high & 0x00FF00FF) << 8)
        odd = ((low >> 8) & 0x00FF00FF) | (((high >> 8) & 0x00FF00FF) << 8)
    else:
        place = tl.load(words_ptr + octet, mask=mask, other=0).to(tl.int32)
        if KIND == "IQ2_XS":
            signs = _eight_signs((place >> 9) & 127)
            place = place & 511
        elif KIND == "IQ2_S":
            block = third_ptr + octet // 32 * 40
            signs = tl.load(block + octet % 32, mask=mask, other=0).to(tl.int32)
            high = tl.load(block + 32 + octet % 32 // 4, mask=mask, other=0).to(tl.int32)
            place = place | (((high >> (of_four * 2).to(tl.int32)) & 3) << 8)
        elif KIND == "IQ1_S":
            high = tl.load(second_ptr + octet // 4, mask=mask, other=0).to(tl.int32)
            place = place | (((high >> (of_four * 3).to(tl.int32)) & 7) << 8)
            signs = ((high >> 15) & 1) * 255
        elif KIND == "IQ1_M":
            high = tl.load(second_ptr + octet // 2, mask=mask, other=0).to(tl.int32)
            high = high >> (octet % 2 * 4).to(tl.int32)
            place = place | ((high & 7) << 8)
            signs = ((high >> 3) & 1) * 255
        even = tl.load(table_ptr + place * 2, mask=mask, other=0)
        odd = tl.load(table_ptr + place * 2 + 1, mask=mask, other=0)
    return even, odd, signs


@triton.jit
def _eight_signs(seven):
    """Add the eighth sign on top. It makes the number of negative signs even."""
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return seven | (parity << 7)


@triton.jit
def _signed(word, signs, index: tl.constexpr, KIND: tl.constexpr):
    """Apply signs to four bytes and add 128. No byte carries into the next."""
    negative = (signs >> index) & 0x01010101
    if KIND == "IQ1_S" or KIND == "IQ1_M":
        result = word - negative * 2
    else:
        flipped = (word ^ (negative * 255)) + negative
        result = flipped ^ -0x7F7F7F80  # 0x80 in each byte
    return result


@triton.jit
def grid_scale(fields, KIND: tl.constexpr):
    """The scale of a sub-block, float32, from the result of `_load_fields`."""
    first, second, _ = fields
    if KIND == "IQ1_M":  # the float16's four parts are above the steps
        bits = ((first >> 12) & 0x000F) | ((first >> 24) & 0x00F0)
        bits = bits | ((first >> 36) & 0x0F00) | ((first >> 48) & 0xF000)
        scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        step = (first >> second).to(tl.int32) & 7
    else:
        scale = first.to(tl.float32)
        step = second.to(tl.int32)
        if KIND == "IQ2_XXS" or KIND == "IQ3_XXS":
            step = (step >> 28) & 15
        elif KIND == "IQ1_S":
            step = (step >> 12) & 7
        else:
            step = step & 15
    result = scale * (2 * step + 1).to(tl.float32)
    if KIND == "IQ3_XXS":
        result = result * 0.25
    elif KIND != "IQ3_S":
        result = result * 0.125
    return result
