"""HeadDrafter: a head that reads the target's hidden states drafts (EAGLE, MTP).

Row p of the head's cache has token p and the hidden state of position p - 1. So the head computes a
step's rows right after the target, with the target's own positions and block tables, and knows all
it needs: no row waits for a token that is not sampled yet. Its output is needed only where drafts
begin, and a head is one layer, so the other rows take no more than their keys and values. Rows of
rejected drafts are computed again with the next step, like the target's. After a prefix hit one row
lacks its hidden state.

Several heads are a chain. Row p of a further head has token p and the hidden state that the head
before it computed for row p - 1. So only the last one's output is not needed for every row. Draft i
comes from head i, and after the last one the first follows again. For that, a draft's row is
computed by every head from which a later draft comes: their rows behind the draft read it.

Decode steps after which nothing is proposed are not observed, so the head's cache lacks their rows.
Their blocks enter the prefix cache all the same: the target would have to compute them again
otherwise, and the head cannot, without its hidden states. It costs acceptance only.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Drafts with a chain of heads, which `load` sets. Mostly it is one."""

    _heads: Sequence[DraftHead]

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        super().start(tables, memory, sampler)
        head, num_heads, num_slots = self._heads[0], len(self._heads), len(tables.num_tokens)
        shape, dtype, device = (head.hidden_size,), head.dtype, tables.device
        # The hidden state before each request's next row. The last row takes what nobody reads.
        self._before = torch.zeros(num_heads, num_slots + 1, *shape, dtype=dtype, device=device)
        # The hidden states of a step's rows, of which each head takes those before its own rows.
        # Captured graphs write them, so they never move.
        size = num_heads, self._max_rows
        self._combined = torch.zeros(*size, *shape, dtype=dtype, device=device)
        # A layer of the target whose metadata are those of the head's layer.
        self._neighbours = {
            name: memory.layer_names[group][0] for name, group in self.groups.items()
        }
        # Of the next draft: the hidden states before its row, for each head.
        self._hidden: list[torch.Tensor] = []
        self._index = self._num_drafts = 0

    def add(self, slot: int, request: NewRequest) -> None:
        self._before[:, slot] = 0.0

    def observe(self, inputs: ForwardInputs, hidden: Hidden) -> None:
        context = inputs.context
        slots, positions = context.token_slots, inputs.positions
        # Rows of a request are consecutive.
        same = slots[1:] == slots[:-1]
        edge = torch.ones_like(slots[:1], dtype=torch.bool)
        is_first, is_last = torch.cat([edge, ~same]), torch.cat([~same, edge])
        nobody = self._before.shape[1] - 1
        own = torch.where(slots < 0, nobody, slots)
        kept = torch.where(is_last, own, nobody)
        attention = {name: context.attention[near] for name, near in self._neighbours.items()}
        own_context = ForwardContext(self.caches, attention, context.query_starts, slots)
        combined = self._heads[0].combine(hidden)
        with forward_context(own_context):
            embedded = self._heads[0].embed(inputs.token_ids)
            for depth, head in enumerate(self._heads):
                shifted = torch.cat([combined[:1], combined[:-1]])
                before = torch.where(is_first[:, None], self._before[depth, own], shifted)
                self._before[depth, kept] = combined
                self._combined[depth, : len(combined)] = combined
                if depth + 1 < len(self._heads):
                    _, combined = head.draft(embedded, before, positions)
                else:
                    head.write(embedded, before, positions)

    def propose(self, step: DraftStep) -> Drafts:
        if self._loop is not None:
            room = self._room(step.host_slots)
            drafts = self._loop.propose(step.host_slots, step.last_rows, room, step.num_drafts)
            if drafts is not None:
                return Drafts(drafts)
        batch = self._batch(step)
        self.begin(batch.slots, step.last_rows, batch.room, step.num_drafts)
        one_each = np.ones(len(step.host_slots), dtype=np.int64)
        logits = self._forward(batch, batch.num_tokens - 1, one_each)
        return Drafts(self._draft(batch, logits, step.num_drafts))

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self._heads[0].vocabulary

    def begin(
        self, slots: torch.Tensor, last_rows: torch.Tensor, room: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        hidden = self._combined[:, last_rows]
        nobody = self._before.shape[1] - 1
        self._before[:, torch.where(slots < 0, nobody, slots)] = hidden
        self._hidden, self._index, self._num_drafts = list(hidden), 0, num_drafts
        return slots

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Hidden:
        embedded = self._heads[0].embed(token_ids)
        index, num_heads = self._index, len(self._heads)
        self._index += 1
        following = list(self._hidden)
        drafted = embedded
        for depth, head in enumerate(self._heads):
            behind, before = (depth + 1) % num_heads, self._hidden[depth]
            if depth == index % num_heads or self._is_used(behind, index + 1):
                states, following[behind] = head.draft(embedded, before, positions)
                drafted = states if depth == index % num_heads else drafted
            elif self._is_used(depth, index + 1):
                head.write(embedded, before, positions)
        self._hidden = following
        return Hidden(drafted)

    def _is_used(self, depth: int, index: int) -> bool:
        """Whether a draft comes from this head, draft `index` or a later one."""
        return index + (depth - index) % len(self._heads) < self._num_drafts

    def logits(self, hidden: Hidden, rows: torch.Tensor | slice) -> torch.Tensor:
        return self._heads[0].project(hidden.states[rows])
