"""Gemma 3 (text): Gemma 2 with norms on queries and keys, and two rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from penstock.layers.norm import ZeroCentredNorm
from penstock.layers.rotary import Rotary, rotary_parameters
from penstock.layers.sublayers import Angles, RotaryAttention
from penstock.models.base import WeightTable
from penstock.models.gemma2 import FULL, WINDOWED, Gemma2ForCausalLM, layer_is_windowed
from penstock.protocol.errors import ModelError


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    defaults = {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().settings(raw)
        settings["rope_parameters"], settings["local_rope"] = _rope_by_kind(settings)
        settings["rope_scaling"] = None  # already included
        return settings

    def is_windowed(self, index: int) -> bool:
        return layer_is_windowed(self.config, index, 6, "sliding_window_pattern")

    @cached_property
    def local_layers(self) -> list[bool]:
        return [self.is_windowed(index) for index in range(self.config.num_layers)]

    @cached_property
    def local_rotary(self) -> Rotary:
        """The rotary embedding of windowed layers."""
        parameters = rotary_parameters({"rope_parameters": self.config.raw["local_rope"]})
        config = self.config
        return Rotary(self.build, config.head_dim, config.max_position, parameters)

    def attention(self, index: int) -> RotaryAttention:
        config = self.config
        rotary = self.local_rotary if self.local_layers[index] else self.rotary
        attention = self.gemma_attention(index, rotary=rotary)
        attention.q_norm = ZeroCentredNorm(self.build, config.head_dim, config.rms_norm_eps)
        attention.k_norm = ZeroCentredNorm(self.build, config.head_dim, config.rms_norm_eps)
        return attention

    def angles(self, positions: torch.Tensor) -> Sequence[Angles]:
        everywhere, nearby = self.rotary.angles(positions), self.local_rotary.angles(positions)
        return [nearby if is_local else everywhere for is_local in self.local_layers]


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of a multimodal checkpoint. The vision tower is not loaded."""

    weights = WeightTable(
        ignored=(
            *Gemma3ForCausalLM.weights.ignored,
            r"(^|\.)(vision_tower|multi_modal_projector)\.",
            r"lm_head\.weight$",
        ),
        renamed={r"^language_model\.": "", r"^model\.language_model\.": "model."},
    )


def _rope_by_kind(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rope settings of full and of windowed layers, in either spelling."""
    given, scaling = _object(raw, "rope_parameters"), _object(raw, "rope_scaling")
    if FULL in given or WINDOWED in given:
        rope, local = _object(given, FULL), _object(given, WINDOWED)
    else:
        rope, local = {**given, **scaling}, {}
    rope = {"rope_theta": raw.get("rope_theta", 1_000_000.0), **rope}
    return rope, {"rope_theta": raw.get("rope_local_base_freq", 10_000.0), **local}


def _object(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object of the config.json; {} for null."""
    given = raw.get(name) or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: {name} must be an object, got {given!r:.80}")
    return {key: value for key, value in given.items() if value is not None}
