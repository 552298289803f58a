"""Weights in the C++ library's layout: GGUF quantization blocks or floats, packed at load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.layers.quantization import LinearMethod, Shard, check_floats
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.cpu.packed import PackedLinear, PackedMatrix, quantize_int8
from penstock.protocol.errors import ModelError

if TYPE_CHECKING:
    from penstock.layers.matrix import MatrixLayer

INT8_COLUMNS = 32
FLOATS_ROWS = 256  # that are converted to floats at once


class NativeWeights:
    """A layer's parts while they load, and all of them together afterwards."""

    def __init__(self) -> None:
        self.parts: dict[str, PackedMatrix] = {}
        self.linear: PackedLinear | None = None
        self.last: dict[Sequence[str], PackedLinear] = {}  # by the parts that it has


class NativeMethod(LinearMethod):
    """Each part keeps its own GGUF type; floats keep their precision.

    With `int8`, float weights are quantized while they load, to 8 bits in quantization blocks of 32
    columns. With `float_dtype`, they are stored in that type.
    """

    def __init__(self, int8: bool = False, float_dtype: torch.dtype | None = None) -> None:
        self.int8 = int8
        self.float_dtype = float_dtype

    def create_weights(self, layer: MatrixLayer) -> None:
        layer.native = NativeWeights()

    def load(
        self, layer: MatrixLayer, part: str, parameter: str, tensor: Weight, shard: Shard
    ) -> None:
        own = shard.cut(tensor)
        if isinstance(own, BlockTensor):
            if self.int8:
                raise ModelError("a GGUF file is quantized already: leave --quantization out")
        else:
            check_floats(part, own)
            if self.int8 and layer.may_quantize and own.shape[1] % INT8_COLUMNS == 0:
                own = quantize_int8(own)
            elif self.float_dtype is not None:
                own = own.to(self.float_dtype)
        self.pack(layer, part, own)

    def pack(self, layer: MatrixLayer, part: str, weight: Weight) -> None:
        """Load this rank's weight of a part."""
        native = layer.native
        native.parts[part] = PackedMatrix(weight)
        # A buffer, so that it counts in the model's size.
        layer.register_buffer(f"packed_{part}", native.parts[part].data, persistent=False)
        if len(native.parts) == len(layer.part_rows):
            native.linear = PackedLinear([native.parts[name] for name in layer.part_rows])

    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert layer.native.linear is not None, "the layer has no weights yet"
        if x.dim() == 2:
            return layer.native.linear(x, bias)
        output = layer.native.linear(x.reshape(-1, x.shape[-1]), bias)  # of images, say
        return output.reshape(*x.shape[:-1], output.shape[-1])

    def apply_last(
        self, layer: MatrixLayer, parts: Sequence[str], x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        native = layer.native
        if parts not in native.last:
            native.last[parts] = PackedLinear([native.parts[name] for name in parts])
        return native.last[parts](x, bias)

    def embed(self, layer: MatrixLayer, rows: torch.Tensor) -> torch.Tensor:
        (matrix,) = layer.native.parts.values()
        return matrix.embed(rows)

    def floats(self, layer: MatrixLayer, part: str) -> torch.Tensor:
        matrix, rows = layer.native.parts[part], torch.arange(layer.part_rows[part])
        # In pieces: steps use the library meanwhile, one call at a time.
        return torch.cat([matrix.embed(some) for some in torch.split(rows, FLOATS_ROWS)])
