"""GGUF files made from small checkpoints, as llama.cpp's converters would make them."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file


@dataclass(frozen=True)
class Twin:
    """Of a variant in tiny_models; `keys` has GGUF metadata by the name in config.json."""

    architecture: str
    variant: str
    overrides: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    permuted: bool = False


EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
TWINS = {
    "phi3": Twin("phi3", "phi3", keys={"sliding_window": "attention.sliding_window"}),
    "phi3_longrope": Twin(
        "phi3",
        "phi3_longrope",
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
    ),
    "olmo2": Twin("olmo2", "olmo2"),
    "granite": Twin("granite", "granite", keys=GRANITE_KEYS, permuted=True),
    "glm4": Twin("glm4", "glm4"),
    "command-r": Twin("command-r", "cohere", keys={"logit_scale": "logit_scale"}),
    "command-r_qk_norm": Twin(
        "command-r",
        "cohere_qk_norm",
        {"attention_bias": False},
        keys={"logit_scale": "logit_scale"},
    ),
    "smollm3": Twin(
        "smollm3",
        "smollm3",
        {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
        permuted=True,
    ),
    "starcoder2": Twin("starcoder2", "starcoder2", {"sliding_window": None}),
    "qwen2moe": Twin("qwen2moe", "qwen2_moe", keys=EXPERT_KEYS),
    "qwen3moe": Twin("qwen3moe", "qwen3_moe", {"mlp_only_layers": []}, keys=EXPERT_KEYS),
    "mixtral": Twin("llama", "mixtral", keys=EXPERT_KEYS, permuted=True),
}
COMMON_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
}


def write_twin(
    path: Path,
    checkpoint: Path,
    twin: Twin,
    metadata: dict[str, Any] | None = None,
    quantize: str | None = None,
) -> Path:
    """Write the checkpoint as a GGUF file; `quantize` is a type for its matrices."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = _put_together(load_file(checkpoint / "model.safetensors"))
    architecture = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == twin.architecture
    )
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, twin.architecture)
    for key, value in {**_metadata(twin, config), **(metadata or {})}.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        heads = _heads(config, name) if twin.permuted else None
        data = np.ascontiguousarray(tensor if heads is None else _permute(tensor, heads))
        if name.endswith("shared_expert_gate.weight"):
            data = data.squeeze(0)
        if quantize is not None and data.ndim > 1:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(own_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own_name, data)
    for name, factors in _factors(config).items():
        writer.add_tensor(name, np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(twin: Twin, config: dict[str, Any]) -> dict[str, Any]:
    prefix = twin.architecture
    values = {
        f"{prefix}.{key}": config[name]
        for name, key in {**COMMON_KEYS, **twin.keys}.items()
        if config.get(name) is not None
    }
    rope = config["rope_parameters"]
    values[f"{prefix}.rope.freq_base"] = float(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    values[f"{prefix}.rope.dimension_count"] = rotated
    if rope["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        stretch = math.log(config["max_position_embeddings"] / original)
        values[f"{prefix}.rope.scaling.attn_factor"] = math.sqrt(1 + stretch / math.log(original))
    return values


def _factors(config: dict[str, Any]) -> dict[str, list[float]]:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "longrope":
        return {}
    return {
        "rope_factors_long.weight": rope["long_factor"],
        "rope_factors_short.weight": rope["short_factor"],
    }


def _put_together(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts in one tensor of each kind, in order."""
    made: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name):
            experts[found.group(1) + found.group(3)][int(found.group(2))] = tensor
        else:
            made[name] = tensor
    for name, parts in experts.items():
        made[name] = np.stack([parts[expert] for expert in sorted(parts)])
    return made


def _heads(config: dict[str, Any], name: str) -> int | None:
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else None


def _permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Halves (i, i + dim / 2) of each head become pairs (2i, 2i + 1)."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
