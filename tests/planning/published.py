"""The published configurations of the models in docs/benchmarks.md, and a planner of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.loading.source import resolve_source
from penstock.planning.hardware import GPUS, Gpu
from penstock.planning.plan import Planner

COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **COMMON, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **COMMON, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def planner_of(
    folder: Path,
    gpu: Gpu = GPUS["h200"],
    input_len: int = 1024,
    output_len: int = 256,
    **options: Any,
) -> Planner:
    config = EngineConfig.from_options({"model": str(folder), "load_format": "dummy", **options})
    source = resolve_source(config.model, config.load)
    return Planner(config, source, gpu, input_len, output_len)
