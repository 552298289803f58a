"""Pixtral's tower: images of any size, and rotary embedding over rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import column_linear, row_linear
from penstock.layers.norm import RMSNorm
from penstock.layers.vision import (
    Arrangement,
    PatchEmbedding,
    Segments,
    VisionAttention,
    VisionBlock,
    activation,
    axial_angles,
    share_of,
)
from penstock.models.config import read_float, read_int
from penstock.models.vision import (
    MediaInputs,
    Pass,
    Projector,
    VisionTower,
    num_feature_layers,
    vision_settings,
)
from penstock.protocol.errors import ModelError

EPS = 1e-5
Grid = tuple[int, int]  # patches of an image: rows and columns
# Names in checkpoints below ``vision.tower``.
PIXTRAL_NAMES = {
    r"^(vision\.tower\..*)\.attention\.o_proj\.": r"\1.attn.out_proj.",
    r"^(vision\.tower\..*)\.attention\.": r"\1.attn.",
    r"^(vision\.tower\..*)\.attention_norm\.": r"\1.norm1.",
    r"^(vision\.tower\..*)\.feed_forward\.": r"\1.mlp.",
    r"^(vision\.tower\..*)\.ffn_norm\.": r"\1.norm2.",
}


class PixtralMLP(nn.Module):
    def __init__(self, build: Build, raw: Mapping[str, Any]) -> None:
        super().__init__()
        size, width = read_int(raw, "hidden_size"), read_int(raw, "intermediate_size")
        share_of(build, width, "columns")
        self.act = activation(raw["hidden_act"])
        self.gate_up_proj = column_linear(build, size, {"gate_proj": width, "up_proj": width})
        self.down_proj = row_linear(build, width, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class PixtralEncoder(nn.Module):
    """The first `num_layers` of the layers."""

    def __init__(self, build: Build, raw: Mapping[str, Any], num_layers: int) -> None:
        super().__init__()
        size, patch = read_int(raw, "hidden_size"), read_int(raw, "patch_size")
        num_heads = read_int(raw, "num_attention_heads")
        head_dim = size // num_heads
        if head_dim * num_heads != size or head_dim % 4:
            raise ModelError(
                f"config.json: the {size} dimensions of the vision tower must be a multiple of 4 "
                f"for each of its {num_heads} heads"
            )
        self.patch, self.size = patch, size
        given = raw.get("rope_parameters")
        rope = given if isinstance(given, Mapping) else raw
        theta = read_float(rope, "rope_theta", 10000.0)
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.frequencies = inverse.reshape(-1, 2).T.to(build.device)
        kernel = (read_int(raw, "num_channels", 3), patch, patch)
        self.patch_conv = PatchEmbedding(build, size, kernel)
        self.ln_pre = RMSNorm(build, size, EPS)
        layers = [
            VisionBlock(
                VisionAttention(build, size, num_heads, bias=False),
                PixtralMLP(build, raw),
                [RMSNorm(build, size, EPS), RMSNorm(build, size, EPS)],
            )
            for _ in range(num_layers)
        ]
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    def arrange(self, grids: Sequence[Grid]) -> Arrangement:
        device = self.frequencies.device
        places = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for h, w in grids]
        angles = axial_angles(torch.cat(places).to(device), self.frequencies)
        return Arrangement(Segments.of([h * w for h, w in grids], device), angles)

    def forward(self, patches: torch.Tensor, arrangement: Arrangement) -> torch.Tensor:
        """[n, channels * patch_size**2] -> [n, size]."""
        x = self.ln_pre(self.patch_conv(patches))
        layers = self.transformer["layers"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = layer(x, arrangement.segments, arrangement.angles)
        return x


class PixtralTower(VisionTower):
    """A row for each patch. The shape of a pass is the grids of its images."""

    merge = 1  # patches on a side of the square that makes a row

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build = build
        vision = vision_settings(raw)
        depth = read_int(vision, "num_hidden_layers")
        used = num_feature_layers(raw, depth, -1)
        self.tower = PixtralEncoder(build, vision, used)
        self.projector = self.make_projector(raw, hidden_size)
        self.unread = tuple(rf"tower\.transformer\.layers\.{i}\." for i in range(used, depth))

    def make_projector(self, raw: Mapping[str, Any], hidden_size: int) -> nn.Module:
        return Projector(self.build, self.tower.size, hidden_size, raw)

    def join(self, items: Sequence[MediaInputs]) -> list[Pass]:
        device, dtype = self.build.device, self.build.dtype
        patches = []
        for item in items:
            height, width = item.facts["sizes"]
            pixels = item.tensors["pixel_values"].to(device=device, dtype=dtype)
            image = pixels.reshape(1, *pixels.shape[-3:])[..., :height, :width]
            patches.append(self.tower.patch_conv.patches_of(image)[0])
        grids = tuple((each.shape[0], each.shape[1]) for each in patches)
        pixels = torch.cat([each.flatten(0, 1) for each in patches])
        return [Pass(pixels, grids, len(pixels))]

    def arrange(self, shape: tuple[Grid, ...]) -> tuple[Arrangement, tuple[Grid, ...]]:
        return self.tower.arrange(shape), shape

    def forward(
        self, pixels: torch.Tensor, arrangement: tuple[Arrangement, tuple[Grid, ...]]
    ) -> torch.Tensor:
        arranged, grids = arrangement
        return self.project(self.tower(pixels, arranged), grids)

    def project(self, x: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        rows: torch.Tensor = self.projector(x)
        return rows

    def split(self, rows: torch.Tensor, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        _, *patch = self.tower.patch_conv.kernel
        counts = [
            math.prod(side // (size * self.merge) for side, size in zip(sides, patch, strict=True))
            for sides in (item.facts["sizes"] for item in items)
        ]
        return list(torch.split(rows, counts))

    def blank(self, num_rows: int) -> Pass:
        height = math.isqrt(num_rows)
        grid = (height * self.merge, num_rows // height * self.merge)
        size = (math.prod(grid), math.prod(self.tower.patch_conv.kernel))
        build = self.build
        return Pass(torch.zeros(size, dtype=build.dtype, device=build.device), (grid,), size[0])
