"""Gemma 3: Gemma 2 with norms on queries and keys, two rotary embeddings, and images by SigLIP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.norm import ZeroCentredNorm
from penstock.layers.rotary import Rotary, rotary_parameters
from penstock.layers.sublayers import Angles, RotaryAttention
from penstock.layers.vision import Arrangement
from penstock.models.base import WeightTable
from penstock.models.config import DecoderConfig, read_float, read_int
from penstock.models.gemma2 import FULL, WINDOWED, Gemma2ForCausalLM, layer_is_windowed
from penstock.models.vision import TileTower, VisionModel, load_tower, vision_settings
from penstock.models.vit import Vit
from penstock.ops.blocks import BlockTensor, Weight
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


class Gemma3Projector(nn.Module):
    """Squares of patches become one row each: their mean, a norm and a matrix."""

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int, side: int) -> None:
        super().__init__()
        vision = vision_settings(raw)
        size = read_int(vision, "hidden_size")
        self.side, self.num_rows = side, read_int(raw, "mm_tokens_per_image", 256)
        self.square = side // math.isqrt(self.num_rows)
        if (side // self.square) ** 2 != self.num_rows:
            raise ModelError(
                f"config.json: mm_tokens_per_image must be the number of equal squares of "
                f"{side} x {side} patches, got {self.num_rows}"
            )
        eps = read_float(vision, "layer_norm_eps", 1e-6)
        self.mm_soft_emb_norm = ZeroCentredNorm(build, size, eps)
        self.mm_input_projection_weight = build.empty(size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, patches, size] -> [n, num_rows, hidden_size]."""
        images = x.transpose(1, 2).reshape(len(x), -1, self.side, self.side)
        pooled = F.avg_pool2d(images, self.square).flatten(2).transpose(1, 2)
        return self.mm_soft_emb_norm(pooled.contiguous()) @ self.mm_input_projection_weight

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        shape = tuple(self.mm_input_projection_weight.shape)
        return {("mm_input_projection_weight", ""): shape}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert not isinstance(tensor, BlockTensor), "not a matrix of a linear layer"
        self.mm_input_projection_weight.copy_(tensor)


class Gemma3Tower(TileTower):
    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build = build
        self.tower = Vit(build, vision_settings(raw))
        self.projector = Gemma3Projector(build, raw, hidden_size, self.tower.embeddings.side)
        self.unread = tuple(rf"tower\.{name}" for name in self.tower.unread)

    def forward(self, pixels: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        rows: torch.Tensor = self.projector(self.tower(pixels, arrangement))
        return rows


class Gemma3ForConditionalGeneration(VisionModel, Gemma3ForCausalLM):
    """An image's tokens see each other."""

    weights = WeightTable(
        ignored=(*Gemma3ForCausalLM.weights.ignored, r"lm_head\.weight$"),
        renamed={
            r"^language_model\.": "",
            r"^model\.language_model\.": "model.",
            r"^(model\.)?vision_tower\.(vision_model\.)?": "vision.tower.",
            r"^(model\.)?multi_modal_projector\.": "vision.projector.",
        },
    )
    tower_prefix = "vision"
    spans = "media"

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)
        raw = config.raw
        self.max_span = read_int(raw, "mm_tokens_per_image", 256)
        load_tower(self, build, lambda own: Gemma3Tower(own, raw, config.hidden_size))


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
