"""How a step's forward pass is run: laid out, then computed. One way a kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.layers.context import forward_context
from penstock.models.base import Hidden, Model
from penstock.protocol.step import StepPlan
from penstock.runner.batch import StepBatch, make_batch
from penstock.runner.kv_memory import KVMemory
from penstock.runner.model_state import ModelState
from penstock.runner.tables import RequestTables


class StepMaker(Protocol):
    def run(
        self, plan: StepPlan, model_states: Sequence[ModelState]
    ) -> tuple[StepBatch, Hidden, torch.Tensor | None]:
        """Compute a plan that the tables are up to date with.

        The batch, the hidden states of its rows, and the logits of those that sample if they came
        with it. Counts the tokens as computed.
        """


class PlainSteps:
    """Everything made anew for each step, in torch."""

    def __init__(self, model: Model, tables: RequestTables, memory: KVMemory) -> None:
        self.model = model
        self.tables = tables
        self.memory = memory

    def run(
        self, plan: StepPlan, model_states: Sequence[ModelState]
    ) -> tuple[StepBatch, Hidden, torch.Tensor | None]:
        batch = make_batch(plan, self.tables)
        for state in model_states:
            state.prepare(batch)
        context = self.memory.context(batch.attention, batch.query_starts, batch.token_slots)
        with forward_context(context):
            hidden = self.model.forward(self.model.embed(batch.token_ids), batch.positions)
        return batch, hidden, None
