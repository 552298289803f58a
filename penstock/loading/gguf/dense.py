"""GGUF architectures: decoders with one MLP per layer."""

from __future__ import annotations

from typing import Any

from penstock.loading.gguf.architecture import (
    LONG_FACTORS,
    SHORT_FACTORS,
    GGUFArchitecture,
    biases,
)
from penstock.loading.gguf.metadata import Metadata, fail
from penstock.loading.gguf.rules import (
    DECODER,
    FUSED_MLP,
    GATED_MLP,
    HEAD_NORMS,
    HEADS,
    NORMS,
    NORMS_BEHIND,
    PERMUTED,
    Rule,
    in_layer,
    minus_one,
)

# Number of layers of the models that scale scores by hidden_size / num_heads instead of head_dim,
# which files do not say: Gemma 2 27B and Gemma 3 27B.
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
_GEMMA_NORMS = minus_one(
    {
        "output_norm": Rule("model.norm"),
        **NORMS_BEHIND,
        **in_layer({"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}),
    }
)


def _granite(metadata: Metadata) -> dict[str, Any]:
    return biases(metadata) | {
        "embedding_multiplier": metadata.number("embedding_scale", default=1.0),
        "residual_multiplier": metadata.number("residual_scale", default=1.0),
        "attention_multiplier": metadata.number("attention.scale"),
        "logits_scaling": metadata.number("logit_scale", default=1.0),
    }


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("attention.temperature_scale") is not None:
        fail(
            metadata.file,
            "queries that are scaled by their position (mistral3.attention.temperature_scale, of "
            "Ministral 3) are not supported: take the model's safetensors",
        )
    return {"sliding_window": None}


def _command_r(metadata: Metadata) -> dict[str, Any]:
    return biases(metadata) | {
        "logit_scale": metadata.number("logit_scale"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    settings: dict[str, Any] = {"sliding_window": metadata.get("attention.sliding_window") or None}
    if metadata.has_tensor(LONG_FACTORS):
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": metadata.floats(LONG_FACTORS),
            "short_factor": metadata.floats(SHORT_FACTORS),
        }
        if metadata.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
        settings["rope_scaling"] = scaling
        settings["original_max_position_embeddings"] = metadata.integer(
            "rope.scaling.original_context_length"
        )
    return settings


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def _query_scalar(metadata: Metadata) -> float:
    """Scores are divided by the square root of this number."""
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    if metadata.integer("block_count") == _SCALED_BY_HIDDEN[metadata.prefix]:
        return hidden / heads
    return metadata.integer("attention.key_length", default=hidden // heads)


def _cap(metadata: Metadata, key: str) -> float | None:
    return None if not metadata.get(key) else metadata.number(key)


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(metadata),
        "sliding_window": metadata.integer("attention.sliding_window", default=4096),
        "attn_logit_softcapping": _cap(metadata, "attn_logit_softcapping"),
        "final_logit_softcapping": _cap(metadata, "final_logit_softcapping"),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    kinds = windowed_layers(metadata, default=6)
    return {
        "query_pre_attn_scalar": _query_scalar(metadata),
        "layer_types": kinds,
        # Without windows, no layer reads this size.
        "sliding_window": metadata.integer("attention.sliding_window", default=4096),
        "rope_theta": metadata.number("rope.freq_base", default=1_000_000.0),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", default=10_000.0),
        "final_logit_softcapping": _cap(metadata, "final_logit_softcapping"),
    }


def _exaone4(metadata: Metadata) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window") or None
    if window is None:
        return {"sliding_window": None}
    return {
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": windowed_layers(metadata, default=4),
    }


def windowed_layers(metadata: Metadata, default: int) -> list[str]:
    """`layer_types`: from a flag per layer, or a period whose last layer has full attention."""
    count = metadata.num_layers()
    pattern = metadata.get("attention.sliding_window_pattern")
    if not metadata.get("attention.sliding_window"):
        flags = [False] * count
    elif isinstance(pattern, list) and len(pattern) >= count:
        flags = [bool(flag) for flag in pattern[:count]]
    else:
        period = metadata.integer("attention.sliding_window_pattern", default=default)
        flags = [(index + 1) % period != 0 for index in range(count)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


DENSE: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        "Llama, Mistral, Mixtral", "LlamaForCausalLM", "llama", {**DECODER, **PERMUTED}, biases
    ),
    "qwen2": GGUFArchitecture("Qwen 2", "Qwen2ForCausalLM", "qwen2", DECODER),
    "qwen3": GGUFArchitecture(
        "Qwen 3", "Qwen3ForCausalLM", "qwen3", {**DECODER, **HEAD_NORMS}, biases
    ),
    # Text has the same position in all three parts of M-RoPE, which only images need.
    "qwen2vl": GGUFArchitecture(
        "Qwen2-VL and Qwen2.5-VL", "Qwen2ForCausalLM", "qwen2", DECODER
    ),
    "qwen3vl": GGUFArchitecture(
        "Qwen3-VL", "Qwen3ForCausalLM", "qwen3", {**DECODER, **HEAD_NORMS}, biases
    ),
    "mistral3": GGUFArchitecture(
        "Mistral Small 3.1 and 3.2", "MistralForCausalLM", "mistral", {**DECODER, **PERMUTED},
        _mistral3,
    ),
    "gemma2": GGUFArchitecture(
        "Gemma 2", "Gemma2ForCausalLM", "gemma2",
        {**HEADS, **GATED_MLP, **_GEMMA_NORMS},
        _gemma2,
    ),
    "gemma3": GGUFArchitecture(
        "Gemma 3 (text)", "Gemma3ForCausalLM", "gemma3_text",
        {
            **HEADS, **GATED_MLP, **_GEMMA_NORMS, **minus_one(HEAD_NORMS),
        },
        _gemma3,
    ),
    "phi3": GGUFArchitecture(
        "Phi-3 and Phi-4", "Phi3ForCausalLM", "phi3",
        {
            **HEADS, **NORMS, **FUSED_MLP,
            **in_layer({"attn_qkv": "self_attn.qkv_proj"}),
        },
        _phi3, mlp="fused", tables=(LONG_FACTORS, SHORT_FACTORS), partly_rotated=True,
    ),
    "olmo2": GGUFArchitecture(
        "OLMo 2 and 3", "Olmo2ForCausalLM", "olmo2",
        {**HEADS, **HEAD_NORMS, **GATED_MLP, **NORMS_BEHIND},
        biases,
    ),
    "exaone4": GGUFArchitecture(
        "EXAONE 4", "Exaone4ForCausalLM", "exaone4",
        {**HEADS, **HEAD_NORMS, **GATED_MLP, **NORMS_BEHIND},
        _exaone4,
    ),
    "granite": GGUFArchitecture(
        "Granite 3", "GraniteForCausalLM", "granite", {**DECODER, **PERMUTED}, _granite
    ),
    "glm4": GGUFArchitecture(
        "GLM-4-0414", "Glm4ForCausalLM", "glm4",
        {
            **HEADS, **NORMS, **FUSED_MLP,
            **in_layer(
                {
                    "post_attention_norm": "post_self_attn_layernorm",
                    "post_ffw_norm": "post_mlp_layernorm",
                }
            ),
        },
        biases, mlp="fused", partly_rotated=True,
    ),
    "command-r": GGUFArchitecture(
        "Command R", "CohereForCausalLM", "cohere",
        {
            **HEADS, **HEAD_NORMS, **GATED_MLP,
            **in_layer({"attn_norm": "input_layernorm"}),
        },
        _command_r, eps_key="layer_norm_eps",
    ),
    "smollm3": GGUFArchitecture(
        "SmolLM3", "SmolLM3ForCausalLM", "smollm3", {**DECODER, **PERMUTED}, biases
    ),
    "starcoder2": GGUFArchitecture(
        "StarCoder2", "Starcoder2ForCausalLM", "starcoder2",
        {
            **HEADS, **NORMS,
            **in_layer({"ffn_up": "c_fc", "ffn_down": "c_proj"}, "mlp."),
        },
        _starcoder2, eps_key="norm_epsilon", mlp="plain",
    ),
}  # fmt: skip
