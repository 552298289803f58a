"""HeadDrafter: a head that reads the target's hidden states drafts (EAGLE, MTP).

Row p of the head's cache has token p and the hidden state of position p - 1. So the head computes a
step's rows right after the target, with the target's own positions and block tables, and knows all
it needs: no row waits for a token that is not sampled yet. Its output is needed only where drafts
begin, and a head is one layer, so the other rows take no more than their keys and values. Rows of
rejected drafts are computed again with the next step, like the target's. After a prefix hit one row
lacks its hidden state.

Decode steps after which nothing is proposed are not observed, so the head's cache lacks their rows.
Their blocks enter the prefix cache all the same: the target would have to compute them again
otherwise, and the head cannot, without its hidden states. It costs acceptance only.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from penstock.layers.context import ForwardContext, forward_context
from penstock.models.base import Hidden
from penstock.models.draft_vocabulary import DraftVocabulary
from penstock.protocol.step import NewRequest
from penstock.runner.drafter import Drafts, DraftStep
from penstock.runner.drafters.model import ModelDrafter
from penstock.runner.forward import ForwardInputs
from penstock.runner.kv_memory import KVMemory
from penstock.runner.sampler import Sampler
from penstock.runner.tables import RequestTables


class DraftHead(Protocol):
    hidden_size: int
    dtype: torch.dtype

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The tokens that it drafts; None: all of the target's."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [n] -> what `draft` and `write` take: [n, hidden_size]."""

    def combine(self, hidden: Hidden) -> torch.Tensor:
        """The target's hidden states that rows take: [n, hidden_size]."""

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute rows. Returns what `project` takes, and the hidden states for the next rows."""

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Cache the keys and values of rows that nothing is drafted from."""

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Logits over the tokens that it drafts."""


class HeadDrafter(ModelDrafter):
    """Drafts with a head, which `load` sets."""

    _head: DraftHead

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        super().start(tables, memory, sampler)
        # The hidden state before each request's next row. The last row takes what nobody reads.
        num_slots, size = len(tables.num_tokens), self._head.hidden_size
        dtype, device = self._head.dtype, tables.device
        self._before = torch.zeros(num_slots + 1, size, dtype=dtype, device=device)
        # What the head made of a step's rows. Captured graphs write it, so it never moves.
        self._combined = torch.zeros(self._max_rows, size, dtype=dtype, device=device)
        # A layer of the target whose metadata are those of the head's layer.
        self._neighbours = {
            name: memory.layer_names[group][0] for name, group in self.groups.items()
        }
        self._hidden = self._before[:0]  # of the rows that are computed

    def add(self, slot: int, request: NewRequest) -> None:
        self._before[slot] = 0.0

    def observe(self, inputs: ForwardInputs, hidden: Hidden) -> None:
        context = inputs.context
        combined = self._head.combine(hidden)
        slots = context.token_slots
        # Rows of a request are consecutive.
        same = slots[1:] == slots[:-1]
        edge = torch.ones_like(slots[:1], dtype=torch.bool)
        is_first, is_last = torch.cat([edge, ~same]), torch.cat([~same, edge])
        nobody = len(self._before) - 1
        own = torch.where(slots < 0, nobody, slots)
        shifted = torch.cat([combined[:1], combined[:-1]])
        before = torch.where(is_first[:, None], self._before[own], shifted)
        attention = {name: context.attention[near] for name, near in self._neighbours.items()}
        own_context = ForwardContext(self.caches, attention, context.query_starts, slots)
        with forward_context(own_context):
            self._head.write(self._head.embed(inputs.token_ids), before, inputs.positions)
        self._before[torch.where(is_last, own, nobody)] = combined
        self._combined[: len(combined)] = combined

    def propose(self, step: DraftStep) -> Drafts:
        if self._loop is not None:
            room = self._room(step.host_slots)
            drafts = self._loop.propose(step.host_slots, step.last_rows, room, step.num_drafts)
            if drafts is not None:
                return Drafts(drafts)
        batch = self._batch(step)
        self.begin(batch.slots, step.last_rows, batch.room)
        one_each = np.ones(len(step.host_slots), dtype=np.int64)
        logits = self._forward(batch, batch.num_tokens - 1, one_each)
        return Drafts(self._draft(batch, logits, step.num_drafts))

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self._head.vocabulary

    def begin(self, slots: torch.Tensor, last_rows: torch.Tensor, room: torch.Tensor) -> None:
        self._hidden = self._combined[last_rows]
        nobody = len(self._before) - 1
        self._before[torch.where(slots < 0, nobody, slots)] = self._hidden

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Hidden:
        embedded = self._head.embed(token_ids)
        states, self._hidden = self._head.draft(embedded, self._hidden, positions)
        return Hidden(states)

    def logits(self, hidden: Hidden, rows: torch.Tensor | slice) -> torch.Tensor:
        return self._head.project(hidden.states[rows])
