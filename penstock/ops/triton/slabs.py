"""Products of many rows with cuBLAS: a slab of the packed matrix is dequantized at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.ops import reference

SLAB = 1 << 27  # numbers dequantized at a time


def multiply_slabs(
    x: torch.Tensor,  # [n, in]
    floats: Callable[[int, int], torch.Tensor],  # rows [start, end) of the matrix, in the type of x
    bias: torch.Tensor | None,  # [out]
    out: torch.Tensor,  # [n, out], rows may have any stride
) -> torch.Tensor:
    """Write x W^T + bias to `out`, and return it."""
    out_features = out.shape[1]
    slab = max(SLAB // x.shape[1], 1)
    for start in range(0, out_features, slab):
        end = min(start + slab, out_features)
        own_bias = None if bias is None else bias[start:end]
        reference.linear(x, floats(start, end), own_bias, out[:, start:end])
    return out
