"""The tensors of a GGUF file under Hugging Face names, with the converter's changes undone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from penstock.loading.gguf.architectures import AsRow, SplitExperts, UnpermuteRope
from penstock.loading.gguf.config import MappedTensor, map_tensors
from penstock.loading.gguf.dequant import FLOAT_DTYPES, check_supported, dequantize
from penstock.loading.gguf.file import GGUFFile, GGUFTensor
from penstock.ops.blocks import BlockTensor, Weight


class GGUFCheckpoint:
    """The tensors of one GGUF file, with the converter's changes undone.

    All are dequantized, but for matrices whose type is one of `native_types`.
    """

    def __init__(
        self, file: GGUFFile, config: dict[str, Any], native_types: Collection[str] = ()
    ) -> None:
        self._file = file
        self._config = config
        self._native_types = native_types
        self._tensors = map_tensors(file, config)
        for mapped in self._tensors:
            check_supported(mapped.tensor, file.path)

    def names(self) -> list[str]:
        return [name for mapped in self._tensors for name, _ in _matrices(mapped)]

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        for mapped in self._tensors:
            rows = self._rows(mapped)
            start = 0
            for name, tensor in _matrices(mapped):
                count = tensor.shape[0]
                yield name, self._weight(tensor, rows[start : start + count])
                start += count

    def _weight(self, tensor: GGUFTensor, rows: torch.Tensor) -> Weight:
        if len(tensor.shape) != 2 or tensor.type.name not in self._native_types:
            return dequantize(tensor, rows.reshape(-1))
        if tensor.type.name in FLOAT_DTYPES:
            return rows.view(FLOAT_DTYPES[tensor.type.name])
        return BlockTensor(*tensor.type, rows)

    def _rows(self, mapped: MappedTensor) -> torch.Tensor:
        """The tensor's bytes, [rows, bytes of a row], in the order that Hugging Face has."""
        data = torch.from_numpy(self._file.view(mapped.tensor.name))
        rows = data.view(sum(tensor.shape[0] for _, tensor in _matrices(mapped)), -1)
        if not isinstance(mapped.transform, UnpermuteRope):
            return rows
        return unpermute_rope(rows, self._config[mapped.transform.heads])


def _matrices(mapped: MappedTensor) -> list[tuple[str, GGUFTensor]]:
    """The tensors that Hugging Face has in a tensor's place, one after the other."""
    tensor = mapped.tensor
    if isinstance(mapped.transform, SplitExperts):
        count, *shape = tensor.shape
        part = tensor._replace(shape=tuple(shape), nbytes=tensor.nbytes // count)
        return [(mapped.name.replace("{e}", str(expert)), part) for expert in range(count)]
    if isinstance(mapped.transform, AsRow) and len(tensor.shape) == 1:
        return [(mapped.name, tensor._replace(shape=(1, *tensor.shape)))]
    return [(mapped.name, tensor)]


def unpermute_rope(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [heads * dim, ...] of q or k, from ggml's pairs (2i, 2i+1) to halves (i, i + dim/2)."""
    paired = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
