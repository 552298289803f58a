"""Weights in the blocks of a GGUF file, on their way from the checkpoint to a layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from penstock.protocol.errors import ModelError


@dataclass(frozen=True)
class BlockTensor:
    """A matrix [rows, columns] of quantized blocks, each row's blocks one behind the other."""

    type_name: str  # as GGUF names it: Q4_1
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
        """Columns [start, end), which must begin and end between blocks."""
        first, last = (at // self.block_size * self.block_bytes for at in (start, end))
        return self.with_data(self.data[:, first:last])

    def pad_rows(self, count: int) -> BlockTensor:
        """`count` rows, those past its own all zero."""
        padding = self.data.new_zeros(count - self.data.shape[0], self.data.shape[1])
        return self.with_data(torch.cat([self.data, padding]))

    def to(self, device: torch.device) -> BlockTensor:
        """The same on a device; a copy, where it lies elsewhere."""
        return self.with_data(self.data.to(device))

    def with_data(self, data: torch.Tensor) -> BlockTensor:
        """Another matrix of this type."""
        return dataclasses.replace(self, data=data)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What lies in memory, by name."""
        return {"data": self.data}


Weight = torch.Tensor | BlockTensor
"""What a checkpoint hands to a layer."""


def take_rows(weight: Weight, start: int, end: int) -> Weight:
    """Rows [start, end), sharing memory."""
    return weight.rows(start, end) if isinstance(weight, BlockTensor) else weight[start:end]


def take_columns(weight: Weight, start: int, end: int) -> Weight:
    """Columns [start, end), sharing memory. ModelError where a border falls inside a block."""
    if not isinstance(weight, BlockTensor):
        return weight[:, start:end]
    for at in (start, end):
        if at % weight.block_size:
            raise ModelError(
                f"a shard's border, column {at}, falls inside a {weight.type_name} block of "
                f"{weight.block_size}: use fewer ranks, or --gguf-compute dequantize"
            )
    return weight.columns(start, end)


def pad_rows(weight: Weight, count: int) -> Weight:
    """`count` rows, those past its own all zero."""
    if weight.shape[0] == count:
        return weight
    if isinstance(weight, BlockTensor):
        return weight.pad_rows(count)
    return torch.cat([weight, weight.new_zeros(count - weight.shape[0], *weight.shape[1:])])
