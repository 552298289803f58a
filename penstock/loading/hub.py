"""Fetches models by hub id: the necessary files, into huggingface_hub's cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.protocol.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")

# (repository, revision, patterns of files, cache folder) -> folder
Snapshot = Callable[[str, str | None, Sequence[str], str | None], str]

TEXT_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt", "*/vocab.txt")
_TENSOR_PATTERNS = {"pt": ("*.bin", "*.pt", "*.pth"), "dummy": ()}
# bge-m3's layers, which its repositories have as pickles only: see models/vector_heads.py.
_VECTOR_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
_ADAPTER_PATTERNS = ("adapter_config.json", "adapter_model.safetensors", "*.gguf")
# Copies of the weights for other programs.
_IGNORE_PATTERNS = ["original/*", "onnx/*", "openvino/*", "consolidated*", "*/*.bin", "*/*.pth"]


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def fetch_from_hub(
    repo_id: str,
    revision: str | None,
    load_format: str,
    download_dir: str | None,
    *,
    snapshot: Snapshot | None = None,
) -> Path:
    """The local folder of a hub id, with its configuration, tokenizer and tensor files.

    Raises ModelError, which says what was tried, if it is unavailable.
    """
    if load_format == "gguf":
        raise ModelError(
            f"load_format gguf needs one file, but {repo_id!r} is a repository: download the "
            ".gguf file that you want and pass its path"
        )
    patterns = [
        *TEXT_PATTERNS,
        *_TENSOR_PATTERNS.get(load_format, ("*.safetensors", *_VECTOR_HEADS)),
    ]
    return _fetch(repo_id, revision, patterns, download_dir, snapshot)


def fetch_adapter_from_hub(
    repo_id: str,
    revision: str | None,
    download_dir: str | None,
    *,
    snapshot: Snapshot | None = None,
) -> Path:
    """The local folder of a hub id, with the files of a LoRA adapter. Raises ModelError."""
    return _fetch(repo_id, revision, _ADAPTER_PATTERNS, download_dir, snapshot)


def _fetch(
    repo_id: str,
    revision: str | None,
    patterns: Sequence[str],
    download_dir: str | None,
    snapshot: Snapshot | None,
) -> Path:
    try:
        return Path((snapshot or _snapshot)(repo_id, revision, patterns, download_dir))
    except Exception as error:  # the hub's client and its transport may raise anything
        at = f" at revision {revision!r}" if revision else ""
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{repo_id!r} is no folder or file here, and as a hub id{at} it could not be fetched: "
            f"{type(error).__name__}: {reason}. If the name is right and this machine is offline, "
            "download the model elsewhere and pass the path of its folder"
        ) from error


def _snapshot(
    repo_id: str, revision: str | None, patterns: Sequence[str], cache_dir: str | None
) -> str:
    from huggingface_hub import snapshot_download  # takes half a second to import

    return snapshot_download(
        repo_id,
        revision=revision,
        allow_patterns=list(patterns),
        ignore_patterns=_IGNORE_PATTERNS,
        cache_dir=cache_dir,
    )
