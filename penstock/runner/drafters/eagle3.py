"""Method eagle3: a small head that reads hidden states of several of the target's layers drafts."""

from __future__ import annotations

import dataclasses

from penstock.loading.source import resolve_source
from penstock.models.assembly import load_model
from penstock.models.eagle3 import Eagle3, aux_layers, flatten_config
from penstock.protocol.errors import ConfigError
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.head import HeadDrafter, use_positions


class Eagle3Drafter(HeadDrafter):
    def __init__(self, name: str, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self._name = name

    def load(self, setup: DraftSetup) -> None:
        own, max_model_len = setup.config_of(self._name), setup.limits.max_model_len
        found = resolve_source(own.model, own.load)
        settings = flatten_config(found.config)
        use_positions(settings, self._name, max_model_len)
        aux = aux_layers(settings, int(setup.source.config["num_hidden_layers"]))
        settings["num_aux_hidden_states"] = len(aux)
        found = dataclasses.replace(found, config=settings)
        head, dtypes, _ = load_model(
            own, found, setup.platform, setup.draft_mesh, max_model_len, create=Eagle3.create
        )
        assert isinstance(head, Eagle3)
        if not setup.target.gives_aux:
            raise ConfigError(
                f"{type(setup.target).__name__} does not give hidden states of its layers: method "
                "eagle3 is not supported for it"
            )
        setup.check_sizes(f"the EAGLE-3 head {self._name}", head, head.target_size)
        setup.target.aux_layers = aux
        self._target, self._head = setup.target, head
        self.use(head, dtypes.kv, setup.max_rows, max_model_len)
