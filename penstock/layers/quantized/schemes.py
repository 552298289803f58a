"""The checkpoint layout of each format, and its conversion to weights in memory.

A scheme is a value: layers with equal schemes are stored alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from penstock.layers.loadable import Expected
from penstock.layers.quantization import Shard, check_floats
from penstock.layers.quantized.weights import (
    Fp4Weight,
    Fp8Weight,
    Int8Weight,
    QuantizedWeight,
    W4Weight,
)
from penstock.ops.quantized import (
    BLOCK,
    FP8,
    quantize_fp8_by_block,
    quantize_fp8_by_row,
    quantize_fp8_whole,
    quantize_int8_by_row,
)
from penstock.protocol.errors import ModelError

Tensors = Mapping[str, torch.Tensor]
Granularity = Literal["tensor", "channel", "block"]


class Scheme:
    """The format of one layer."""

    @property
    def label(self) -> str:
        """A short name for errors and logs."""
        raise NotImplementedError

    @property
    def optional(self) -> frozenset[str]:
        """Parameters that a checkpoint may omit."""
        return frozenset()

    @property
    def marks(self) -> frozenset[str]:
        """Parameters that an unquantized layer does not have."""
        return frozenset({"weight_scale"})

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        """The tensors of a part [out, in], including optional ones."""
        raise NotImplementedError

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        """This rank's weight, from tensors that `Shard.cut_packed` has cut, on their device."""
        raise NotImplementedError


def check_type(name: str, tensor: torch.Tensor, *known: torch.dtype) -> None:
    """Raise ModelError for another type: its bytes would be read as wrong numbers."""
    if tensor.dtype not in known:
        raise ModelError(
            f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}; supported: "
            f"{' or '.join(str(each).removeprefix('torch.') for each in known)}"
        )


def scales_of(tensors: Tensors, name: str) -> torch.Tensor:
    """Scales as stored. Raises ModelError if they are not floats or not finite."""
    scales = tensors[name]
    if not scales.is_floating_point():
        raise ModelError(
            f"{name} is stored as {str(scales.dtype).removeprefix('torch.')}; supported: floats"
        )
    check_finite(name, scales.float())
    return scales


def check_finite(name: str, scales: torch.Tensor) -> None:
    """Raise ModelError for scales that are not finite."""
    if not bool(torch.isfinite(scales).all()):
        raise ModelError(
            f"{name} has scales that are not finite: the checkpoint is damaged, fetch it again or "
            "quantize the model again"
        )


def one_scale(tensors: Tensors, name: str) -> torch.Tensor:
    """A single divisor as float32. Raises ModelError unless positive."""
    scale = scales_of(tensors, name).float()
    if not bool((scale > 0).all()):
        raise ModelError(
            f"{name} must be a positive scale, is {float(scale)}: the checkpoint is damaged, or "
            "was quantized without calibration; quantize the model again"
        )
    return scale


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """e4m3 weights with one scale per matrix, row, or quantization block of 128 x 128."""

    granularity: Granularity
    static: bool  # activations use the checkpoint's scale
    scale_name: str = "weight_scale"
    input_name: str = "input_scale"

    @property
    def label(self) -> str:
        return f"fp8 by {self.granularity}, {'static' if self.static else 'dynamic'} activations"

    @property
    def optional(self) -> frozenset[str]:
        return frozenset() if self.static else frozenset({self.input_name})

    @property
    def marks(self) -> frozenset[str]:
        return frozenset({self.scale_name})

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        rows, columns = shape
        scale = {
            "tensor": Expected((), rows=None, columns=None),
            "channel": Expected((rows,), columns=None),
            "block": Expected((-(-rows // BLOCK), -(-columns // BLOCK)), cut=False),
        }[self.granularity]
        return {
            "weight": Expected(shape),
            self.scale_name: scale,
            self.input_name: Expected((), rows=None, columns=None),
        }

    def named_as(self, tensors: Collection[str]) -> Fp8Scheme:
        """The scheme with transformers' names of scales, if a layer has those."""
        if self.scale_name in tensors or "weight_scale_inv" not in tensors:
            return self
        return replace(self, scale_name="weight_scale_inv", input_name="activation_scale")

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        weight = tensors["weight"]
        check_type("weight", weight, FP8)
        scale = scales_of(tensors, self.scale_name).float()
        if self.granularity == "block":
            scale = _own_blocks(scale, shard)
        elif self.granularity == "tensor":
            scale = scale.expand(len(weight)).contiguous()
        input_scale = one_scale(tensors, self.input_name) if self.static else None
        return Fp8Weight(weight, scale, input_scale)


def _own_blocks(scale: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The scales of a shard's quantization blocks; by row if it starts inside a block."""
    last_column = shard.first_column + shard.num_columns
    if shard.first_column % BLOCK or (last_column % BLOCK and last_column != shard.shape[1]):
        raise ModelError(
            f"a shard boundary, column {shard.first_column} or {last_column} of {shard.shape[1]}, "
            f"falls inside an fp8 block of {BLOCK}: use fewer ranks (tensor_parallel_size)"
        )
    scale = scale[:, shard.first_column // BLOCK : -(-last_column // BLOCK)]
    last_row = shard.first_row + shard.num_own_rows
    if shard.first_row % BLOCK:
        rows = torch.arange(shard.first_row, last_row, device=scale.device)
        return scale[rows // BLOCK]
    return scale[shard.first_row // BLOCK : -(-last_row // BLOCK)].contiguous()


@dataclass(frozen=True)
class Int8Scheme(Scheme):
    """int8 weights with one scale per matrix or row; activations in int8 or unquantized."""

    granularity: Literal["tensor", "channel"]
    activations: Literal["static", "dynamic", "none"]

    @property
    def label(self) -> str:
        return f"int8 by {self.granularity}, {self.activations} activations"

    @property
    def optional(self) -> frozenset[str]:
        unused = {"input_zero_point", "weight_zero_point"}
        return frozenset(unused if self.activations == "static" else {*unused, "input_scale"})

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        one = Expected((), rows=None, columns=None)
        by_row = Expected((shape[0],), columns=None)
        scale = one if self.granularity == "tensor" else by_row
        return {
            "weight": Expected(shape),
            "weight_scale": scale,
            "weight_zero_point": scale,
            "input_scale": one,
            "input_zero_point": one,
        }

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        for name in ("weight_zero_point", "input_zero_point"):
            if name in tensors and tensors[name].any():
                raise ModelError(
                    f"{name} is not zero: int8 weights and activations must be symmetric here; "
                    "quantize the model with symmetric: true"
                )
        weight = tensors["weight"]
        check_type("weight", weight, torch.int8)
        scale = scales_of(tensors, "weight_scale").float().expand(len(weight)).contiguous()
        if self.activations == "none":
            packed = (weight.view(torch.uint8) ^ 128).contiguous()
            return W4Weight(packed, scale[:, None], None, weight.shape[1], bits=8)
        input_scale = one_scale(tensors, "input_scale") if self.activations == "static" else None
        return Int8Weight(weight, scale, input_scale)


@dataclass(frozen=True)
class Fp4Scheme(Scheme):
    """e2m1 weights: MXFP4 with e8m0 scales, NVFP4 with e4m3 scales and a global scale."""

    kind: Literal["mxfp4", "nvfp4"]
    packed_name: str = "weight_packed"
    global_name: str = "weight_global_scale"
    divides: bool = True  # the global scale divides; else it multiplies

    @property
    def label(self) -> str:
        return self.kind

    @property
    def group_size(self) -> int:
        return 32 if self.kind == "mxfp4" else 16

    optional = frozenset({"input_global_scale", "input_scale"})

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        rows, columns = shape
        if columns % self.group_size:
            raise ModelError(
                f"a matrix of {rows} x {columns} cannot have {self.kind} weights: groups of "
                f"{self.group_size} columns do not divide it"
            )
        one = Expected((), rows=None, columns=None)
        expected = {
            self.packed_name: Expected((rows, columns // 2)),
            "weight_scale": Expected((rows, columns // self.group_size)),
            "input_global_scale": one,
            "input_scale": one,
        }
        if self.kind == "nvfp4":
            expected[self.global_name] = one
        return expected

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        packed, scales = tensors[self.packed_name], tensors["weight_scale"]
        check_type(self.packed_name, packed, torch.uint8)
        if self.kind == "mxfp4":
            check_type("weight_scale", scales, torch.uint8, torch.float8_e8m0fnu)
            exponents = scales.view(torch.uint8)
            check_finite("weight_scale", exponents.view(torch.float8_e8m0fnu).float())
            return Fp4Weight(packed, exponents, None, self.group_size)
        check_type("weight_scale", scales, FP8)
        check_finite("weight_scale", scales.float())
        if self.divides:
            one = 1.0 / one_scale(tensors, self.global_name)
        else:
            one = scales_of(tensors, self.global_name).float()
        return Fp4Weight(packed, scales, one.expand(len(packed)).contiguous(), self.group_size)


# -- quantized while loading


@dataclass(frozen=True)
class OnlineScheme(Scheme):
    """Float weights, quantized while they load."""

    kind: Literal["fp8", "int8", "int8_weight_only"]
    granularity: Granularity = "channel"

    @property
    def label(self) -> str:
        return f"{self.kind} by {self.granularity}, made while loading"

    marks = frozenset()  # the checkpoint has floats

    def expected(self, shape: tuple[int, int]) -> dict[str, Expected]:
        return {"weight": Expected(shape)}

    def convert(self, tensors: Tensors, shard: Shard) -> QuantizedWeight:
        weight = tensors["weight"]
        check_floats("", weight)
        if self.kind != "fp8":
            numbers, scale = quantize_int8_by_row(weight)
            if self.kind == "int8":
                return Int8Weight(numbers, scale)
            packed = numbers.view(torch.uint8) ^ 128
            return W4Weight(packed, scale[:, None], None, weight.shape[1], bits=8)
        if self.granularity == "block":
            return Fp8Weight(*quantize_fp8_by_block(weight))
        if self.granularity == "channel":
            return Fp8Weight(*quantize_fp8_by_row(weight))
        numbers, scale = quantize_fp8_whole(weight)
        return Fp8Weight(numbers, scale.expand(len(numbers)).contiguous())
