"""Weights in the C++ library's layout, packed once at load."""

from __future__ import annotations

import ctypes

import torch

from penstock.ops.blocks import BlockTensor
from penstock.ops.cpu.dtypes import BLOCK_TYPES, FLOAT_TYPES
from penstock.ops.cpu.library import WeightPart, WeightsStruct, loaded

_library = loaded()
_packed_bytes = _library.penstock_packed_bytes
_pack = _library.penstock_pack
_embed = _library.penstock_embed
_linear = _library.penstock_linear


class PackedMatrix:
    """A matrix [rows, columns] in quantization blocks of a type in BLOCK_TYPES, or in floats."""

    def __init__(self, weight: torch.Tensor | BlockTensor) -> None:
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        if isinstance(weight, BlockTensor):
            self.type = BLOCK_TYPES[weight.type_name]
            data = weight.data
        else:
            self.type = FLOAT_TYPES[weight.dtype]
            data = (weight if weight.stride(1) == 1 else weight.contiguous()).view(torch.uint8)
        assert data.stride(1) == 1, "a row's bytes lie one behind the other"
        rows, columns = self.shape
        self.data = torch.empty(_packed_bytes(self.type, rows, columns), dtype=torch.uint8)
        _pack(self.type, data.data_ptr(), data.stride(0), rows, columns, self.data.data_ptr())

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Dequantize some rows: [n] int64 -> [n, columns]. IndexError if a row does not exist."""
        out = torch.empty(len(rows), self.shape[1], dtype=torch.float32)
        ids = rows.to(torch.int64).contiguous()
        _embed(
            self.type, self.data.data_ptr(), *self.shape, ids.data_ptr(), len(ids), out.data_ptr()
        )  # fmt: skip
        return out


class PackedLinear:
    """Matrices whose outputs are concatenated: y = x [W1; W2; ...]^T + bias."""

    def __init__(self, parts: list[PackedMatrix]) -> None:
        self._parts = parts  # keeps their memory alive
        self.in_features = parts[0].shape[1]
        assert all(part.shape[1] == self.in_features for part in parts), "parts differ in columns"
        array = (WeightPart * len(parts))()
        self.out_features = 0
        for entry, part in zip(array, parts, strict=True):
            entry.packed, entry.type = part.data.data_ptr(), part.type
            entry.columns, entry.first_column = part.shape[0], self.out_features
            self.out_features += part.shape[0]
        self._array = array

    def weights(self, bias: torch.Tensor | None) -> WeightsStruct:
        """The weights as the library takes them. Valid while this object and the bias live."""
        pointer = None
        if bias is not None:
            assert bias.dtype == torch.float32, f"a bias in {bias.dtype}"
            assert bias.shape == (self.out_features,), f"a bias {list(bias.shape)}"
            assert bias.is_contiguous(), "a bias is read as it lies"
            pointer = bias.data_ptr()
        return WeightsStruct(ctypes.addressof(self._array), len(self._parts), pointer)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, in_features] float32 -> [n, out_features]."""
        # The library reads that many floats of each row without a check.
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype != torch.float32:
            raise ValueError(
                f"x must be [n, {self.in_features}] float32, got {list(x.shape)} {x.dtype}"
            )
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, self.out_features)
        _linear(
            ctypes.byref(self.weights(bias)), x.data_ptr(), x.stride(0), rows, self.in_features,
            out.data_ptr(), self.out_features,
        )  # fmt: skip
        return out


def quantize_int8(weight: torch.Tensor) -> BlockTensor:
    """Quantize a float matrix to Q8_0: 32 columns share a float16 scale. Columns % 32 == 0."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows, columns // 32, 32)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    numbers = (blocks * inverse).round_().clamp_(-127, 127).to(torch.int8)
    data = torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], dim=-1)
    return BlockTensor("Q8_0", 32, 34, data.view(rows, columns // 32 * 34))
