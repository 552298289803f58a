"""LoRA adapters for the tiny model of `server_process`, written without peft, which is slow."""

from __future__ import annotations

import json
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
