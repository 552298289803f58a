"""Extracts the settings of the text model from a multimodal config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.protocol.errors import ModelError

# By model_type: defaults of the text model's settings.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llava": {},
    "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
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


KEPT = ("quantization_config", "compression_config", "vision_config")


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
    settings = {**outer, **defaults, **said, "architectures": config.get("architectures")}
    if config.get("tie_word_embeddings") is not None:
        settings["tie_word_embeddings"] = config["tie_word_embeddings"]
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
