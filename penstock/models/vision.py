"""Models that take images and videos: what the runner asks of them, and how they are put together.

A vision-language model is a language model with a vision tower. The tower turns an item into rows
that replace the embeddings of the item's placeholder tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace as replace_limits
from torch import nn

from penstock.config import EngineConfig
from penstock.distributed.mesh import RankGroup
from penstock.layers.build import Build
from penstock.layers.linear import Linear
from penstock.layers.vision import Undivided, activation, plain_linear
from penstock.models.base import Model
from penstock.models.config import read_float
from penstock.models.runtime import hold_whole_prompts
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.limits import SpanKind, StepLimits
from penstock.protocol.media import MediaItem, Modality

logger = logging.getLogger(__name__)

Positions = npt.NDArray[np.int64]
TILE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # to which passes of tiles are padded


@dataclass(frozen=True)
class MediaInputs:
    """One item, as the model's processor prepared it."""

    modality: Modality
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, list[int]]


@dataclass(frozen=True)
class Pass:
    """One run of a tower, for some items together."""

    pixels: torch.Tensor  # of all items, in the tower's type on its device
    shape: tuple[Any, ...]  # passes of the same shape differ in the values of their pixels alone
    num_patches: int


class VisionTower(nn.Module):
    """A vision encoder and its projection to the language model's embeddings."""

    unread: tuple[str, ...] = ()  # regular expressions of its tensors that are not loaded

    def encode(self, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        """The rows of each item's placeholders: [num_rows, media_width]."""
        rows = [self(each.pixels, self.arrange(each.shape)) for each in self.join(items)]
        return self.split(torch.cat(rows), items)

    def join(self, items: Sequence[MediaInputs]) -> list[Pass]:
        """The items as one pass, or as several if they need too much memory together."""
        raise NotImplementedError

    def arrange(self, shape: tuple[Any, ...]) -> Any:
        """What passes of a shape need besides their pixels: tensors on the device."""
        raise NotImplementedError

    def forward(self, pixels: torch.Tensor, arrangement: Any) -> torch.Tensor:
        """The rows of a pass. Does not wait for the device, so that a graph can capture it."""
        raise NotImplementedError

    def split(self, rows: torch.Tensor, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        """The rows of all passes by item. Those of padding are left out."""
        raise NotImplementedError

    def blank(self, num_rows: int) -> Pass:
        """A pass of about `num_rows` rows, at least one item: all pixels are 0."""
        raise NotImplementedError

    def padded(self, given: Pass) -> Pass:
        """A pass whose first rows are those of `given`, in one of fewer shapes."""
        return given


class TileEncoder(Protocol):
    """What takes the tiles of a `TileTower`."""

    tile: tuple[int, int, int]  # channels, height and width
    patch: int  # pixels on a side

    def arrange(self, n: int, channels: int, height: int, width: int) -> Any: ...
    def __call__(self, images: torch.Tensor, arrangement: Any) -> torch.Tensor: ...


class TileTower(VisionTower):
    """Takes tiles of one size, each alone: an item has one, or several.

    Passes are [tiles, channels, height, width], and their rows [tiles, rows, media_width].
    """

    build: Build
    tower: TileEncoder

    def join(self, items: Sequence[MediaInputs]) -> list[Pass]:
        images = torch.cat([_tiles(item) for item in items])
        images = images.to(device=self.build.device, dtype=self.build.dtype)
        return [self._pass(part) for part in torch.split(images, TILE_COUNTS[-1])]

    def arrange(self, shape: tuple[int, ...]) -> Any:
        return self.tower.arrange(*shape)

    def split(self, rows: torch.Tensor, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        counts = [len(_tiles(item)) for item in items]
        return [part.flatten(0, 1) for part in torch.split(rows[: sum(counts)], counts)]

    def blank(self, num_rows: int) -> Pass:
        one = self._blank(1)
        rows_of_tile = self(one.pixels, self.arrange(one.shape)).shape[1]
        return self._blank(min(max(num_rows // rows_of_tile, 1), TILE_COUNTS[-1]))

    def padded(self, given: Pass) -> Pass:
        count = len(given.pixels)
        size = next(size for size in TILE_COUNTS if size >= count)
        if size == count:
            return given
        blank = given.pixels.new_zeros((size - count, *given.pixels.shape[1:]))
        return self._pass(torch.cat([given.pixels, blank]))

    def _blank(self, count: int) -> Pass:
        shape = (count, *self.tower.tile)
        return self._pass(torch.zeros(shape, dtype=self.build.dtype, device=self.build.device))

    def _pass(self, images: torch.Tensor) -> Pass:
        shape = tuple(images.shape)
        n, _, height, width = shape
        patch = self.tower.patch
        return Pass(images, shape, n * (height // patch) * (width // patch))


def _tiles(item: MediaInputs) -> torch.Tensor:
    """[tiles, channels, height, width]."""
    pixels = item.tensors["pixel_values"]
    return pixels.reshape(-1, *pixels.shape[-3:])


class VisionModel:
    """Mixed into a language model that has a vision tower, before its class."""

    item_ranks: RankGroup = RankGroup()  # each rank has the tower and encodes some of the items
    media_width: int  # of a row; the hidden size, times more if later layers get rows, too
    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    uses_mrope: ClassVar[bool] = False  # positions have three parts: time, height, width
    tower_prefix: ClassVar[str]  # the tower's attribute, and its name in checkpoints
    num_levels: int = 1  # media_width in hidden sizes
    spans: ClassVar[SpanKind] = "none"  # see StepLimits
    max_span: int = 0  # if `spans` is media: placeholders of an image in a row

    @property
    def has_tower(self) -> bool:
        return hasattr(self, self.tower_prefix)

    @property
    def tower(self) -> VisionTower:
        tower: VisionTower = getattr(self, self.tower_prefix)
        return tower

    def rope_positions(self, num_tokens: int, items: Sequence[MediaItem]) -> Positions:
        """[3, num_tokens]: the rotary positions of a prompt. With `uses_mrope` only."""
        raise NotImplementedError


def load_tower(model: Model, build: Build, make: Callable[[Build], VisionTower]) -> None:
    """Give a vision-language model its tower, or leave the tower's weights unread.

    A tower's weights are not quantized. The first pipeline stage has the tower: each of its ranks
    has all of it, or a shard (`Build.shards_towers`).
    """
    assert isinstance(model, VisionModel)
    prefix = model.tower_prefix
    unread: tuple[str, ...] = ("",)
    takes_media = bool(set(build.takes_media) & set(model.modalities))
    if takes_media:
        model.media_width = model.hidden_size * model.num_levels
    if takes_media and build.mesh.is_first_stage:
        own = replace(build, linear_method=build.tower_method)
        tower = _sharded(own, make) if build.shards_towers else None
        if tower is None:
            tower = make(replace(own, mesh=replace(build.mesh, tp=RankGroup())))
            model.item_ranks = build.tp
        for layer in tower.modules():
            if isinstance(layer, Linear):
                layer.encodes_media = True
        setattr(model, prefix, tower)
        unread = tower.unread
    elsewhere = [rf"^(?!{prefix}\.)(?:{pattern})" for pattern in model.weights.elsewhere]
    elsewhere += [rf"^{prefix}\.{name}" for name in unread]
    weights = replace(model.weights, elsewhere=tuple(elsewhere))
    if not build.generates:  # names without a prefix become those of the language model
        weights = weights.renaming(
            {rf"^(model\.)?{prefix}\.": f"{prefix}.", r"^(model\.)language_model\.": "model."}
        )
    model.weights = weights


def _sharded(build: Build, make: Callable[[Build], VisionTower]) -> VisionTower | None:
    """The tower with a shard of its layers on each rank; None if they do not divide."""
    try:
        return make(build)
    except Undivided as error:
        logger.warning(
            "The vision tower is not sharded, because its %s do not divide among %d ranks: "
            "mm_encoder_tp_mode is data",
            error, build.tp.size,
        )  # fmt: skip
        return None


def media_limits(model: Model, limits: StepLimits, config: EngineConfig) -> StepLimits:
    """The limits of a model that takes media. Refuses steps that cannot hold an image's span."""
    assert isinstance(model, VisionModel)
    limits = replace_limits(
        limits, encoder_rows=config.media.encoder_cache_tokens, encoder_width=model.media_width
    )
    if model.spans == "none":
        return limits
    if model.spans == "prompt":
        limits = hold_whole_prompts(limits, config)
        return replace_limits(limits, spans="prompt", max_span=limits.max_model_len)
    if model.max_span > limits.max_num_batched_tokens:
        raise ConfigError(
            f"this model computes the {model.max_span} tokens of an image in one step: "
            f"max_num_batched_tokens must be at least {model.max_span}, got "
            f"{limits.max_num_batched_tokens}; raise it, or set language_model_only"
        )
    threshold = limits.long_prefill_token_threshold
    return replace_limits(
        limits,
        spans=model.spans,
        max_span=model.max_span,
        long_prefill_token_threshold=max(threshold, model.max_span) if threshold else 0,
    )


class Projector(nn.Module):
    """Two linear layers, from a tower's features to embeddings."""

    def __init__(self, build: Build, size: int, hidden_size: int, raw: Mapping[str, Any]) -> None:
        super().__init__()
        bias = bool(raw.get("multimodal_projector_bias", True))
        self.act = activation(raw.get("projector_hidden_act", "gelu"))
        self.linear_1 = plain_linear(build, size, hidden_size, bias)
        self.linear_2 = plain_linear(build, hidden_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.act(self.linear_1(x)))


# By model_type: what a vision_config leaves out.
VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    },
    "pixtral": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 1024,
        "patch_size": 16,
        "hidden_act": "gelu",
    },
    "llama4_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
    },
    "internvl_vision": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
    },
}


def vision_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The vision tower's part of a config.json."""
    settings = raw.get("vision_config")
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json: vision_config must be an object, got {settings!r:.80}")
    defaults = VISION_DEFAULTS.get(str(settings.get("model_type")), {})
    given = {key: value for key, value in settings.items() if value is not None}
    for name in ("image_size", "patch_size"):  # height and width, which are the same
        sides = given.get(name)
        if isinstance(sides, list) and len(sides) == 2 and sides[0] == sides[1]:
            given[name] = sides[0]
    return {**defaults, **given}


def shuffle_scale(raw: Mapping[str, Any], name: str, side: int) -> int:
    """Patches on a side of the squares that `pixel_shuffle` makes, from their share of a side."""
    ratio = read_float(raw, name, 0.5)
    scale = round(1 / ratio) if ratio > 0 else 0
    if not scale or side % scale:
        raise ModelError(
            f"config.json: {name} must divide the {side} patches of a tile's side, got {ratio}"
        )
    return scale


def num_feature_layers(raw: Mapping[str, Any], depth: int, default: int) -> int:
    """How many of a tower's `depth` layers run before its features are taken."""
    layer = raw.get("vision_feature_layer", default)
    if isinstance(layer, list) and len(layer) == 1:
        layer = layer[0]
    if (
        not isinstance(layer, int)
        or isinstance(layer, bool)
        or not -depth <= layer + 1 <= depth + 1
    ):
        raise ModelError(
            f"config.json: vision_feature_layer must be an integer, one of the tower's {depth} "
            f"layers, got {layer!r:.80}"
        )
    return depth + 1 + layer if layer < 0 else layer
