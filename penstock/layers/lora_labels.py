"""LoRA adapters of the layers that follow pooling: classifiers, which adapters often replace."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.layers.context import current_adapters
from penstock.layers.linear import Linear, Product
from penstock.layers.lora import AdapterWeights, add_delta


@dataclass(frozen=True)
class _OwnLabels:
    """An adapter's whole layer, in float32. Every rank has all of it."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None  # [out_features]


class LabelSlots:
    """The adapters of a layer that follows pooling (`Linear.adapter`).

    Such a layer is small. So each slot has a layer of its own, with the delta added to its matrix.
    """

    needs_rows = False  # it runs after the forward pass, outside of graphs

    def __init__(self, name: str, layer: Linear) -> None:
        self.name = name
        self.layer = layer
        self._by_slot: dict[int, Linear] = {}

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        output, step = product(x), current_adapters()
        if step is None:
            return output
        for slot, layer in self._by_slot.items():
            rows = step.rows_of(slot)
            if len(rows):
                output[rows] = layer(x[rows])
        return output

    def prepare(self, weights: AdapterWeights) -> _OwnLabels | None:
        whole, delta = weights.replaced.get(self.name), weights.linear.get((self.name, ""))
        if whole is None and delta is None:
            return None
        layer = self.layer
        weight = layer.method.floats(layer, "").cpu() if whole is None else whole.float()
        bias = None if layer.bias is None else layer.bias.cpu()
        if delta is not None:
            weight = add_delta(weight, delta)
            if delta.bias is not None:
                bias = delta.bias.float() if bias is None else bias + delta.bias
        return _OwnLabels(weight, bias)

    def place(self, slot: int, own: _OwnLabels | None) -> None:
        self._by_slot.pop(slot, None)
        if own is None:
            return
        layer = self.layer
        made = Linear(
            layer.build, layer.in_features, [*layer.parts.values()], bias=own.bias is not None
        )
        made.load("weight", "", own.weight)
        if own.bias is not None:
            made.load("bias", "", own.bias)
        self._by_slot[slot] = made
