"""Products with matrices in GGUF quantization blocks.

One row, or a few rows one by one, are multiplied without rounding the weights: as integers on the
tensor cores (`gguf_row.py`), or as floats in registers. For more rows, cuBLAS multiplies slabs of
the matrix that are converted to the type of x and then dropped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops.triton.gguf_decode import (
    ONE,
    fraction,
    load_weights,
    look_up,
    scales,
    unit,
    values,
)
from penstock.ops.triton.gguf_layout import Planes
from penstock.ops.triton.gguf_row import can_multiply, tensor_rows
from penstock.ops.triton.overlap import let_next_start, overlap, wait_for_others
from penstock.ops.triton.slabs import multiply_slabs
from penstock.ops.triton.tuning_gguf import (
    RowPlan,
    most_single_rows,
    row_plan,
    tensor_plan,
)


@triton.jit
def _load_plane(
    x_ptr, column, in_features, plane: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x at a plane's columns, and x as it is multiplied with fractions; float32."""
    if EVEN:
        x = tl.load(x_ptr + column + plane * 4).to(tl.float32)
    else:
        at = column + plane * 4
        x = tl.load(x_ptr + at, mask=at < in_features, other=0.0).to(tl.float32)
    weighted = x
    if TABLE == 0:
        weighted = x * unit(plane, LOW, HIGH)
    return x, weighted


@triton.jit
def _load_planes(
    x_ptr, column, in_features, first: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Four planes of x as they are multiplied, the sum of x, and the excess of the products."""
    x0, w0 = _load_plane(x_ptr, column, in_features, first, LOW, HIGH, TABLE, EVEN)
    x1, w1 = _load_plane(x_ptr, column, in_features, first + 1, LOW, HIGH, TABLE, EVEN)
    x2, w2 = _load_plane(x_ptr, column, in_features, first + 2, LOW, HIGH, TABLE, EVEN)
    x3, w3 = _load_plane(x_ptr, column, in_features, first + 3, LOW, HIGH, TABLE, EVEN)
    total = (x0 + x1) + (x2 + x3)
    surplus = (w0 + w1) + (w2 + w3) + ZERO * total
    total = tl.sum(total.reshape(QUADS, 4), axis=1)
    surplus = tl.sum(surplus.reshape(QUADS, 4), axis=1)
    return w0, w1, w2, w3, total, surplus


@triton.jit
def _load_x(
    x_ptr, first_quad, in_features,
    LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """x of some quads: the results of `_load_planes` for all planes, four by four."""
    word = tl.arange(0, QUADS * 4)
    at = (first_quad + word // 4) * (128 // LOW) + word % 4
    result = ()
    for four in tl.static_range(8 // LOW):
        result += (
            _load_planes(x_ptr, at, in_features, four * 4, LOW, HIGH, ZERO, TABLE, EVEN, QUADS),
        )  # type: ignore[assignment]
    return result


@triton.jit
def _products(
    x,  # as `_load_x` returns it
    weights,  # words, high bits and fields of one row, as `load_weights` returns them
    one,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    GROUP: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """What each quad adds to its row's sum: [QUADS] float32.

    Fractions include a constant 1 and numbers include a zero point. Sums of x correct the products
    for both.
    """
    PLANES: tl.constexpr = 32 // LOW
    EACH: tl.constexpr = GROUP // 4 if GROUP // 4 < PLANES else PLANES  # planes of a scale
    words, high, fields = weights
    acc = tl.zeros([QUADS], tl.float32)
    for part in tl.static_range(PLANES // EACH):
        products = tl.zeros([QUADS * 4], tl.float32)
        x_total = tl.zeros([QUADS], tl.float32)
        surplus = tl.zeros([QUADS], tl.float32)
        for index in tl.static_range(EACH):
            if TABLE != 0:
                number = look_up(words, part * EACH + index, TABLE)
            else:
                number = fraction(words, high, one, part * EACH + index, LOW, HIGH)
            products += number * x[(part * EACH + index) // 4][(part * EACH + index) % 4]
            if index % 4 == 0:
                x_total += x[(part * EACH + index) // 4][4]
                surplus += x[(part * EACH + index) // 4][5]
        summed = tl.sum(products.reshape(QUADS, 4), axis=1)
        if TABLE == 0:
            summed -= surplus
        scale, offset = scales(fields[part], KIND)
        acc += summed * scale
        if OFFSET:
            acc += offset * x_total
    return acc


@triton.jit
def _load_four(
    words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, row, out_features, first_quad,
    in_features, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """Weights of four rows from `row` on, as `load_weights` returns them.

    Each row is a tensor of its own. Then words and scales go directly to the threads that own their
    quads; otherwise the compiler would move them through shared memory.
    """
    word, quad = tl.arange(0, QUADS * 4), tl.arange(0, QUADS)
    rows = ()
    for index in tl.static_range(4):
        rows += (
            load_weights(
                words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, row + index,
                row + index < out_features, word, quad, first_quad, in_features,
                KIND, LOW, HIGH, GROUP,
            ),
        )  # type: ignore[assignment]  # fmt: skip
    return rows


@triton.jit
def _four_rows(
    x,  # as `_load_x` returns it
    rows,  # as `_load_four` returns them
    one,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    GROUP: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """`_products` of four rows: [QUADS, 2, 2], row 2 j + i at [:, i, j]."""
    ab = tl.join(
        _products(x, rows[0], one, KIND, LOW, HIGH, GROUP, TABLE, OFFSET, QUADS),
        _products(x, rows[1], one, KIND, LOW, HIGH, GROUP, TABLE, OFFSET, QUADS),
    )
    cd = tl.join(
        _products(x, rows[2], one, KIND, LOW, HIGH, GROUP, TABLE, OFFSET, QUADS),
        _products(x, rows[3], one, KIND, LOW, HIGH, GROUP, TABLE, OFFSET, QUADS),
    )
    return tl.join(ab, cd)


@triton.jit
def _store_sums(acc, bias_ptr, out_ptr, row, out_features, BIAS: tl.constexpr):
    """Sum and store the results of `_four_rows`."""
    out = tl.sum(acc, axis=0)
    own = row + tl.arange(0, 2)[:, None] + tl.arange(0, 2)[None, :] * 2
    if BIAS:
        out += tl.load(bias_ptr + own, mask=own < out_features, other=0.0).to(tl.float32)
    tl.store(out_ptr + own, out.to(out_ptr.dtype.element_ty), mask=own < out_features)


@triton.jit(do_not_specialize=["one"])
def _one_row_kernel(
    x_ptr, words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, bias_ptr, out_ptr,
    x_stride, out_stride, num_tokens, in_features, out_features, one,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, OVERLAP: tl.constexpr, STEPS: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """STEPS times four rows of the weight, times a row of x.

    WHOLE: x stays in registers.
    """
    let_next_start(OVERLAP)
    # Programs with the same weights are adjacent, so weights are read from memory once.
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    first_row = (tl.program_id(0) // num_tokens).to(tl.int64) * (STEPS * 4)
    x_ptr += token * x_stride
    out_ptr += token * out_stride
    rows = _load_four(
        words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, first_row, out_features, 0,
        in_features, KIND, LOW, HIGH, GROUP, QUADS,
    )  # fmt: skip
    wait_for_others(OVERLAP)
    x = _load_x(x_ptr, 0, in_features, LOW, HIGH, ZERO, TABLE, EVEN, QUADS)
    acc = _four_rows(x, rows, one, KIND, LOW, HIGH, GROUP, TABLE, OFFSET, QUADS)
    if WHOLE:
        _store_sums(acc, bias_ptr, out_ptr, first_row, out_features, BIAS)
        for step in range(1, STEPS):
            row = first_row + step * 4
            rows = _load_four(
                words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, row, out_features, 0,
                in_features, KIND, LOW, HIGH, GROUP, QUADS,
            )  # fmt: skip
            acc = _four_rows(x, rows, one, KIND, LOW, HIGH, GROUP, TABLE, OFFSET, QUADS)
            _store_sums(acc, bias_ptr, out_ptr, row, out_features, BIAS)
    else:
        for first_quad in range(QUADS, in_features * LOW // 128, QUADS):
            rows = _load_four(
                words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, first_row, out_features,
                first_quad, in_features, KIND, LOW, HIGH, GROUP, QUADS,
            )  # fmt: skip
            x = _load_x(x_ptr, first_quad, in_features, LOW, HIGH, ZERO, TABLE, EVEN, QUADS)
            acc += _four_rows(x, rows, one, KIND, LOW, HIGH, GROUP, TABLE, OFFSET, QUADS)
        _store_sums(acc, bias_ptr, out_ptr, first_row, out_features, BIAS)


@triton.jit
def _join_four(a, b, c, d):
    """[...] each as [..., 2, 2], in that order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _join_eight(a, b, c, d, e, f, g, h):
    return tl.join(_join_four(a, c, e, g), _join_four(b, d, f, h))


@triton.jit
def _in_order(p, LOW: tl.constexpr, QUADS: tl.constexpr):
    """All planes of some quads, each [QUADS * 4], as columns [QUADS * 128 / LOW]."""
    if LOW == 8:
        joined = _join_four(p[0], p[1], p[2], p[3])
    elif LOW == 4:
        joined = _join_eight(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7])
    else:
        joined = tl.join(
            _join_eight(p[0], p[2], p[4], p[6], p[8], p[10], p[12], p[14]),
            _join_eight(p[1], p[3], p[5], p[7], p[9], p[11], p[13], p[15]),
        )
    return joined.reshape(QUADS, 4, 32 // LOW).permute(0, 2, 1).reshape(QUADS * (128 // LOW))


@triton.jit(do_not_specialize=["one"])
def _floats_kernel(
    row_ptr, words_ptr, high_ptr, first_ptr, second_ptr, third_ptr, out_ptr,
    in_features, one,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, CHOSEN: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """Some quads of one row as floats. CHOSEN: `row_ptr` names the row."""
    PLANES: tl.constexpr = 32 // LOW
    EACH: tl.constexpr = GROUP // 4 if GROUP // 4 < PLANES else PLANES
    at = tl.program_id(0).to(tl.int64)
    row = at
    if CHOSEN:
        row = tl.load(row_ptr + at).to(tl.int64)
    first_quad = tl.program_id(1) * QUADS
    word = tl.arange(0, QUADS * 4)
    words, high, fields = load_weights(
        words_ptr, high_ptr, first_ptr, second_ptr, third_ptr,
        row, row >= 0, word, word // 4, first_quad, in_features, KIND, LOW, HIGH, GROUP,
    )  # fmt: skip
    planes = ()
    for part in tl.static_range(PLANES // EACH):
        scale, offset = scales(fields[part], KIND)
        for index in tl.static_range(EACH):
            weight = values(
                words, high, scale, offset, one, part * EACH + index,
                LOW, HIGH, ZERO, TABLE, OFFSET,
            )  # fmt: skip
            planes += (weight.to(out_ptr.dtype.element_ty),)  # type: ignore[assignment]
    column = first_quad * (128 // LOW) + tl.arange(0, QUADS * (128 // LOW))
    target = out_ptr + at * in_features + column
    tl.store(target, _in_order(planes, LOW, QUADS), mask=column < in_features)


def gguf_linear(
    x: torch.Tensor,  # [n, in]
    weight: Planes,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,  # [n, out], rows may have any stride
) -> torch.Tensor:
    """As the reference. For a few rows, weights are not rounded."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, (out_features, in_features) = x.shape[0], weight.shape
    if out is None:
        out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    tensor_cores = can_multiply(weight.layout, x.dtype)
    if num_tokens > most_single_rows(weight.layout, tensor_cores):
        return multiply_slabs(
            x, lambda start, end: as_floats(weight.rows(start, end), x.dtype), bias, out
        )
    if tensor_cores:
        own_plan = tensor_plan(weight.layout.group, out_features, in_features)
        return tensor_rows(x, weight, bias, out, own_plan)
    return single_rows(x, weight, bias, out, row_plan(weight.type_name, out_features, in_features))


def gguf_embed(token_ids: torch.Tensor, weight: Planes, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize some rows: token_ids [n] -> [n, in]."""
    return as_floats(weight, dtype, token_ids)


def single_rows(
    x: torch.Tensor, weight: Planes, bias: torch.Tensor | None, out: torch.Tensor, plan: RowPlan
) -> torch.Tensor:
    """x [n, in], row by row, times the weight, in floats."""
    num_tokens, (out_features, in_features) = x.shape[0], weight.shape
    num_quads = weight.num_quads
    is_whole = num_quads <= plan.quads
    steps = plan.steps if is_whole else 1
    _one_row_kernel[(triton.cdiv(out_features, 4 * steps) * num_tokens,)](
        x, *weight.pointers, out if bias is None else bias, out,
        x.stride(0), out.stride(0), num_tokens, in_features, out_features, ONE, **weight.constants,
        BIAS=bias is not None, EVEN=num_quads % plan.quads == 0, WHOLE=is_whole,
        **overlap(x.device), STEPS=steps, QUADS=plan.quads,
        num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
    )  # fmt: skip
    return out


def as_floats(weight: Planes, dtype: torch.dtype, rows: torch.Tensor | None = None) -> torch.Tensor:
    """All rows, or the named rows [n], as [n, in] in `dtype`."""
    out_features, in_features = weight.shape
    count = out_features if rows is None else len(rows)
    out = torch.empty((count, in_features), dtype=dtype, device=weight.words.device)
    if count == 0:
        return out
    num_quads = weight.num_quads
    quads = min(triton.next_power_of_2(num_quads), 128)
    _floats_kernel[(count, triton.cdiv(num_quads, quads))](
        weight.words if rows is None else rows, *weight.pointers, out, in_features, ONE,
        **weight.constants, CHOSEN=rows is not None, QUADS=quads, num_warps=4,
    )  # fmt: skip
    return out
