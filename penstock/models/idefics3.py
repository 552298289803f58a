"""Idefics 3 and SmolVLM: tiles of an image through SigLIP, then squares of patches as one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import Linear
from penstock.layers.vision import Arrangement, pixel_shuffle, plain_linear
from penstock.models.composed import ComposedVisionModel
from penstock.models.config import read_int
from penstock.models.vision import TileTower, VisionTower, vision_settings
from penstock.models.vit import Vit
from penstock.protocol.errors import ModelError


class Idefics3Tower(TileTower):
    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build = build
        self.tower = Vit(build, vision_settings(raw))
        self.scale = read_int(raw, "scale_factor", 2)
        if self.tower.embeddings.side % self.scale:
            raise ModelError(
                f"config.json: scale_factor must divide the {self.tower.embeddings.side} patches "
                f"of a tile's side, got {self.scale}"
            )
        width = self.tower.size * self.scale**2
        self.projection = nn.ModuleDict(
            {"proj": plain_linear(build, width, hidden_size, bias=False)}
        )
        self.unread = tuple(rf"tower\.{name}" for name in self.tower.unread)

    def forward(self, pixels: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        x = pixel_shuffle(self.tower(pixels, arrangement), self.scale)
        proj = self.projection["proj"]
        assert isinstance(proj, Linear)
        rows: torch.Tensor = proj(x.flatten(0, 1))
        return rows.view(len(x), -1, rows.shape[-1])


class Idefics3ForConditionalGeneration(ComposedVisionModel):
    renamed = {
        r"^model\.text_model\.": "model.",
        r"^model\.vision_model\.": "vision.tower.",
        r"^model\.connector\.modality_projection\.": "vision.projection.",
    }

    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        return Idefics3Tower(build, raw, hidden_size)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    modalities = ("image", "video")
