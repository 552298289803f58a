"""GGUF architectures: MoE decoders."""

from __future__ import annotations

from typing import Any

from penstock.loading.gguf.architecture import GGUFArchitecture, biases
from penstock.loading.gguf.metadata import Metadata
from penstock.loading.gguf.rules import (
    CORRECTION,
    EMBEDDINGS,
    EXPERTS,
    GATED_MLP,
    HEAD_NORMS,
    HEADS,
    LAYER,
    NORMS,
    NORMS_POST,
    PERMUTED,
    SHARED_EXPERT,
    SHARED_GATE,
    SPARSE_DECODER,
    HalfOfKVB,
    Rule,
    in_layer,
    whole,
)

SIGMOID = 2  # value of `expert_gating_func`; 1 is softmax


def num_experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.expert_size(),
    }


def _local_experts(metadata: Metadata) -> dict[str, Any]:
    """For models whose `intermediate_size` is that of an expert."""
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.expert_size(),
    }


def shared_expert(metadata: Metadata) -> dict[str, Any]:
    gate = metadata.first_tensor("ffn_gate_shexp.weight", num_dims=2)
    return {
        "shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length", default=gate.shape[0]
        ),
    }


def _qwen2moe(metadata: Metadata) -> dict[str, Any]:
    norm = bool(metadata.get("expert_weights_norm") or False)
    return num_experts(metadata) | shared_expert(metadata) | {"norm_topk_prob": norm}


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    norm = metadata.get("expert_weights_norm")
    return num_experts(metadata) | biases(metadata) | {"norm_topk_prob": norm in (None, True)}


def _routed(metadata: Metadata) -> dict[str, Any]:
    """The settings under the names of DeepSeek and related models."""
    experts = num_experts(metadata)
    count = experts.pop("num_experts")
    # Files older than these keys omit DeepSeek V3's expert groups, which all its models have.
    is_v3 = count == 256 and is_corrected(metadata)
    groups = (8, 4) if metadata.get("expert_group_count") is None and is_v3 else (1, 1)
    return experts | {
        "n_routed_experts": count,
        "n_shared_experts": metadata.integer("expert_shared_count", default=0, low=0),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", default=0, low=0),
        "n_group": metadata.integer("expert_group_count", default=groups[0]),
        "topk_group": metadata.integer("expert_group_used_count", default=groups[1]),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm") or False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", default=1.0),
    }


def is_corrected(metadata: Metadata) -> bool:
    """Whether experts are selected with sigmoid scores as in DeepSeek V3; V2 uses softmax."""
    function = metadata.get("expert_gating_func")
    if function is not None:
        return bool(function == SIGMOID)
    return any(".exp_probs_b" in name for name in metadata.file.tensors)


def _deepseek2(metadata: Metadata) -> dict[str, Any]:
    """Files before April 2025 have a head's sizes under the names of other architectures."""
    is_older = metadata.get("attention.key_length_mla") is None
    suffix = "" if is_older else "_mla"
    rope_dim = metadata.integer("rope.dimension_count")
    q_rank = metadata.get("attention.q_lora_rank")
    settings = _routed(metadata) | {
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "q_lora_rank": None if q_rank is None else metadata.integer("attention.q_lora_rank"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": metadata.difference(f"attention.key_length{suffix}", rope_dim),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": metadata.integer(f"attention.value_length{suffix}"),
        "attention_bias": metadata.has_tensor("blk.0.attn_kv_a_mqa.bias"),
        "head_dim": rope_dim,
    }
    if settings["n_group"] > 1:
        settings["topk_method"] = "group_limited_greedy"  # V2's
    return settings


def _glm4moe(metadata: Metadata) -> dict[str, Any]:
    norm = metadata.get("expert_weights_norm")
    return (
        _routed(metadata)
        | {"norm_topk_prob": norm in (None, True)}
        | {"attention_bias": metadata.has_tensor("blk.0.attn_q.bias")}
        | {"use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight")}
    )


def _minimax_m2(metadata: Metadata) -> dict[str, Any]:
    return _local_experts(metadata) | {
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "use_routing_bias": is_corrected(metadata),
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    return _local_experts(metadata) | {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _llama4(metadata: Metadata) -> dict[str, Any]:
    """Files omit chunks, temperatures and norms: these are Scout's and Maverick's."""
    settings = _local_experts(metadata) | {
        "intermediate_size_mlp": metadata.integer("feed_forward_length"),
        "interleave_moe_layer_step": metadata.integer("interleave_moe_layer_step"),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.integer("expert_count") != 128,  # all but Maverick
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    }
    if metadata.get("attention.sliding_window") == 0:  # neither chunks nor layers without positions
        count = metadata.num_layers()
        settings |= {"layer_types": ["full_attention"] * count, "no_rope_layers": [1] * count}
    return settings


MIXTRAL = GGUFArchitecture(
    "Mixtral", "MixtralForCausalLM", "mixtral",
    {**SPARSE_DECODER, **PERMUTED},
    _local_experts, mlp="experts",
)  # fmt: skip
_LATENT = {
    **in_layer(
        {
            "attn_q": "q_proj",
            "attn_q_a": "q_a_proj",
            "attn_q_a_norm": "q_a_layernorm",
            "attn_q_b": "q_b_proj",
            "attn_kv_a_mqa": "kv_a_proj_with_mqa",
            "attn_kv_a_norm": "kv_a_layernorm",
            "attn_kv_b": "kv_b_proj",  # in older files
            "attn_output": "o_proj",
        },
        "self_attn.",
    ),
    "blk.{n}.attn_k_b": Rule(LAYER + "self_attn.kv_b_proj", HalfOfKVB("keys")),
    "blk.{n}.attn_v_b": Rule(LAYER + "self_attn.kv_b_proj", HalfOfKVB("values")),
}
_DEEPSEEK = {
    **EMBEDDINGS, **_LATENT, **NORMS, **GATED_MLP, **EXPERTS, **SHARED_EXPERT, **CORRECTION
}  # fmt: skip
DEEPSEEK_V2 = GGUFArchitecture(
    "DeepSeek V2", "DeepseekV2ForCausalLM", "deepseek_v2", _DEEPSEEK, _deepseek2,
    mlp="mixed", attention="latent",
)  # fmt: skip

SPARSE: dict[str, GGUFArchitecture] = {
    "qwen2moe": GGUFArchitecture(
        "Qwen 2 with experts", "Qwen2MoeForCausalLM", "qwen2_moe",
        {**SPARSE_DECODER, **SHARED_EXPERT, **SHARED_GATE},
        _qwen2moe, mlp="experts",
    ),
    "qwen3moe": GGUFArchitecture(
        "Qwen 3 with experts", "Qwen3MoeForCausalLM", "qwen3_moe",
        {**SPARSE_DECODER, **HEAD_NORMS},
        _qwen3moe, mlp="experts",
    ),
    "qwen3vlmoe": GGUFArchitecture(
        "Qwen3-VL with experts", "Qwen3MoeForCausalLM", "qwen3_moe",
        {**SPARSE_DECODER, **HEAD_NORMS},
        _qwen3moe, mlp="experts",
    ),
    "deepseek2": GGUFArchitecture(
        "DeepSeek V2 to V3.1, R1, Kimi K2, GLM-4.7-Flash", "DeepseekV3ForCausalLM", "deepseek_v3",
        _DEEPSEEK, _deepseek2, mlp="mixed", attention="latent",
    ),
    "glm4moe": GGUFArchitecture(
        "GLM-4.5 to 4.7", "Glm4MoeForCausalLM", "glm4_moe",
        {
            **HEADS, **HEAD_NORMS, **NORMS_POST, **GATED_MLP, **EXPERTS,
            **SHARED_EXPERT, **CORRECTION,
        },
        _glm4moe, mlp="mixed", partly_rotated=True,
    ),
    "minimax-m2": GGUFArchitecture(
        "MiniMax-M2", "MiniMaxM2ForCausalLM", "minimax_m2",
        {**SPARSE_DECODER, **HEAD_NORMS, **CORRECTION},
        _minimax_m2, mlp="experts", partly_rotated=True,
    ),
    "gpt-oss": GGUFArchitecture(
        "gpt-oss", "GptOssForCausalLM", "gpt_oss",
        {
            **HEADS, **NORMS_POST, **EXPERTS,
            "blk.{n}.attn_sinks.weight": whole(LAYER + "self_attn.sinks"),
        },
        _gpt_oss, mlp="experts", truncates_yarn=False,
    ),
    "llama4": GGUFArchitecture(
        "Llama 4 (text)", "Llama4ForCausalLM", "llama4_text",
        {**SPARSE_DECODER, **GATED_MLP, **SHARED_EXPERT},
        _llama4, mlp="mixed",
    ),
}  # fmt: skip
