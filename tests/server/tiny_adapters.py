"""LoRA adapters for the tiny model of `server_process`, written without peft, which is slow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SHAPES = {  # of the tiny model's matrices: outputs and inputs
    "self_attn.q_proj": (32, 32),
    "self_attn.v_proj": (16, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}


def write_adapter(folder: Path, seed: int, rank: int = 4, scale: float = 1.0) -> Path:
    """Random matrices that change what the model says."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name.rpartition(".")[2] for name in SHAPES],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, (num_out, num_in) in SHAPES.items():
        prefix = f"base_model.model.model.layers.0.{name}"
        for part, shape in (("lora_A", (rank, num_in)), ("lora_B", (num_out, rank))):
            values = scale * draw.standard_normal(shape)
            tensors[f"{prefix}.{part}.weight"] = values.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_adapters(root: Path) -> Path:
    """Three that differ, below a folder: a, b and c."""
    for seed, name in enumerate("abc"):
        write_adapter(root / name, seed)
    return root


def broken_adapters(outside: Path) -> dict[str, tuple[Callable[[Path], object], str]]:
    """Ways to break the adapter in a folder, and what a server says of it then.

    `outside` is an adapter that may not be loaded.
    """
    return {
        "rank": (lambda path: write_adapter(path, 0, rank=17), "rank"),
        "nan": (lambda path: write_adapter(path, 0, scale=float("nan")), "not finite"),
        "pickle": (
            lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"),
            "ickle",
        ),
        "cut": (lambda path: os.truncate(path / "adapter_model.safetensors", 200), ""),
        "config": (lambda path: (path / "adapter_config.json").write_text("[]"), "JSON object"),
        "link": (
            lambda path: (
                (path / "adapter_model.safetensors").unlink(),
                (path / "adapter_model.safetensors").symlink_to(
                    outside / "adapter_model.safetensors"
                ),
            ),
            "outside its folder",
        ),
    }
