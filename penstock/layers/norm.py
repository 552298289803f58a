"""Root-mean-square normalization, with the residual addition in front of it."""

from __future__ import annotations

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.ops.blocks import BlockTensor, Weight


class RMSNorm(nn.Module):
    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self.ops = build.ops
        self.eps = eps
        self.weight = build.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.ops.rms_norm(x, self.weight, self.eps)
        return normed

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum. None is the first layer: nothing to add."""
        if residual is None:
            return self(x), x
        normed, residual = self.ops.add_rms_norm(x, residual, self.weight, self.eps)
        return normed, residual

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {("weight", ""): tuple(self.weight.shape)}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "a norm's weight is not a matrix"
        self.weight.copy_(tensor)
