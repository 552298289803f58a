"""Schemes of bitsandbytes: NF4, FP4, and 8 bits of LLM.int8()."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.layers.loadable import ANY, Expected
from penstock.layers.quantization import Shard
from penstock.layers.quantized.schemes import Scheme, Tensors, check_type, scales_of
from penstock.layers.quantized.weights import QuantizedWeight, TableWeight, W4Weight
from penstock.protocol.errors import ModelError

_LARGEST = 127  # the int8 number that equals a row's scale
_BY_ROW = 0  # the only weight_format that is not GPU-specific


@dataclass(frozen=True)
class TableScheme(Scheme):
    """4-bit table indexes, in rows as `loading/bitsandbytes.py` arranges them.

    The quantization group size follows from the scales: configurations do not contain it.
    """

    kind: str  # nf4 or fp4; the table itself is in the checkpoint

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.kind}"

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        rows, columns = shape
        return {
            "weight": Expected((rows, columns // 2)),
            "weight_scale": Expected((rows, ANY)),
            "quant_map": Expected((16,), rows=None, columns=None),
        }

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        packed, scales = tensors["weight"], scales_of(tensors, "weight_scale")
        check_type("weight", packed, torch.uint8)
        columns = 2 * packed.shape[1]
        if columns % scales.shape[1]:
            raise ModelError(
                f"{scales.shape[1]} scales per row do not divide its {columns} columns into groups"
            )
        table = scales_of(tensors, "quant_map").float().contiguous()
        return TableWeight(packed.contiguous(), scales.float().contiguous(), table)


@dataclass(frozen=True)
class LlmInt8Scheme(Scheme):
    """8-bit numbers scaled by the largest of each row (SCB).

    Activations are not quantized. bitsandbytes itself rounds all but their outliers, for speed.
    """

    label = "bitsandbytes int8"
    optional = frozenset({"weight_format"})
    marks = frozenset({"SCB"})

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        return {
            "weight": Expected(shape),
            "SCB": Expected((shape[0],), columns=None),
            "weight_format": Expected((), rows=None, columns=None),
        }

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        weight, form = tensors["weight"], tensors.get("weight_format")
        check_type("weight", weight, torch.int8)
        if form is not None and int(form) != _BY_ROW:
            raise ModelError(
                f"weight_format is {int(form)}: the numbers are in an order for one kind of GPU; "
                f"save it with bitsandbytes 0.45 or later, which writes {_BY_ROW} (by rows)"
            )
        packed = (weight.view(torch.uint8) ^ 128).contiguous()
        scales = scales_of(tensors, "SCB").float()[:, None] / _LARGEST
        return W4Weight(packed, scales, None, weight.shape[1], bits=8)
