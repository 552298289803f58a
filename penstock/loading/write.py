"""Writes checkpoints: sharded safetensors in a folder that appears when everything is written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.config.quantization import find_quantization_config
from penstock.loading.sentence_transformers import module_folders
from penstock.loading.source import ModelSource, read_json
from penstock.protocol.errors import ConfigError

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
# Small layers in files of their own, which are copied (bge-m3).
VECTOR_HEADS = ("sparse_linear", "colbert_linear")


def check_target(out: Path, source: ModelSource) -> None:
    """Refuse a target that is not empty or not writable."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already: choose a new or empty folder")
    out = out.resolve()
    root = _root(source)
    if out.is_relative_to(root.resolve()):
        raise ConfigError(f"{out} lies inside the model {root}: name a folder elsewhere")
    nearest = next(path for path in out.parents if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "no folder" if not nearest.is_dir() else "a folder that cannot be written to"
        raise ConfigError(f"{out} cannot be made: {nearest} is {what}")


def check_unquantized(source: ModelSource, remedy: str) -> None:
    """Refuse a checkpoint in which weights are not floats."""
    found = find_quantization_config(source.config)
    if source.gguf is not None:
        raise ConfigError(f"{source.name} is a GGUF file: {remedy}")
    if found is not None:
        how = found.get("quant_method", "a method of its own")
        raise ConfigError(f"{source.name} is quantized already ({how}): {remedy}")


@dataclass
class NewCheckpoint:
    """A changed copy of a model that is being written."""

    writer: ShardWriter
    config: dict[str, Any]  # config.json, to be changed


@contextmanager
def new_checkpoint(
    source: ModelSource, out: Path, shard_bytes: int = SHARD_BYTES
) -> Iterator[NewCheckpoint]:
    """Write a changed copy of `source` to `out`, which appears when everything is written.

    The model's other files are copied. A failure leaves nothing behind. Raises ConfigError if the
    folder cannot be written.
    """
    out = out.resolve()  # a link may lead to the folder
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            whole = Path(scratch) / "model"
            folder = whole / source.path.relative_to(_root(source))
            folder.mkdir(parents=True)
            # The original file: `source.config` has only the text model's settings.
            config = read_json(source.path / "config.json")
            new = NewCheckpoint(ShardWriter(folder, shard_bytes), config)
            yield new
            new.writer.finish()
            _write_config(folder, config)
            _copy_others(source.path, folder)
            if source.modules_folder is not None:
                _copy_modules(source, whole)
            if out.exists():
                out.rmdir()  # empty, as `check_target` ensured
            os.replace(whole, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {out}: {error}") from error


class ShardWriter:
    """Writes tensors to files of a limited size, and an index if there are several."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._num_pending = 0  # bytes
        self._total = 0
        self._shards: list[list[str]] = []  # names by file

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._num_pending + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._num_pending += tensor.nbytes
        self._total += tensor.nbytes

    def finish(self) -> None:
        """Write the remaining tensors, and rename the files to include their number."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._path(index).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index_json = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        _write_json(self._folder / INDEX, index_json)

    def _flush(self) -> None:
        save_file(self._pending, self._path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append([*self._pending])
        self._pending, self._num_pending = {}, 0

    def _path(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, and give the tensor files its permissions."""
    _write_json(folder / "config.json", config)
    for path in folder.glob("*.safetensors"):  # only their writer could read them
        path.chmod((folder / "config.json").stat().st_mode)


def _root(source: ModelSource) -> Path:
    """The folder with all files of a model: modules.json may have the transformer further in."""
    return source.modules_folder or source.path


def _copy_modules(source: ModelSource, folder: Path) -> None:
    """Copy sentence-transformers' other modules, such as 1_Pooling and 2_Dense, with weights."""
    root = _root(source)
    _copy_others(root, folder)
    for path in module_folders(root):
        if path != source.path and path != root and path.is_dir():
            shutil.copytree(path, folder / path.relative_to(root), dirs_exist_ok=True)


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the tokenizer, the templates and other files of a model, but no folders."""
    for path in source.iterdir():
        is_weights = path.suffix in WEIGHT_FILES or path.name.endswith(".index.json")
        is_weights = is_weights and path.stem not in VECTOR_HEADS
        if path.is_file() and not is_weights and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
