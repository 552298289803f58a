"""LLaVA-NeXT and OneVision: the whole image in one tile, then in a grid of tiles (anyres).

OneVision takes videos, too: each frame is a tile with a quarter of its patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.layers.build import Build
from penstock.layers.vision import Table
from penstock.models.composed import LLAVA_NAMES, ComposedVisionModel
from penstock.models.config import read_int
from penstock.models.llava import LlavaTower
from penstock.models.vision import MediaInputs, VisionTower, vision_settings
from penstock.protocol.errors import ModelError


def best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The size in which the image keeps most of its pixels, and then wastes the fewest."""

    def rank(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(sizes, key=rank)  # the first of equals


def without_padding(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Cut off what pads an image of this height and width. [size, rows, columns]."""
    rows, columns = x.shape[1:]
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return x[:, padding : rows - padding]
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return x[:, :, padding : columns - padding]


class LlavaNextTower(LlavaTower):
    """After each row of the tiles' patches comes `image_newline`."""

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(build, raw, hidden_size)
        self.image_newline = Table(build, hidden_size)
        self.side = read_int(vision_settings(raw), "image_size")
        given = raw.get("image_grid_pinpoints")
        self.sizes = self.default_sizes() if given is None else _sizes(given)

    def default_sizes(self) -> list[tuple[int, int]]:
        grids = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
        return [(rows * self.side, columns * self.side) for rows, columns in grids]

    def split(self, rows: torch.Tensor, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        return [
            self.rows(item, part.view(-1, *rows.shape[1:]))
            for part, item in zip(super().split(rows, items), items, strict=True)
        ]

    def rows(self, item: MediaInputs, x: torch.Tensor) -> torch.Tensor:
        """An item's rows, of its tiles [n, patches, hidden_size]."""
        return self._pack(x, *item.facts["sizes"])

    def _pack(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Tiles [n, patches, hidden_size] of an image of this height and width -> its rows."""
        newline = self.image_newline.weight
        whole, tiles = x[0], x[1:]
        if not len(tiles):
            return torch.cat([whole, newline[None]])
        rows, columns = (side // self.side for side in best_size(height, width, self.sizes))
        side = self.side // self.tower.patch
        grid = tiles.reshape(rows, columns, side, side, -1).permute(4, 0, 2, 1, 3)
        patches = without_padding(grid.flatten(1, 2).flatten(2, 3), height, width)
        patches = self.shrink(patches, side)
        patches = torch.cat([patches, newline[:, None, None].expand(-1, patches.shape[1], 1)], 2)
        return torch.cat([whole, patches.flatten(1).T])

    def shrink(self, patches: torch.Tensor, side: int) -> torch.Tensor:
        """Fewer patches, if there are too many. [size, rows, columns]."""
        return patches


class LlavaOnevisionTower(LlavaNextTower):
    default_layer = -1
    default_strategy = "full"

    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(build, raw, hidden_size)
        kind = str(raw.get("vision_aspect_ratio", "anyres_max_9"))
        most = kind.removeprefix("anyres_max_")
        if not most.isdecimal():
            raise ModelError(
                "config.json: vision_aspect_ratio must be anyres_max_ and the number of tiles, "
                f"such as anyres_max_9, got {kind!r:.80}"
            )
        self.max_tiles = int(most)

    def rows(self, item: MediaInputs, x: torch.Tensor) -> torch.Tensor:
        if item.modality == "image":
            return super().rows(item, x)
        side = self.side // self.tower.patch
        frames = x.reshape(len(x), side, side, -1).permute(0, 3, 1, 2)
        half = math.ceil(side / 2)
        pooled = F.interpolate(frames, [half, half], mode="bilinear")
        return torch.cat([pooled.flatten(2).mT.flatten(0, 1), self.image_newline.weight[None]])

    def default_sizes(self) -> list[tuple[int, int]]:
        sides = [count * self.side for count in range(1, 7)]
        return [(height, width) for height in sides for width in sides]

    def shrink(self, patches: torch.Tensor, side: int) -> torch.Tensor:
        rows, columns = patches.shape[1:]
        ratio = math.sqrt(rows * columns / (self.max_tiles * side**2))
        if ratio <= 1.1:
            return patches
        size = [int(rows // ratio), int(columns // ratio)]
        return F.interpolate(patches[None], size, mode="bilinear")[0]


def _sizes(given: object) -> list[tuple[int, int]]:
    def is_size(each: object) -> bool:
        is_pair = isinstance(each, list) and len(each) == 2
        return is_pair and all(isinstance(side, int) and side > 0 for side in each)  # type: ignore[attr-defined]

    if not isinstance(given, list) or not given or not all(map(is_size, given)):
        raise ModelError(
            "config.json: image_grid_pinpoints must be a list of [height, width], got "
            f"{given!r:.80}"
        )
    return [(height, width) for height, width in given]


class LlavaNextForConditionalGeneration(ComposedVisionModel):
    renamed = {**LLAVA_NAMES, r"^(model\.)?image_newline$": "vision.image_newline.weight"}

    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        return LlavaNextTower(build, raw, hidden_size)


class LlavaOnevisionForConditionalGeneration(LlavaNextForConditionalGeneration):
    modalities = ("image", "video")

    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        return LlavaOnevisionTower(build, raw, hidden_size)
