"""Numbers and objects in a config.json that no model has: refused by name, never a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import config_of

from penstock import LLM
from penstock.layers.build import Build
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import ConfigError, ModelError

HUGE = 10**400  # which JSON may say, and no float can hold


def build(config: dict[str, Any]) -> None:
    build_model(config, Build(torch.float32, torch.device("cpu"), 64, Ops("cpu")))


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("llama", {"rms_norm_eps": HUGE}, "rms_norm_eps must be a small number"),
        ("llama", {"rms_norm_eps": True}, "rms_norm_eps must be a small number"),
        ("llama", {"head_dim": 15}, "15 dimensions of a head .* must be even"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta must be above 0, got 0"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1}}, "must be above 1"),
        ("llama", {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic"}}, "more than 2 rot"),
        ("mamba2", {"time_step_limit": [0.0, HUGE]}, "time_step_limit must be two numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, HUGE]}, "mlp_multipliers must be a number"),
        ("falcon_h1", {"mlp_multipliers": [1.0, None]}, "mlp_multipliers must be 2 numbers"),
        ("falcon_h1", {"ssm_multipliers": [float("nan")] * 5}, "ssm_multipliers must be a number"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers must have a 0 or 1 for each of 3"),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, "layer_types must name chunked_at"),
        ("llama4", {"layer_types": ["full_attention"]}, "for each of 3 layers"),
        ("llama4", {"moe_layers": "all"}, "moe_layers must list layers, got 'all'"),
        (
            "llama4",
            {"attention_chunk_size": 0},
            "attention_chunk_size must be an integer of at least 1",
        ),
        ("gemma3", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("gemma3", {"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ("gemma3", {"rope_parameters": {"full_attention": 1}}, "full_attention must be an obj"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be above 0, got 0"),
        ("granite", {"residual_multiplier": "x"}, "residual_multiplier must be a number, got 'x'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must have a 0 or 1 for each of 3"),
        ("starcoder2", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported, only gelu_py"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ("cohere", {"layer_norm_eps": "x"}, "layer_norm_eps must be a small number, got 'x'"),
        ("deepseek_v2", {"topk_method": "x"}, "topk_method must be greedy or group_limited_greedy"),
        ("deepseek_v2", {"n_group": 3}, r"n_group \(3\) must divide n_routed_experts \(8\)"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, r"must be at most the 4 experts of topk_group"),
        (
            "deepseek_v3",
            {"kv_lora_rank": 0},
            "kv_lora_rank must be an integer of at least 1, got 0",
        ),
        ("glm4_moe_lite", {"mlp_layer_types": ["x"]}, "kind of each of 3 layers, got"),
        ("mamba2", {"num_heads": 7}, r"num_heads \(7\) times head_dim \(16\) must be expand"),
        ("mamba2", {"n_groups": 3}, r"n_groups \(3\) must divide the number of Mamba heads \(8\)"),
        ("mamba2", {"time_step_limit": [1]}, r"time_step_limit must be two numbers .* got \[1\]"),
        ("mamba2", {"time_step_limit": [2, 1]}, "time_step_limit must be two numbers"),
        ("mamba2", {"conv_kernel": 1}, "conv_kernel must be an integer of at least 2, got 1"),
        ("falcon_h1", {"mamba_n_heads": 7}, r"mamba_n_heads \(7\) must divide the size"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "must be a multiple of linear_num_key_heads"),
        ("qwen3_next", {"layer_types": ["x"] * 3}, "layer_types must name linear_attention or fu"),
    ],
)
def test_a_setting_that_no_model_has_is_named(
    variant: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        build({**config_of(variant), **change})


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["rope_theta", "partial_rotary_factor", "factor"])
def test_null_in_an_object_means_nothing_is_said(variant: str, name: str) -> None:
    config = config_of(variant)
    rope = config["rope_parameters"]
    for each in rope.values() if variant == "gemma3" else [rope]:
        each[name] = None
    build(config)


def test_a_model_larger_than_memory_is_said_to_be(tmp_path: Path) -> None:
    config = {**config_of("mamba2"), "state_size": 2**30}  # a petabyte
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="not enough memory for the weights"):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, cpu_threads=1)
