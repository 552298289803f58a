"""LLaVA 1.5: a vision tower, two linear layers, and any of several language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from penstock.layers.build import Build
from penstock.layers.vision import Arrangement
from penstock.models.composed import LLAVA_NAMES, ComposedVisionModel
from penstock.models.config import read_int
from penstock.models.pixtral import PIXTRAL_NAMES, PixtralTower
from penstock.models.vision import (
    Projector,
    TileTower,
    VisionTower,
    num_feature_layers,
    vision_settings,
)
from penstock.models.vit import Vit


class LlavaTower(TileTower):
    default_layer: ClassVar[int] = -2
    default_strategy: ClassVar[str] = "default"  # without the first row, that of the class

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build = build
        vision = vision_settings(raw)
        depth = read_int(vision, "num_hidden_layers")
        self.tower = Vit(build, vision, num_feature_layers(raw, depth, self.default_layer))
        strategy = raw.get("vision_feature_select_strategy", self.default_strategy)
        self.drops_first = strategy == "default"
        self.projector = Projector(build, self.tower.size, hidden_size, raw)
        self.unread = tuple(rf"tower\.{name}" for name in self.tower.unread)

    def forward(self, pixels: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        x = self.tower(pixels, arrangement)
        rows: torch.Tensor = self.projector(x[:, 1:] if self.drops_first else x)
        return rows


class LlavaForConditionalGeneration(ComposedVisionModel):
    renamed = {**LLAVA_NAMES, **PIXTRAL_NAMES}

    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        if vision_settings(raw).get("model_type") == "pixtral":
            return PixtralTower(build, raw, hidden_size)
        return LlavaTower(build, raw, hidden_size)
