"""Experts with e4m3 weights: the kernels of experts.py, with x rounded to e4m3 as well."""

from __future__ import annotations

import torch
import triton

from penstock.ops.triton.experts import Scales, run_down, run_gate_up, sum_experts
from penstock.ops.triton.fp8 import BLOCK, quantize
from penstock.ops.triton.routing import align
from penstock.ops.triton.tuning_quantized import quantized_experts_plan


def fp8_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden] float8_e4m3fn: gate, then up
    gate_up_scale: torch.Tensor,  # [experts, 2 * intermediate], or by quantization block
    down: torch.Tensor,  # [experts, hidden, intermediate] float8_e4m3fn
    down_scale: torch.Tensor,
    gate_up_input_scale: torch.Tensor | None,  # scalar; None: dynamic
    down_input_scale: torch.Tensor | None,
    activation: str,
    gate_up_bias: torch.Tensor | None = None,  # [experts, 2 * intermediate]
    down_bias: torch.Tensor | None = None,  # [experts, hidden]
) -> torch.Tensor:
    """As the reference. Rows of both matrices are multiples of 16 numbers."""
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    assert gate_up.shape[2] % 16 == 0, "the copy engine wants whole 16 bytes"
    assert down.shape[2] % 16 == 0, "the copy engine wants whole 16 bytes"
    plan = quantized_experts_plan(num_tokens * top_k, len(gate_up), gate_up.element_size())
    blocks = align(ids, len(gate_up), plan.rows)
    rounded, scales = _round(x.contiguous(), gate_up_input_scale, gate_up, gate_up_scale)
    activated = run_gate_up(
        rounded, blocks, top_k, gate_up, gate_up_bias, activation, plan, scales, x.dtype
    )
    rounded, scales = _round(activated, down_input_scale, down, down_scale)
    weighted = run_down(rounded, blocks, weights, down, down_bias, plan, scales, x.dtype)
    return sum_experts(weighted, ids, len(gate_up))


def _round(
    x: torch.Tensor,
    static: torch.Tensor | None,  # the scale of x
    weight: torch.Tensor,  # [experts, out, in]
    weight_scale: torch.Tensor,  # [experts], [experts, out], or by quantization block
) -> tuple[torch.Tensor, Scales]:
    """x in e4m3, and the scales of both."""
    num_experts, out_features, _ = weight.shape
    own, blocked = weight_scale.float(), weight_scale.ndim == 3
    if not blocked:
        own = own.view(num_experts, -1, 1).expand(num_experts, out_features, 1)
    rounded, scales, _ = quantize(x, static, blocked)
    if blocked and static is not None:
        scales = scales.expand(triton.cdiv(x.shape[1], BLOCK), -1).contiguous()
    row_block = 1 if own.shape[1] == out_features else BLOCK
    return rounded, Scales(scales, own.contiguous(), row_block, "blocks" if blocked else "rows")
