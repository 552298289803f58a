"""Random models with a multi-token-prediction (MTP) layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint

NUM_LAYERS = 3
KINDS = ["sparse", "dense", "sparse", "sparse"]  # the last one is the MTP layer
MTP = f"model.layers.{NUM_LAYERS}"


def make_target(folder: Path, variant: str, **settings: Any) -> Path:
    """A model whose last layer becomes its MTP layer. Layers before it are the model's."""
    changes = {"num_hidden_layers": NUM_LAYERS + 1, "tie_word_embeddings": False, **settings}
    if variant == "glm4_moe_lite":
        changes["mlp_layer_types"] = KINDS
    make_checkpoint(folder, variant, **changes)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    size = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(5)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{MTP}.{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    projection = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    tensors[f"{MTP}.eh_proj.weight"] = projection
    tensors[f"{MTP}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{MTP}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    if variant == "glm4_moe_lite":
        config["mlp_layer_types"] = KINDS[:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
