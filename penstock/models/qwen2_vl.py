"""Qwen2-VL and Qwen2.5-VL: Qwen2 with a tower for images and videos of any size, and M-RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.norm import LayerNorm, Norm, RMSNorm
from penstock.layers.rotary import MRotary, Rotary
from penstock.layers.sublayers import GatedMLP
from penstock.layers.vision import (
    Arrangement,
    PatchEmbedding,
    Segments,
    VisionAttention,
    VisionBlock,
    VisionMLP,
    activation,
    axial_angles,
    plain_linear,
    share_of,
)
from penstock.models.config import DecoderConfig, read_int
from penstock.models.qwen2 import Qwen2ForCausalLM
from penstock.models.vision import (
    MediaInputs,
    Pass,
    Positions,
    VisionModel,
    VisionTower,
    load_tower,
    vision_settings,
)
from penstock.protocol.errors import ModelError
from penstock.protocol.media import MediaItem, Modality

EPS = 1e-6
Grid = tuple[int, int, int]  # patches of an item: time, height, width


class Grids:
    """The grids of patches of several items, in the order of a processor's patches.

    Patches come in squares of `merge` x `merge`, which become one row of the output.
    """

    def __init__(self, grids: Sequence[Grid], merge: int) -> None:
        self.grids = grids
        self.merge = merge

    @property
    def rows(self) -> list[int]:
        """The rows of each item's output."""
        return [t * h * w // self.merge**2 for t, h, w in self.grids]

    @property
    def frames(self) -> list[int]:
        """The patches of each frame."""
        return list(chain.from_iterable([h * w] * t for t, h, w in self.grids))

    def coordinates(self) -> Positions:
        """[n, 2]: the row and the column of each patch."""
        return np.concatenate([self._coordinates(*grid) for grid in self.grids])

    def _coordinates(self, t: int, h: int, w: int) -> Positions:
        m = self.merge
        at = np.stack(np.meshgrid(np.arange(h), np.arange(w), indexing="ij"), axis=-1)
        squares = at.reshape(h // m, m, w // m, m, 2).transpose(0, 2, 1, 3, 4)
        return np.tile(squares.reshape(-1, 2), (t, 1))

    def windows(self, size: int) -> tuple[Positions, list[int]]:
        """Squares in the order of windows of `size` x `size` squares, and how many each has."""
        order: list[Positions] = []
        lengths: list[int] = []
        first = 0
        for t, h, w in self.grids:
            rows, columns = h // self.merge, w // self.merge
            index = np.arange(t * rows * columns).reshape(t, rows, columns) + first
            first += index.size
            for frame in index:
                for top in range(0, rows, size):
                    for left in range(0, columns, size):
                        window = frame[top : top + size, left : left + size].ravel()
                        order.append(window)
                        lengths.append(window.size)
        return np.concatenate(order), lengths


class PatchMerger(nn.Module):
    """Norm, then the patches of a square together through two linear layers."""

    def __init__(self, build: Build, norm: Norm, size: int, merge: int, hidden_size: int) -> None:
        super().__init__()
        self.width = size * merge**2
        self.ln_q = norm
        self.mlp = nn.ModuleList(
            [
                plain_linear(build, self.width, self.width),
                nn.GELU(),
                plain_linear(build, self.width, hidden_size),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln_q(x).reshape(-1, self.width)
        for layer in self.mlp:
            x = layer(x)
        return x


class QwenTower(VisionTower):
    """The tower of Qwen2-VL. Images keep their size, and each frame attends to itself."""

    hidden_size_key: ClassVar[str] = "embed_dim"
    kernel_bias: ClassVar[bool] = False

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__()
        self.build, self.raw = build, raw
        size = self.size = read_int(raw, self.hidden_size_key)
        self.merge = read_int(raw, "spatial_merge_size", 2)
        self.num_heads = read_int(raw, "num_heads")
        if size % self.num_heads or size // self.num_heads % 4:
            raise ModelError(
                f"config.json: the {size} dimensions of the vision tower must be a multiple of 4 "
                f"for each of its {self.num_heads} heads"
            )
        patch = read_int(raw, "patch_size", 14)
        channels = read_int(raw, "in_channels", read_int(raw, "in_chans", 3))
        kernel = (channels, read_int(raw, "temporal_patch_size", 2), patch, patch)
        proj = PatchEmbedding(build, size, kernel, self.kernel_bias)
        self.patch_embed = nn.ModuleDict({"proj": proj})
        depth = read_int(raw, "depth")
        self.blocks = nn.ModuleList([self.block(index) for index in range(depth)])
        self.merger = self.make_merger(hidden_size)

    def make_merger(self, hidden_size: int) -> nn.Module:
        return PatchMerger(self.build, self.norm(), self.size, self.merge, hidden_size)

    def norm(self) -> Norm:
        return LayerNorm(self.build, self.size, EPS, bias=True)

    def mlp(self) -> nn.Module:
        intermediate_size = int(self.size * self.raw.get("mlp_ratio", 4))
        act = activation(self.raw.get("hidden_act", "quick_gelu"))
        return VisionMLP(self.build, self.size, intermediate_size, act)

    def block(self, index: int) -> VisionBlock:
        attention = VisionAttention(self.build, self.size, self.num_heads, fused=True)
        return VisionBlock(attention, self.mlp(), [self.norm(), self.norm()])

    def join(self, items: Sequence[MediaInputs]) -> list[Pass]:
        pixels = torch.cat([item.tensors["pixel_values"] for item in items])
        pixels = pixels.to(device=self.build.device, dtype=self.build.dtype)
        return [Pass(pixels, tuple(grid_of(item.facts) for item in items), len(pixels))]

    def arrange(self, shape: tuple[Grid, ...]) -> Arrangement:
        grids, device = Grids(shape, self.merge), self.build.device
        size = self.size // self.num_heads // 2
        one = 1.0 / 10000.0 ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        coordinates = torch.from_numpy(grids.coordinates()).to(device)
        angles = axial_angles(coordinates, one.expand(2, -1))
        return self.arranged(grids, Arrangement(Segments.of(grids.frames, device), angles))

    def arranged(self, grids: Grids, arrangement: Arrangement) -> Arrangement:
        """With what the layers of a subclass need besides."""
        return arrangement

    def forward(self, pixels: torch.Tensor, arrangement: Any) -> torch.Tensor:
        return self.layers(self.patch_embed["proj"](pixels), arrangement)

    def layers(self, x: torch.Tensor, arrangement: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, arrangement.segments, arrangement.angles)
        return self.merger(x)

    def split(self, rows: torch.Tensor, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        grids = Grids([grid_of(item.facts) for item in items], self.merge)
        return list(torch.split(rows, grids.rows))

    def blank(self, num_rows: int) -> Pass:
        height = math.isqrt(num_rows)
        grid = (1, height * self.merge, num_rows // height * self.merge)
        proj = self.patch_embed["proj"]
        assert isinstance(proj, PatchEmbedding)
        size = (math.prod(grid), math.prod(proj.kernel))
        build = self.build
        return Pass(torch.zeros(size, dtype=build.dtype, device=build.device), (grid,), size[0])


@dataclass(frozen=True, kw_only=True)
class WindowArrangement(Arrangement):
    """`segments` and `angles` are in the order of windows."""

    windowed: Segments
    patches: torch.Tensor  # in the order of windows
    squares: torch.Tensor


class Qwen25Tower(QwenTower):
    """The tower of Qwen2.5-VL: most layers attend inside windows."""

    hidden_size_key = "hidden_size"

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(build, raw, hidden_size)
        patch = read_int(raw, "patch_size", 14)
        self.window = read_int(raw, "window_size", 112) // self.merge // patch
        self.full = set(raw.get("fullatt_block_indexes", (7, 15, 23, 31)))

    def norm(self) -> Norm:
        return RMSNorm(self.build, self.size, EPS)

    def mlp(self) -> nn.Module:
        intermediate_size = read_int(self.raw, "intermediate_size")
        share_of(self.build, intermediate_size, "columns")
        return GatedMLP(self.build, self.size, intermediate_size, bias=True)

    def arranged(self, grids: Grids, arrangement: Arrangement) -> WindowArrangement:
        order, lengths = grids.windows(self.window)
        unit, device = self.merge**2, self.build.device
        squares = torch.from_numpy(order).to(device)
        patches = (squares[:, None] * unit + torch.arange(unit, device=device)).flatten()
        assert arrangement.angles is not None
        cos, sin = arrangement.angles
        return WindowArrangement(
            arrangement.segments,
            (cos[patches], sin[patches]),
            windowed=Segments.of([length * unit for length in lengths], device),
            patches=patches,
            squares=squares,
        )

    def layers(self, x: torch.Tensor, arrangement: WindowArrangement) -> torch.Tensor:
        x = x[arrangement.patches]
        for index, block in enumerate(self.blocks):
            is_full = index in self.full
            segments = arrangement.segments if is_full else arrangement.windowed
            x = block(x, segments, arrangement.angles)
        merged = self.merger(x)
        output = torch.empty_like(merged)
        output[arrangement.squares] = merged
        return output


def grid_of(facts: Mapping[str, list[int]]) -> Grid:
    t, h, w = facts["grid_thw"]
    return t, h, w


def mrope_positions(
    num_tokens: int, items: Sequence[MediaItem], merge: int, tokens_per_second: int = 0
) -> Positions:
    """[3, num_tokens]. Each run of placeholders takes as many positions as its longer side squares.

    With `tokens_per_second`, the times of a video's frames are in seconds, else in frames.
    """
    positions = np.zeros((3, num_tokens), dtype=np.int64)
    at = position = 0
    for item in items:
        t, h, w = grid_of(item.facts)
        t, h, w = t // len(item.runs), h // merge, w // merge
        times = np.arange(t)
        if tokens_per_second and "seconds" in item.facts:
            numerator, denominator = item.facts["seconds"]  # of a 32-bit float
            interval = np.float32(numerator / denominator) * np.float32(tokens_per_second)
            times = (times.astype(np.float32) * interval).astype(np.int64)
        grid = np.stack(np.meshgrid(times, np.arange(h), np.arange(w), indexing="ij"))
        for distance, length in item.runs:
            start = item.offset + distance
            positions[:, at:start] = np.arange(start - at) + position
            position += start - at
            at = start + length
            positions[:, start:at] = grid.reshape(3, -1) + position
            position += max(h, w)
    positions[:, at:] = np.arange(num_tokens - at) + position
    return positions


class MRopeModel(VisionModel):
    """A vision-language model whose positions are times, heights and widths."""

    config: DecoderConfig
    rotary_class: ClassVar[type[Rotary]] = MRotary
    modalities: ClassVar[tuple[Modality, ...]] = ("image", "video")
    uses_mrope = True
    tower_prefix = "visual"
    renamed: ClassVar = {r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."}
    counts_seconds: ClassVar[bool] = False  # positions of a video's frames are in time

    def rope_positions(self, num_tokens: int, items: Sequence[MediaItem]) -> Positions:
        raw = vision_settings(self.config.raw)
        merge = read_int(raw, "spatial_merge_size", 2)
        per_second = read_int(raw, "tokens_per_second", 4) if self.counts_seconds else 0
        return mrope_positions(num_tokens, items, merge, per_second)


class Qwen2VLForConditionalGeneration(MRopeModel, Qwen2ForCausalLM):
    weights = Qwen2ForCausalLM.weights.renaming(MRopeModel.renamed)
    tower_class: ClassVar[type[QwenTower]] = QwenTower

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)
        load_tower(self, build, lambda own: self.make_tower(own, vision_settings(config.raw)))

    def make_tower(self, build: Build, raw: Mapping[str, Any]) -> VisionTower:
        return self.tower_class(build, raw, self.config.hidden_size)


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    tower_class = Qwen25Tower
    counts_seconds = True
