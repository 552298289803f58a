"""Products of many rows, for cuBLAS: a packed matrix becomes floats, some of its rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.ops import reference

SLAB = 1 << 27  # numbers that are floats at one time


def multiply_slabs(
    x: torch.Tensor,  # [n, in]
    floats: Callable[[int, int], torch.Tensor],  # rows [start, end) of the matrix, as x's type
    bias: torch.Tensor | None,  # [out]
    out: torch.Tensor,  # [n, out], of rows that need not follow each other
) -> torch.Tensor:
    """`out`, with x W^T + bias in it."""
    out_features = out.shape[1]
    slab = max(SLAB // x.shape[1], 1)
    for start in range(0, out_features, slab):
        end = min(start + slab, out_features)
        own_bias = None if bias is None else bias[start:end]
        reference.linear(x, floats(start, end), own_bias, out[:, start:end])
    return out
