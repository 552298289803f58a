"""Which images and videos requests may have, and how they are processed."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config.options import option, require
from penstock.protocol.errors import ConfigError, InputError

MODALITIES = ("image", "video")
IO_KEYS = {"image": ("rgba_background_color",), "video": ("num_frames", "fps", "frame_recovery")}


def check_io_kwargs(modality: str, given: Mapping[str, Any]) -> None:
    """Raise InputError for an option that decoding does not know, or a wrong value."""
    name = "media_io_kwargs"

    def require(is_right: bool, key: str, form: str) -> None:
        if not is_right:
            raise InputError(
                f"{name}: {modality}.{key} must be {form}, got {given[key]!r:.80}", name
            )

    for key, value in given.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key not in IO_KEYS[modality]:
            known = ", ".join(IO_KEYS[modality])
            raise InputError(f"{name}: {modality} may contain {known}, got {key!r:.80}", name)
        if key == "rgba_background_color":
            is_color = isinstance(value, (list, tuple)) and len(value) == 3
            is_color = is_color and all(type(part) is int and 0 <= part < 256 for part in value)
            require(is_color, key, "three integers from 0 to 255")
        elif key == "num_frames":
            require(type(value) is int and (value > 0 or value == -1), key, "at least 1, or -1")
        elif key == "fps":
            require(is_number and (0 < value <= 1000 or value == -1), key, "above 0, or -1")
        else:
            require(isinstance(value, bool), key, "true or false")


@dataclass(frozen=True)
class MediaConfig:
    limit_mm_per_prompt: dict[str, Any] | None = option(
        None,
        'Maximum number of media items per prompt as JSON, such as {"image": 4, "video": 0}. '
        "Default: no limit but the context. If all are 0, the vision tower is not loaded.",
    )
    language_model_only: bool = option(
        False, "Do not load the vision tower, and refuse images and videos."
    )
    mm_encoder_tp_mode: Literal["data", "weights"] = option(
        "data",
        "How tensor-parallel ranks share the vision tower. data: each has all of it and encodes "
        "some of the images; weights: each has a shard of its layers (docs/vision.md).",
    )
    mm_processor_kwargs: dict[str, Any] | None = option(
        None,
        'Arguments of the model\'s image processor as JSON, such as {"max_pixels": 802816}. '
        "Requests can override them.",
    )
    media_io_kwargs: dict[str, Any] | None = option(
        None,
        'How media are decoded, as JSON by modality, such as {"image": {"rgba_background_color": '
        '[255, 255, 255]}, "video": {"num_frames": 32}}.',
    )
    mm_processor_cache_gb: float = option(
        4.0,
        "Size in GiB of the cache of processed media, in shared memory. Media of running requests "
        "may exceed it.",
    )
    encoder_cache_tokens: int = option(
        16384,
        "Number of embeddings of media to keep in device memory. Also the most that one item may "
        "have.",
    )

    allowed_local_media_path: str = option(
        "", "Folder whose files requests may name with file:// URLs. Default: none."
    )
    allowed_media_domains: list[str] | None = option(
        None, "Hosts from which media may be fetched. Default: all that have a public address."
    )
    allowed_media_networks: list[str] = option(
        [],
        "Private networks from which media may be fetched, such as 10.1.0.0/16.",
    )
    allow_media_redirects: bool = option(
        False, "Follow redirects when fetching media. Each target is checked like the URL itself."
    )
    media_fetch_timeout: float = option(10.0, "Seconds that fetching an item may take.")
    media_max_mb: int = option(64, "Maximum size of an item's file in MiB.")
    enable_mm_embeds: bool = option(
        False,
        "Accept embeddings in place of images and videos (image_embeds, video_embeds). They enter "
        "the model unchecked: enable it for trusted clients only.",
    )

    def __post_init__(self) -> None:
        require(self, "encoder_cache_tokens", "media_max_mb", least=1)
        require(self, "media_fetch_timeout", above=0)
        for given in self.allowed_media_networks:
            try:
                ipaddress.ip_network(given)
            except ValueError as error:
                raise ConfigError(
                    f"allowed_media_networks must contain networks such as 10.1.0.0/16: {error}"
                ) from error
        require(self, "mm_processor_cache_gb", least=0)
        for name, most in (self.limit_mm_per_prompt or {}).items():
            if name not in MODALITIES:
                raise ConfigError(
                    f"limit_mm_per_prompt may contain {' and '.join(MODALITIES)}, got {name!r}"
                )
            if not isinstance(most, int) or isinstance(most, bool) or most < 0:
                raise ConfigError(
                    f"limit_mm_per_prompt: {name} must be an integer of at least 0, got {most!r}"
                )
        for name, given in (self.media_io_kwargs or {}).items():
            if name not in MODALITIES or not isinstance(given, dict):
                raise ConfigError(
                    f"media_io_kwargs must have an object for {' or '.join(MODALITIES)}, got "
                    f"{name!r}: {given!r:.80}"
                )
            try:
                check_io_kwargs(name, given)
            except InputError as error:
                raise ConfigError(str(error)) from error

    def limit_of(self, modality: str) -> int | None:
        """The most items of a modality in a prompt; None: no limit."""
        if self.language_model_only:
            return 0
        most: int | None = (self.limit_mm_per_prompt or {}).get(modality)
        return most

    @property
    def modalities(self) -> tuple[str, ...]:
        """What requests may have, if the model takes it."""
        return tuple(name for name in MODALITIES if self.limit_of(name) != 0)
