"""GGUF files made from small checkpoints, as llama.cpp's converters would make them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_conversions import (
    Conversion,
    Tensors,
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
from safetensors.numpy import load_file
from tiny_models import LATENT_YARN


@dataclass(frozen=True)
class Twin:
    """Of a variant in tiny_models; `keys` has GGUF metadata by the name in config.json."""

    architecture: str
    variant: str
    overrides: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    conversions: tuple[Conversion, ...] = (stack_experts,)
    metadata: dict[str, Any] = field(default_factory=dict)  # that no setting is
    left_out: tuple[str, ...] = ()  # of COMMON_KEYS


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
    "deepseek2_v2": Twin(
        "deepseek2",
        "deepseek_v2",
        keys=LATENT_KEYS,
        conversions=LATENT,
        metadata={**LATENT_SIZES, **SOFTMAX},
    ),
    "deepseek2_lite": Twin(
        "deepseek2",
        "deepseek_v2_lite",
        ONE_MSCALE,
        keys=LATENT_KEYS,
        conversions=LATENT,
        metadata={**LATENT_SIZES, **SOFTMAX},
    ),
    "deepseek2_v3": Twin(
        "deepseek2",
        "deepseek_v3",
        ONE_MSCALE,
        keys=LATENT_KEYS,
        conversions=LATENT,
        metadata={**LATENT_SIZES, **SIGMOID},
    ),
    "deepseek2_before_absorption": Twin(
        "deepseek2",
        "deepseek_v3",
        ONE_MSCALE,
        keys=LATENT_KEYS,
        conversions=ROUTED,
        metadata={**OLD_LATENT_SIZES, **SIGMOID},
    ),
    "deepseek2_glm_lite": Twin(
        "deepseek2",
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        keys=LATENT_KEYS,
        conversions=LATENT,
        metadata={**LATENT_SIZES, "leading_dense_block_count": 1},
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
    "llama4": Twin(
        "llama4",
        "llama4",
        {**LLAMA4, "moe_layers": None},
        keys=LLAMA4_KEYS,
        conversions=(split_stacked,),
        left_out=("intermediate_size",),
    ),
    "llama4_all_experts": Twin(
        "llama4",
        "llama4",
        {**LLAMA4, "moe_layers": None, "interleave_moe_layer_step": 1, "num_experts_per_tok": 2},
        keys=LLAMA4_KEYS,
        conversions=(split_stacked,),
        left_out=("intermediate_size",),
    ),
    "llama4_stretched": Twin(
        "llama4",
        "llama4",
        {**LLAMA4, "moe_layers": None, "rope_scaling": STEP},
        keys=LLAMA4_KEYS,
        conversions=(split_stacked,),
        left_out=("intermediate_size",),
    ),
    "mamba2": Twin(
        "mamba2",
        "mamba2",
        keys=MAMBA_KEYS,
        conversions=(convert_mamba,),
        metadata=MAMBA_SIZES,
        left_out=("num_attention_heads", "head_dim", "intermediate_size"),
    ),
    "mamba2_biased": Twin(
        "mamba2",
        "mamba2_biased",
        keys=MAMBA_KEYS,
        conversions=(convert_mamba,),
        metadata=MAMBA_SIZES,
        left_out=("num_attention_heads", "head_dim", "intermediate_size"),
    ),
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
