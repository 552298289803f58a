"""GGUF architectures whose models run on transformers' code."""

from __future__ import annotations

from typing import Any

from penstock.loading.gguf.architecture import GGUFArchitecture, biases
from penstock.loading.gguf.dense import DENSE, windowed_layers
from penstock.loading.gguf.experts import num_experts
from penstock.loading.gguf.metadata import Metadata
from penstock.loading.gguf.rope import rope_scaling
from penstock.loading.gguf.rules import (
    DECODER,
    GATED_MLP,
    HEAD_NORMS,
    HEADS,
    NORMS,
    NORMS_POST,
    SPARSE_DECODER,
    Rule,
    in_layer,
    minus_one,
)


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _cohere2(metadata: Metadata) -> dict[str, Any]:
    return {
        "logit_scale": metadata.number("logit_scale"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": windowed_layers(metadata, default=4),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    return {
        "use_qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "use_parallel_residual": bool(metadata.get("use_parallel_residual")),
        "qk_layernorm": False,
    }


def _olmo3(metadata: Metadata) -> dict[str, Any]:
    """Only the layers with full attention scale their positions."""
    theta = {"rope_theta": metadata.number("rope.freq_base", default=10000.0)}
    stretched = rope_scaling(metadata, {}, DENSE["olmo2"]) or {"rope_type": "default"}
    return biases(metadata) | {
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": theta | stretched,
            "sliding_attention": theta | {"rope_type": "default"},
        },
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": windowed_layers(metadata, default=4),
    }


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    norm = bool(metadata.get("expert_weights_norm") or False)
    experts = num_experts(metadata)
    size = experts.pop("moe_intermediate_size")
    return experts | {"intermediate_size": size, "norm_topk_prob": norm}


def _seed_oss(metadata: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "attention_out_bias": metadata.has_tensor("blk.0.attn_output.bias"),
    }


# Its files are named OLMo 2, which has no sliding windows.
OLMO3 = GGUFArchitecture(
    "OLMo 3", "Olmo3ForCausalLM", "olmo3", DENSE["olmo2"].rules, _olmo3
)  # fmt: skip
OTHERS: dict[str, GGUFArchitecture] = {
    "gemma": GGUFArchitecture(
        "Gemma 1", "GemmaForCausalLM", "gemma",
        {
            **HEADS, **GATED_MLP, **minus_one(NORMS),
            **minus_one({"output_norm": Rule("model.norm")}),
        },
        _gemma,
    ),
    "cohere2": GGUFArchitecture(
        "Command R7B, Command A", "Cohere2ForCausalLM", "cohere2",
        {**HEADS, **GATED_MLP, **in_layer({"attn_norm": "input_layernorm"})},
        _cohere2, eps_key="layer_norm_eps",
    ),
    "stablelm": GGUFArchitecture(
        "StableLM", "StableLmForCausalLM", "stablelm", DECODER, _stablelm,
        eps_key="layer_norm_eps", partly_rotated=True,
    ),
    "olmoe": GGUFArchitecture(
        "OLMoE", "OlmoeForCausalLM", "olmoe",
        {**SPARSE_DECODER, **HEAD_NORMS},
        _olmoe, mlp="experts",
    ),
    "seed_oss": GGUFArchitecture(
        "Seed-OSS", "SeedOssForCausalLM", "seed_oss",
        {**HEADS, **NORMS_POST, **GATED_MLP},
        _seed_oss,
    ),
}  # fmt: skip
