"""Random Medusa heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NUM_HEADS, NUM_LAYERS = 3, 2
FORMATS = ("authors", "vllm", "vllm with few tokens", "the target's head")


def make_heads(folder: Path, target: Path, form: str = "authors", **changes: Any) -> Path:
    """Random heads for a target, in one of the formats."""
    target_config = json.loads((target / "config.json").read_text())
    size, vocab_size = target_config["hidden_size"], target_config["vocab_size"]
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    tensors, num_tokens = {}, 80 if form == "vllm with few tokens" else vocab_size
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            name = f"blocks.{head}.layers.{layer}"
            if form == "authors":
                name = f"{head}.{layer}.linear"
                tensors[f"{name}.bias"] = rand(1, size)[0]
            tensors[f"{name}.weight"] = rand(size, size)
        name = f"{head}.{NUM_LAYERS}" if form == "authors" else f"lm_heads.{head}"
        tensors[f"{name}.weight"] = 4 * rand(num_tokens, size)
    config: dict[str, Any] = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_LAYERS}
    if form != "authors":
        config = {"architectures": ["MedusaModel"], "model_type": "medusa"}
        config |= {"num_heads": NUM_HEADS, "num_hidden_layers": NUM_LAYERS}
        config |= {"hidden_size": size, "vocab_size": vocab_size}
    if form == "vllm with few tokens":
        tensors["token_map"] = torch.randperm(vocab_size, generator=generator)[:num_tokens]
        config["truncated_vocab_size"] = num_tokens
    if form == "the target's head":
        tensors = {name: each for name, each in tensors.items() if "lm_heads" not in name}
        config["original_lm_head"] = True
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder
