"""Method eagle3: a small head that reads hidden states of several of the target's layers drafts."""

from __future__ import annotations

import dataclasses

from penstock.loading.source import resolve_source
from penstock.models.assembly import load_model
from penstock.models.base import Model
from penstock.models.eagle3 import Eagle3, aux_layers, flatten_config
from penstock.protocol.errors import ConfigError
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.head import HeadDrafter


class Eagle3Drafter(HeadDrafter):
    def __init__(self, name: str, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self._name = name

    def load(self, setup: DraftSetup) -> None:
        own, max_model_len = setup.config_of(self._name), setup.limits.max_model_len
        found = resolve_source(own.model, own.load)
        settings = flatten_config(found.config)
        # Such files name the context that the head was trained with. Its layer has no such limit.
        settings["max_position_embeddings"] = max_model_len
        aux = aux_layers(settings, int(setup.source.config["num_hidden_layers"]))
        settings["num_aux_hidden_states"] = len(aux)
        found = dataclasses.replace(found, config=settings)
        head, dtypes, _ = load_model(
            own, found, setup.platform, setup.draft_mesh, max_model_len, create=Eagle3.create
        )
        assert isinstance(head, Eagle3)
        self._check(setup.target, head)
        setup.target.aux_layers = aux
        self._target, self._head = setup.target, head
        self.use(head, dtypes.kv, setup.max_rows, max_model_len)

    def _check(self, target: Model, head: Eagle3) -> None:
        if not target.gives_aux:
            raise ConfigError(
                f"{type(target).__name__} does not give hidden states of its layers: method eagle3 "
                "is not supported for it"
            )
        for what, own, theirs in (
            ("vocab_size", head.vocab_size, target.vocab_size),
            ("hidden_size", head.hidden_size, target.hidden_size),
            ("target_hidden_size", head.target_size, target.hidden_size),
        ):
            if own != theirs:
                raise ConfigError(
                    f"the EAGLE-3 head {self._name} is for a target with {what} {own}, this one's "
                    f"is {theirs}: choose the head that was trained for it"
                )
