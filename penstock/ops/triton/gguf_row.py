"""Single rows of x times GGUF weights of 4, 5 or 6 bits on the tensor cores, exactly.

The tensor cores multiply sixteen matrix rows with at least eight columns. Here the columns are
sub-blocks: column i holds x for the i-th of eight sub-blocks, and zeros elsewhere. One number of
the result is then the sum of one sub-block, which is scaled afterwards. Numbers are small integers,
which bfloat16 and float16 represent exactly.

Data goes directly from memory to the registers of the tensor cores. A thread holds a quad
(`gguf_layout.py`) of a row, and loads order their dimensions so that this is its part of an
operand. Another order would be slower, not wrong.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.triton.gguf_decode import load_two, scales
from penstock.ops.triton.gguf_layout import Layout, Planes
from penstock.ops.triton.overlap import let_next_start, overlap, wait_for_others
from penstock.ops.triton.tuning_gguf import TensorPlan

ROWS = 16


def can_multiply(layout: Layout, dtype: torch.dtype) -> bool:
    """Whether the numbers of this layout fit the tensor cores in `dtype`."""
    is_number = layout.low == 4 and layout.table is None
    return is_number and layout.group <= 32 and dtype in (torch.bfloat16, torch.float16)


def _numbers(magic: int, high: int, last: str = "") -> str:
    """PTX: from two words in $4, with high bits in $5 to be shifted down by $6, four pairs.

    Each pair is a plane's numbers in the mantissa of `magic`, two powers of two. `last` follows.
    """
    mask = ((1 << high) - 1) << 4
    lines = ["{\n.reg .b32 h, t;\n"]
    if high:
        lines.append("shf.r.wrap.b32 h, $5, 0, $6;\n")
    for plane in range(4):
        lines.append(f"shr.b32 t, $4, {4 * plane};\n")
        lines.append(f"lop3.b32 ${plane}, t, 0x000F000F, {magic:#x}, 0xEA;\n")  # (t & ...) | magic
        if high:
            shift = "shl" if plane == 0 else "shr"
            lines.append(f"{shift}.b32 t, h, {abs(4 - 4 * plane)};\n")
            lines.append(f"lop3.b32 ${plane}, t, {mask | mask << 16:#x}, ${plane}, 0xEA;\n")
        lines.append(last.format(f"${plane}"))
    return "".join(lines) + "}"


# In bfloat16 the result is 128 + number. In float16 it is 1024 + number; 1024 is subtracted at
# once.
BF16 = tl.constexpr({high: _numbers(0x43004300, high) for high in range(3)})
LESS = "mov.b32 t, 0x64006400;\nsub.f16x2 {0}, {0}, t;\n"
FP16 = tl.constexpr({high: _numbers(0x64006400, high, LESS) for high in range(3)})
REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")


@triton.jit
def _base(dtype: tl.constexpr, ASM: tl.constexpr):
    """The excess of the numbers from `_planes`."""
    base: tl.constexpr = 128.0 if ASM and dtype == tl.bfloat16 else 0.0
    return base


@triton.jit
def _planes(words, high, shift, dtype: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """The numbers in each four bits of int16 words, in `dtype`: four tensors of that shape."""
    if ASM and dtype == tl.bfloat16:
        planes = tl.inline_asm_elementwise(
            BF16[HIGH], REGISTERS, [words, high, shift],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM:
        planes = tl.inline_asm_elementwise(
            FP16[HIGH], REGISTERS, [words, high, shift],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        planes = ()
        for plane in tl.static_range(4):
            number = (words.to(tl.int32) >> (4 * plane)) & 15
            if HIGH > 0:
                more = (high.to(tl.int32) >> (shift.to(tl.int32) + 4 * plane)) & ((1 << HIGH) - 1)
                number = number | (more << 4)
            planes += (number.to(dtype),)
    return planes


@triton.jit
def _load_words(
    words_ptr, high_ptr, row, quad, num_quads, HIGH: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Words, and the words with their high bits: [16 BLOCKS, 32] int16 of quads."""
    at = tl.arange(0, 32)[None, :] % 8
    source = words_ptr + row * (num_quads * 8) + quad * 8 + at
    mask = None
    if MASKED:
        mask = quad < num_quads
    words = tl.load(source, mask=mask, eviction_policy="evict_first")
    high = words
    if HIGH > 0:
        SHARED: tl.constexpr = 4 // HIGH
        source = high_ptr + row * (tl.cdiv(num_quads, SHARED) * 8) + quad // SHARED * 8 + at
        high = tl.load(source, mask=mask)
    return words, high


@triton.jit
def _load_weights(
    words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, block, low_row, out_features,
    in_features, KIND: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
    MASKED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """For BLOCKS times eight sub-blocks: words in chunks of 128 columns, and fields of scales.

    Fields are split into even and odd sub-blocks, [32 BLOCKS] each, for rows 0 to 7 and 8 to 15.
    """
    num_quads = in_features // 32
    # [2 * BLOCKS * 8, 32]: half of the rows, eight sub-blocks, row. So a warp holds eight rows at
    # once.
    index = tl.arange(0, 16 * BLOCKS)[:, None]
    row = low_row + index // (8 * BLOCKS) * 8 + index % 8
    # Rows out of range read the first row; their results are not stored.
    row = tl.where(row < out_features, row, 0).to(tl.int64)
    quad = (block + index // 8 % BLOCKS) * (GROUP // 4) + tl.arange(0, 32)[None, :] // 8
    a = _load_words(words_ptr, high_ptr, row, quad, num_quads, HIGH, MASKED)
    chunks = (a, a)
    if GROUP == 32:
        b = _load_words(words_ptr, high_ptr, row, quad + 4, num_quads, HIGH, MASKED)
        chunks = (a, b)
    index = tl.arange(0, 32 * BLOCKS)  # eight, row, pair of sub-blocks
    row = low_row + index // 4 % 8
    group = (block + index // 32) * 8 + index % 4 * 2
    own = tl.where(row < out_features, row, 0).to(tl.int64)
    low = load_two(first_ptr, second_ptr, third_ptr, own, group, in_features, KIND, GROUP, MASKED)
    own = tl.where(row + 8 < out_features, row + 8, 0).to(tl.int64)
    high = load_two(first_ptr, second_ptr, third_ptr, own, group, in_features, KIND, GROUP, MASKED)
    return chunks, low, high


@triton.jit
def _load_x(
    x_ptr, block, chunk: tl.constexpr, half: tl.constexpr, eight: tl.constexpr, in_features,
    GROUP: tl.constexpr, MASKED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """x at eight columns of a chunk's quads, as operands of two planes: [BLOCKS, 16, 8]."""
    index = tl.arange(0, 32 * BLOCKS)[:, None]  # eight, sub-block, quad
    group, quad = index // 4 % 8, index % 4
    at = (block + index // 32) * (8 * GROUP) + chunk * 128 + quad * 32 + half * 16 + eight * 8
    is_own = group == (chunk * 4 + quad if GROUP == 32 else quad * 2 + half)
    if MASKED:
        is_own = is_own & (at < in_features)
    x = tl.load(x_ptr + at + tl.arange(0, 8)[None, :], mask=is_own, other=0.0)
    even, odd = tl.split(x.reshape(BLOCKS, 8, 4, 2, 2, 2).permute(0, 1, 2, 4, 5, 3))
    even = even.permute(0, 3, 2, 4, 1).reshape(BLOCKS, 16, 8)
    odd = odd.permute(0, 3, 2, 4, 1).reshape(BLOCKS, 16, 8)
    return even, odd


@triton.jit
def _halves(words):
    """Split words [n, 32] into those with a quad's first and last columns: [n, 16] each."""
    n: tl.constexpr = words.shape[0]
    first, last = tl.split(words.reshape(n, 16, 2))
    return first, last


@triton.jit
def _to_operand(plane, BLOCKS: tl.constexpr):
    """[2 * BLOCKS * 8, 16] as [BLOCKS, 16, 16]. A thread holds two and two columns of a quad."""
    plane = plane.reshape(2, BLOCKS, 8, 4, 2, 2).permute(1, 0, 2, 4, 3, 5)
    return plane.reshape(BLOCKS, 16, 16)


@triton.jit
def _sums(
    x_ptr, block, chunks, in_features, HIGH: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr,
    MASKED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """For each sub-block, the sum of numbers times x, and the sum of x: [BLOCKS, 16, 8]."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros([BLOCKS, 16, 8], tl.float32)
    x_total = tl.zeros([BLOCKS, 16, 8], tl.float32)
    ones = tl.full([BLOCKS, 16, 16], 1.0, dtype)
    SHARED: tl.constexpr = 4 // HIGH if HIGH > 0 else 1
    shift = (tl.arange(0, 16) // 4 % SHARED * HIGH).to(tl.int16)[None, :]
    shift = shift.broadcast_to(16 * BLOCKS, 16)
    for chunk in tl.static_range(GROUP // 16):
        words, high = _halves(chunks[chunk][0]), _halves(chunks[chunk][1])
        for half in tl.static_range(2):
            planes = _planes(words[half], high[half], shift, dtype, HIGH, ASM)
            for eight in tl.static_range(2):
                even, odd = _load_x(
                    x_ptr, block, chunk, half, eight, in_features, GROUP, MASKED, BLOCKS
                )
                own = _to_operand(planes[eight * 2], BLOCKS)
                total = tl.dot(own, even, total, input_precision="ieee")
                x_total = tl.dot(ones, even, x_total, input_precision="ieee")
                own = _to_operand(planes[eight * 2 + 1], BLOCKS)
                total = tl.dot(own, odd, total, input_precision="ieee")
                x_total = tl.dot(ones, odd, x_total, input_precision="ieee")
    return total, x_total


@triton.jit
def _as_result(a, b, c, d, BLOCKS: tl.constexpr):
    """Join even and odd sub-blocks of rows 0 to 7 and 8 to 15: [BLOCKS, 16, 8]."""
    joined = tl.join(tl.join(a, b), tl.join(c, d))  # [32 BLOCKS, odd, half]
    joined = joined.reshape(BLOCKS, 8, 4, 2, 2).permute(0, 4, 1, 2, 3)
    return joined.reshape(BLOCKS, 16, 8)


@triton.jit
def _products(
    x_ptr, block, weights, in_features, KIND: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """What each sub-block from `_load_weights` adds to its row's sum: [BLOCKS, 16, 8]."""
    chunks, low, high = weights
    total, x_total = _sums(x_ptr, block, chunks, in_features, HIGH, GROUP, ASM, MASKED, BLOCKS)
    a, a_offset = scales(low[0], KIND)
    b, b_offset = scales(low[1], KIND)
    c, c_offset = scales(high[0], KIND)
    d, d_offset = scales(high[1], KIND)
    total -= (_base(x_ptr.dtype.element_ty, ASM) + ZERO) * x_total
    total *= _as_result(a, b, c, d, BLOCKS)
    if OFFSET:
        total += x_total * _as_result(a_offset, b_offset, c_offset, d_offset, BLOCKS)
    return total


@triton.jit
def _tensor_row_kernel(
    x_ptr, words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, bias_ptr, out_ptr,
    x_stride, out_stride, num_tokens, in_features, out_features,
    KIND: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr,
    OVERLAP: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of the weight times a row of x, BLOCKS times eight sub-blocks at once.

    The first step is outside the loop. Otherwise x would be loaded only after these weights.
    """
    let_next_start(OVERLAP)
    # Programs with the same weights are adjacent, so weights are read from memory once.
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    low_row = tl.program_id(0) // num_tokens * 16
    x_ptr += token * x_stride
    out_ptr += token * out_stride
    weights = _load_weights(
        words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, 0, low_row, out_features,
        in_features, KIND, HIGH, GROUP, MASKED, BLOCKS,
    )  # fmt: skip
    wait_for_others(OVERLAP)
    acc = _products(
        x_ptr, 0, weights, in_features, KIND, HIGH, ZERO, GROUP, OFFSET, ASM, MASKED, BLOCKS
    )
    if STEPS > 1:
        for step in range(1, STEPS):
            weights = _load_weights(
                words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, step * BLOCKS, low_row,
                out_features, in_features, KIND, HIGH, GROUP, MASKED, BLOCKS,
            )  # fmt: skip
            acc += _products(
                x_ptr, step * BLOCKS, weights, in_features, KIND, HIGH, ZERO, GROUP, OFFSET, ASM,
                MASKED, BLOCKS,
            )  # fmt: skip
    out = tl.sum(tl.sum(acc, axis=2), axis=0)
    row = low_row + tl.arange(0, 16)
    is_row = row < out_features
    if BIAS:
        out += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=is_row)


def tensor_rows(
    x: torch.Tensor, weight: Planes, bias: torch.Tensor | None, out: torch.Tensor, plan: TensorPlan
) -> torch.Tensor:
    """x [n, in], row by row, times the weight."""
    num_tokens, (out_features, in_features) = len(x), weight.shape
    words, high, *fields = weight.pointers
    layout = weight.layout
    each = 8 * layout.group * plan.turns * plan.warps  # columns of a step
    _tensor_row_kernel[(triton.cdiv(out_features, ROWS) * num_tokens,)](
        x, words.view(torch.int16), high.view(torch.int16), *fields, out if bias is None else bias,
        out, x.stride(0), out.stride(0), num_tokens, in_features, out_features,
        KIND=layout.kind, HIGH=layout.high, ZERO=layout.zero,
        GROUP=layout.group, OFFSET=layout.offset, BIAS=bias is not None, ASM=x.is_cuda,
        MASKED=in_features % each != 0, **overlap(x.device), STEPS=triton.cdiv(in_features, each),
        BLOCKS=plan.turns * plan.warps,
        num_warps=plan.warps, num_stages=1, maxnreg=plan.registers,
    )  # fmt: skip
    return out
