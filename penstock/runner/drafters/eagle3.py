"""Method eagle3: a small head that reads hidden states of several of the target's layers drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.layers.build import Build
from penstock.loading.speculators import flatten, head_method
from penstock.models.base import Model
from penstock.models.eagle3 import Eagle3, aux_layers
from penstock.protocol.errors import ConfigError
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.eagle_head import EagleHeadDrafter


class Eagle3Drafter(EagleHeadDrafter):
    what = "EAGLE-3"

    def choose_layers(self, setup: DraftSetup) -> None:
        settings = flatten(self.source(setup).config)
        method = head_method(settings)
        if method is None:
            raise ConfigError(
                f"{self._name} is not an EAGLE-3 head, which has LlamaForCausalLMEagle3 or "
                "Eagle3Speculator as architectures in config.json, not "
                f"{settings.get('architectures')!r:.80}: use method eagle for a head of the first "
                "EAGLE, draft_model for a whole model"
            )
        if method != "eagle3":
            raise ConfigError(f"{self._name} is not an EAGLE-3 head: use method {method}")
        if not setup.target.gives_aux:
            raise ConfigError(
                f"{type(setup.target).__name__} does not give hidden states of its layers: method "
                "eagle3 is not supported for it"
            )
        num_layers = int(setup.source.config["num_hidden_layers"])
        setup.target.aux_layers = aux_layers(settings, num_layers)

    def read(
        self, setup: DraftSetup, config: Mapping[str, Any], names: list[str]
    ) -> tuple[dict[str, Any], Callable[[Build, Mapping[str, Any]], Model]]:
        settings = flatten(config)
        settings["num_aux_hidden_states"] = len(setup.target.aux_layers)

        def create(build: Build, raw: Mapping[str, Any]) -> Model:
            return Eagle3(build, raw, setup.target, names)

        return settings, create
