"""Numbers of ranks that do not divide a model are refused, with those that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import config_of

from penstock.config import EngineConfig
from penstock.loading.source import ModelSource
from penstock.models.division import check_division
from penstock.protocol.errors import ConfigError

SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 120}
TWELVE_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 120}
SPREAD = {"enable_expert_parallel": True}


def check(variant: str, sizes: dict[str, Any], options: dict[str, Any]) -> None:
    settings = {**config_of(variant), **sizes}
    source = ModelSource(variant, Path(variant), "folder", settings, {}, (), None, "")
    check_division(EngineConfig.from_options(options), source)


@pytest.mark.parametrize(
    ("variant", "sizes", "size", "message"),
    [
        ("llama", {}, 3, "4 attention heads and its intermediate size of 112, got 3; 1, 2, 4"),
        ("llama", SIX_HEADS, 4, "6 attention heads and .*, got 4; 1, 2, 3, 6"),
        ("llama", TWELVE_HEADS, 6, "4 key-value heads, or be a .*, got 6; 1, 2, 4, 12"),
        ("llama", {"vocab_size": 9}, 4, "any of the 9 tokens of the .* fewer ranks; 1, 2"),
        ("qwen3_moe", {"moe_intermediate_size": 50}, 4, "experts' .* 50 .*, got 4; 1, 2"),
        ("mamba2", {}, 3, "must divide the model's 8 .*, got 3; 1, 2, 4, 8"),
        ("qwen3_next", {}, 4, "2 linear key heads, got 4; 1, 2"),
    ],
)
def test_a_tensor_parallel_size_is_refused_with_those_that_do(
    variant: str, sizes: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{message} would do$"):
        check(variant, sizes, {"tensor_parallel_size": size})


def test_with_experts_and_stages_the_other_sizes_are_kept() -> None:
    """Two replicas of four ranks would need eight experts."""
    options = {"data_parallel_size": 2, "tensor_parallel_size": 4, **SPREAD}
    with pytest.raises(ConfigError, match=r"4 are fewer than 8 ranks: .*; 1, 2 would do$"):
        check("qwen3_moe", {"num_experts": 4}, options)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size must be at most 2, .* got 3$"):
        check("llama", {"num_hidden_layers": 2}, {"pipeline_parallel_size": 3})


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}])
def test_expert_parallelism_is_refused_for_a_model_without_experts(options: Any) -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel is for models with experts"):
        check("llama", {}, {**SPREAD, **options})


def test_experts_of_one_stage_are_enough_for_expert_parallelism() -> None:
    """The first layers of some models have none."""
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    check("deepseek_v3", sizes, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **SPREAD})
