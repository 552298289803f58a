"""Weights in GGUF quantization blocks, between the checkpoint and a layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from penstock.protocol.errors import ModelError


@dataclass(frozen=True)
class BlockTensor:
    """A matrix [rows, columns] of quantization blocks. The blocks of a row are consecutive."""

    type_name: str  # GGUF's name, such as Q4_1
    block_size: int  # elements
    block_bytes: int
    data: torch.Tensor  # [rows, bytes of a row] uint8; may be backed by the file

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.data.shape
        return rows, row_bytes // self.block_bytes * self.block_size

    def rows(self, start: int, end: int) -> BlockTensor:
        """Rows [start, end), sharing memory."""
        return self.with_data(self.data[start:end])

    def columns(self, start: int, end: int) -> BlockTensor:
        """Columns [start, end), which must fall on borders of quantization blocks."""
        first, last = (at // self.block_size * self.block_bytes for at in (start, end))
        return self.with_data(self.data[:, first:last])

    def pad_rows(self, count: int) -> BlockTensor:
        """Pad with zero rows to `count` rows."""
        padding = self.data.new_zeros(count - self.data.shape[0], self.data.shape[1])
        return self.with_data(torch.cat([self.data, padding]))

    def to(self, device: torch.device) -> BlockTensor:
        """The matrix on a device. Copies if it is elsewhere."""
        return self.with_data(self.data.to(device))

    def with_data(self, data: torch.Tensor) -> BlockTensor:
        """A matrix of the same type with other data."""
        return dataclasses.replace(self, data=data)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in memory, by name."""
        return {"data": self.data}


Weight = torch.Tensor | BlockTensor
"""A weight as the checkpoint passes it to a layer."""


def take_rows(weight: Weight, start: int, end: int) -> Weight:
    """Rows [start, end), sharing memory."""
    return weight.rows(start, end) if isinstance(weight, BlockTensor) else weight[start:end]


def take_columns(weight: Weight, start: int, end: int) -> Weight:
    """Columns [start, end), sharing memory.

    Raises ModelError if a border falls inside a quantization block.
    """
    if not isinstance(weight, BlockTensor):
        return weight[:, start:end]
    for at in (start, end):
        if at % weight.block_size:
            raise ModelError(
                f"a shard boundary, column {at}, falls inside a {weight.type_name} block of "
                f"{weight.block_size}: use fewer ranks, or --gguf-compute dequantize"
            )
    return weight.columns(start, end)


def pad_rows(weight: Weight, count: int) -> Weight:
    """Pad with zero rows to `count` rows."""
    if weight.shape[0] == count:
        return weight
    if isinstance(weight, BlockTensor):
        return weight.pad_rows(count)
    return torch.cat([weight, weight.new_zeros(count - weight.shape[0], *weight.shape[1:])])
