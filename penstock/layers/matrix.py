"""The base of linear layers and embeddings: a matrix of parts, stored by a linear method."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from penstock.layers.build import Build
    from penstock.layers.gguf import GgufWeights
    from penstock.layers.native import NativeWeights
    from penstock.layers.quantization import LinearMethod
    from penstock.layers.quantized.linear import QuantizedWeights


class MatrixLayer(nn.Module):
    """This rank's [out_features, in_features]: the parts' rows, one above the other."""

    weight: nn.Parameter  # where the linear method is DenseMethod
    native: NativeWeights  # where it is NativeMethod
    gguf: GgufWeights  # where it is GgufMethod
    quantized: QuantizedWeights  # where it is QuantizedMethod
    may_quantize = True  # by a linear method that does so while weights load

    def __init__(self, build: Build, in_features: int, part_rows: dict[str, int]) -> None:
        super().__init__()
        self.build = build
        self.in_features = in_features
        self.part_rows = part_rows
        self.out_features = sum(part_rows.values())
        self.use(build.linear_method)

    def use(self, method: LinearMethod) -> None:
        """Keep the matrix as this method does; before anything is loaded."""
        self.method = method
        method.create_weights(self)

    def rows_of(self, parameter: torch.Tensor, part: str) -> torch.Tensor:
        """The rows of a fused parameter that belong to `part`."""
        start = 0
        for name, rows in self.part_rows.items():
            if name == part:
                return parameter[start : start + rows]
            start += rows
        raise KeyError(part)
