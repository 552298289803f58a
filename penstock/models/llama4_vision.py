"""Llama 4 with images: tiles of an image, rotary embedding over rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.norm import LayerNorm
from penstock.layers.vision import (
    Arrangement,
    Segments,
    Table,
    VisionAttention,
    VisionBlock,
    VisionMLP,
    axial_angles,
    cut_patches,
    pixel_shuffle,
    plain_linear,
)
from penstock.models.config import DecoderConfig, read_float, read_int
from penstock.models.llama4 import Llama4ForCausalLM
from penstock.models.vision import (
    TileTower,
    VisionModel,
    load_tower,
    shuffle_scale,
    vision_settings,
)
from penstock.protocol.errors import ModelError

EPS = 1e-5


class Llama4Vit(nn.Module):
    """The row of the class is the last one."""

    def __init__(self, build: Build, raw: Mapping[str, Any]) -> None:
        super().__init__()
        size, heads = read_int(raw, "hidden_size"), read_int(raw, "num_attention_heads")
        head_dim = size // heads
        if head_dim * heads != size or head_dim % 4:
            raise ModelError(
                f"config.json: the {size} dimensions of the vision tower must be a multiple of 4 "
                f"for each of its {heads} heads"
            )
        self.size, self.patch = size, read_int(raw, "patch_size")
        self.side = read_int(raw, "image_size") // self.patch
        rope = raw.get("rope_parameters")
        theta = read_float(rope if isinstance(rope, Mapping) else raw, "rope_theta", 10000.0)
        half = head_dim // 2
        one = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        self.frequencies = one.expand(2, -1).to(build.device)
        channels = read_int(raw, "num_channels", 3)
        self.tile = (channels, self.side * self.patch, self.side * self.patch)
        self.patch_embedding = plain_linear(build, channels * self.patch**2, size, bias=False)
        self.class_embedding = Table(build, size)
        self.positions = Table(build, self.side**2 + 1, size)
        self.norm_pre, self.norm_post = (LayerNorm(build, size, EPS, bias=True) for _ in range(2))
        width = read_int(raw, "intermediate_size")
        layers = [
            VisionBlock(
                VisionAttention(build, size, heads, interleaved=True),
                VisionMLP(build, size, width, F.gelu),
                [LayerNorm(build, size, EPS, bias=True) for _ in range(2)],
            )
            for _ in range(read_int(raw, "num_hidden_layers"))
        ]
        self.layers = nn.ModuleList(layers)

    def arrange(self, n: int, channels: int, height: int, width: int) -> Arrangement:
        if (channels, height, width) != self.tile:
            raise ValueError(f"a tile must have {self.side} x {self.side} patches")
        device = self.frequencies.device
        at = torch.arange(1, self.side + 1)
        places = torch.cartesian_prod(at, at).flip(1)  # column, row
        places = torch.cat([places, torch.zeros(1, 2, dtype=places.dtype)]).repeat(n, 1)
        angles = axial_angles(places.to(device), self.frequencies)
        return Arrangement(Segments.of([self.side**2 + 1] * n, device), angles)

    def forward(self, images: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        """[n, channels, height, width] -> [n, patches, size]."""
        patches = cut_patches(images, self.patch, self.patch)
        n, rows, columns, _ = patches.shape
        x = self.patch_embedding(patches.flatten(0, 2)).unflatten(0, (n, rows * columns))
        x = torch.cat([x, self.class_embedding.weight.expand(n, 1, -1)], dim=1)
        x = self.norm_pre((x + self.positions.weight).flatten(0, 1))
        for layer in self.layers:
            x = layer(x, arrangement.segments, arrangement.angles)
        return self.norm_post(x).unflatten(0, (n, -1))[:, :-1]


class Llama4Tower(TileTower):
    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build = build
        vision = vision_settings(raw)
        self.tower = Llama4Vit(build, vision)
        self.scale = shuffle_scale(vision, "pixel_shuffle_ratio", self.tower.side)
        inner, width = (read_int(vision, f"projector_{name}_dim") for name in ("input", "output"))
        self.fc1 = plain_linear(build, self.tower.size * self.scale**2, inner, bias=False)
        self.fc2 = plain_linear(build, inner, width, bias=False)
        self.projector = plain_linear(build, width, hidden_size, bias=False)

    def forward(self, pixels: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        x = pixel_shuffle(self.tower(pixels, arrangement), self.scale)
        rows = self.projector(F.gelu(self.fc2(F.gelu(self.fc1(x.flatten(0, 1))))))
        return rows.view(len(x), -1, rows.shape[-1])


class Llama4ForConditionalGeneration(VisionModel, Llama4ForCausalLM):
    tower_prefix = "vision"
    weights = Llama4ForCausalLM.weights.renaming(
        {
            r"^language_model\.": "",
            r"^(model\.)?multi_modal_projector\.linear_1\.": "vision.projector.",
            r"^(model\.)?vision_model\.vision_adapter\.mlp\.": "vision.",
            r"^(model\.)?vision_model\.": "vision.tower.",
            r"^(vision\.tower\.patch_embedding)\.linear\.": r"\1.",
            r"^(vision\.tower\.class_embedding)$": r"\1.weight",
            r"^vision\.tower\.positional_embedding_vlm$": "vision.tower.positions.weight",
            r"^vision\.tower\.layernorm_": "vision.tower.norm_",
            r"^vision\.tower\.model\.": "vision.tower.",
            r"^(vision\.tower\..*)\.self_attn\.o_proj\.": r"\1.attn.out_proj.",
            r"^(vision\.tower\..*)\.self_attn\.": r"\1.attn.",
            r"^(vision\.tower\..*)\.input_layernorm\.": r"\1.norm1.",
            r"^(vision\.tower\..*)\.post_attention_layernorm\.": r"\1.norm2.",
        }
    )

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)
        raw = config.raw
        load_tower(self, build, lambda own: Llama4Tower(own, raw, config.hidden_size))
