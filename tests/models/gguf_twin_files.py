"""GGUF files made from small checkpoints, as llama.cpp's converters would make them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_conversions import Tensors
from gguf_twins import Twin
from safetensors.numpy import load_file

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
ADD = {float: "add_float32", bool: "add_bool", int: "add_uint32", str: "add_string"}


def write_twin(
    path: Path,
    checkpoint: Path,
    twin: Twin,
    metadata: dict[str, Any] | None = None,
    quantize: str | None = None,
    extra: Tensors | None = None,
) -> Path:
    """Write the checkpoint as a GGUF file; `quantize` is a type for its matrices."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors: Tensors = load_file(checkpoint / "model.safetensors")
    for convert in twin.conversions:
        tensors = convert(tensors, config)
    architecture = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == twin.architecture
    )
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, twin.architecture)
    for key, value in {**_metadata(twin, config), **(metadata or {})}.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            writer.add_array(key, value)
        else:
            getattr(writer, ADD[type(value)])(key, value)
    for name, tensor in {**tensors, **(extra or {})}.items():
        is_named = name.startswith("blk.")
        own_name = name if is_named else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        data = np.ascontiguousarray(tensor)
        kind = gguf.GGMLQuantizationType[quantize or "F32"]
        fits = data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        if quantize is not None and data.ndim > 1 and fits and _is_matrix(own_name):
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


def _is_matrix(name: str) -> bool:
    """What llama.cpp quantizes: no biases, norms, routers, filters and parameters of heads."""
    parts = (".bias", "scale", "norm", "ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_d")
    return not any(part in name for part in parts)


def _metadata(twin: Twin, config: dict[str, Any]) -> dict[str, Any]:
    prefix = twin.architecture
    common = {name: key for name, key in COMMON_KEYS.items() if name not in twin.left_out}
    values = {
        f"{prefix}.{key}": config[name]
        for name, key in (*common.items(), *twin.keys.items())
        if config.get(name) is not None
    }
    if twin.architecture in ("exaone4", "olmo2") and config.get("sliding_window") is not None:
        flags = [kind == "sliding_attention" for kind in config["layer_types"]]
        values[f"{prefix}.attention.sliding_window_pattern"] = flags
    if f"{prefix}.attention.key_length" in values:
        values[f"{prefix}.attention.value_length"] = values[f"{prefix}.attention.key_length"]
    values |= {f"{prefix}.{key}": value for key, value in _rope(twin, config).items()}
    return values | {f"{prefix}.{key}": value for key, value in twin.metadata.items()}


def _rope(twin: Twin, config: dict[str, Any]) -> dict[str, Any]:
    both = config.get("rope_parameters")
    if both is None:
        return {}
    rope = both.get("full_attention", both)
    values: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "qk_rope_head_dim" not in config and not twin.architecture.startswith("gemma"):
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        values["rope.dimension_count"] = rotated
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                values[f"rope.scaling.yarn_{name}"] = float(rope[name])
        if rope.get("mscale_all_dim") is not None:
            values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if rope["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        stretch = math.log(config["max_position_embeddings"] / original)
        values["rope.scaling.attn_factor"] = math.sqrt(1 + stretch / math.log(original))
    return values


def _factors(config: dict[str, Any]) -> dict[str, list[float]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3_factors(config, rope)}
    if rope.get("rope_type") != "longrope":
        return {}
    return {
        "rope_factors_long.weight": rope["long_factor"],
        "rope_factors_short.weight": rope["short_factor"],
    }


def _llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> list[float]:
    """What the frequency of each pair of dimensions is divided by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for index in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / config["head_dim"])
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors
