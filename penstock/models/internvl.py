"""InternVL 3 and 3.5: tiles of an image through InternViT, then squares of patches as one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.norm import LayerNorm, Norm, RMSNorm
from penstock.layers.sublayers import Angles
from penstock.layers.vision import (
    Arrangement,
    PatchEmbedding,
    Segments,
    Table,
    Undivided,
    VisionAttention,
    VisionBlock,
    VisionMLP,
    activation,
    pixel_shuffle,
)
from penstock.models.composed import LLAVA_NAMES, ComposedVisionModel
from penstock.models.config import check_fixed, read_float, read_int
from penstock.models.vision import (
    Projector,
    TileTower,
    VisionTower,
    num_feature_layers,
    shuffle_scale,
    vision_settings,
)

EPS = 1e-6


def _norm(build: Build, raw: Mapping[str, Any]) -> Norm:
    size, eps = read_int(raw, "hidden_size"), read_float(raw, "layer_norm_eps", EPS)
    if raw.get("norm_type", "layer_norm") == "rms_norm":
        return RMSNorm(build, size, eps)
    return LayerNorm(build, size, eps, bias=True)


class InternVitBlock(VisionBlock):
    """Each half's output is scaled by dimension before it is added."""

    def __init__(self, build: Build, raw: Mapping[str, Any]) -> None:
        size, num_heads = read_int(raw, "hidden_size"), read_int(raw, "num_attention_heads")
        has_bias = bool(raw.get("attention_bias", False))
        attention = VisionAttention(build, size, num_heads, has_bias, output_bias=True)
        if raw.get("use_qk_norm"):
            if build.tp.size > 1:
                raise Undivided("norms over all heads")
            attention.q_norm, attention.k_norm = (RMSNorm(build, size, EPS) for _ in range(2))
        width = read_int(raw, "intermediate_size")
        mlp = VisionMLP(build, size, width, activation(raw.get("hidden_act", "gelu")))
        super().__init__(attention, mlp, [_norm(build, raw), _norm(build, raw)])
        self.lambda_1, self.lambda_2 = Table(build, size), Table(build, size)

    def forward(
        self, x: torch.Tensor, segments: Segments, angles: Angles | None = None
    ) -> torch.Tensor:
        x = x + self.lambda_1.weight * self.attn(self.norm1(x), segments)
        return x + self.lambda_2.weight * self.mlp(self.norm2(x))


class InternVit(nn.Module):
    """The first `num_layers` of the layers."""

    def __init__(self, build: Build, raw: Mapping[str, Any], num_layers: int) -> None:
        super().__init__()
        check_fixed(raw, use_absolute_position_embeddings=True, use_mean_pooling=True)
        size, patch = read_int(raw, "hidden_size"), read_int(raw, "patch_size")
        self.size = size
        self.side = read_int(raw, "image_size") // patch
        kernel = (read_int(raw, "num_channels", 3), patch, patch)
        self.tile, self.patch = (kernel[0], self.side * patch, self.side * patch), patch
        self.patch_embedding = PatchEmbedding(build, size, kernel, bias=True)
        self.cls_token = Table(build, 1, 1, size)
        self.position_embeddings = Table(build, 1, self.side**2 + 1, size)
        self.layers = nn.ModuleList([InternVitBlock(build, raw) for _ in range(num_layers)])

    def arrange(self, n: int, channels: int, height: int, width: int) -> Arrangement:
        if (channels, height, width) != self.tile:
            raise ValueError(f"a tile must have {self.side} x {self.side} patches")
        device = self.position_embeddings.weight.device
        return Arrangement(Segments.of([1 + self.side**2] * n, device))

    def forward(self, images: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        """[n, channels, height, width] -> [n, 1 + patches, size]."""
        patches = self.patch_embedding.patches_of(images)
        n, rows, columns, _ = patches.shape
        x = self.patch_embedding(patches.flatten(0, 2)).unflatten(0, (n, rows * columns))
        x = torch.cat([self.cls_token.weight.expand(n, -1, -1), x], dim=1)
        x = (x + self.position_embeddings.weight).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, arrangement.segments)
        return x.unflatten(0, (n, -1))


class InternVLProjector(Projector):
    def __init__(self, build: Build, size: int, hidden_size: int, raw: Mapping[str, Any]) -> None:
        super().__init__(build, size, hidden_size, raw)
        self.layer_norm = LayerNorm(build, size, 1e-5, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer_norm(x))


class InternVLTower(TileTower):
    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build = build
        vision = vision_settings(raw)
        depth = read_int(vision, "num_hidden_layers")
        used = num_feature_layers(raw, depth, -1)
        self.tower = InternVit(build, vision, used)
        self.scale = shuffle_scale(raw, "downsample_ratio", self.tower.side)
        self.drops_first = raw.get("vision_feature_select_strategy", "default") == "default"
        width = self.tower.size * self.scale**2
        self.projector = InternVLProjector(build, width, hidden_size, raw)
        self.unread = tuple(rf"tower\.layers\.{i}\." for i in range(used, depth))
        self.unread += (r"tower\.mask_token$",)

    def forward(self, pixels: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        x = self.tower(pixels, arrangement)
        if self.drops_first:
            x = x[:, 1:]
        rows: torch.Tensor = self.projector(pixel_shuffle(x, self.scale).flatten(0, 1))
        return rows.view(len(pixels), -1, rows.shape[-1])


class InternVLForConditionalGeneration(ComposedVisionModel):
    modalities = ("image", "video")
    renamed = {
        **LLAVA_NAMES,
        r"^vision\.tower\.embeddings\.patch_embeddings\.projection\.": (
            "vision.tower.patch_embedding."
        ),
        r"^vision\.tower\.embeddings\.(cls_token|position_embeddings)$": r"vision.tower.\1.weight",
        r"^vision\.tower\.embeddings\.": "vision.tower.",
        r"^vision\.tower\.encoder\.layer\.(\d+)\.layernorm_before\.": (
            r"vision.tower.layers.\1.norm1."
        ),
        r"^vision\.tower\.encoder\.layer\.(\d+)\.layernorm_after\.": (
            r"vision.tower.layers.\1.norm2."
        ),
        r"^vision\.tower\.encoder\.layer\.(\d+)\.(lambda_[12])$": (
            r"vision.tower.layers.\1.\2.weight"
        ),
        r"^vision\.tower\.encoder\.layer\.(\d+)\.attention\.projection_layer\.": (
            r"vision.tower.layers.\1.attn.out_proj."
        ),
        r"^vision\.tower\.encoder\.layer\.(\d+)\.attention\.": r"vision.tower.layers.\1.attn.",
        r"^vision\.tower\.encoder\.layer\.": "vision.tower.layers.",
    }

    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        return InternVLTower(build, raw, hidden_size)
