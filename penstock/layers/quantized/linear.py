"""The linear method of quantized weights, whatever their format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from penstock.layers.loadable import Expected
from penstock.layers.quantization import LinearMethod, Shard
from penstock.layers.quantized.schemes import Scheme
from penstock.layers.quantized.weights import QuantizedWeight, fuse
from penstock.ops.blocks import BlockTensor, Weight
from penstock.protocol.errors import ModelError

if TYPE_CHECKING:
    from penstock.layers.matrix import MatrixLayer

Finish = Callable[["MatrixLayer", list[QuantizedWeight]], bool]
"""Takes over a layer's parts in another layout and method, or returns False."""


class QuantizedWeights:
    """A layer's tensors while they load, and its matrices afterwards."""

    def __init__(self) -> None:
        self.staged: dict[str, dict[str, torch.Tensor]] = {}  # of incomplete parts
        self.parts: dict[str, QuantizedWeight] = {}
        self.fused: list[QuantizedWeight] = []


class QuantizedMethod(LinearMethod):
    """The method of one layer. A part is converted as soon as all of its tensors have arrived.

    `present` lists the optional tensors in the checkpoint, by part. Memory beyond the weights is
    that of one layer.
    """

    def __init__(
        self,
        scheme: Scheme,
        present: Mapping[str, Collection[str]],
        finish: Finish | None = None,
        embeds: bool = False,
    ) -> None:
        self.scheme = scheme
        self.present = present
        self.finish = finish
        self.embeds = embeds  # rows are read, which only the plain layout supports

    def create_weights(self, layer: MatrixLayer) -> None:
        layer.quantized = QuantizedWeights()

    def expected(self, part: str, shape: tuple[int, int]) -> Mapping[str, Expected]:
        missing = self.scheme.optional.difference(self.present.get(part, ()))
        tensors = self.scheme.expected(shape)
        return {name: tensor for name, tensor in tensors.items() if name not in missing}

    def load(
        self, layer: MatrixLayer, part: str, parameter: str, tensor: Weight, shard: Shard
    ) -> None:
        if isinstance(tensor, BlockTensor):
            raise ModelError("a GGUF file is quantized already: leave --quantization out")
        expected = self.expected(part, shard.shape)
        own = shard.cut_packed(parameter, tensor, expected[parameter])
        state = layer.quantized
        staged = state.staged.setdefault(part, {})
        staged[parameter] = own.to(layer.build.device)
        if len(staged) < len(expected):
            return
        weight = self.scheme.convert(staged, shard)
        del state.staged[part]
        if shard.num_own_rows < shard.num_rows:
            weight = weight.padded(shard.num_rows)
        self.add(layer, part, weight)

    def add(self, layer: MatrixLayer, part: str, weight: QuantizedWeight) -> None:
        """Store a part's weight. With the last part, the layer is complete."""
        state = layer.quantized
        state.parts[part] = weight
        if len(state.parts) < len(layer.part_rows):
            return
        parts = [state.parts[name] for name in layer.part_rows]
        state.parts.clear()
        if self.finish is not None and self.finish(layer, parts):
            return
        fused = fuse(parts)
        if not self.embeds:
            fused = [weight.prepare(layer.build.ops) for weight in fused]
        state.fused = fused
        for index, weight in enumerate(fused):
            for name, tensor in weight.tensors().items():
                # A buffer, so that it counts in the model's size.
                layer.register_buffer(f"quantized_{index}_{name}", tensor, persistent=False)

    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        fused, ops = layer.quantized.fused, layer.build.ops
        if len(fused) == 1:
            return fused[0].linear(ops, x, bias)
        outputs = [weight.linear(ops, x, None) for weight in fused]
        output = torch.cat(outputs, dim=-1)
        return output if bias is None else output + bias

    def embed(self, layer: MatrixLayer, rows: torch.Tensor) -> torch.Tensor:
        (weight,) = layer.quantized.fused
        return weight.floats(rows).to(layer.build.dtype)
