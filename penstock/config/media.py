"""Which images and videos requests may have, and how they are processed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config.options import option, require
from penstock.protocol.errors import ConfigError

MODALITIES = ("image", "video")
IO_KEYS = {"image": ("rgba_background_color",), "video": ("num_frames", "fps")}


@dataclass(frozen=True)
class MediaConfig:
    limit_mm_per_prompt: dict[str, Any] | None = option(
        None,
        'Maximum number of media items per prompt as JSON, such as {"image": 4, "video": 0}. '
        "Default: no limit but the context. With 0 for all, the vision tower is not loaded.",
    )
    language_model_only: bool = option(
        False, "Do not load the vision tower, and refuse images and videos."
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

    def __post_init__(self) -> None:
        require(self, "encoder_cache_tokens", least=1)
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
            for key in given:
                if key not in IO_KEYS[name]:
                    raise ConfigError(
                        f"media_io_kwargs: {name} may contain {', '.join(IO_KEYS[name])}, got "
                        f"{key!r}"
                    )

    def limit_of(self, modality: str) -> int | None:
        """The most items of a modality in a prompt; None: no limit."""
        if self.language_model_only:
            return 0
        most: int | None = (self.limit_mm_per_prompt or {}).get(modality)
        return most

    @property
    def takes_media(self) -> bool:
        return any(self.limit_of(name) != 0 for name in MODALITIES)
