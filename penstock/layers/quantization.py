"""Linear methods: how a layer stores its matrix and multiplies with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.layers.loadable import Expected
from penstock.ops.blocks import BlockTensor, Weight, pad_rows, take_columns, take_rows
from penstock.ops.gguf_blocks import dequantize
from penstock.protocol.errors import ModelError

if TYPE_CHECKING:
    from penstock.layers.matrix import MatrixLayer

FLOATS_COLUMNS = 256  # that are converted to floats at once
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shard:
    """This rank's rows and columns of a part, which is [out, in] in the checkpoint.

    Rows past the end (of a vocabulary that does not divide) are zero.
    """

    shape: tuple[int, int]  # of the whole part
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int

    @property
    def num_own_rows(self) -> int:
        """Rows that exist in the part."""
        return max(min(self.num_rows, self.shape[0] - self.first_row), 0)

    def cut(self, weight: Weight) -> Weight:
        """[out, in] -> [num_rows, num_columns], padded."""
        weight = take_rows(weight, self.first_row, self.first_row + self.num_own_rows)
        if self.num_columns != self.shape[1]:
            last = self.first_column + self.num_columns
            weight = take_columns(weight, self.first_column, last)
        return pad_rows(weight, self.num_rows)

    def cut_packed(self, name: str, tensor: torch.Tensor, expected: Expected) -> torch.Tensor:
        """This rank's share of a tensor whose elements pack several rows or columns.

        Without padding. Raises ModelError if a border falls inside an element or a quantization
        group.
        """
        if not expected.cut:
            return tensor
        out_features, in_features = self.shape
        if expected.rows is not None:
            tensor = _cut(
                name, tensor, expected.rows, out_features, self.first_row, self.num_own_rows
            )
        has_one_group = expected.columns is not None and tensor.shape[expected.columns] == 1
        if expected.columns is not None and not has_one_group:
            tensor = _cut(
                name, tensor, expected.columns, in_features, self.first_column, self.num_columns
            )
        return tensor


def _cut(
    name: str, tensor: torch.Tensor, dim: int, total: int, first: int, count: int
) -> torch.Tensor:
    size = tensor.shape[dim]
    if count == total:
        return tensor
    start, length = first * size, count * size
    if start % total or length % total:
        raise ModelError(
            f"a shard boundary, {first} or {first + count} of {total}, falls inside an element of "
            f"{name} {list(tensor.shape)}: use fewer ranks (tensor_parallel_size)"
        )
    return tensor.narrow(dim, start // total, length // total)


class LinearMethod:
    """Chosen once, from the checkpoint's configuration and the device."""

    packs = True  # whether it stores matrices in its own layout

    def create_weights(self, layer: MatrixLayer) -> None:
        """Register the layer's parameters."""

    def expected(self, part: str, shape: tuple[int, int]) -> Mapping[str, Expected]:
        """The checkpoint tensors of one part [out, in], by parameter."""
        return {"weight": Expected(shape)}

    def load(
        self, layer: MatrixLayer, part: str, parameter: str, tensor: Weight, shard: Shard
    ) -> None:
        """Load this rank's share of one of them."""
        raise NotImplementedError

    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, in] -> [n, out]."""
        raise NotImplementedError

    def apply_last(
        self, layer: MatrixLayer, parts: Sequence[str], x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`apply` for the last parts only. None: not without the others."""
        return None

    def embed(self, layer: MatrixLayer, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n] of a matrix with one part -> [n, in]."""
        raise NotImplementedError

    def floats(self, layer: MatrixLayer, part: str) -> torch.Tensor:
        """A part's weights [out, in] in float32, as `apply` multiplies with them."""
        build, columns = layer.build, layer.in_features
        rows = torch.empty(columns, layer.part_rows[part], dtype=torch.float32, device=build.device)
        identity = torch.zeros(FLOATS_COLUMNS, columns, dtype=build.dtype, device=build.device)
        for first in range(0, columns, FLOATS_COLUMNS):
            count = min(FLOATS_COLUMNS, columns - first)
            identity.zero_()[:, first:].fill_diagonal_(1.0)
            output = self.apply(layer, identity[:count], None)
            rows[first : first + count] = layer.rows_of(output.T, part).T
        return rows.T


class DenseMethod(LinearMethod):
    """Plain floating-point weights, fused into one matrix."""

    packs = False

    def create_weights(self, layer: MatrixLayer) -> None:
        layer.weight = layer.build.empty(layer.out_features, layer.in_features)

    def load(
        self, layer: MatrixLayer, part: str, parameter: str, tensor: Weight, shard: Shard
    ) -> None:
        if isinstance(tensor, BlockTensor):
            tensor = dequantize(tensor)
        check_floats(part, tensor)
        own = shard.cut(tensor)
        assert not isinstance(own, BlockTensor)
        layer.rows_of(layer.weight, part).copy_(own)

    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return layer.build.ops.linear(x, layer.weight, bias)

    def embed(self, layer: MatrixLayer, rows: torch.Tensor) -> torch.Tensor:
        return layer.build.ops.embed(rows, layer.weight)

    def floats(self, layer: MatrixLayer, part: str) -> torch.Tensor:
        return layer.rows_of(layer.weight, part).float()


class DeferredQuantization(LinearMethod):
    """Stands in for the methods of a quantized checkpoint's layers until the plan has chosen.

    Nothing is loaded or computed before that.
    """


def check_floats(part: str, tensor: torch.Tensor) -> None:
    """Refuse quantized numbers without scales: read as floats, they would give wrong logits."""
    if tensor.dtype not in _FLOATS:
        where = f" of {part}" if part else ""
        raise ModelError(
            f"the weight{where} is stored as {str(tensor.dtype).removeprefix('torch.')}, but the "
            "checkpoint has no scales for it, or its quantization_config leaves the layer out"
        )
