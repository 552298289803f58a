"""Method eagle: a small head that reads the target's last hidden state drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.layers.build import Build
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.source import resolve_source
from penstock.models.assembly import load_model
from penstock.models.eagle import Eagle
from penstock.protocol.errors import ConfigError
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.head import HeadDrafter, use_positions


class EagleDrafter(HeadDrafter):
    def __init__(self, name: str, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self._name = name

    def load(self, setup: DraftSetup) -> None:
        own, max_model_len = setup.config_of(self._name), setup.limits.max_model_len
        found = resolve_source(own.model, own.load)
        names = open_checkpoint(found, own.load).names() if found.tensor_files else []
        self._check_kind(found.config, names)
        settings = dict(found.config)
        use_positions(settings, self._name, max_model_len)

        def create(build: Build, raw: Mapping[str, Any]) -> Eagle:
            return Eagle(build, raw, setup.target, names)

        found = dataclasses.replace(found, config=settings)
        head, dtypes, _ = load_model(
            own, found, setup.platform, setup.draft_mesh, max_model_len, create
        )
        assert isinstance(head, Eagle)
        setup.check_sizes(f"the EAGLE head {self._name}", head)
        self._target, self._head = setup.target, head
        self.use(head, dtypes.kv, setup.max_rows, max_model_len)

    def _check_kind(self, settings: Mapping[str, Any], names: list[str]) -> None:
        kinds = settings.get("architectures") or []
        if any("eagle3" in str(kind).lower() for kind in kinds):
            raise ConfigError(f"{self._name} is an EAGLE-3 head: use method eagle3")
        if names and not any(name.endswith("fc.weight") for name in names):
            raise ConfigError(
                f"{self._name} is not an EAGLE head: its checkpoint has no fc.weight. For a whole "
                "model, use method draft_model"
            )
