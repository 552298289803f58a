"""Vision-language models whose language model is one of several, named by their config.json."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from penstock.layers.build import Build
from penstock.models.base import Model
from penstock.models.config import DecoderConfig
from penstock.models.vision import VisionModel, VisionTower, load_tower
from penstock.protocol.errors import ModelError

# By the model_type of text_config.
LANGUAGE_MODELS = {
    "gemma": "gemma:GemmaForCausalLM",
    "gemma2": "gemma2:Gemma2ForCausalLM",
    "llama": "llama:LlamaForCausalLM",
    "mistral": "mistral:MistralForCausalLM",
    "qwen2": "qwen2:Qwen2ForCausalLM",
    "qwen3": "qwen3:Qwen3ForCausalLM",
    "qwen3_moe": "qwen3_moe:Qwen3MoeForCausalLM",
    "smollm3": "smollm3:SmolLM3ForCausalLM",
}

# Names in checkpoints of LLaVA and the many models that are put together like it.
LLAVA_NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?vision_tower\.(vision_model\.)?": "vision.tower.",
    r"^(model\.)?multi_modal_projector\.": "vision.projector.",
}


class ComposedVisionModel(VisionModel):
    """Subclasses define the tower. `create` puts it on the language model."""

    has_stages: ClassVar[bool] = True
    tower_prefix = "vision"
    renamed: ClassVar[Mapping[str, str]] = {}  # names in checkpoints

    @classmethod
    def create(cls, build: Build, raw: Mapping[str, Any]) -> Model:
        kind = raw.get("model_type")
        if kind not in LANGUAGE_MODELS:
            raise ModelError(
                f"config.json: text_config has model_type {kind!r:.80}; supported beside images: "
                f"{', '.join(LANGUAGE_MODELS)}"
            )
        module, _, name = LANGUAGE_MODELS[kind].partition(":")
        base = getattr(importlib.import_module(f"penstock.models.{module}"), name)
        composed: Any = _compose
        created: Model = composed(cls, base).create(build, raw)
        return created

    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        raise NotImplementedError


@lru_cache
def _compose(parts: Any, base: Any) -> Any:
    """A class of the tower's part on a language model."""

    class Composed(parts, base):  # type: ignore[misc]
        weights = base.weights.renaming(parts.renamed)

        @classmethod
        def create(cls, build: Build, raw: Mapping[str, Any]) -> Model:
            created: Model = base.create.__func__(cls, build, raw)
            return created

        def __init__(self, build: Build, config: DecoderConfig) -> None:
            super().__init__(build, config)
            raw, size = config.raw, config.hidden_size
            load_tower(self, build, lambda own: self.make_tower(own, raw, size))

    Composed.__name__ = Composed.__qualname__ = parts.__name__
    return Composed
