"""Experts with e4m3 weights: as in experts.py, tokens are sorted by expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.ops.triton.experts import place, store_activated, store_weighted, sum_experts
from penstock.ops.triton.fp8 import BLOCK, quantize
from penstock.ops.triton.routing import Blocks, align
from penstock.ops.triton.tuning import ExpertsPlan
from penstock.ops.triton.tuning_quantized import quantized_experts_plan


@triton.jit(do_not_specialize=["num_blocks", "num_scales"])
def _fp8_gate_up_kernel(
    x_ptr, weight, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, pair_ptr, expert_ptr, rows_ptr,
    hidden, size, num_blocks, num_scales, scale_rows, scale_columns,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, BLOCKED: tl.constexpr,
    ROW_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out [num_blocks * ROWS, size], sorted by expert, of x [n, hidden] e4m3, in tokens' order."""
    block, column = place(num_blocks, tl.cdiv(size, COLUMNS), GROUP)
    num_rows = tl.load(rows_ptr + block)
    if num_rows <= 0:
        return
    expert = tl.load(expert_ptr + block)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    pair = tl.load(pair_ptr + block * ROWS + row, mask=is_row, other=0)
    token = pair // TOP_K
    depth = tl.arange(0, DEPTH)
    source = x_ptr + token.to(tl.int64)[:, None] * hidden + depth[None, :]
    first = column * COLUMNS
    # A tile's rows: COLUMNS of the gate's, then as many of up's.
    index = tl.arange(0, 2 * COLUMNS)
    within = first + index % COLUMNS
    weight_row = within + index // COLUMNS * size
    is_weight = within < size
    scales = w_scale_ptr + expert.to(tl.int64) * scale_rows * scale_columns
    acc = tl.zeros([2 * COLUMNS, ROWS], tl.float32)
    for at in range(0, hidden, DEPTH):
        mask = is_row[:, None] & (at + depth < hidden)[None, :]
        rows = tl.load(source + at, mask=mask, other=0.0)
        columns = weight.load([expert, 0, first, at]).reshape(2 * COLUMNS, DEPTH)
        if BLOCKED:
            w_at = scales + weight_row // ROW_BLOCK * scale_columns + at // 128
            w_scale = tl.load(w_at, mask=is_weight, other=0.0)
            x_at = x_scale_ptr + (at // 128) * num_scales + token
            x_scale = tl.load(x_at, mask=is_row, other=0.0)
            acc += tl.dot(columns, rows.T) * w_scale[:, None] * x_scale[None, :]
        else:
            acc = tl.dot(columns, rows.T, acc, max_num_imprecise_acc=DEPTH)
    if not BLOCKED:
        acc *= tl.load(x_scale_ptr + token, mask=is_row, other=0.0)[None, :]
        acc *= tl.load(scales + weight_row, mask=is_weight, other=0.0)[:, None]
    if BIAS:
        bias = bias_ptr + expert.to(tl.int64) * 2 * size + weight_row
        acc += tl.load(bias, mask=is_weight, other=0.0).to(tl.float32)[:, None]
    store_activated(acc, out_ptr, block, first, size, row, is_row, ACTIVATION, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["num_blocks", "num_scales"])
def _fp8_down_kernel(
    x, weight, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, factor_ptr, pair_ptr, expert_ptr,
    rows_ptr, size, hidden, num_blocks, num_scales, scale_rows, scale_columns,
    BIAS: tl.constexpr, BLOCKED: tl.constexpr, ROW_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [num_pairs, hidden], weighted, of x [num_blocks * ROWS, size] e4m3, which is sorted."""
    block, column = place(num_blocks, tl.cdiv(hidden, COLUMNS), GROUP)
    num_rows = tl.load(rows_ptr + block)
    if num_rows <= 0:
        return
    expert = tl.load(expert_ptr + block)
    first = column * COLUMNS
    weight_row = first + tl.arange(0, COLUMNS)
    is_weight = weight_row < hidden
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    scales = w_scale_ptr + expert.to(tl.int64) * scale_rows * scale_columns
    x_scales = x_scale_ptr + block * ROWS + row
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in range(0, size, DEPTH):
        rows = x.load([block * ROWS, at])  # padding holds anything: it is not stored
        columns = weight.load([expert, first, at]).reshape(COLUMNS, DEPTH)
        if BLOCKED:
            w_at = scales + weight_row // ROW_BLOCK * scale_columns + at // 128
            w_scale = tl.load(w_at, mask=is_weight, other=0.0)
            x_scale = tl.load(x_scales + (at // 128) * num_scales, mask=is_row, other=0.0)
            acc += tl.dot(columns, rows.T) * w_scale[:, None] * x_scale[None, :]
        else:
            acc = tl.dot(columns, rows.T, acc, max_num_imprecise_acc=DEPTH)
    if not BLOCKED:
        acc *= tl.load(x_scales, mask=is_row, other=0.0)[None, :]
        acc *= tl.load(scales + weight_row, mask=is_weight, other=0.0)[:, None]
    store_weighted(
        acc, bias_ptr, out_ptr, factor_ptr, pair_ptr, expert, block, hidden, weight_row, is_weight,
        row, is_row, BIAS, ROWS,
    )  # fmt: skip


def fp8_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden] float8_e4m3fn: gate above up
    gate_up_scale: torch.Tensor,  # [experts, 2 * intermediate], or by block
    down: torch.Tensor,  # [experts, hidden, intermediate] float8_e4m3fn
    down_scale: torch.Tensor,
    gate_up_input_scale: torch.Tensor | None,  # scalar; None: dynamic
    down_input_scale: torch.Tensor | None,
    activation: str,
    gate_up_bias: torch.Tensor | None = None,  # [experts, 2 * intermediate]
    down_bias: torch.Tensor | None = None,  # [experts, hidden]
) -> torch.Tensor:
    """As the reference; rows of both matrices are multiples of 16 numbers."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    assert gate_up.shape[2] % 16 == 0, "the copy engine wants whole 16 bytes"
    assert down.shape[2] % 16 == 0, "the copy engine wants whole 16 bytes"
    plan = quantized_experts_plan(num_tokens * top_k, len(gate_up), gate_up.element_size())
    blocks = align(ids, len(gate_up), plan.rows)
    activated = _fp8_gate_up(
        x.contiguous(), blocks, top_k, gate_up, gate_up_scale, gate_up_input_scale, gate_up_bias,
        activation, plan,
    )  # fmt: skip
    weighted = _fp8_down(
        activated, blocks, weights, down, down_scale, down_input_scale, down_bias, plan
    )
    return sum_experts(weighted, num_tokens)


class _Scales:
    """Scales of all experts' rows or blocks, and what a kernel needs to know of them."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        num_experts, out_features, _ = weight.shape
        self.data = scale.float()
        if self.data.ndim == 1:  # one an expert
            self.data = self.data[:, None].expand(num_experts, out_features)
        self.data = self.data.contiguous()
        self.blocked = self.data.ndim == 3
        self.rows = self.data.shape[1]
        self.columns = self.data.shape[2] if self.blocked else 1
        self.row_block = 1 if self.rows == out_features else BLOCK


def _quantize(
    x: torch.Tensor, static: torch.Tensor | None, blocked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rounded, scales, _ = quantize(x, static, blocked)
    if blocked and static is not None:
        scales = scales.expand(triton.cdiv(x.shape[1], BLOCK), -1).contiguous()
    return rounded, scales


def _fp8_gate_up(
    x: torch.Tensor,
    blocks: Blocks,
    top_k: int,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    plan: ExpertsPlan,
) -> torch.Tensor:
    """[num_blocks * rows, size], sorted by expert."""
    num_experts, double, hidden = weight.shape
    size, num_blocks, tile = double // 2, len(blocks.experts), plan.gate_up
    scales = _Scales(weight, weight_scale)
    rounded, x_scales = _quantize(x, input_scale, scales.blocked)
    out = torch.empty((len(blocks.pairs), size), dtype=x.dtype, device=x.device)
    pairs_of_columns = TensorDescriptor.from_tensor(
        weight.view(num_experts, 2, size, hidden), [1, 2, tile.columns, tile.depth]
    )
    _fp8_gate_up_kernel[(num_blocks * triton.cdiv(size, tile.columns),)](
        rounded, pairs_of_columns, x_scales, scales.data, x if bias is None else bias, out,
        blocks.pairs, blocks.experts, blocks.rows, hidden, size, num_blocks, len(x),
        scales.rows, scales.columns,
        TOP_K=top_k, ACTIVATION=activation, BIAS=bias is not None, BLOCKED=scales.blocked,
        ROW_BLOCK=scales.row_block, ROWS=plan.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        GROUP=tile.group, num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
    return out


def _fp8_down(
    x: torch.Tensor,  # [num_blocks * rows, size], sorted by expert
    blocks: Blocks,
    factors: torch.Tensor,  # [n, top_k]
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    plan: ExpertsPlan,
) -> torch.Tensor:
    """[n * top_k, hidden], weighted, in the tokens' order."""
    _, hidden, size = weight.shape
    num_blocks, tile = len(blocks.experts), plan.down
    scales = _Scales(weight, weight_scale)
    rounded, x_scales = _quantize(x, input_scale, scales.blocked)
    out = torch.empty((factors.numel(), hidden), dtype=x.dtype, device=x.device)
    _fp8_down_kernel[(num_blocks * triton.cdiv(hidden, tile.columns),)](
        TensorDescriptor.from_tensor(rounded, [plan.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [1, tile.columns, tile.depth]),
        x_scales, scales.data, x if bias is None else bias, out, factors,
        blocks.pairs, blocks.experts, blocks.rows, size, hidden, num_blocks, len(x),
        scales.rows, scales.columns,
        BIAS=bias is not None, BLOCKED=scales.blocked, ROW_BLOCK=scales.row_block, ROWS=plan.rows,
        COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=tile.group,
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
    return out
