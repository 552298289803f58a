"""Experts with weights in the layout of `packed_layout.py`, over tokens sorted by expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.ops import quantized_experts as plain
from penstock.ops.experts import run_all_experts
from penstock.ops.triton.experts import place, store_activated, store_weighted, sum_experts
from penstock.ops.triton.packed import count_chunks, multiply_chunks
from penstock.ops.triton.packed_layout import Packed
from penstock.ops.triton.routing import align
from penstock.ops.triton.tuning_quantized import quantized_experts_plan


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, extra_ptr, bias_ptr, out_ptr,
    pair_ptr, expert_ptr, rows_ptr, hidden, size, num_blocks, width, num_groups, group_width,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    GLOBAL: tl.constexpr, ZEROS: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [num_blocks * ROWS, size], sorted by expert, of x [n, hidden], in the tokens' order."""
    block, column = place(num_blocks, tl.cdiv(size, COLUMNS), GROUP)
    num_rows = tl.load(rows_ptr + block)
    if num_rows <= 0:
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    pair = tl.load(pair_ptr + block * ROWS + row, mask=is_row, other=0)
    first = column * COLUMNS
    # A tile has COLUMNS gate rows, then as many up rows.
    index = tl.arange(0, 2 * COLUMNS)
    within = first + index % COLUMNS
    is_weight = within < size
    weight_row = expert * 2 * size + tl.where(is_weight, within + index // COLUMNS * size, 0)
    acc = multiply_chunks(
        tl.zeros([2 * COLUMNS, ROWS], tl.float32),
        weight_ptr, scale_ptr, zero_ptr, extra_ptr, x_ptr + (pair // TOP_K).to(tl.int64) * hidden,
        weight_row, is_row, 0, count_chunks(width, KIND), hidden, width, num_groups, group_width,
        KIND, ZEROS, PARTS, EVEN, ASM,
    )  # fmt: skip
    if GLOBAL:
        acc *= tl.load(extra_ptr + weight_row, mask=is_weight, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + weight_row, mask=is_weight, other=0.0).to(tl.float32)[:, None]
    gate, up = acc.reshape(2, COLUMNS, ROWS).permute(2, 1, 0).split()
    store_activated(gate, up, out_ptr, block, first, size, row, is_row, ACTIVATION, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, extra_ptr, bias_ptr, out_ptr, factor_ptr,
    pair_ptr, expert_ptr, rows_ptr, size, hidden, num_blocks, width, num_groups, group_width,
    BIAS: tl.constexpr, KIND: tl.constexpr, GLOBAL: tl.constexpr, ZEROS: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [num_pairs, hidden], weighted, of x [num_blocks * ROWS, size], sorted by expert."""
    block, column = place(num_blocks, tl.cdiv(hidden, COLUMNS), GROUP)
    num_rows = tl.load(rows_ptr + block)
    if num_rows <= 0:
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    within = column * COLUMNS + tl.arange(0, COLUMNS)
    is_weight = within < hidden
    weight_row = expert * hidden + tl.where(is_weight, within, 0)
    acc = multiply_chunks(
        tl.zeros([COLUMNS, ROWS], tl.float32),
        weight_ptr, scale_ptr, zero_ptr, extra_ptr,
        x_ptr + (block * ROWS + row).to(tl.int64) * size,
        weight_row, is_row, 0, count_chunks(width, KIND), size, width, num_groups, group_width,
        KIND, ZEROS, PARTS, EVEN, ASM,
    )  # fmt: skip
    if GLOBAL:
        acc *= tl.load(extra_ptr + weight_row, mask=is_weight, other=0.0)[:, None]
    store_weighted(
        acc, bias_ptr, out_ptr, factor_ptr, pair_ptr, expert, block, hidden, within, is_weight,
        row, is_row, BIAS, ROWS,
    )  # fmt: skip


def w4_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # from `prepare_w4`: [experts, 2 * intermediate, words]
    gate_up_scales: torch.Tensor,  # [experts, 2 * intermediate, hidden / group_size]
    gate_up_zeros: torch.Tensor | None,
    down: torch.Tensor,  # [experts, hidden, words]
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    group_size: int,  # the row length, if a row has one scale
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    bits: int = 4,
) -> torch.Tensor:
    """As the reference. Weights in another layout (unusual quantization groups) are slow."""
    if gate_up.dtype != torch.int16 or down.dtype != torch.int16:
        return plain.w4_experts(
            x, weights, ids, gate_up, gate_up_scales, gate_up_zeros, down, down_scales, down_zeros,
            group_size, activation, gate_up_bias, down_bias, bits, run_all_experts,
        )  # fmt: skip
    first = Packed(gate_up, gate_up_scales, gate_up_zeros, group_size)
    second = Packed(down, down_scales, down_zeros, group_size)
    return experts(x, weights, ids, first, second, activation, gate_up_bias, down_bias)


def fp4_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # from `prepare_fp4`: [experts, 2 * intermediate, words]
    gate_up_scales: torch.Tensor,  # [experts, 2 * intermediate, hidden / group_size]
    gate_up_global: torch.Tensor | None,  # [experts, 2 * intermediate]
    down: torch.Tensor,  # [experts, hidden, words]
    down_scales: torch.Tensor,
    down_global: torch.Tensor | None,
    group_size: int,
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference."""
    assert gate_up.dtype == down.dtype == torch.int16, "groups of 16 or 32 are what there is"
    first = Packed(gate_up, gate_up_scales, None, group_size, "fp4", gate_up_global)
    second = Packed(down, down_scales, None, group_size, "fp4", down_global)
    return experts(x, weights, ids, first, second, activation, gate_up_bias, down_bias)


def table_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # from `prepare_table`: [experts, 2 * intermediate, bytes]
    gate_up_scales: torch.Tensor,  # [experts, 2 * intermediate, groups]
    down: torch.Tensor,  # [experts, hidden, bytes]
    down_scales: torch.Tensor,
    values: torch.Tensor,  # [16] float32
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference."""
    size = gate_up.shape[1] // 2
    groups = x.shape[1] // gate_up_scales.shape[-1], size // down_scales.shape[-1]
    first = Packed(gate_up, gate_up_scales, None, groups[0], "table", values)
    second = Packed(down, down_scales, None, groups[1], "table", values)
    return experts(x, weights, ids, first, second, activation, gate_up_bias, down_bias)


def w8_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden] uint8
    gate_up_scales: torch.Tensor,  # [experts, 2 * intermediate, hidden / group_size]
    gate_up_zeros: torch.Tensor | None,
    down: torch.Tensor,  # [experts, hidden, intermediate] uint8
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    group_size: int,  # the row length, if a row has one scale
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference."""
    first = Packed(gate_up, gate_up_scales, gate_up_zeros, group_size, "w8")
    second = Packed(down, down_scales, down_zeros, group_size, "w8")
    return experts(x, weights, ids, first, second, activation, gate_up_bias, down_bias)


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Packed,
    down: Packed,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """Each token's weighted sum over its experts: [n, hidden]."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    num_experts, double, _ = gate_up.data.shape
    hidden, size = x.shape[1], double // 2
    plan = quantized_experts_plan(num_tokens * top_k, num_experts, x.element_size())
    blocks = align(ids, num_experts, plan.rows)
    num_blocks = len(blocks.experts)
    x = x.contiguous()
    activated = torch.empty((len(blocks.pairs), size), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(num_blocks * triton.cdiv(size, plan.gate_up.columns),)](
        x, *gate_up.operands, x if gate_up_bias is None else gate_up_bias, activated,
        blocks.pairs, blocks.experts, blocks.rows, hidden, size, num_blocks, *gate_up.sizes,
        TOP_K=top_k, ACTIVATION=activation, BIAS=gate_up_bias is not None, **gate_up.constants,
        ASM=x.is_cuda, EVEN=gate_up.is_even(hidden), ROWS=plan.rows,
        COLUMNS=plan.gate_up.columns, GROUP=plan.gate_up.group,
        num_warps=plan.gate_up.launch.num_warps, num_stages=plan.gate_up.launch.num_stages,
    )  # fmt: skip
    weighted = torch.empty((num_tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    _down_kernel[(num_blocks * triton.cdiv(hidden, plan.down.columns),)](
        activated, *down.operands, x if down_bias is None else down_bias, weighted, weights,
        blocks.pairs, blocks.experts, blocks.rows, size, hidden, num_blocks, *down.sizes,
        BIAS=down_bias is not None, **down.constants, ASM=x.is_cuda, EVEN=down.is_even(size),
        ROWS=plan.rows, COLUMNS=plan.down.columns, GROUP=plan.down.group,
        num_warps=plan.down.launch.num_warps, num_stages=plan.down.launch.num_stages,
    )  # fmt: skip
    return sum_experts(weighted, ids, num_experts)
