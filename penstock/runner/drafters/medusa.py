"""Method medusa: heads over the target's last hidden state draft, each one token further on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from penstock.layers.build import Build
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.source import resolve_source
from penstock.models.assembly import load_model
from penstock.models.base import Hidden
from penstock.models.medusa import Medusa, medusa_settings
from penstock.protocol.errors import ConfigError
from penstock.runner.drafter import Drafter, Drafts, DraftSetup, DraftStep
from penstock.runner.forward import ForwardInputs
from penstock.runner.kv_memory import KVMemory
from penstock.runner.sampler import Sampler, SamplingRows
from penstock.runner.tables import RequestTables


class MedusaDrafter(Drafter):
    """Its heads know the context, but not the drafts of each other. They keep no KV cache."""

    def __init__(self, name: str, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._name = name

    def load(self, setup: DraftSetup) -> None:
        own, target = setup.config_of(self._name), setup.target
        found = resolve_source(own.model, own.load)
        names = open_checkpoint(found, own.load).names() if found.tensor_files else []
        settings = medusa_settings(found.config, target, names)
        if settings["num_heads"] is None or settings["num_layers"] is None:
            raise ConfigError(
                f"{self._name} is not a Medusa checkpoint: config.json has no medusa_num_heads and "
                "medusa_num_layers"
            )
        settings["dtype"] = settings["dtype"] or setup.source.config.get("dtype")
        found = dataclasses.replace(found, config=settings)

        def create(build: Build, raw: Mapping[str, Any]) -> Medusa:
            return Medusa(build, raw, target)

        head, _, _ = load_model(
            own, found, setup.platform, setup.draft_mesh, setup.limits.max_model_len, create
        )
        assert isinstance(head, Medusa)
        setup.check_sizes(f"the Medusa checkpoint {self._name}", head)
        if self.num_drafts > head.num_heads:
            raise ConfigError(
                f"num_speculative_tokens must be at most {head.num_heads}, the number of heads in "
                f"{self._name}, got {self.num_drafts}"
            )
        self.model = head
        size, device = (setup.max_rows, head.hidden_size), setup.platform.device
        # Of a step's rows. Captured graphs write it, so it never moves.
        self._states = torch.zeros(size, dtype=head.dtype, device=device)

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        self._sampler = sampler

    def observe(self, inputs: ForwardInputs, hidden: Hidden) -> None:
        self._states[: len(hidden.states)] = hidden.states

    def propose(self, step: DraftStep) -> Drafts:
        tables, slots = step.tables, step.slots.long()
        states, num_tokens = self._states[step.last_rows], tables.num_tokens[slots].long()
        max_position = int(tables.computed_bound[step.host_slots].max()) + 1 + step.num_drafts
        drafts = []
        for index in range(step.num_drafts):
            positions = num_tokens + index
            rows = SamplingRows(slots, positions, step.host_slots, max_position)
            drafts.append(self._sampler.draft(self.model.logits_of(index, states), rows))
            tables.token_ids[slots, positions] = drafts[-1].int()  # penalties read it
        return Drafts(torch.stack(drafts, dim=1))
