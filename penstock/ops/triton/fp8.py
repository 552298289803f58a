"""Products with e4m3 weights.

One row: weights become floats in registers and activations stay unquantized; this is bound by
memory. More rows are rounded to fp8 first, each with its own scale, and use the tensor cores. Up to
`few_rows`, a kernel splits the columns among programs. Beyond, torch's scaled matmul runs, or,
where that is not supported, the same kernel with larger tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.ops import quantized as plain
from penstock.ops.triton.overlap import begin, overlap
from penstock.ops.triton.splitting import add_parts
from penstock.ops.triton.tuning import RowTile
from penstock.ops.triton.tuning_quantized import (
    Fp8Plan,
    fp8_plan,
    fp8_row_tile,
    takes_own_kernel,
)
from penstock.protocol.errors import ConfigError

FP8 = torch.float8_e4m3fn
BLOCK = 128  # rows and columns of a quantization block
FP8_MAX = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(1e-12)


@triton.jit
def _quantize_kernel(
    x_ptr, static_ptr, out_ptr, scale_ptr, arrived_ptr, x_stride, size, num_rows, num_arrived,
    STATIC: tl.constexpr, GROUPED: tl.constexpr, ARRIVED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize a row to e4m3, with one scale or one per 128 columns: scales [groups, num_rows].

    The first program also zeroes the counters of the matmul that follows.
    """
    row = tl.program_id(0).to(tl.int64)
    if ARRIVED > 0:  # noqa: SIM102  known when compiled, unlike the program
        if row == 0:
            counter = tl.arange(0, ARRIVED)
            tl.store(arrived_ptr + counter, tl.zeros([ARRIVED], tl.int32), counter < num_arrived)
    column = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static_ptr)
        tl.store(scale_ptr + row, scale)
        scaled = x / scale
    elif GROUPED:
        grouped = x.reshape(COLUMNS // 128, 128)
        scale = tl.maximum(tl.max(tl.abs(grouped), axis=1) / FP8_MAX, SMALLEST_SCALE)
        group = tl.arange(0, COLUMNS // 128)
        tl.store(scale_ptr + group * num_rows + row, scale, mask=group < tl.cdiv(size, 128))
        scaled = (grouped / scale[:, None]).reshape(COLUMNS)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) / FP8_MAX, SMALLEST_SCALE)
        tl.store(scale_ptr + row, scale)
        scaled = x / scale
    scaled = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    tl.store(out_ptr + row * size + column, scaled.to(tl.float8e4nv), mask=column < size)


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, in_features, out_features, num_blocks,
    BIAS: tl.constexpr, BLOCKED: tl.constexpr, ROW_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight times x. Products are summed across threads once, at the end.

    SPAN columns, all of one thread, are summed at once. Float32 sums take four times the registers
    of their inputs, and prefetching needs those registers.
    """
    begin(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < out_features
    if BLOCKED:
        block, within = tl.arange(0, COLUMNS // 128), tl.arange(0, 128)
        column = block[:, None] * 128 + within[None, :]
        source = weight_ptr + row.to(tl.int64)[:, None, None] * in_features + column[None, :, :]
        acc = tl.zeros([ROWS, COLUMNS // 128, 128 // SPAN], tl.float32)
        scales = scale_ptr + (row // ROW_BLOCK)[:, None] * num_blocks + block[None, :]
        for at in range(0, in_features, COLUMNS):
            is_column = at + column < in_features
            mask = is_row[:, None, None] & is_column[None, :, :]
            weight = tl.load(source + at, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + at + column, mask=is_column, other=0.0).to(tl.float32)
            exists = is_row[:, None] & (at // 128 + block < num_blocks)[None, :]
            scale = tl.load(scales + at // 128, mask=exists, other=0.0)
            product = weight.to(tl.float32) * x[None, :, :]
            product = product.reshape(ROWS, COLUMNS // 128, 128 // SPAN, SPAN)
            acc += tl.sum(product, axis=3) * scale[:, :, None]
        out = tl.sum(tl.sum(acc, axis=2), axis=1)
    else:
        column = tl.arange(0, COLUMNS)
        source = weight_ptr + row.to(tl.int64)[:, None] * in_features + column[None, :]
        acc = tl.zeros([ROWS, COLUMNS // SPAN], tl.float32)
        for at in range(0, in_features, COLUMNS):
            is_column = at + column < in_features
            mask = is_row[:, None] & is_column[None, :]
            weight = tl.load(source + at, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + at + column, mask=is_column, other=0.0)
            product = weight.to(tl.float32) * x.to(tl.float32)[None, :]
            acc += tl.sum(product.reshape(ROWS, COLUMNS // SPAN, SPAN), axis=2)
        out = tl.sum(acc, axis=1) * tl.load(scale_ptr + row, mask=is_row, other=0.0)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x, weight, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    num_tokens, in_features, out_features, num_blocks,
    BIAS: tl.constexpr, BLOCKED: tl.constexpr, ROW_BLOCK: tl.constexpr, SWAP: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight times TOKENS rows of x, over one split of the columns."""
    first_token, first = tl.program_id(0) * TOKENS, tl.program_id(1) * ROWS
    split = tl.program_id(2)
    token, row = first_token + tl.arange(0, TOKENS), first + tl.arange(0, ROWS)
    is_token, is_row = token < num_tokens, row < out_features
    steps = tl.cdiv(tl.cdiv(in_features, DEPTH), SPLITS)
    low = split * steps * DEPTH
    high = tl.minimum(low + steps * DEPTH, in_features)
    if SWAP:  # the weights are the left operand, which suits few tokens
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for at in range(low, high, DEPTH):
        columns = weight.load([first, at])
        rows = x.load([first_token, at])
        if BLOCKED:  # a step is one quantization block
            block = at // 128
            w_scale = tl.load(
                w_scale_ptr + (row // ROW_BLOCK) * num_blocks + block, mask=is_row, other=0.0
            )
            x_scale = tl.load(x_scale_ptr + block * num_tokens + token, mask=is_token, other=0.0)
            if SWAP:
                acc += tl.dot(columns, rows.T) * w_scale[:, None] * x_scale[None, :]
            else:
                acc += tl.dot(rows, columns.T) * x_scale[:, None] * w_scale[None, :]
        elif PRECISE:  # tensor cores keep few bits of a sum: they sum only one step
            if SWAP:
                acc = tl.dot(columns, rows.T, acc, max_num_imprecise_acc=DEPTH)
            else:
                acc = tl.dot(rows, columns.T, acc, max_num_imprecise_acc=DEPTH)
        elif SWAP:
            acc = tl.dot(columns, rows.T, acc)
        else:
            acc = tl.dot(rows, columns.T, acc)
    if SWAP:
        acc = acc.T
    offset = token.to(tl.int64)[:, None] * out_features + row[None, :]
    mask = is_token[:, None] & is_row[None, :]
    done = True
    if SPLITS > 1:
        arrived = arrived_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        stride = num_tokens.to(tl.int64) * out_features
        acc, done = add_parts(acc, partial_ptr, arrived, offset, stride, mask, split, SPLITS)
    if done:
        if not BLOCKED:
            acc *= tl.load(x_scale_ptr + token, mask=is_token, other=0.0)[:, None]
            acc *= tl.load(w_scale_ptr + row, mask=is_row, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


def prepare_fp8(
    weight: torch.Tensor, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales per row or per quantization block, in float32. Refuses GPUs without fp8."""
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        raise ConfigError(
            "fp8 weights need a GPU of compute capability 8.9 or above, got "
            f"{torch.cuda.get_device_name(weight.device)}: choose weights of 4 bits (GPTQ, AWQ, "
            "compressed-tensors) or an unquantized model"
        )
    scale = weight_scale.float()
    if scale.ndim == 0:
        scale = scale.expand(len(weight))
    return weight.contiguous(), scale.contiguous()


def fp8_linear(
    x: torch.Tensor,  # [n, in]
    weight: torch.Tensor,  # [out, in] float8_e4m3fn
    weight_scale: torch.Tensor,  # float32, as `prepare_fp8` gives it
    input_scale: torch.Tensor | None,  # scalar; None: dynamic
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference, but a single row is not rounded to fp8."""
    num_tokens, (out_features, in_features) = x.shape[0], weight.shape
    if in_features % 16 or weight_scale.ndim == 0:  # TMA needs multiples of 16 bytes
        return plain.fp8_linear(x, weight, weight_scale, input_scale, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    if num_tokens == 0:
        return x.new_empty((0, out_features))
    if num_tokens == 1:
        return one_row(x, weight, weight_scale, bias)
    blocked = weight_scale.ndim == 2
    torch_can = not blocked and x.dtype == torch.bfloat16 and out_features % 16 == 0
    if torch_can and not takes_own_kernel(num_tokens):
        rounded, scales, _ = quantize(x, input_scale, False)
        return torch._scaled_mm(
            rounded, weight.t(), scale_a=scales[:, None], scale_b=weight_scale[None, :],
            bias=bias, out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
    plan = fp8_plan(num_tokens, out_features, in_features, blocked)
    return run_tiles(x, weight, weight_scale, input_scale, bias, plan)


def quantize(
    x: torch.Tensor, static: torch.Tensor | None, grouped: bool, num_arrived: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x in e4m3, its scales ([n], or [ceil(size / 128), n]), and `num_arrived` int32 zeros."""
    num_rows, size = x.shape
    grouped = grouped and static is None
    rounded = torch.empty((num_rows, size), dtype=FP8, device=x.device)
    shape = (triton.cdiv(size, BLOCK), num_rows) if grouped else (num_rows,)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    arrived = torch.empty(num_arrived, dtype=torch.int32, device=x.device)
    columns = max(triton.next_power_of_2(size), BLOCK)
    _quantize_kernel[(num_rows,)](
        x, x if static is None else static, rounded, scales, arrived, x.stride(0), size, num_rows,
        num_arrived, STATIC=static is not None, GROUPED=grouped,
        ARRIVED=triton.next_power_of_2(num_arrived) if num_arrived else 0, COLUMNS=columns,
        num_warps=min(max(columns // 512, 1), 16),
    )  # fmt: skip
    return rounded, scales, arrived


def run_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    plan: Fp8Plan,
) -> torch.Tensor:
    """x [n, in] times the weight, on the tensor cores."""
    num_tokens, (out_features, in_features) = x.shape[0], weight.shape
    blocked = weight_scale.ndim == 2
    grid = (triton.cdiv(num_tokens, plan.tokens), triton.cdiv(out_features, plan.rows), plan.splits)
    rounded, scales, arrived = quantize(
        x, input_scale, blocked, grid[0] * grid[1] if plan.splits > 1 else 0
    )
    if blocked and input_scale is not None:
        scales = scales.expand(triton.cdiv(in_features, BLOCK), -1).contiguous()
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    partial = out
    if plan.splits > 1:
        shape = (plan.splits, num_tokens, out_features)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    _tile_kernel[grid](
        TensorDescriptor.from_tensor(rounded, [plan.tokens, plan.depth]),
        TensorDescriptor.from_tensor(weight, [plan.rows, plan.depth]),
        scales, weight_scale, out if bias is None else bias, out, partial, arrived,
        num_tokens, in_features, out_features, weight_scale.shape[1] if blocked else 0,
        BIAS=bias is not None, BLOCKED=blocked, ROW_BLOCK=_row_block(weight, weight_scale),
        SWAP=plan.swap, SPLITS=plan.splits, ROWS=plan.rows, TOKENS=plan.tokens, DEPTH=plan.depth,
        PRECISE=plan.precise,
        num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages,
    )  # fmt: skip
    return out


def one_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tile: RowTile | None = None,
    span: int = 16,
) -> torch.Tensor:
    """x [1, in] times the weight, in floats."""
    out_features, in_features = weight.shape
    blocked = weight_scale.ndim == 2
    tile = fp8_row_tile(out_features, blocked) if tile is None else tile
    out = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(out_features, tile.rows),)](
        x, weight, weight_scale, out if bias is None else bias, out, in_features, out_features,
        weight_scale.shape[1] if blocked else 0, BIAS=bias is not None, BLOCKED=blocked,
        ROW_BLOCK=_row_block(weight, weight_scale), ROWS=tile.rows, COLUMNS=tile.columns,
        SPAN=span, **overlap(x.device),
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
    return out


def _row_block(weight: torch.Tensor, weight_scale: torch.Tensor) -> int:
    """How many rows share a row of scales."""
    return 1 if len(weight_scale) == len(weight) else BLOCK
