"""How a linear layer holds its weights and multiplies with them: one strategy a format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from penstock.layers.linear import Linear


class LinearMethod(Protocol):
    """Chosen once, from the checkpoint's own configuration."""

    def create_weights(self, layer: Linear) -> None:
        """Register the layer's parameters."""

    def load(self, layer: Linear, part: str, shard: torch.Tensor) -> None:
        """Store one part's weight, already cut to this rank's shard [out, in]."""

    def apply(self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, in] -> [n, out]."""


class DenseMethod:
    """Plain floating-point weights, fused into one matrix."""

    def create_weights(self, layer: Linear) -> None:
        layer.weight = layer.build.empty(layer.out_features, layer.in_features)

    def load(self, layer: Linear, part: str, shard: torch.Tensor) -> None:
        layer.rows_of(layer.weight, part).copy_(shard)

    def apply(self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = layer.build.ops.linear(x, layer.weight, bias)
        return output
