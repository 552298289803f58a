"""Method eagle: a small head that reads the target's last hidden state drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.layers.build import Build
from penstock.loading.speculators import flatten, head_method
from penstock.models.base import Model
from penstock.models.eagle import Eagle
from penstock.protocol.errors import ConfigError
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.eagle_head import EagleHeadDrafter


class EagleDrafter(EagleHeadDrafter):
    what = "EAGLE"

    def read(
        self, setup: DraftSetup, config: Mapping[str, Any], names: list[str]
    ) -> tuple[dict[str, Any], Callable[[Build, Mapping[str, Any]], Model]]:
        settings = flatten(config)
        if head_method(settings) == "eagle3":
            raise ConfigError(f"{self._name} is an EAGLE-3 head: use method eagle3")
        if names and not any(name.endswith("fc.weight") for name in names):
            raise ConfigError(
                f"{self._name} is not an EAGLE head: its checkpoint has no fc.weight. For a whole "
                "model, use method draft_model"
            )

        def create(build: Build, raw: Mapping[str, Any]) -> Model:
            return Eagle(build, raw, setup.target, names)

        return settings, create
