"""Settings of tiny models of every architecture, of which `tiny_models` makes checkpoints."""

from __future__ import annotations

from typing import Any

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # far from uniform, so that the top two logits are rarely close
    "eos_token_id": 2,
    "bos_token_id": 1,
}

ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "rope_theta": 10000.0,
}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16}
FALCON_H1 = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.8,
    "mlp_multipliers": [0.7, 0.6],
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.2, 0.7, 0.8, 1.1],
}

GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "pad_token_id": 0,
}

LLAMA4 = {
    "head_dim": 16,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 18,  # no multiple of the blocks that tests have
    "floor_scale": 16,
    "attn_scale": 0.5,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied_biased": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "llama_rope_linear": (
        "Llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama_rope_dynamic": (
        "Llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "llama_rope_llama3": (
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500.0,
            }
        },
    ),
    "llama_rope_yarn": (
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 10000.0,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_windowed": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2_windowed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 24, "pad_token_id": 0}),
    "phi3_longrope": (
        "Phi3",
        {
            "pad_token_id": 0,
            "head_dim": 16,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 2048,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
            },
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
            "attention_bias": True,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere_qk_norm": ("Cohere", {"use_qk_norm": True, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3_windowed": (
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 24,
            "pad_token_id": 0,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
            "attention_bias": True,
        },
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "rope_scaling": LATENT_YARN},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": LATENT_YARN,
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **ROUTED,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
        },
    ),
    "glm4_moe_unnormed": ("Glm4Moe", {**ROUTED, "n_group": 4, "topk_group": 2}),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": 24, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "mimo": ("MiMo", {}),
    "minimax_m2": (
        "MiniMaxM2",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2_biased": (
        "Mamba2",
        {
            **MAMBA2,
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": ("FalconH1", FALCON_H1),
    "falcon_h1_normed": (
        "FalconH1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [2],
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 24}),
    "starcoder2_unbiased": ("Starcoder2", {"use_bias": False, "hidden_act": "gelu"}),
    "gemma": ("Gemma", {"head_dim": 16, "pad_token_id": 0}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24, "pad_token_id": 0},
    ),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3_images": ("Gemma3Images", GEMMA3),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "pad_token_id": 0,
        },
    ),
    "llama4_unnormed": (
        "Llama4",
        {
            **LLAMA4,
            "moe_layers": [0, 2],
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "llama4": ("Llama4", {**LLAMA4, "interleave_moe_layer_step": 2}),
    "exaone4": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "pad_token_id": 0},
    ),
    "exaone4_windowed": (
        "Exaone4",
        {"sliding_window": 24, "sliding_window_pattern": 2, "pad_token_id": 0},
    ),
}

# Architectures that Penstock has no file for: transformers' code runs them.
OUTSIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": (
        "StableLm",
        {
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 0.5,
            "pad_token_id": 0,
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "pad_token_id": 0,
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True, "pad_token_id": 0}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
}

# Not everywhere: some tests count on what the older variants generate.
UNEVEN_NORMS = {
    "Cohere",
    "Cohere2",
    "Exaone4",
    "DeepseekV2",
    "DeepseekV3",
    "FalconH1",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Glm4",
    "Glm4Moe",
    "Glm4MoeLite",
    "GptOss",
    "Granite",
    "Llama4",
    "Mamba2",
    "MiniMaxM2",
    "Olmo2",
    "Olmo3",
    "Olmoe",
    "Phi3",
    "Qwen3Next",
    "SeedOss",
    "SmolLM3",
    "Starcoder2",
}
