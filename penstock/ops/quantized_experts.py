"""Mixture of experts with quantized weights, in plain torch.

The layouts are those of `quantized.py`, with the matrices of all experts in one tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.ops.experts import RunExperts, gated, of_expert, run_by_expert
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
    first = of_expert(
        lambda rows, own, scale, bias: fp8_linear(rows, own, scale, gate_up_input_scale, bias),
        *(gate_up, gate_up_scale),
    )
    second = of_expert(
        lambda rows, own, scale, bias: fp8_linear(rows, own, scale, down_input_scale, bias),
        *(down, down_scale),
    )
    run = gated(first, second, activation, gate_up_bias, down_bias)
    return run_by_expert(x, weights, ids, len(gate_up), run)


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
    run_experts: RunExperts = run_by_expert,
) -> torch.Tensor:
    """Each token's weighted sum over its experts: [n, hidden]."""

    def linear(
        rows: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        group = min(group_size, rows.shape[1])
        return w4_linear(rows, packed, scales, zeros, group, bias, bits)

    first = of_expert(linear, gate_up, gate_up_scales, gate_up_zeros)
    second = of_expert(linear, down, down_scales, down_zeros)
    run = gated(first, second, activation, gate_up_bias, down_bias)
    return run_experts(x, weights, ids, len(gate_up), run)


def w8_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,  # [experts, 2 * intermediate, hidden] uint8: gate rows, then up rows
    gate_up_scales: torch.Tensor,
    gate_up_zeros: torch.Tensor | None,
    down: torch.Tensor,  # [experts, hidden, intermediate] uint8
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    group_size: int,
    activation: str,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`w4_experts` for 8 bits."""
    return w4_experts(
        x, weights, ids, gate_up, gate_up_scales, gate_up_zeros, down, down_scales, down_zeros,
        group_size, activation, gate_up_bias, down_bias, 8,
    )  # fmt: skip


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

    def linear(rows: torch.Tensor, own: Any, scales: Any, scale: Any, bias: Any) -> torch.Tensor:
        return fp4_linear(rows, own, scales, scale, group_size, bias)

    first = of_expert(linear, gate_up, gate_up_scales, gate_up_global)
    second = of_expert(linear, down, down_scales, down_global)
    run = gated(first, second, activation, gate_up_bias, down_bias)
    return run_by_expert(x, weights, ids, len(gate_up), run)


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

    def linear(rows: torch.Tensor, own: Any, scales: Any, bias: Any) -> torch.Tensor:
        return table_linear(rows, own, scales, values, bias)

    first = of_expert(linear, gate_up, gate_up_scales)
    second = of_expert(linear, down, down_scales)
    run = gated(first, second, activation, gate_up_bias, down_bias)
    return run_by_expert(x, weights, ids, len(gate_up), run)
