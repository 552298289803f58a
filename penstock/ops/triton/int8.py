"""Products of int8 weights and activations, with torch's integer matmul."""

from __future__ import annotations

import torch

from penstock.ops import quantized as plain

MIN_ROWS = 32  # cuBLAS needs more than 16; fewer rows are padded with zeros
MULTIPLE = 8  # of rows and columns


def int8_linear(
    x: torch.Tensor,  # [n, in]
    weight: torch.Tensor,  # [out, in] int8
    weight_scale: torch.Tensor,  # float32: [out], or scalar
    input_scale: torch.Tensor | None,  # scalar; None: dynamic, by token
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference, with exact integer sums."""
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        return plain.int8_linear(x, weight, weight_scale, input_scale, bias)
    x32 = x.float()
    if input_scale is None:
        input_scale = (x32.abs().amax(-1, keepdim=True) / 127.0).clamp_min(1e-12)
    rows = max(-(-len(x) // MULTIPLE) * MULTIPLE, MIN_ROWS)
    numbers = torch.zeros(rows, x.shape[1], dtype=torch.int8, device=x.device)
    numbers[: len(x)] = (x32 / input_scale).round().clamp(-128, 127)
    sums: torch.Tensor = torch._int_mm(numbers, weight.t())[: len(x)]
    output = sums.float() * input_scale * weight_scale
    return (output if bias is None else output + bias.float()).to(x.dtype)
