"""Mixture of experts with quantized weights, in plain torch.

The layouts are those of `quantized.py`, with the matrices of all experts in one tensor.
"""

from __future__ import annotations

from functools import partial

import torch

from penstock.ops.experts import RunExperts, run_gated
from penstock.ops.quantized import fp4_linear, fp8_linear, table_linear, w4_linear


def fp8_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden] float8_e4m3fn: gate, then up
    gate_up_scale: torch.Tensor,  # [experts, *]: as for fp8_linear, by row or by quantization block
    down: torch.Tensor,  # [experts, hidden, intermediate] float8_e4m3fn
    down_scale: torch.Tensor,
    gate_up_input_scale: torch.Tensor | None,  # scalar; None: dynamic
    down_input_scale: torch.Tensor | None,
    activation: str,
    gate_up_bias: torch.Tensor | None = None,  # [experts, 2 * intermediate]
    down_bias: torch.Tensor | None = None,  # [experts, hidden]
) -> torch.Tensor:
    """Each token's weighted sum over its experts: [n, hidden]."""
    first, second = (
        None if scale is None else scale.expand(len(gate_up))
        for scale in (gate_up_input_scale, down_input_scale)
    )
    return run_gated(
        x, weights, ids, activation, fp8_linear,
        (gate_up, gate_up_scale, first, gate_up_bias), (down, down_scale, second, down_bias),
    )  # fmt: skip


def w4_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden * bits / 8] uint8: gate, then up
    gate_up_scales: torch.Tensor,  # [experts, 2 * intermediate, hidden / group_size]
    gate_up_zeros: torch.Tensor | None,
    down: torch.Tensor,  # [experts, hidden, intermediate * bits / 8] uint8
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    group_size: int,  # the row length, if a row has one scale
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    bits: int = 4,
    run_experts: RunExperts | None = None,
) -> torch.Tensor:
    """Each token's weighted sum over its experts: [n, hidden]."""
    return run_gated(
        x, weights, ids, activation,
        lambda rows, packed, scales, zeros, bias: w4_linear(
            rows, packed, scales, zeros, min(group_size, rows.shape[1]), bias, bits
        ),
        (gate_up, gate_up_scales, gate_up_zeros, gate_up_bias),
        (down, down_scales, down_zeros, down_bias),
        run_experts,
    )  # fmt: skip


w8_experts = partial(w4_experts, bits=8)


def fp4_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden / 2] uint8: gate rows, then up rows
    gate_up_scales: torch.Tensor,  # [experts, 2 * intermediate, hidden / group_size]
    gate_up_global: torch.Tensor | None,  # [experts, 2 * intermediate]
    down: torch.Tensor,  # [experts, hidden, intermediate / 2] uint8
    down_scales: torch.Tensor,
    down_global: torch.Tensor | None,
    group_size: int,
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's weighted sum over its experts: [n, hidden]."""
    return run_gated(
        x, weights, ids, activation,
        lambda rows, own, scales, scale, bias: fp4_linear(
            rows, own, scales, scale, group_size, bias
        ),
        (gate_up, gate_up_scales, gate_up_global, gate_up_bias),
        (down, down_scales, down_global, down_bias),
    )  # fmt: skip


def table_experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden / 2] uint8: gate rows, then up rows
    gate_up_scales: torch.Tensor,  # [experts, 2 * intermediate, groups]
    down: torch.Tensor,  # [experts, hidden, intermediate / 2] uint8
    down_scales: torch.Tensor,
    values: torch.Tensor,  # [16] float32, shared by all experts
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's weighted sum over its experts: [n, hidden]."""
    return run_gated(
        x, weights, ids, activation,
        lambda rows, own, scales, bias: table_linear(rows, own, scales, values, bias),
        (gate_up, gate_up_scales, gate_up_bias), (down, down_scales, down_bias),
    )  # fmt: skip
