"""Quantized matrices in memory: one class per kind, in the layouts of `penstock.ops.quantized`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F

from penstock.ops.quantized import (
    BLOCK,
    FP8,
    dequantize_fp4,
    dequantize_fp8,
    dequantize_table,
    dequantize_w4,
)
from penstock.ops.registry import Ops


class QuantizedWeight(Protocol):
    """This rank's matrix [out, in] of one or several parts."""

    def linear(self, ops: Ops, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, in] -> [n, out]."""

    def experts(self, ops: Ops, down: Any, *inputs: Any, **options: Any) -> torch.Tensor:
        """The op of stacked experts, of which this is `gate_up`. `down` is of the same kind.

        `inputs` are x, weights and ids; `options` the activation and the biases.
        """

    def floats(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows as float32: [n] -> [n, in]. Not available after `prepare`."""

    def padded(self, num_rows: int) -> QuantizedWeight:
        """The matrix padded with zero rows at its end."""

    def prepare(self, ops: Ops) -> QuantizedWeight:
        """The matrix in the layout that is fastest for these ops."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors, by field."""


T = TypeVar("T", bound="_Fields")
SHARED = ("input_scale", "perm", "values")  # fields shared by all rows


@dataclass(frozen=True)
class _Fields:
    """The common behaviour of most kinds: a frozen dataclass of tensors with one row per output.

    The fields in `SHARED` are the exception.
    """

    prepared_by: ClassVar[str] = ""  # an op that some devices have
    prepared: ClassVar[tuple[str, ...]] = ()  # fields that it takes; it replaces the first ones

    def tensors(self) -> dict[str, torch.Tensor]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}

    def padded(self: T, num_rows: int) -> T:
        rows = {name: tensor for name, tensor in self.tensors().items() if name not in SHARED}
        return dataclasses.replace(
            self, **{name: _pad(tensor, num_rows) for name, tensor in rows.items()}
        )

    def prepare(self: T, ops: Ops) -> T:
        prepare = ops.find(self.prepared_by)
        if prepare is None:
            return self
        found = prepare(*(getattr(self, name) for name in self.prepared))
        return dataclasses.replace(self, **dict(zip(self.prepared, found, strict=False)))


@dataclass(frozen=True)
class Fp8Weight(_Fields):
    weight: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # [out] float32, or by quantization block
    input_scale: torch.Tensor | None = None  # scalar

    prepared_by = "prepare_fp8"
    prepared = ("weight", "scale")

    def linear(self, ops: Ops, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.fp8_linear(x, self.weight, self.scale, self.input_scale, bias)

    def experts(self, ops: Ops, down: Fp8Weight, *inputs: Any, **options: Any) -> torch.Tensor:
        return ops.fp8_experts(
            *inputs, self.weight, self.scale, down.weight, down.scale,
            self.input_scale, down.input_scale, **options,
        )  # fmt: skip

    def floats(self, rows: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        if scale.ndim == 2 and len(scale) != len(self.weight):
            scale = scale[rows // BLOCK]
        else:
            scale = scale[rows]
        return dequantize_fp8(_rows_of_bytes(self.weight, rows), scale)

    def padded(self, num_rows: int) -> Fp8Weight:
        scale = self.scale
        if scale.ndim == 1 or len(scale) == len(self.weight):
            scale = _pad(scale, num_rows)
        elif -(-num_rows // BLOCK) != len(scale):
            scale = _pad(scale, -(-num_rows // BLOCK))
        return dataclasses.replace(self, weight=_pad(self.weight, num_rows), scale=scale)

    def by_row(self) -> Fp8Weight:
        """The scales of quantization blocks, repeated for each row."""
        rows = torch.arange(len(self.weight), device=self.scale.device) // BLOCK
        return dataclasses.replace(self, scale=self.scale[rows])


@dataclass(frozen=True)
class Int8Weight(_Fields):
    weight: torch.Tensor  # [out, in] int8
    scale: torch.Tensor  # [out] float32
    input_scale: torch.Tensor | None = None  # scalar

    def linear(self, ops: Ops, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.int8_linear(x, self.weight, self.scale, self.input_scale, bias)

    def experts(self, ops: Ops, down: Int8Weight, *inputs: Any, **options: Any) -> torch.Tensor:
        raise NotImplementedError("experts store them as W4Weight of 8 bits")

    def floats(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows].float() * self.scale[rows, None]


@dataclass(frozen=True)
class W4Weight(_Fields):
    packed: torch.Tensor  # [out, in * bits / 8] uint8
    scales: torch.Tensor  # [out, in / group_size]
    zeros: torch.Tensor | None  # [out, in / group_size] uint8
    group_size: int
    bits: int = 4
    perm: torch.Tensor | None = None  # [in] int64: column i multiplies x[:, perm[i]]

    prepared_by = "prepare_w4"
    prepared = ("packed", "scales", "zeros", "group_size", "bits")

    def linear(self, ops: Ops, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        multiply = ops.w8_linear if self.bits == 8 else ops.w4_linear
        return multiply(
            x, self.packed, self.scales, self.zeros, self.group_size, bias, perm=self.perm
        )

    def experts(self, ops: Ops, down: W4Weight, *inputs: Any, **options: Any) -> torch.Tensor:
        compute = ops.w8_experts if self.bits == 8 else ops.w4_experts
        return compute(
            *inputs, self.packed, self.scales, self.zeros, down.packed, down.scales, down.zeros,
            max(self.group_size, down.group_size), **options,
        )  # fmt: skip

    def floats(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.perm is None, "an embedding's columns are in order"
        zeros = None if self.zeros is None else self.zeros[rows]
        return dequantize_w4(
            self.packed[rows], self.scales[rows], zeros, self.group_size, self.bits
        )


@dataclass(frozen=True)
class Fp4Weight(_Fields):
    packed: torch.Tensor  # [out, in / 2] uint8
    scales: torch.Tensor  # [out, in / group_size] uint8 (e8m0) or float8_e4m3fn
    global_scale: torch.Tensor | None  # [out] float32
    group_size: int

    prepared_by = "prepare_fp4"
    prepared = ("packed", "scales", "global_scale", "group_size")

    def linear(self, ops: Ops, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.fp4_linear(x, self.packed, self.scales, self.global_scale, self.group_size, bias)

    def experts(self, ops: Ops, down: Fp4Weight, *inputs: Any, **options: Any) -> torch.Tensor:
        return ops.fp4_experts(
            *inputs, self.packed, self.scales, self.global_scale,
            down.packed, down.scales, down.global_scale, self.group_size, **options,
        )  # fmt: skip

    def floats(self, rows: torch.Tensor) -> torch.Tensor:
        scales = _rows_of_bytes(self.scales, rows)
        own = None if self.global_scale is None else self.global_scale[rows]
        return dequantize_fp4(self.packed[rows], scales, own, self.group_size)


@dataclass(frozen=True)
class TableWeight(_Fields):
    packed: torch.Tensor  # [out, in / 2] uint8
    scales: torch.Tensor  # [out, groups] float32
    values: torch.Tensor  # [16] float32: the values of the table

    def linear(self, ops: Ops, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.table_linear(x, self.packed, self.scales, self.values, bias)

    def experts(self, ops: Ops, down: TableWeight, *inputs: Any, **options: Any) -> torch.Tensor:
        return ops.table_experts(
            *inputs, self.packed, self.scales, down.packed, down.scales, self.values, **options
        )

    def floats(self, rows: torch.Tensor) -> torch.Tensor:
        return dequantize_table(self.packed[rows], self.scales[rows], self.values)

    def prepare(self, ops: Ops) -> TableWeight:
        prepare = ops.find("prepare_table")
        return self if prepare is None else dataclasses.replace(self, packed=prepare(self.packed))


W = TypeVar("W", Fp8Weight, Int8Weight, W4Weight, Fp4Weight, TableWeight)


def fuse(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Concatenate all parts into one matrix. Parts that cannot be combined stay separate."""
    first = parts[0]
    if len(parts) == 1:
        return [first]
    if isinstance(first, Fp8Weight):
        return [_fuse_fp8([part for part in parts if isinstance(part, Fp8Weight)])]
    if isinstance(first, W4Weight):
        others = [part for part in parts if isinstance(part, W4Weight)]
        alike = all(_same(first.perm, part.perm) for part in others)
        alike = alike and len({(part.group_size, part.zeros is None) for part in others}) == 1
        if not alike:
            return list(parts)
        return [_stack(first, others, perm=first.perm)]
    if isinstance(first, Int8Weight):
        ints = [part for part in parts if isinstance(part, Int8Weight)]
        return [_stack(first, ints, input_scale=_largest([part.input_scale for part in ints]))]
    if isinstance(first, TableWeight):
        tables = [part for part in parts if isinstance(part, TableWeight)]
        alike = all(torch.equal(first.values, part.values) for part in tables)
        if not alike or len({part.scales.shape[1] for part in tables}) > 1:
            return list(parts)
        return [_stack(first, tables, values=first.values)]
    assert isinstance(first, Fp4Weight)
    return [_stack(first, [part for part in parts if isinstance(part, Fp4Weight)])]


def _fuse_fp8(parts: list[Fp8Weight]) -> Fp8Weight:
    if parts[0].scale.ndim == 2 and any(len(part.weight) % BLOCK for part in parts[:-1]):
        parts = [part.by_row() for part in parts]  # a quantization block would span two parts
    return _stack(parts[0], parts, input_scale=_largest([part.input_scale for part in parts]))


def _stack(first: W, parts: Sequence[W], **given: torch.Tensor | None) -> W:
    """`first` with every tensor not in `given` concatenated over all parts."""
    stacked = {
        name: _cat([part.tensors()[name] for part in parts])
        for name in first.tensors()
        if name not in given
    }
    return dataclasses.replace(first, **stacked, **given)  # type: ignore[arg-type]


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].dtype != FP8:
        return torch.cat(tensors)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(FP8)


def _rows_of_bytes(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Indexing that also works for types that torch can only store."""
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def _pad(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    count = num_rows - len(tensor)
    if not count:
        return tensor
    padding = [0, 0] * (tensor.ndim - 1) + [0, count]
    if tensor.dtype == FP8:
        return F.pad(tensor.view(torch.uint8), padding).view(FP8)
    return F.pad(tensor, padding)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _largest(scales: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The scale of the parts' common input: the largest overflows nowhere."""
    given = [scale for scale in scales if scale is not None]
    return torch.stack(given).amax() if given else None
