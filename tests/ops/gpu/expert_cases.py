"""Random inputs of layers with experts."""

from __future__ import annotations

import torch


def experts_case(
    device: torch.device, n: int, dtype: torch.dtype, bias: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    num_experts, top_k, hidden, size = 5, 2, 160, 96
    x = torch.randn(n, hidden, device=device).to(dtype)
    weights = torch.rand(n, top_k, device=device)
    ids = torch.rand(n, num_experts, device=device).topk(top_k).indices.int()
    biases: tuple[torch.Tensor | None, ...] = (None, None)
    if bias:
        first = torch.randn(num_experts, 2 * size, device=device).to(dtype)
        biases = (first, torch.randn(num_experts, hidden, device=device).to(dtype))
    return (x, weights, ids), biases
