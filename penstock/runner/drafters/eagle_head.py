"""EagleHeadDrafter: loads an EAGLE or EAGLE-3 head, which has a checkpoint of its own."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from penstock.layers.build import Build
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.source import ModelSource, resolve_source
from penstock.models.assembly import load_model
from penstock.models.base import Model
from penstock.models.eagle import Eagle
from penstock.models.eagle3 import Eagle3
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.head import HeadDrafter

logger = logging.getLogger(__name__)


class EagleHeadDrafter(HeadDrafter):
    what: ClassVar[str]  # "the ... head" of messages

    def __init__(self, name: str, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self._name = name
        self._source: ModelSource | None = None

    def source(self, setup: DraftSetup) -> ModelSource:
        """The files of the head."""
        if self._source is None:
            own = setup.config_of(self._name)
            self._source = resolve_source(own.model, own.load)
        return self._source

    @abstractmethod
    def read(
        self, setup: DraftSetup, config: Mapping[str, Any], names: list[str]
    ) -> tuple[dict[str, Any], Callable[[Build, Mapping[str, Any]], Model]]:
        """The settings of the head and how it is made, by its config.json and tensors."""

    def load(self, setup: DraftSetup) -> None:
        own, max_model_len = setup.config_of(self._name), setup.limits.max_model_len
        found = self.source(setup)
        names = open_checkpoint(found, own.load).names() if found.tensor_files else []
        settings, create = self.read(setup, found.config, names)
        use_positions(settings, self._name, max_model_len)
        found = replace(found, config=settings)
        head, dtypes, _ = load_model(
            own, found, setup.platform, setup.draft_mesh, max_model_len, create
        )
        assert isinstance(head, Eagle | Eagle3)
        setup.check_sizes(f"the {self.what} head {self._name}", head, head.target_size)
        head.share()
        self._heads = [head]
        self.use(head, dtypes.kv, setup.max_rows, max_model_len)


def use_positions(settings: dict[str, Any], name: str, max_model_len: int) -> None:
    """Let a head compute positions up to `max_model_len`, whatever its config.json says.

    Such files name the context that the head was trained with. Its layer has no such limit.
    """
    trained = settings.get("max_position_embeddings")
    if isinstance(trained, int) and trained < max_model_len:
        logger.info(
            "%s has max_position_embeddings %d: it drafts up to max_model_len, %d tokens",
            name, trained, max_model_len,
        )  # fmt: skip
    settings["max_position_embeddings"] = max_model_len
