"""Load balancing of experts (EPLB): how many copies there are, and how often they move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.options import naming_option, option, parse_keys, require


@dataclass(frozen=True)
class EplbSettings:
    """The keys of `eplb_config`."""

    num_redundant_experts: int = option(
        0, "Number of additional expert copies per layer, over all ranks."
    )
    window_size: int = option(1000, "Number of past steps whose load decides the placement.")
    step_interval: int = option(
        3000, "Number of steps after which a layer's experts may move. Layers take turns."
    )

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> EplbSettings:
        """Raises `ConfigError`, which names the key."""
        with naming_option("eplb_config"):
            return cls(**parse_keys(cls, given or {}, "eplb_config"))

    def __post_init__(self) -> None:
        require(self, "num_redundant_experts", least=0)
        require(self, "window_size", "step_interval", least=1)
