"""Models that take images and videos: what the runner asks of them, and how they are put together.

A vision-language model is a language model with a vision tower. The tower turns an item into rows
that replace the embeddings of the item's placeholder tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from penstock.distributed.mesh import RankGroup
from penstock.layers.build import Build
from penstock.layers.quantization import DenseMethod
from penstock.models.base import Model
from penstock.protocol.errors import ModelError
from penstock.protocol.media import MediaItem, Modality

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MediaInputs:
    """One item, as the model's processor prepared it."""

    modality: Modality
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, list[int]]


class VisionTower(nn.Module):
    """A vision encoder and its projection to the language model's embeddings."""

    unread: tuple[str, ...] = ()  # regular expressions of its tensors that are not loaded

    def encode(self, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        """The rows of each item's placeholders: [num_rows, media_width]."""
        raise NotImplementedError


class VisionModel:
    """Mixed into a language model that has a vision tower, before its class."""

    media_width: int  # of a row; the hidden size, times more if later layers get rows, too
    uses_mrope: ClassVar[bool] = False  # positions have three parts: time, height, width
    tower_prefix: ClassVar[str]  # the tower's attribute, and its name in checkpoints
    num_levels: int = 1  # media_width in hidden sizes

    def encode_media(self, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        tower: VisionTower = getattr(self, self.tower_prefix)
        return tower.encode(items)

    def rope_positions(self, num_tokens: int, items: Sequence[MediaItem]) -> Positions:
        """[3, num_tokens]: the rotary positions of a prompt. With `uses_mrope` only."""
        raise NotImplementedError


def load_tower(model: Model, build: Build, make: Callable[[Build], VisionTower]) -> None:
    """Give a vision-language model its tower, or leave the tower's weights unread.

    A tower's weights are not quantized, and are whole on every rank.
    """
    assert isinstance(model, VisionModel)
    prefix = model.tower_prefix
    unread: tuple[str, ...] = ("",)
    if build.takes_media:
        one = replace(build.mesh, tp=RankGroup())
        tower = make(replace(build, mesh=one, linear_method=DenseMethod()))
        setattr(model, prefix, tower)
        model.media_width = model.hidden_size * model.num_levels
        unread = tower.unread
    patterns = (rf"^{prefix}\.{name}" for name in unread)
    model.weights = replace(model.weights, elsewhere=(*model.weights.elsewhere, *patterns))


def vision_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The vision tower's part of a config.json."""
    settings = raw.get("vision_config")
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json: vision_config must be an object, got {settings!r:.80}")
    return {key: value for key, value in settings.items() if value is not None}
