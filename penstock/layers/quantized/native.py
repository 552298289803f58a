"""Converts quantized weights to types of the C++ library.

Integers go into quantization blocks of 32 columns with a float16 scale, if that is exact. fp8
becomes float16, which holds e4m3 numbers; this is exact too, except for block-wise scales. Tables
of 16 values are rounded to 8-bit integers: dequantizing a tile at a time would take a hundred times
as long. Row factors, zero points and the order of columns are applied around the product. Other
weights stay with `penstock.ops.quantized`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.layers.matrix import MatrixLayer
from penstock.layers.native import NativeMethod
from penstock.layers.quantization import LinearMethod
from penstock.layers.quantized.weights import (
    Fp4Weight,
    Fp8Weight,
    Int8Weight,
    QuantizedWeight,
    TableWeight,
    W4Weight,
)
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.cpu.packed import PackedLinear, PackedMatrix
from penstock.ops.quantized import (
    FP4_VALUES,
    dequantize_fp8,
    e8m0_to_float,
    unpack_nibbles,
)

COLUMNS = 32  # of a quantization block


@dataclass(frozen=True)
class QuantizedBlocks:
    """A matrix row_factor * (blocks + offsets), with its columns in the order of `perm`."""

    blocks: Weight
    row_factor: torch.Tensor | None = None  # [out]
    offsets: torch.Tensor | None = None  # [out, quantization groups]: added to each weight
    perm: torch.Tensor | None = None


def to_blocks(weight: QuantizedWeight) -> QuantizedBlocks | None:
    """The same numbers in quantization blocks, or None if they do not fit."""
    if isinstance(weight, Int8Weight):
        whole = weight.weight.shape[1]
        return _blocks(weight.weight, weight.scale[:, None], None, whole, 8, None)
    if isinstance(weight, Fp8Weight):
        return _fp8(weight)
    if isinstance(weight, Fp4Weight) and weight.global_scale is None:
        # Twice an e2m1 number is an integer, and half of a power of two is a power of two.
        doubled = torch.tensor([int(2 * value) for value in FP4_VALUES], dtype=torch.int8)
        numbers = doubled[unpack_nibbles(weight.packed).int()]
        return _blocks(numbers, e8m0_to_float(weight.scales) / 2, None, weight.group_size, 8, None)
    if isinstance(weight, TableWeight):
        return _table(weight)
    if not isinstance(weight, W4Weight):
        return None
    if weight.bits == 4:
        numbers = unpack_nibbles(weight.packed)
    else:
        numbers = (weight.packed ^ 128).view(torch.int8)
    return _blocks(
        numbers, weight.scales, weight.zeros, weight.group_size, weight.bits, weight.perm
    )


def _blocks(
    numbers: torch.Tensor,  # [out, in] uint8 of 4 bits, or int8
    scales: torch.Tensor,  # [out, quantization groups]
    zeros: torch.Tensor | None,
    group_size: int,
    bits: int,
    perm: torch.Tensor | None,
) -> QuantizedBlocks | None:
    if group_size % COLUMNS:
        return None
    found = _float16(scales.float())
    if found is None:
        return None
    halves, factor = found
    rows, columns = numbers.shape
    by_block = numbers.view(rows, columns // COLUMNS, COLUMNS)
    if bits == 4:
        by_block = by_block[..., :16] | (by_block[..., 16:] << 4)
    repeated = halves.repeat_interleave(group_size // COLUMNS, dim=1)[..., None].contiguous()
    data = torch.cat([repeated.view(torch.uint8), by_block.view(torch.uint8)], dim=-1).flatten(1)
    type_name = "Q4_0" if bits == 4 else "Q8_0"
    blocks = BlockTensor(type_name, COLUMNS, 18 if bits == 4 else 34, data)
    offsets = None
    if zeros is not None:
        offsets = (float(1 << (bits - 1)) - zeros.float()) * halves.float()
    return QuantizedBlocks(blocks, factor, offsets, perm)


def _table(weight: TableWeight) -> QuantizedBlocks | None:
    """The error is at most 1/254 of a quantization group's largest weight, plus scale rounding."""
    unit = weight.values.abs().amax().clamp_min(1e-30) / 127
    places = (weight.values / unit).round().to(torch.int8)
    numbers = places[unpack_nibbles(weight.packed).int()]
    scales = weight.scales * unit
    factor = _near_one(scales)[:, None]
    rounded = (scales / factor).half().float() * factor
    return _blocks(numbers, rounded, None, numbers.shape[1] // scales.shape[1], 8, None)


def _fp8(weight: Fp8Weight) -> QuantizedBlocks:
    if weight.scale.ndim == 1:
        return QuantizedBlocks(weight.weight.half(), weight.scale)
    floats = dequantize_fp8(weight.weight, weight.scale)
    factor = _near_one(floats)
    return QuantizedBlocks((floats / factor[:, None]).half(), factor)


def _near_one(numbers: torch.Tensor) -> torch.Tensor:
    """For each row, the power of two that brings its largest number near one."""
    return torch.exp2(numbers.abs().amax(1).clamp_min(1e-30).log2().floor())


def _float16(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """[out, groups] as float16 times a factor per row [out], exactly; None if impossible."""
    halves = scales.half()
    if torch.equal(halves.float(), scales):
        return halves, None
    if scales.shape[1] == 1:
        return torch.ones_like(halves), scales[:, 0].contiguous()
    factor = _near_one(scales)  # far from float16's smallest numbers
    near_one = scales / factor[:, None]
    halves = near_one.half()
    return (halves, factor) if torch.equal(halves.float(), near_one) else None


class NativeFinish:
    """Moves a layer to the library once its parts have arrived, if all fit quantization blocks."""

    def __init__(self, plain: NativeMethod) -> None:
        self._plain = plain

    def __call__(self, layer: MatrixLayer, parts: list[QuantizedWeight]) -> bool:
        found = [blocks for part in parts if (blocks := to_blocks(part)) is not None]
        if len(found) < len(parts) or not _same_order(found):
            return False
        layer.use(self._plain)
        for part, blocks in zip(layer.part_rows, found, strict=True):
            self._plain.pack(layer, part, blocks.blocks)
        if any(each.row_factor is not None or each.offsets is not None for each in found) or (
            found[0].perm is not None
        ):
            layer.method = NativeBlocksMethod(layer, found)
        return True


def _same_order(parts: list[QuantizedBlocks]) -> bool:
    first = parts[0].perm
    if first is None:
        return all(part.perm is None for part in parts)
    return all(part.perm is not None and torch.equal(part.perm, first) for part in parts)


class NativeBlocksMethod(LinearMethod):
    """The library's product of one layer, plus what quantization blocks cannot hold."""

    def __init__(self, layer: MatrixLayer, parts: list[QuantizedBlocks]) -> None:
        self._perm = parts[0].perm
        self._row_factor: torch.Tensor | None = None
        self._offsets: PackedMatrix | None = None  # [out, quantization groups]
        self._times_offsets: PackedLinear | None = None
        rows = [part.blocks.shape[0] for part in parts]
        if any(part.row_factor is not None for part in parts):
            ones = [torch.ones(count) for count in rows]
            factors = [part.row_factor for part in parts]
            self._row_factor = torch.cat(
                [one if own is None else own for one, own in zip(ones, factors, strict=True)]
            )
        offsets = [part.offsets for part in parts]
        groups = next((own.shape[1] for own in offsets if own is not None), 0)
        if groups:
            # Packed, so that the library multiplies them. Torch's sums of one row and of many
            # differ in the last bits. The next layer rounds to 8 bits, where that can be a whole
            # step.
            self._offsets = PackedMatrix(
                torch.cat(
                    [
                        torch.zeros(count, groups) if own is None else own
                        for count, own in zip(rows, offsets, strict=True)
                    ]
                )
            )
            self._times_offsets = PackedLinear([self._offsets])
            layer.register_buffer("offsets", self._offsets.data, persistent=False)
        if self._row_factor is not None:
            layer.register_buffer("row_factor", self._row_factor, persistent=False)
        if self._perm is not None:
            layer.register_buffer("perm", self._perm, persistent=False)

    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        linear = layer.native.linear
        assert isinstance(linear, PackedLinear)
        if self._perm is not None:
            x = x[:, self._perm]
        output = linear(x, bias if self._row_factor is None else None)
        if self._times_offsets is not None:
            sums = x.reshape(len(x), self._times_offsets.in_features, -1).sum(-1)  # [n, groups]
            output += self._times_offsets(sums, None)
        if self._row_factor is not None:
            output *= self._row_factor
            if bias is not None:
                output += bias
        return output

    def embed(self, layer: MatrixLayer, rows: torch.Tensor) -> torch.Tensor:
        assert self._perm is None, "an embedding's columns are in order"
        (matrix,) = layer.native.parts.values()
        embedded = matrix.embed(rows)
        if self._offsets is not None:
            group_size = embedded.shape[1] // self._offsets.shape[1]
            embedded += self._offsets.embed(rows).repeat_interleave(group_size, dim=1)
        return embedded if self._row_factor is None else embedded * self._row_factor[rows, None]
