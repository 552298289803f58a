"""Streams the tensors of a model under Hugging Face names, from memory maps.

Every checkpoint reads one tensor at a time, so memory peaks at one tensor beyond what the consumer
keeps. GGUF tensors are dequantized to float32, or kept for layers that compute with their
quantization blocks. Other files give their own types. `bitsandbytes.py` converts that library's
flat matrices to rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from penstock.config import LoadConfig
from penstock.loading.bitsandbytes import BitsAndBytesCheckpoint, has_flat_matrices
from penstock.loading.gguf.checkpoint import GGUFCheckpoint
from penstock.loading.gguf.file import GGUFFile
from penstock.loading.gguf.mmproj import map_tower
from penstock.loading.source import ModelSource, read_json
from penstock.loading.wanted import IsWanted, always
from penstock.ops.blocks import Weight
from penstock.protocol.errors import ModelError


class Checkpoint(Protocol):
    """Tensors by Hugging Face name."""

    def names(self) -> list[str]:
        """All names, in the order of `tensors`."""

    def tensors(self, is_wanted: IsWanted = always) -> Iterator[tuple[str, Weight]]:
        """Every tensor whose name is wanted, in file order. The others are not read.

        One may be backed by the file: copy it, do not write to it.
        """


def open_checkpoint(
    source: ModelSource, load: LoadConfig, native_types: Collection[str] = ()
) -> Checkpoint:
    """The tensors of `source`. Raises ModelError, naming the file, for unreadable files.

    Matrices of a GGUF file with a type in `native_types` are not dequantized.
    """
    if source.gguf is not None:
        model = GGUFCheckpoint(source.gguf, source.config, native_types)
        if source.mmproj is None:
            return model
        return JoinedCheckpoint(model, tower_checkpoint(source.mmproj, source.config))
    checkpoint: Checkpoint
    if load.load_format == "pt":
        checkpoint = PickleCheckpoint(source.tensor_files)
    else:
        checkpoint = SafetensorsCheckpoint(source.tensor_files)
    is_flat = has_flat_matrices(checkpoint.names())
    return BitsAndBytesCheckpoint(checkpoint) if is_flat else checkpoint


def tower_checkpoint(mmproj: GGUFFile, config: Mapping[str, Any]) -> GGUFCheckpoint:
    """The tensors of a vision tower, all dequantized."""
    return GGUFCheckpoint(mmproj, config["vision_config"], (), map_tower(mmproj, config))


class JoinedCheckpoint:
    """The tensors of several checkpoints, one after the other."""

    def __init__(self, *parts: Checkpoint) -> None:
        self._parts = parts

    def names(self) -> list[str]:
        return [name for part in self._parts for name in part.names()]

    def tensors(self, is_wanted: IsWanted = always) -> Iterator[tuple[str, Weight]]:
        for part in self._parts:
            yield from part.tensors(is_wanted)


def read_floats(checkpoint: Checkpoint, title: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint that is no GGUF file, with a progress bar on a terminal."""
    progress: Iterable[tuple[str, Weight]] = tqdm(
        checkpoint.tensors(),
        total=len(checkpoint.names()),
        desc=title,
        unit="tensor",
        disable=None,
    )
    for name, tensor in progress:
        assert isinstance(tensor, torch.Tensor), "only GGUF files have other tensors"
        yield name, tensor


class SafetensorsCheckpoint:
    """The tensors of one or several safetensors files."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self._names: dict[Path, list[str]] = {}  # in file order
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

    def tensors(self, is_wanted: IsWanted = always) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self._files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in filter(is_wanted, self._names[path]):
                        yield name, file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from error


class PickleCheckpoint:
    """The tensors of .bin files. Only tensors are unpickled, and no code is executed."""

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

    def tensors(self, is_wanted: IsWanted = always) -> Iterator[tuple[str, torch.Tensor]]:
        for tensors in self._tensors.values():
            for name in filter(is_wanted, tensors):
                yield name, tensors[name]


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(tensors, dict):
        raise ModelError(f"{path}: must contain a dict of tensors, got {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{path}: entry {name!r} is not a tensor but {type(tensor).__name__}")
    return tensors


def _claim(owners: dict[str, Path], names: list[str], path: Path) -> None:
    for name in names:
        if name in owners:
            raise ModelError(f"tensor {name!r} is in {owners[name]} and again in {path}")
        owners[name] = path


def _check_index(owners: dict[str, Path], index_name: str) -> None:
    """Check that each tensor of an index is in the file that the index names."""
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
