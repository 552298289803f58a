"""How a layer holds its matrix and multiplies with it: one strategy a format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from penstock.ops.blocks import BlockTensor, Weight

if TYPE_CHECKING:
    from penstock.layers.matrix import MatrixLayer


class LinearMethod(Protocol):
    """Chosen once, from the checkpoint's own configuration and the device."""

    packs: bool  # whether it keeps each matrix in a layout of its own

    def create_weights(self, layer: MatrixLayer) -> None:
        """Register the layer's parameters."""

    def load(self, layer: MatrixLayer, part: str, shard: Weight) -> None:
        """Store one part's weight, already cut to this rank's shard [out, in]."""

    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, in] -> [n, out]."""

    def embed(self, layer: MatrixLayer, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n] of a matrix with one part -> [n, in]."""


class DenseMethod:
    """Plain floating-point weights, fused into one matrix."""

    packs = False

    def create_weights(self, layer: MatrixLayer) -> None:
        layer.weight = layer.build.empty(layer.out_features, layer.in_features)

    def load(self, layer: MatrixLayer, part: str, shard: Weight) -> None:
        assert not isinstance(shard, BlockTensor), "blocks are for methods that compute with them"
        layer.rows_of(layer.weight, part).copy_(shard)

    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = layer.build.ops.linear(x, layer.weight, bias)
        return output

    def embed(self, layer: MatrixLayer, rows: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = layer.build.ops.embed(rows, layer.weight)
        return embedded
