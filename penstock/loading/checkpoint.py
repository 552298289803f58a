"""The tensors of a model under Hugging Face names, streamed from memory maps.

Every checkpoint reads one tensor at a time: memory peaks at one tensor beyond what its consumer
keeps. GGUF blocks come out as float32, or as they are for layers that compute with them; other
files give their own types. `bitsandbytes.py` brings that library's flat matrices into rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from penstock.config import LoadConfig
from penstock.loading.bitsandbytes import BitsAndBytesCheckpoint, has_flat_matrices
from penstock.loading.gguf_architectures import AsRow, SplitExperts, UnpermuteRope
from penstock.loading.gguf_config import MappedTensor, map_tensors
from penstock.loading.gguf_dequant import FLOAT_DTYPES, check_supported, dequantize
from penstock.loading.gguf_file import GGUFFile, GGUFTensor
from penstock.loading.source import ModelSource, read_json
from penstock.ops.blocks import BlockTensor, Weight
from penstock.protocol.errors import ModelError


class Checkpoint(Protocol):
    """Tensors by Hugging Face name."""

    def names(self) -> list[str]:
        """All names, in the order of `tensors`."""

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """Every tensor, in file order. One may be backed by the file: copy, don't write."""


def open_checkpoint(
    source: ModelSource, load: LoadConfig, native_types: Collection[str] = ()
) -> Checkpoint:
    """The tensors of `source`. Raises ModelError, naming the file, for what cannot be read.

    Matrices of a GGUF file whose type is one of `native_types` come as they are.
    """
    if source.gguf is not None:
        return GGUFCheckpoint(source.gguf, source.config, native_types)
    checkpoint: Checkpoint
    if load.load_format == "pt":
        checkpoint = PickleCheckpoint(source.tensor_files)
    else:
        checkpoint = SafetensorsCheckpoint(source.tensor_files)
    is_flat = has_flat_matrices(checkpoint.names())
    return BitsAndBytesCheckpoint(checkpoint) if is_flat else checkpoint


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


class SafetensorsCheckpoint:
    """The tensors of one or several safetensors files."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self._names: dict[Path, list[str]] = {}  # in the order in which they lie
        owners: dict[str, Path] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    self._names[path] = list(file.offset_keys())
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from error
            _claim(owners, self._names[path], path)
        _check_index(owners, "model.safetensors.index.json")

    def names(self) -> list[str]:
        return [name for path in self._files for name in self._names[path]]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self._files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in self._names[path]:
                        yield name, file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from error


class PickleCheckpoint:
    """The tensors of .bin files: only tensors are unpickled, nothing is executed."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._tensors: dict[Path, dict[str, torch.Tensor]] = {}
        owners: dict[str, Path] = {}
        for path in files:
            self._tensors[path] = _load_pickle(path)
            _claim(owners, list(self._tensors[path]), path)
        _check_index(owners, "pytorch_model.bin.index.json")
        self._owners = owners

    def names(self) -> list[str]:
        return list(self._owners)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensors in self._tensors.values():
            yield from tensors.items()


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(tensors, dict):
        raise ModelError(f"{path}: must hold a dict of tensors, got {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{path}: entry {name!r} is not a tensor but {type(tensor).__name__}")
    return tensors


def _claim(owners: dict[str, Path], names: list[str], path: Path) -> None:
    for name in names:
        if name in owners:
            raise ModelError(f"tensor {name!r} lies in {owners[name]} and again in {path}")
        owners[name] = path


def _check_index(owners: dict[str, Path], index_name: str) -> None:
    """What an index promises must be in the file that it names."""
    index = next(iter(owners.values())).parent / index_name if owners else None
    if index is None or not index.exists():
        return
    for name, file in read_json(index)["weight_map"].items():
        owner = owners.get(name)
        if owner is None or owner.name != file:
            where = "nowhere" if owner is None else f"in {owner.name}"
            raise ModelError(f"{index}: says that {name!r} is in {file!r}, but it is {where}")


def _unreadable(path: Path, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:300]
    return ModelError(f"{path}: cannot be read, truncated or corrupt: {reason}")
