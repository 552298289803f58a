"""Writes a quantized copy of a checkpoint, one tensor at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from penstock.config import LoadConfig
from penstock.layers.quantization import check_floats
from penstock.layers.quantized.checkpoints import find_quantization_config
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.sentence_transformers import module_folders
from penstock.loading.source import ModelSource, read_json
from penstock.ops.blocks import BlockTensor
from penstock.protocol.errors import ConfigError
from penstock.quantize.methods import Method

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"

# Matrices that do not belong to linear layers, by the end of their names.
NOT_LINEAR = re.compile(r"(embed\w*|wte|wpe|\w*norm\w*|conv1d)\.weight$")
# Linear layers that stay unquantized: the heads and the routers, whose few numbers decide a lot.
KEPT = (
    r"lm_head$",
    r".*\.(gate|router|shared_expert_gate|block_sparse_moe\.gate)$",
    r"(\w+\.)?(score|classifier|pre_classifier|pooler|head)(\.(dense|out_proj|\d+))*$",
)
# Vision and audio modules beside a text model: small, and not run here.
NOT_TEXT = r"(.*\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\..*"
# Layers that engines fuse into one matrix. They are quantized together or not at all.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
)
# Small layers in files of their own, which are copied (bge-m3).
VECTOR_HEADS = ("sparse_linear", "colbert_linear")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass
class Report:
    """What happened to a checkpoint."""

    quantized: list[str] = field(default_factory=list)  # layers
    kept: dict[str, str] = field(default_factory=dict)  # unquantized linear layers, and why
    bytes_before: int = 0
    bytes_after: int = 0


def check_source(source: ModelSource) -> None:
    """Refuse a checkpoint that is already quantized."""
    if source.gguf is not None:
        raise ConfigError(
            f"{source.name} is a GGUF file, quantized by its own means: give a folder or a hub id "
            "with safetensors in 16 or 32 bits"
        )
    found = find_quantization_config(source.config)
    if found is not None:
        how = found.get("quant_method", "a method of its own")
        raise ConfigError(
            f"{source.name} is quantized already ({how}): give the checkpoint that it was made of"
        )


def check_target(out: Path, source: ModelSource) -> None:
    """Refuse a target that is not empty or not writable."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: name a folder that is not, or that is empty")
    out = out.resolve()
    root = _root(source)
    if out.is_relative_to(root.resolve()):
        raise ConfigError(f"{out} lies inside the model {root}: name a folder elsewhere")
    nearest = next(path for path in out.parents if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "no folder" if not nearest.is_dir() else "a folder that cannot be written to"
        raise ConfigError(f"{out} cannot be made: {nearest} is {what}")


def write_quantized(
    source: ModelSource,
    out: Path,
    method: Method,
    kept: Sequence[str] = (),
    moments: Mapping[str, torch.Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Write `source` with its linear layers quantized, except those that match `kept`.

    `moments` are the second moments of the inputs, by layer. The folder appears when everything is
    written; an interrupted run leaves nothing behind. Raises ConfigError if it cannot be written.
    """
    out = out.resolve()  # a link may lead to the folder
    try:
        return _write(source, out, method, kept, moments or {}, shard_bytes)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {out}: {error}") from error


def _write(
    source: ModelSource,
    out: Path,
    method: Method,
    kept: Sequence[str],
    moments: Mapping[str, torch.Tensor],
    shard_bytes: int,
) -> Report:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        whole = Path(scratch) / "model"
        root = _root(source)
        folder = whole / source.path.relative_to(root)
        folder.mkdir(parents=True)
        writer = _ShardWriter(folder, shard_bytes)
        report = _convert(source, method, [*KEPT, NOT_TEXT, *kept], moments, writer)
        writer.finish()
        # The original file: `source.config` has only the text model's settings.
        config = read_json(source.path / "config.json")
        config["quantization_config"] = method.config(_ignored(report))
        _write_json(folder / "config.json", config)
        for path in folder.glob("*.safetensors"):  # only their writer could read them
            path.chmod((folder / "config.json").stat().st_mode)
        _copy_others(source.path, folder)
        if source.modules_folder is not None:
            _copy_modules(source, whole)
        if out.exists():
            out.rmdir()  # empty, as `check_target` ensured
        os.replace(whole, out)
    return report


def _ignored(report: Report) -> list[str]:
    """Linear layers that readers must not treat as quantized.

    Names are those of the checkpoint. If the text model is part of another, readers name its parts
    differently. Then patterns match the ends of names.
    """
    # A tied head is not in the file, but it is a linear layer too.
    has_head = any(layer.rpartition(".")[2] == "lm_head" for layer in report.kept)
    ignored = [] if has_head else ["re:.*lm_head$"]
    if any(re.match(NOT_TEXT, layer) for layer in report.kept):
        ignored.append(f"re:{NOT_TEXT}")
    for layer in report.kept:
        if re.match(NOT_TEXT, layer):
            continue
        inner = layer.partition("language_model.")[2]
        last = inner[inner.find("layers.") :] if "layers." in inner else inner
        ignored.append(f"re:.*{re.escape(last)}$" if last else layer)
    return ignored


def _convert(
    source: ModelSource,
    method: Method,
    kept: Sequence[str],
    moments: Mapping[str, torch.Tensor],
    writer: _ShardWriter,
) -> Report:
    report = Report()
    checkpoint = open_checkpoint(source, LoadConfig())
    _check_fused({name.removesuffix(".weight") for name in checkpoint.names()}, kept)
    progress: Iterable[tuple[str, torch.Tensor | BlockTensor]] = tqdm(
        checkpoint.tensors(),
        total=len(checkpoint.names()),
        desc="Quantizing",
        unit="tensor",
        disable=None,
    )
    for name, tensor in progress:
        assert isinstance(tensor, torch.Tensor)
        report.bytes_before += tensor.nbytes
        pieces = {name: tensor}
        if tensor.ndim == 2 and name.endswith(".weight") and not NOT_LINEAR.search(name):
            layer = name.removesuffix(".weight")
            reason = _reason_to_keep(layer, tensor, method, kept)
            if reason is None:
                found = method.compress(tensor, moments.get(layer))
                pieces = {f"{layer}.{suffix}": piece for suffix, piece in found.items()}
                report.quantized.append(layer)
            else:
                report.kept[layer] = reason
        elif tensor.ndim == 3 and ".experts." in name:
            report.kept[name.removesuffix(".weight")] = "it has all experts in one tensor"
        for piece_name, piece in pieces.items():
            report.bytes_after += piece.nbytes
            writer.add(piece_name, piece)
    if not report.quantized:
        reasons = "; ".join(f"{layer}: {why}" for layer, why in report.kept.items())
        raise ConfigError(f"{source.name} has no layer that could be quantized ({reasons:.400})")
    return report


def _check_fused(layers: Set[str], kept: Sequence[str]) -> None:
    """Raise ConfigError if a pattern excludes only some parts of a fused layer."""
    for layer in sorted(layers):
        parent, _, part = layer.rpartition(".")
        parts = next((parts for parts in FUSED if part in parts), ())
        if not parts or _pattern_of(layer, kept) is None:
            continue
        for other in (f"{parent}.{name}" for name in parts):
            if other in layers and _pattern_of(other, kept) is None:
                raise ConfigError(
                    f"--keep has {layer}, but not {other}: engines compute them as one matrix. "
                    f"Keep all of {', '.join(parts)}, or none"
                )


def _pattern_of(layer: str, kept: Sequence[str]) -> str | None:
    return next((pattern for pattern in kept if re.match(pattern, layer)), None)


def _reason_to_keep(
    layer: str, weight: torch.Tensor, method: Method, kept: Sequence[str]
) -> str | None:
    pattern = _pattern_of(layer, kept)
    if pattern is not None:
        return f"it matches {pattern}"
    if not weight.is_floating_point():
        return f"its numbers are {weight.dtype}"
    check_floats(layer, weight)
    return method.refusal(weight)


class _ShardWriter:
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
