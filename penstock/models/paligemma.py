"""PaliGemma: SigLIP, one linear layer, and Gemma. All tokens of a prompt see each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import Linear
from penstock.layers.vision import Arrangement, plain_linear
from penstock.models.composed import LLAVA_NAMES, ComposedVisionModel
from penstock.models.vision import TileTower, VisionTower, vision_settings
from penstock.models.vit import Vit


class PaliGemmaTower(TileTower):
    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build = build
        self.tower = Vit(build, vision_settings(raw))
        self.projector = nn.ModuleDict(
            {"linear": plain_linear(build, self.tower.size, hidden_size)}
        )
        self.unread = tuple(rf"tower\.{name}" for name in self.tower.unread)

    def forward(self, pixels: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        linear = self.projector["linear"]
        assert isinstance(linear, Linear)
        return linear(self.tower(pixels, arrangement))


class PaliGemmaForConditionalGeneration(ComposedVisionModel):
    renamed = LLAVA_NAMES
    spans = "prompt"
    is_causal = True  # beyond these spans, whatever text_config says of bidirectional attention

    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        return PaliGemmaTower(build, raw, hidden_size)
