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
    "CohereForCausalLM": "cohere",
    "Glm4ForCausalLM": "glm4",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}


def build_model(raw: Mapping[str, Any], build: Build) -> DecoderLM:
    """The model that a config.json describes, its weights still to be loaded."""
    names = raw.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in ARCHITECTURES:
            module = importlib.import_module(f"penstock.models.{ARCHITECTURES[name]}")
            model_class: type[DecoderLM] = getattr(module, name)
            given = {key: value for key, value in raw.items() if value is not None}
            config = DecoderConfig.from_raw({**model_class.defaults, **given})
            return model_class(build, config).eval()
    raise ModelError(
        f"config.json: architectures {names!r:.200} are not supported; "
        f"supported are {', '.join(sorted(ARCHITECTURES))}"
    )
