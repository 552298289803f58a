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
    """This rank's matrix [out_features, in_features]: the rows of all parts, concatenated."""

    weight: nn.Parameter  # if the linear method is DenseMethod
    native: NativeWeights  # if it is NativeMethod
    gguf: GgufWeights  # if it is GgufMethod
    quantized: QuantizedWeights  # if it is QuantizedMethod
    may_quantize = True  # while weights load
    split_input = False  # whether ranks have different columns, and their outputs are summed

    def __init__(self, build: Build, in_features: int, part_rows: dict[str, int]) -> None:
        super().__init__()
        self.build = build
        self.in_features = in_features
        self.part_rows = part_rows
        self.out_features = sum(part_rows.values())
        self.use(build.linear_method)

    def use(self, method: LinearMethod) -> None:
        """Store the matrix with this method. Call it before anything is loaded."""
        self.method = method
        method.create_weights(self)

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that this rank adds."""
        return None

    def shard_of(self, part: str) -> tuple[slice, slice]:
        """This rank's rows and columns of a part."""
        raise NotImplementedError

    def rows_of(self, parameter: torch.Tensor, part: str) -> torch.Tensor:
        """The rows of a fused parameter that belong to `part`."""
        start = 0
        for name, rows in self.part_rows.items():
            if name == part:
                return parameter[start : start + rows]
            start += rows
        raise KeyError(part)
