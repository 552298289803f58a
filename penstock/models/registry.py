"""Which class runs which architecture. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from penstock.layers.build import Build
from penstock.models.config import DecoderConfig
from penstock.models.decoder import DecoderLM
from penstock.protocol.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def build_model(raw: Mapping[str, Any], build: Build) -> DecoderLM:
    """The model that a config.json describes, its weights still to be loaded."""
    names = raw.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in ARCHITECTURES:
            module = importlib.import_module(f"penstock.models.{ARCHITECTURES[name]}")
            model: DecoderLM = getattr(module, name)(build, DecoderConfig.from_raw(raw))
            return model.eval()
    raise ModelError(
        f"config.json: architectures {names!r:.200} are not supported; "
        f"supported are {', '.join(sorted(ARCHITECTURES))}"
    )
