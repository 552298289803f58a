"""Reads an adapter's weights for a model: the entry point for workers, and for merging."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from penstock.layers.lora import AdapterWeights
from penstock.loading.adapters.config import parse_config
from penstock.loading.adapters.deltas import AdapterDeltas, DeltaReader
from penstock.loading.adapters.gguf import GgufAdapterWeights
from penstock.loading.adapters.places import Places
from penstock.loading.adapters.serving import serving_weights
from penstock.loading.adapters.source import CONFIG, find_files, open_inside, start_digest
from penstock.loading.adapters.tensors import SafetensorsWeights
from penstock.protocol.errors import AdapterError


def read_adapter(
    path: str | Path,
    model: Any,
    max_rank: int,
    dtype: torch.dtype,
    digest: str | None = None,
) -> AdapterWeights:
    """An adapter's weights by the model's layers, on the host, before sharding.

    Matrices have the type `dtype`, magnitudes of DoRA are float32. `model` is a loaded model.
    Raises AdapterError if the adapter cannot be read, does not fit the model, has a rank above
    `max_rank`, or has another content than `digest` says. Several threads may read at once.
    """
    return serving_weights(read_deltas(path, model, max_rank, dtype, digest), model, dtype)


def read_deltas(
    path: str | Path,
    model: Any,
    max_rank: int,
    dtype: torch.dtype,
    digest: str | None = None,
) -> AdapterDeltas:
    """What an adapter's files say. Unlike `read_adapter`, `model` may be without weights.

    All names and shapes are checked before any weights are read.
    """
    files = find_files(Path(path))
    places = Places(model)
    with open_inside(files.weights) as file:
        size, limit = os.fstat(file.fileno()).st_size, places.max_bytes(max_rank)
        if size > limit:
            raise AdapterError(
                f"{files.weights} has {size} bytes, more than any adapter of rank {max_rank} for "
                f"this model ({limit}): raise --max-lora-rank, or check the file"
            )
        hashed = start_digest(files.config)
        weights: SafetensorsWeights | GgufAdapterWeights
        if files.config is None:
            weights = GgufAdapterWeights(file, files.weights, model)
            config = weights.config
        else:
            config = parse_config(files.config, files.weights.parent / CONFIG)
            weights = SafetensorsWeights(file, files.weights)
        reader = DeltaReader(weights, files.weights, config, places, max_rank, dtype)
        reader.plan()
        weights.load(hashed)
    if digest is not None and hashed.hexdigest() != digest:
        raise AdapterError(
            f"{path} has other weights than when it was registered: register it again"
        )
    return reader.read()
