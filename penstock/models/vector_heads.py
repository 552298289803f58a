"""bge-m3's further vectors: a weight for each token (sparse), and a vector for each (ColBERT).

Each comes of a linear layer over the last hidden states, in a file of its own beside the model.
Repositories have these two as pickles only, so that they are read as such, if there is no
safetensors file of the name: by torch's unpickler of tensors, and only if they hold nothing but a
layer's weight and bias.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from penstock.config import EngineConfig
from penstock.loading.source import ModelSource
from penstock.protocol.errors import ModelError
from penstock.protocol.pooling import VectorName
from penstock.text.tokenizer import load_tokenizer

FILES: dict[VectorName, str] = {"sparse": "sparse_linear", "colbert": "colbert_linear"}
UNWEIGHTED = ("cls_token", "bos_token", "sep_token", "eos_token", "pad_token", "unk_token")
NO_IDS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(frozen=True)
class VectorHeads:
    layers: dict[VectorName, VectorHead]
    unweighted_ids: npt.NDArray[np.int64]  # tokens around a text, which sparse vectors leave out


class VectorHead(nn.Module):
    """A linear layer of a file, in float32."""

    def __init__(self, path: Path, in_features: int, device: torch.device) -> None:
        super().__init__()
        tensors = _read(path)
        found = {
            name: list(tensor.shape) if isinstance(tensor, torch.Tensor) else None
            for name, tensor in tensors.items()
        }
        num_outputs = (found.get("bias") or [0])[0]
        is_sparse = path.stem == FILES["sparse"]
        if found != {"weight": [num_outputs, in_features], "bias": [num_outputs]} or (
            is_sparse and num_outputs != 1
        ):
            rows = 1 if is_sparse else "n"
            raise ModelError(
                f"{path}: must contain a weight of [{rows}, {in_features}] and a bias of [{rows}], "
                f"got {found!r:.200}"
            )
        self.weight = tensors["weight"].float().to(device)
        self.bias = tensors["bias"].float().to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def load_vector_heads(
    source: ModelSource, config: EngineConfig, hidden_size: int, device: torch.device
) -> VectorHeads | None:
    """What stands beside the model; None where there is nothing."""
    layers: dict[VectorName, VectorHead] = {}
    for name, stem in FILES.items():
        paths = [source.path / f"{stem}{suffix}" for suffix in (".safetensors", ".pt")]
        path = next((path for path in paths if path.exists()), None)
        if path is not None:
            layers[name] = VectorHead(path, hidden_size, device)
    return VectorHeads(layers, _unweighted_ids(source, config)) if layers else None


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{path}: cannot be read: {reason:.200}") from error
    if not isinstance(tensors, dict):
        raise ModelError(f"{path}: must contain tensors by name, got {type(tensors).__name__}")
    return tensors


def _unweighted_ids(source: ModelSource, config: EngineConfig) -> npt.NDArray[np.int64]:
    if config.model.skip_tokenizer_init:  # what config.json says must do
        found = [source.config.get(f"{name}_id") for name in UNWEIGHTED]
        return np.array([given for given in found if isinstance(given, int)], np.int64)
    tokenizer = load_tokenizer(source, config.model.tokenizer)
    ids: set[int] = set()
    for name in UNWEIGHTED:
        token = tokenizer.special_tokens.get(name)
        if token is not None:
            ids.update(tokenizer.encode(token, add_special_tokens=False))
    return np.array(sorted(ids), np.int64)
