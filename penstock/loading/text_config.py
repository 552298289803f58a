"""Extracts the settings of the text model from a multimodal config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ModelError

SIGLIP_TEXT: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
}

# By model_type of the text model: what a text_config may leave out.
LANGUAGE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_text_model": {
        "vocab_size": 49_408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
    },
    "siglip_text_model": SIGLIP_TEXT,
    "siglip2_text_model": SIGLIP_TEXT,
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "qwen3": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
}

# By model_type: defaults of the text model's settings in these models.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip": {"model_type": "clip_text_model"},
    "siglip": {"model_type": "siglip_text_model"},
    "siglip2": {"model_type": "siglip2_text_model"},
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "llama"},
    "llava_onevision": {"model_type": "qwen2"},
    "internvl": {"model_type": "qwen2"},
    "paligemma": {
        "model_type": "gemma",
        "vocab_size": 257_152,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "mistral3": {
        "model_type": "mistral",
        "vocab_size": 131_072,
        "hidden_size": 5120,
        "intermediate_size": 32_768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000_000.0,
    },
    "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
    "glm4v": {},
    "glm4v_moe": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "qwen2_vl": {"model_type": "qwen2_vl_text"},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text"},
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "llama4": {
        "model_type": "llama4_text",
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}


MAX_HEADER_BYTES = 2**27
TIES = "tie_word_embeddings"
KEPT = ("quantization_config", "compression_config", "vision_config")


def settle_ties(settings: dict[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """With `TIES`, if the settings leave it open and the files can tell.

    Vision-language models have the setting twice, and their files differ in which one counts.
    """
    names = [name for path in files for name in _tensor_names(path)]
    if "vision_config" not in settings or TIES in settings or not names:
        return settings
    return {**settings, TIES: not any(name.endswith("lm_head.weight") for name in names)}


def _tensor_names(path: Path) -> list[str]:
    """Of a safetensors file; [] for others, and for broken ones, which the loader refuses."""
    if path.suffix != ".safetensors":
        return []
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
    except (OSError, ValueError, RecursionError):
        return []
    return list(header) if isinstance(header, dict) else []


def text_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the text model alone. Most files already are that."""
    text = config.get("text_config")
    defaults = TEXT_DEFAULTS.get(str(config.get("model_type")))
    if defaults is None or text is None:
        return config
    if not isinstance(text, dict):
        raise ModelError(f"config.json: text_config must be an object, got {text!r:.80}")
    outer = {
        key: value for key, value in config.items() if not key.endswith("_config") or key in KEPT
    }
    said = {key: value for key, value in text.items() if value is not None}
    kind = said.get("model_type", defaults.get("model_type"))
    defaults = {**LANGUAGE_DEFAULTS.get(str(kind), {}), **outer, **defaults}
    settings = {**defaults, **said, "architectures": config.get("architectures")}
    if "projection_dim" in config:  # of both towers; a tower's own is for when it is used alone
        settings["projection_dim"] = config["projection_dim"]
    ties = {each.get(TIES) for each in (config, text)} - {None}
    if len(ties) == 2:  # the tensors say which is right
        del settings[TIES]
    if config["model_type"] == "gemma3" and "rope_parameters" not in settings:
        # Older files scale only the layers with full attention. max_position_embeddings already
        # includes it, so it must not apply to all layers.
        settings["rope_parameters"] = {
            "full_attention": {
                "rope_theta": settings.pop("rope_theta", 1_000_000.0),
                **(settings.pop("rope_scaling", None) or {}),
            },
            "sliding_attention": {"rope_theta": settings.pop("rope_local_base_freq", 10_000.0)},
        }
    return settings
