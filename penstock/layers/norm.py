"""Normalization, with the residual addition before it."""

from __future__ import annotations

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.ops.blocks import BlockTensor, Weight


class Norm(nn.Module):
    """Normalizes the last dimension."""

    weight: nn.Parameter

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum. None in the first layer: nothing to add."""
        if residual is not None:
            x = x + residual
        return self(x), x

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {(name, ""): tuple(value.shape) for name, value in self.named_parameters()}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "a norm's weight is not a matrix"
        self.get_parameter(parameter).copy_(tensor)


class RMSNorm(Norm):
    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self.ops = build.ops
        self.eps = eps
        self.weight = build.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class ZeroCentredNorm(RMSNorm):
    """An RMSNorm whose weight is the checkpoint's plus 1, in float32 for precision."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__(build, size, eps)
        data = torch.empty(size, dtype=torch.float32, device=build.device)
        self.weight = nn.Parameter(data, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(x.dtype)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = super().add(x, residual)
        return normed.to(x.dtype), residual

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "a norm's weight is not a matrix"
        self.weight.copy_(tensor.float() + 1.0)


class LayerNorm(Norm):
    def __init__(
        self, build: Build, size: int | tuple[int, ...], eps: float, bias: bool = False
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.eps = eps
        shape = (size,) if isinstance(size, int) else size
        self.weight = build.empty(*shape)
        self.bias = build.empty(*shape) if bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
