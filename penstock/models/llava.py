"""LLaVA 1.5: a CLIP or SigLIP tower, two linear layers, and any of several language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.vision import activation, plain_linear
from penstock.models.composed import ComposedVisionModel
from penstock.models.config import read_int
from penstock.models.vision import MediaInputs, VisionTower, stack_images, vision_settings
from penstock.models.vit import Vit
from penstock.protocol.errors import ModelError


class Projector(nn.Module):
    def __init__(self, build: Build, size: int, hidden_size: int, raw: Mapping[str, Any]) -> None:
        super().__init__()
        bias = bool(raw.get("multimodal_projector_bias", True))
        self.act = activation(raw.get("projector_hidden_act", "gelu"))
        self.linear_1 = plain_linear(build, size, hidden_size, bias)
        self.linear_2 = plain_linear(build, hidden_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.act(self.linear_1(x)))


class LlavaTower(VisionTower):
    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build = build
        vision = vision_settings(raw)
        layer = raw.get("vision_feature_layer", -2)
        if not isinstance(layer, int):
            raise ModelError(
                f"config.json: vision_feature_layer must be an integer, got {layer!r:.80}"
            )
        depth = read_int(vision, "num_hidden_layers")
        self.tower = Vit(build, vision, depth + 1 + layer if layer < 0 else layer)
        self.drops_first = raw.get("vision_feature_select_strategy", "default") == "default"
        self.projector = Projector(build, self.tower.size, hidden_size, raw)
        self.unread = tuple(rf"tower\.{name}" for name in self.tower.unread)

    def encode(self, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        images, _ = stack_images(items, self.build)
        x = self.tower(images)
        if self.drops_first:
            x = x[:, 1:]
        rows: torch.Tensor = self.projector(x)
        return list(rows)


class LlavaForConditionalGeneration(ComposedVisionModel):
    renamed = {
        r"^model\.language_model\.": "model.",
        r"^language_model\.model\.": "model.",
        r"^language_model\.lm_head\.": "lm_head.",
        r"^(model\.)?vision_tower\.(vision_model\.)?": "vision.tower.",
        r"^(model\.)?multi_modal_projector\.": "vision.projector.",
    }

    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        return LlavaTower(build, raw, hidden_size)
