"""Small checkpoints of which GGUF files are made, with what llama.cpp's converters do to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gguf_conversions import (
    Conversion,
    add_one_to_norms,
    convert_delta_net,
    convert_mamba,
    convert_old_delta_net,
    fold_multipliers,
    fuse_gate_up,
    permute_heads,
    rename_corrections,
    split_kv_b,
    split_stacked,
    squeeze_gates,
    stack_experts,
)
from tiny_variants import LATENT_YARN


@dataclass(frozen=True)
class Twin:
    """Of a variant in tiny_models; `keys` has GGUF metadata by the name in config.json."""

    architecture: str
    variant: str
    overrides: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    conversions: tuple[Conversion, ...] = (stack_experts,)
    metadata: dict[str, Any] = field(default_factory=dict)  # that no setting is
    left_out: tuple[str, ...] = ()  # of the keys that all files have


PERMUTED = (permute_heads, stack_experts)
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
ROUTED_KEYS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
}
LATENT_KEYS = {
    **ROUTED_KEYS,
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
WINDOW = {"sliding_window": "attention.sliding_window"}
GEMMA_KEYS = {
    **WINDOW,
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
MAMBA_KEYS = {
    "conv_kernel": "ssm.conv_kernel",
    "state_size": "ssm.state_size",
    "num_heads": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
}
FALCON_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
}
DELTA_KEYS = {
    **EXPERT_KEYS,
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
# Of which a file keeps what DeepSeek's models have: both factors are one.
ONE_MSCALE = {"rope_scaling": {**LATENT_YARN, "mscale": 0.8}}
# The sizes of a latent head, which is an ordinary one in older files.
LATENT_SIZES = {
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
    "attention.head_count_kv": 1,
}
OLD_LATENT_SIZES = {"attention.key_length": 24, "attention.value_length": 12}
SIGMOID, SOFTMAX = {"expert_gating_func": 2}, {"expert_gating_func": 1}
MAMBA_SIZES = {"ssm.inner_size": 128, "context_length": 2**20}
MAMBA_SIZES |= {"feed_forward_length": 0, "attention.head_count": 0}
# What the files of Llama 4 do not say.
LLAMA4 = {
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "no_rope_layers": None,
    "num_hidden_layers": 5,
}
STEP = {  # as Scout's: no wave is between those that are kept and those that are stretched
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
LLAMA4_KEYS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "intermediate_size": "expert_feed_forward_length",
    "intermediate_size_mlp": "feed_forward_length",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
QWEN3_NEXT = {"layer_types": None, "num_hidden_layers": 5, "mlp_only_layers": []}
ROUTED = (stack_experts, rename_corrections)
LATENT = (stack_experts, rename_corrections, split_kv_b)
NORMED = (stack_experts, squeeze_gates, add_one_to_norms)
FALCON = (convert_mamba, fold_multipliers)


def latent_twin(
    variant: str,
    overrides: dict[str, Any],
    scores: dict[str, Any],
    conversions: tuple[Conversion, ...] = LATENT,
    sizes: dict[str, Any] = LATENT_SIZES,
) -> Twin:
    return Twin("deepseek2", variant, overrides, LATENT_KEYS, conversions, {**sizes, **scores})


def mamba_twin(variant: str) -> Twin:
    return Twin(
        "mamba2",
        variant,
        keys=MAMBA_KEYS,
        conversions=(convert_mamba,),
        metadata=MAMBA_SIZES,
        left_out=("num_attention_heads", "head_dim", "intermediate_size"),
    )


def llama4_twin(overrides: dict[str, Any]) -> Twin:
    return Twin(
        "llama4",
        "llama4",
        {**LLAMA4, "moe_layers": None, **overrides},
        keys=LLAMA4_KEYS,
        conversions=(split_stacked,),
        left_out=("intermediate_size",),
    )


TWINS = {
    "phi3": Twin("phi3", "phi3", keys=WINDOW),
    "phi3_longrope": Twin(
        "phi3",
        "phi3_longrope",
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
    ),
    "olmo2": Twin("olmo2", "olmo2"),
    "granite": Twin("granite", "granite", keys=GRANITE_KEYS, conversions=PERMUTED),
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
        conversions=PERMUTED,
    ),
    "starcoder2": Twin("starcoder2", "starcoder2", {"sliding_window": None}),
    "qwen2moe": Twin(
        "qwen2moe", "qwen2_moe", keys=EXPERT_KEYS, conversions=(stack_experts, squeeze_gates)
    ),
    "qwen2vl": Twin("qwen2vl", "qwen2", metadata={"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": Twin("qwen3vl", "qwen3", metadata={"n_deepstack_layers": 3}),
    "qwen3vlmoe": Twin("qwen3vlmoe", "qwen3_moe", {"mlp_only_layers": []}, keys=EXPERT_KEYS),
    "mistral3": Twin("mistral3", "mistral", {"sliding_window": None}, conversions=PERMUTED),
    "qwen3moe": Twin("qwen3moe", "qwen3_moe", {"mlp_only_layers": []}, keys=EXPERT_KEYS),
    "mixtral": Twin("llama", "mixtral", keys=EXPERT_KEYS, conversions=PERMUTED),
    "gemma2": Twin(
        "gemma2",
        "gemma2",
        {"query_pre_attn_scalar": 16},
        keys=GEMMA_KEYS,
        conversions=(add_one_to_norms,),
    ),
    "gemma3": Twin(
        "gemma3",
        "gemma3",
        {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7},
        keys=GEMMA_KEYS,
        conversions=(add_one_to_norms,),
    ),
    "gemma": Twin("gemma", "gemma", conversions=(add_one_to_norms,)),
    "cohere2": Twin(
        "cohere2",
        "cohere2",
        {"layer_types": None, "num_hidden_layers": 5},
        keys={**WINDOW, "logit_scale": "logit_scale"},
    ),
    "stablelm": Twin(
        "stablelm",
        "stablelm",
        {"qk_layernorm": False},
        keys={"use_parallel_residual": "use_parallel_residual"},
    ),
    "olmo3": Twin("olmo2", "olmo3", keys=WINDOW),
    "olmo3_yarn": Twin(
        "olmo2",
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "rope_theta": 10000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
        keys=WINDOW,
    ),
    "seed_oss": Twin("seed_oss", "seed_oss"),
    "olmoe": Twin("olmoe", "olmoe", keys=EXPERT_KEYS),
    "exaone4": Twin("exaone4", "exaone4"),
    "exaone4_windowed": Twin("exaone4", "exaone4_windowed", keys=WINDOW),
    "deepseek2_v2": latent_twin("deepseek_v2", {}, SOFTMAX),
    "deepseek2_lite": latent_twin("deepseek_v2_lite", ONE_MSCALE, SOFTMAX),
    "deepseek2_v3": latent_twin("deepseek_v3", ONE_MSCALE, SIGMOID),
    "deepseek2_before_absorption": latent_twin(
        "deepseek_v3", ONE_MSCALE, SIGMOID, ROUTED, OLD_LATENT_SIZES
    ),
    "deepseek2_glm_lite": latent_twin(
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"leading_dense_block_count": 1},
    ),
    "glm4moe": Twin("glm4moe", "glm4_moe", keys=ROUTED_KEYS, conversions=ROUTED, metadata=SIGMOID),
    "glm4moe_unnormed": Twin(
        "glm4moe", "glm4_moe_unnormed", keys=ROUTED_KEYS, conversions=ROUTED, metadata=SIGMOID
    ),
    "minimax-m2": Twin(
        "minimax-m2",
        "minimax_m2",
        keys={**EXPERT_KEYS, "intermediate_size": "expert_feed_forward_length"},
        conversions=ROUTED,
        metadata=SIGMOID,
    ),
    "gpt-oss": Twin(
        "gpt-oss",
        "gpt_oss",
        keys={**EXPERT_KEYS, **WINDOW, "intermediate_size": "expert_feed_forward_length"},
        conversions=(split_stacked,),
    ),
    "llama4": llama4_twin({}),
    "llama4_all_experts": llama4_twin({"interleave_moe_layer_step": 1, "num_experts_per_tok": 2}),
    "llama4_stretched": llama4_twin({"rope_scaling": STEP}),
    "mamba2": mamba_twin("mamba2"),
    "mamba2_biased": mamba_twin("mamba2_biased"),
    "falcon-h1": Twin("falcon-h1", "falcon_h1", keys=FALCON_KEYS, conversions=FALCON),
    "falcon-h1_normed": Twin(
        "falcon-h1",
        "falcon_h1_normed",
        {
            "mamba_proj_bias": False,
            "projectors_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
        },
        keys=FALCON_KEYS,
        conversions=FALCON,
    ),
    "qwen3next": Twin(
        "qwen3next",
        "qwen3_next",
        QWEN3_NEXT,
        keys=DELTA_KEYS,
        conversions=(*NORMED, convert_delta_net),
        metadata={"ssm.inner_size": 32, "full_attention_interval": 4},
    ),
    "qwen3next_old": Twin(
        "qwen3next",
        "qwen3_next",
        QWEN3_NEXT,
        keys=DELTA_KEYS,
        conversions=(*NORMED, convert_old_delta_net, fuse_gate_up),
        metadata={"ssm.inner_size": 32, "full_attention_interval": 4},
    ),
}
