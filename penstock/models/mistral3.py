"""Mistral Small 3.1 and later: Pixtral's tower, whose patches are merged in squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.norm import RMSNorm
from penstock.layers.vision import plain_linear
from penstock.models.config import read_float, read_int
from penstock.models.llava import LlavaForConditionalGeneration
from penstock.models.pixtral import Grid, PixtralTower
from penstock.models.vision import Projector, VisionTower


class Mistral3PatchMerger(nn.Module):
    def __init__(self, build: Build, size: int, merge: int) -> None:
        super().__init__()
        self.merging_layer = plain_linear(build, size * merge**2, size, bias=False)


class Mistral3Projector(Projector):
    def __init__(self, build: Build, size: int, hidden_size: int, raw: Mapping[str, Any]) -> None:
        super().__init__(build, size, hidden_size, {"multimodal_projector_bias": False, **raw})
        self.merge = read_int(raw, "spatial_merge_size", 2)
        self.norm = RMSNorm(build, size, read_float(raw, "rms_norm_eps", 1e-6))
        self.patch_merger = Mistral3PatchMerger(build, size, self.merge)

    def forward(self, squares: torch.Tensor) -> torch.Tensor:
        return super().forward(self.patch_merger.merging_layer(squares))

    def squares_of(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Patches [height * width, size] -> [squares, size * merge**2], the size outermost."""
        m = self.merge
        rows, columns = height // m, width // m
        grid = x.reshape(height, width, -1)[: rows * m, : columns * m]
        cut = grid.reshape(rows, m, columns, m, -1).permute(0, 2, 4, 1, 3)
        return cut.reshape(rows * columns, -1)


class Mistral3Tower(PixtralTower):
    def __init__(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> None:
        super().__init__(build, raw, hidden_size)
        self.merge = read_int(raw, "spatial_merge_size", 2)

    def make_projector(self, raw: Mapping[str, Any], hidden_size: int) -> nn.Module:
        return Mistral3Projector(self.build, self.tower.size, hidden_size, raw)

    def project(self, x: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        projector = self.projector
        assert isinstance(projector, Mistral3Projector)
        images = torch.split(projector.norm(x), [h * w for h, w in grids])
        squares = [
            projector.squares_of(image, *grid) for image, grid in zip(images, grids, strict=True)
        ]
        return super().project(torch.cat(squares), grids)


class Mistral3ForConditionalGeneration(LlavaForConditionalGeneration):
    def make_tower(self, build: Build, raw: Mapping[str, Any], hidden_size: int) -> VisionTower:
        return Mistral3Tower(build, raw, hidden_size)
