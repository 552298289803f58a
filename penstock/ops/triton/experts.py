"""MoE kernels: two matmuls over tokens sorted by expert, with the activation fused into the first.

Very few tokens are not sorted: the rows of each of their experts' matrices are read directly.
Nothing here synchronizes with the host, so graphs can be captured.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.ops.triton.routing import Blocks, align
from penstock.ops.triton.tuning import (
    ExpertsPlan,
    experts_plan,
    few_experts_tiles,
    is_few_tokens,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_clamped")


def refusal(hidden: int, size: int, activation: str, dtype: torch.dtype) -> str | None:
    """Why experts of these sizes have no kernel; None if they have one."""
    if activation not in ACTIVATIONS:
        return f"activation {activation} has no kernel"
    if (hidden * dtype.itemsize) % 16 or (size * dtype.itemsize) % 16:
        return f"rows of {hidden} and {size} elements are not multiples of 16 bytes"
    return None


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-inner)) * up
    gate = tl.minimum(gate, 7.0)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)


@triton.jit
def place(num_blocks, num_columns, GROUP: tl.constexpr):
    """Which tile this program computes: GROUP token blocks share cached weight columns."""
    program = tl.program_id(0)
    group_size = GROUP * num_columns
    first = program // group_size * GROUP
    size = tl.minimum(num_blocks - first, GROUP)
    within = program % group_size
    return first + within % size, within // size


@triton.jit
def store_activated(
    gate, up,  # [ROWS, COLUMNS] float32
    out_ptr, block, first, size, row, is_row,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a token block's rows of out [num_blocks * ROWS, size], columns from `first` on."""
    at = first + tl.arange(0, COLUMNS)
    out = activate(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    target = out_ptr + (block * ROWS + row).to(tl.int64)[:, None] * size + at[None, :]
    tl.store(target, out, mask=is_row[:, None] & (at < size)[None, :])


@triton.jit
def store_weighted(
    acc,  # [columns, ROWS] float32
    bias_ptr, out_ptr, factor_ptr, pair_ptr, expert, block, hidden, column, is_column,
    row, is_row, BIAS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store acc in its pairs' rows of out, times each pair's routing weight."""
    if BIAS:
        bias = bias_ptr + expert.to(tl.int64) * hidden + column
        acc += tl.load(bias, mask=is_column, other=0.0).to(tl.float32)[:, None]
    pair = tl.load(pair_ptr + block * ROWS + row, mask=is_row, other=0)
    acc *= tl.load(factor_ptr + pair, mask=is_row, other=0.0)[None, :]
    target = out_ptr + pair.to(tl.int64)[:, None] * hidden + column[None, :]
    out = acc.T.to(out_ptr.dtype.element_ty)
    tl.store(target, out, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _accumulate(
    acc, columns, rows, w_scale_at, x_scale_at, is_weight, is_row,
    SCALES: tl.constexpr, SWAP: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """acc + one step of columns [COLUMNS, DEPTH] times rows [ROWS, DEPTH].

    SWAP: the weights are the left operand, which suits few rows. SCALES: numbers are e4m3. Scales
    by "rows" are applied at the end; scales by "blocks" of 128 columns are applied at each step.
    """
    if SCALES == "blocks":
        w_scale = tl.load(w_scale_at, mask=is_weight, other=0.0)
        x_scale = tl.load(x_scale_at, mask=is_row, other=0.0)
        acc += tl.dot(columns, rows.T) * w_scale[:, None] * x_scale[None, :]
    elif SCALES == "rows":
        acc = tl.dot(columns, rows.T, acc, max_num_imprecise_acc=DEPTH)
    elif SWAP:
        acc = tl.dot(columns, rows.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, columns.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_blocks", "num_scales"])
def _gate_up_kernel(
    x_ptr, weight, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, pair_ptr, expert_ptr, rows_ptr,
    hidden, size, num_blocks, num_scales, scale_rows, scale_columns,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, SCALES: tl.constexpr,
    ROW_BLOCK: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [num_blocks * ROWS, size], sorted by expert, of x [n, hidden], in the tokens' order."""
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
    # A tile has COLUMNS gate rows, then as many up rows.
    index = tl.arange(0, 2 * COLUMNS)
    within = first + index % COLUMNS
    weight_row = within + index // COLUMNS * size
    is_weight = within < size
    scales = w_scale_ptr + expert.to(tl.int64) * scale_rows * scale_columns
    if SWAP:
        acc = tl.zeros([2 * COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    for at in range(0, hidden, DEPTH):
        mask = is_row[:, None] if EVEN else is_row[:, None] & (at + depth < hidden)[None, :]
        rows = tl.load(source + at, mask=mask, other=0.0)
        columns = weight.load([expert, 0, first, at]).reshape(2 * COLUMNS, DEPTH)
        acc = _accumulate(
            acc, columns, rows, scales + weight_row // ROW_BLOCK * scale_columns + at // 128,
            x_scale_ptr + (at // 128) * num_scales + token, is_weight, is_row, SCALES, SWAP, DEPTH,
        )  # fmt: skip
    if SCALES == "rows":
        acc *= tl.load(x_scale_ptr + token, mask=is_row, other=0.0)[None, :]
        acc *= tl.load(scales + weight_row, mask=is_weight, other=0.0)[:, None]
    if SWAP:
        gate, up = acc.reshape(2, COLUMNS, ROWS).permute(2, 1, 0).split()
    else:
        gate, up = acc.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
    if BIAS:
        at = first + tl.arange(0, COLUMNS)
        bias = bias_ptr + expert.to(tl.int64) * 2 * size + at
        gate += tl.load(bias, mask=at < size, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + size, mask=at < size, other=0.0).to(tl.float32)[None, :]
    store_activated(gate, up, out_ptr, block, first, size, row, is_row, ACTIVATION, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["num_blocks", "num_scales"])
def _down_kernel(
    x, weight, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, factor_ptr, pair_ptr, expert_ptr,
    rows_ptr, size, hidden, num_blocks, num_scales, scale_rows, scale_columns,
    BIAS: tl.constexpr, SCALES: tl.constexpr, ROW_BLOCK: tl.constexpr, SWAP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [num_pairs, hidden], weighted, of x [num_blocks * ROWS, size], sorted by expert."""
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
    if SWAP:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, size, DEPTH):
        rows = x.load([block * ROWS, at])  # padding rows are arbitrary and not stored
        columns = weight.load([expert, first, at]).reshape(COLUMNS, DEPTH)
        acc = _accumulate(
            acc, columns, rows, scales + weight_row // ROW_BLOCK * scale_columns + at // 128,
            x_scales + (at // 128) * num_scales, is_weight, is_row, SCALES, SWAP, DEPTH,
        )  # fmt: skip
    if SCALES == "rows":
        acc *= tl.load(x_scales, mask=is_row, other=0.0)[None, :]
        acc *= tl.load(scales + weight_row, mask=is_weight, other=0.0)[:, None]
    if not SWAP:
        acc = acc.T
    store_weighted(
        acc, bias_ptr, out_ptr, factor_ptr, pair_ptr, expert, block, hidden, weight_row, is_weight,
        row, is_row, BIAS, ROWS,
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    x_ptr, id_ptr, out_ptr, hidden, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum x [n, TOP_K, hidden] over the experts of this rank: out [n, hidden]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        source = x_ptr + (token * TOP_K + slot) * hidden + at
        expert = tl.load(id_ptr + token * TOP_K + slot)
        width = tl.where(expert < num_experts, hidden, 0)
        total += tl.load(source, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + at, total.to(out_ptr.dtype.element_ty), mask=at < hidden)


@triton.jit
def _few_gate_up_kernel(
    x_ptr, id_ptr, weight_ptr, bias_ptr, out_ptr, hidden, size, num_experts,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [num_pairs, size]: ROWS rows of a pair's gate and up."""
    pair = tl.program_id(1)
    expert = tl.load(id_ptr + pair).to(tl.int64)
    if expert >= num_experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < size
    column = tl.arange(0, BLOCK)
    source = weight_ptr + (expert * 2 * size + row)[:, None] * hidden + column[None, :]
    x_source = x_ptr + (pair // TOP_K).to(tl.int64) * hidden + column
    gate = tl.zeros([ROWS, BLOCK], tl.float32)
    up = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, hidden, BLOCK):
        is_column = at + column < hidden
        mask = is_row[:, None] & is_column[None, :]
        x = tl.load(x_source + at, mask=is_column, other=0.0).to(tl.float32)[None, :]
        gate_weight = tl.load(source + at, mask=mask, other=0.0, eviction_policy="evict_first")
        up_weight = tl.load(
            source + size * hidden + at, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        gate += gate_weight.to(tl.float32) * x
        up += up_weight.to(tl.float32) * x
    gate = tl.sum(gate, axis=1)
    up = tl.sum(up, axis=1)
    if BIAS:
        bias = bias_ptr + expert * 2 * size + row
        gate += tl.load(bias, mask=is_row, other=0.0).to(tl.float32)
        up += tl.load(bias + size, mask=is_row, other=0.0).to(tl.float32)
    out = activate(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * size + row, out, mask=is_row)


@triton.jit
def _few_down_kernel(
    x_ptr, id_ptr, scale_ptr, weight_ptr, bias_ptr, out_ptr, size, hidden, num_experts,
    TOP_K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [n, hidden]: ROWS rows of a token's output, over its experts as if concatenated."""
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < hidden
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, TOP_K * size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_column = column < TOP_K * size
        pair = token * TOP_K + column // size
        expert = tl.load(id_ptr + pair, mask=is_column, other=0).to(tl.int64)
        is_column = is_column & (expert < num_experts)
        scale = tl.load(scale_ptr + pair, mask=is_column, other=0.0)
        x = tl.load(x_ptr + token * TOP_K * size + column, mask=is_column, other=0.0)
        source = weight_ptr + expert * hidden * size + column % size
        weight = tl.load(
            source[None, :] + row.to(tl.int64)[:, None] * size,
            mask=is_row[:, None] & is_column[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        acc += weight.to(tl.float32) * (x.to(tl.float32) * scale)[None, :]
    out = tl.sum(acc, axis=1)
    if BIAS:
        for slot in tl.static_range(TOP_K):
            expert = tl.load(id_ptr + token * TOP_K + slot).to(tl.int64)
            width = tl.where(expert < num_experts, hidden, 0)
            bias = tl.load(bias_ptr + expert * hidden + row, mask=row < width, other=0.0)
            out += bias.to(tl.float32) * tl.load(scale_ptr + token * TOP_K + slot)
    tl.store(out_ptr + token * hidden + row, out.to(out_ptr.dtype.element_ty), mask=is_row)


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, except for what `refusal` rejects."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    x = x.contiguous()
    if is_few_tokens(num_tokens):
        return _few(x, weights, ids, gate_up, down, activation, gate_up_bias, down_bias)
    plan = experts_plan(num_tokens * top_k, len(gate_up), x.element_size())
    blocks = align(ids, len(gate_up), plan.rows)
    activated = run_gate_up(x, blocks, top_k, gate_up, gate_up_bias, activation, plan)
    scaled = run_down(activated, blocks, weights, down, down_bias, plan)
    return sum_experts(scaled, ids, len(gate_up))


class Scales(NamedTuple):
    """Scales of e4m3 numbers in x and in all experts' weights."""

    x: torch.Tensor  # [n], or by 128 columns [ceil(in / 128), n]
    weight: torch.Tensor  # [experts, rows, columns]: by quantization block, or one column
    row_block: int  # rows of a weight that share a scale
    kind: Literal["rows", "blocks", ""]  # "": unscaled

    @property
    def sizes(self) -> tuple[int, int]:
        return self.weight.shape[1], self.weight.shape[2]


def _unscaled(x: torch.Tensor) -> Scales:
    """Placeholder for unquantized numbers. Its tensors are never read."""
    return Scales(x, x[None, :1, :1], 1, "")


def run_gate_up(
    x: torch.Tensor,  # [n, hidden]
    blocks: Blocks,
    top_k: int,
    weight: torch.Tensor,  # [num_experts, 2 * size, hidden]
    bias: torch.Tensor | None,
    activation: str,
    plan: ExpertsPlan,
    scales: Scales | None = None,  # if x and weights are e4m3
    dtype: torch.dtype | None = None,  # of the result; None: that of x
) -> torch.Tensor:
    """[num_blocks * rows, size], sorted by expert."""
    scales = scales or _unscaled(x)
    num_experts, double, hidden = weight.shape
    size = double // 2
    num_blocks, tile = len(blocks.experts), plan.gate_up
    out = torch.empty((len(blocks.pairs), size), dtype=dtype or x.dtype, device=x.device)
    pairs_of_columns = TensorDescriptor.from_tensor(
        weight.view(num_experts, 2, size, hidden), [1, 2, tile.columns, tile.depth]
    )
    _gate_up_kernel[(num_blocks * triton.cdiv(size, tile.columns),)](
        x, pairs_of_columns, scales.x, scales.weight, out if bias is None else bias, out,
        blocks.pairs, blocks.experts, blocks.rows, hidden, size, num_blocks, len(x), *scales.sizes,
        TOP_K=top_k, ACTIVATION=activation, BIAS=bias is not None, SCALES=scales.kind,
        ROW_BLOCK=scales.row_block, EVEN=not scales.kind and hidden % tile.depth == 0,
        SWAP=tile.swap, ROWS=plan.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=tile.group,
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
    return out


def run_down(
    x: torch.Tensor,  # [num_blocks * rows, size], sorted by expert
    blocks: Blocks,
    factors: torch.Tensor,  # [n, top_k]
    weight: torch.Tensor,  # [num_experts, hidden, size]
    bias: torch.Tensor | None,
    plan: ExpertsPlan,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[n * top_k, hidden], weighted, in the tokens' order."""
    scales = scales or _unscaled(x)
    _, hidden, size = weight.shape
    num_blocks, tile = len(blocks.experts), plan.down
    out = torch.empty((factors.numel(), hidden), dtype=dtype or x.dtype, device=x.device)
    rows = TensorDescriptor.from_tensor(x, [plan.rows, tile.depth])
    columns = TensorDescriptor.from_tensor(weight, [1, tile.columns, tile.depth])
    _down_kernel[(num_blocks * triton.cdiv(hidden, tile.columns),)](
        rows, columns, scales.x, scales.weight, out if bias is None else bias, out, factors,
        blocks.pairs, blocks.experts, blocks.rows, size, hidden, num_blocks, len(x),
        *scales.sizes,
        BIAS=bias is not None, SCALES=scales.kind, ROW_BLOCK=scales.row_block, SWAP=tile.swap,
        ROWS=plan.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=tile.group,
        num_warps=tile.launch.num_warps, num_stages=tile.launch.num_stages,
    )  # fmt: skip
    return out


def sum_experts(scaled: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Sum scaled [n * top_k, hidden] over each token's experts. `ids` [n, top_k] has them."""
    (num_tokens, top_k), hidden = ids.shape, scaled.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=scaled.dtype, device=scaled.device)
    block = min(triton.next_power_of_2(hidden), 1024)
    _sum_kernel[(num_tokens, triton.cdiv(hidden, block))](
        scaled, ids, out, hidden, num_experts, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out


def _few(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, top_k = ids.shape
    _, hidden, size = down.shape
    first, second = few_experts_tiles()
    activated = torch.empty((num_tokens * top_k, size), dtype=x.dtype, device=x.device)
    _few_gate_up_kernel[(triton.cdiv(size, first.rows), num_tokens * top_k)](
        x, ids, gate_up, gate_up if gate_up_bias is None else gate_up_bias, activated,
        hidden, size, len(gate_up), TOP_K=top_k, ACTIVATION=activation,
        BIAS=gate_up_bias is not None,
        ROWS=first.rows, BLOCK=first.columns,
        num_warps=first.launch.num_warps, num_stages=first.launch.num_stages,
    )  # fmt: skip
    out = torch.empty_like(x)
    _few_down_kernel[(triton.cdiv(hidden, second.rows), num_tokens)](
        activated, ids, weights, down, down if down_bias is None else down_bias, out,
        size, hidden, len(down), TOP_K=top_k, BIAS=down_bias is not None,
        ROWS=second.rows, BLOCK=second.columns,
        num_warps=second.launch.num_warps, num_stages=second.launch.num_stages,
    )  # fmt: skip
    return out
