"""Reads GGUF tensors under Hugging Face names, and reverses the converter's changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.loading.gguf.config import map_tensors
from penstock.loading.gguf.dequant import FLOAT_DTYPES, check_supported, dequantize
from penstock.loading.gguf.file import GGUFFile, GGUFTensor
from penstock.loading.gguf.mapping import MappedTensor
from penstock.loading.gguf.rules import (
    HalfOfKVB,
    LeadingOnes,
    Piece,
    SplitExperts,
    Stored,
    Transform,
    UnpermuteRope,
)
from penstock.loading.wanted import IsWanted, always
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.gguf_recode import recode
from penstock.protocol.errors import ModelError


class GGUFCheckpoint:
    """The tensors of one GGUF file, with the converter's changes reversed.

    All are dequantized, except matrices whose type is in `native_types` or converts to one of them
    without rounding.
    """

    def __init__(
        self,
        file: GGUFFile,
        config: Mapping[str, Any],
        native_types: Collection[str] = (),
        tensors: Sequence[MappedTensor] | None = None,
    ) -> None:
        """`tensors`: those of a vision tower; by default those of the language model."""
        self._file = file
        self._config = config
        self._native_types = native_types
        self._tensors = map_tensors(file, config) if tensors is None else tensors
        for mapped in self._tensors:
            check_supported(mapped.tensor, file.path)

    def names(self) -> list[str]:
        return [
            name
            for mapped in self._tensors
            if _ends_tensor(mapped.transform)
            for name, _ in _matrices(mapped)
        ]

    def tensors(self, is_wanted: IsWanted = always) -> Iterator[tuple[str, Weight]]:
        halves: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        pieces: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        for mapped in self._tensors:
            if not any(is_wanted(name) for name, _ in _matrices(mapped)):
                continue
            if isinstance(mapped.transform, HalfOfKVB):
                both = halves[mapped.name]
                both[mapped.transform.half] = self._floats(mapped)
                if len(both) == 2:
                    del halves[mapped.name]
                    yield mapped.name, join_kv_b(mapped.name, **both)
            elif isinstance(mapped.transform, Piece):
                found = pieces[mapped.name]
                found[mapped.transform.number] = self._floats(mapped)
                if len(found) == mapped.transform.count:
                    del pieces[mapped.name]
                    yield mapped.name, join_pieces(mapped.name, found, mapped.transform)
            elif isinstance(mapped.transform, LeadingOnes):
                tensor = self._floats(mapped)
                ones = (1,) * (mapped.transform.num_dims - tensor.dim())
                yield mapped.name, tensor.view(*ones, *tensor.shape)
            elif isinstance(mapped.transform, Stored) and mapped.transform is not Stored.AS_VECTOR:
                yield mapped.name, undo(mapped.transform, self._floats(mapped), mapped.name)
            else:
                yield from self._by_rows(mapped, is_wanted)

    def _by_rows(self, mapped: MappedTensor, is_wanted: IsWanted) -> Iterator[tuple[str, Weight]]:
        """For transforms that only reorder rows: quantization blocks stay unchanged."""
        rows, matrices = self._rows(mapped), _matrices(mapped)
        scales = self._scales(mapped, len(matrices))
        start = 0
        for (name, tensor), scale in zip(matrices, scales, strict=True):
            own = rows[start : start + tensor.shape[0]]
            start += tensor.shape[0]
            if not is_wanted(name):
                continue
            if scale is None:
                yield name, self._weight(tensor, own)
            else:
                yield name, dequantize(tensor, own.reshape(-1)).mul_(scale)

    def _scales(self, mapped: MappedTensor, count: int) -> Sequence[float | None]:
        """The factor of each of a tensor's matrices; None for 1."""
        if mapped.scale is None:
            return [None] * count
        data = self._file.view(mapped.scale.name)
        scales: list[float] = dequantize(mapped.scale, data).reshape(-1).tolist()
        if count % len(scales):
            raise ModelError(
                f"tensor {mapped.scale.name} has {len(scales)} scales of {count} matrices"
            )
        return [scale for scale in scales for _ in range(count // len(scales))]

    def _floats(self, mapped: MappedTensor) -> torch.Tensor:
        return dequantize(mapped.tensor, self._file.view(mapped.tensor.name))

    def _weight(self, tensor: GGUFTensor, rows: torch.Tensor) -> Weight:
        if len(tensor.shape) != 2:
            return dequantize(tensor, rows.reshape(-1))
        if tensor.type.name not in self._native_types:
            recoded = recode(BlockTensor(*tensor.type, rows), self._native_types)
            return dequantize(tensor, rows.reshape(-1)) if recoded is None else recoded
        if tensor.type.name in FLOAT_DTYPES:
            return rows.view(FLOAT_DTYPES[tensor.type.name])
        return BlockTensor(*tensor.type, rows)

    def _rows(self, mapped: MappedTensor) -> torch.Tensor:
        """The tensor's bytes, [rows, bytes of a row], in Hugging Face's order."""
        data = torch.from_numpy(self._file.view(mapped.tensor.name))
        rows = data.view(sum(tensor.shape[0] for _, tensor in _matrices(mapped)), -1)
        if not isinstance(mapped.transform, UnpermuteRope):
            return rows
        return unpermute_rope(rows, self._config[mapped.transform.heads])


def _ends_tensor(transform: Transform | None) -> bool:
    """Whether a tensor is one of the model's, or the last part of one."""
    if isinstance(transform, Piece):
        return transform.number == transform.count - 1
    return transform != HalfOfKVB("keys")  # which is joined with the values


def _matrices(mapped: MappedTensor) -> list[tuple[str, GGUFTensor]]:
    """The Hugging Face tensors that a GGUF tensor contains, in order."""
    tensor = mapped.tensor
    if isinstance(mapped.transform, SplitExperts):
        parts = mapped.transform.parts
        count, rows, *columns = tensor.shape
        part = tensor._replace(
            shape=(rows // len(parts), *columns), nbytes=tensor.nbytes // count // len(parts)
        )
        return [
            (mapped.name.replace("{e}", str(expert)).replace("{p}", name), part)
            for expert in range(count)
            for name in parts
        ]
    if mapped.transform is Stored.AS_VECTOR and len(tensor.shape) == 1:
        return [(mapped.name, tensor._replace(shape=(1, *tensor.shape)))]
    return [(mapped.name, tensor)]


def unpermute_rope(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows [heads * dim, ...] of q or k, from ggml's pairs to halves (i, i + dim/2)."""
    paired = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def undo(stored: Stored, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Reverse the conversion of a small tensor."""
    if stored is Stored.PLUS_ONE:
        return tensor - 1.0
    if stored is Stored.SQUEEZED:
        return tensor.unsqueeze(1)
    if stored is Stored.MINUS_EXP:
        if (tensor >= 0).any():
            raise ModelError(f"tensor {name}: must be below 0, got {float(tensor.max())}")
        tensor = tensor.neg().log()
    return tensor.reshape(-1)


def join_kv_b(name: str, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Join keys [heads, rank, key_dim] and values [heads, value_dim, rank] into one matrix."""
    if (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        raise ModelError(
            f"tensor {name}: keys {list(keys.shape)} and values {list(values.shape)} do not match"
        )
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def join_pieces(name: str, pieces: Mapping[int, torch.Tensor], piece: Piece) -> torch.Tensor:
    """Join the tensors of all pieces, by their numbers."""
    ordered = [pieces[number] for number in range(piece.count)]
    is_stacked = piece.kind == "frames"
    shapes = {each.shape if is_stacked else each.shape[1:] for each in ordered}
    if len(shapes) > 1:
        found = ", ".join(str(list(each.shape)) for each in ordered)
        raise ModelError(f"tensor {name}: its {piece.count} parts do not match: {found}")
    return torch.stack(ordered, dim=2) if is_stacked else torch.cat(ordered)
