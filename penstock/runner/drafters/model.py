"""ModelDrafter: drafts with layers of its own, whose KV cache lies beside the target's.

Row p of a draft layer's cache belongs to the token at position p, like a row of the target's. So
the target's block tables, prefix cache, preemption and rollback serve the draft layers, too.

Drafts are computed one after the other, each from the request tables, where the one before it was
written. What differs between drafters is how the rows of known tokens come into the cache: see
`HeadDrafter` and `DraftModelDrafter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.layers.context import ForwardContext, forward_context
from penstock.models.base import Hidden, Model
from penstock.models.draft_vocabulary import DraftVocabulary
from penstock.ops.attention import AttentionMetadata
from penstock.protocol.kv import KVCacheSpec, RecurrentSpec
from penstock.runner.drafter import Drafter, DraftStep
from penstock.runner.drafters.states import DraftStates
from penstock.runner.graphs import GraphPool
from penstock.runner.kv_memory import KVMemory
from penstock.runner.sampler import Sampler, SamplingRows
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import IntArray, RequestTables

if TYPE_CHECKING:
    from penstock.runner.drafters.loop import DraftLoop

PREFIX = "draft."  # of the layers' names in the KV cache


@dataclass(frozen=True)
class DraftBatch:
    """The requests for which tokens are drafted."""

    slots: torch.Tensor  # [n] int64
    host_slots: IntArray  # [n], the same
    num_tokens: torch.Tensor  # [n] int64: known tokens
    room: torch.Tensor  # [n] int64: positions below have a place in the cache of the draft layers
    block_tables: dict[int, torch.Tensor]  # by KV group: [n, max_blocks] int32
    max_position: int  # an upper bound of the positions of drafts

    def take(self, index: IntArray) -> DraftBatch:
        where = to_device(index, self.slots.device)
        return DraftBatch(
            self.slots[where],
            self.host_slots[index],
            self.num_tokens[where],
            self.room[where],
            {group: table[where] for group, table in self.block_tables.items()},
            self.max_position,
        )


class ModelDrafter(Drafter):
    """The draft layers, their cache, and the loop that drafts with them.

    On a GPU, `DraftLoop` captures the loop in graphs. What sampling does not do there, such as
    penalties, takes the way of a CPU.
    """

    keeps_last: bool = False  # whether the loop also computes a row for the last draft
    states: DraftStates | None = None  # if some of the draft layers are recurrent

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.num_lookahead = num_drafts
        self._loop: DraftLoop | None = None

    def use(self, model: Model, kv_dtype: str, max_rows: int, max_positions: int) -> None:
        """Draft with `model`, at most `max_rows` rows at once, for positions below a maximum."""
        self.model = model
        self._max_rows, self.max_positions = max_rows, max_positions
        specs = model.kv_specs(kv_dtype)
        self._specs = {
            name: spec for name, spec in specs.items() if not isinstance(spec, RecurrentSpec)
        }

    def kv_specs(self) -> dict[str, KVCacheSpec]:
        return {PREFIX + name: spec for name, spec in self._specs.items()}

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        self._tables = tables
        self._sampler = sampler
        self.caches = {name: memory.caches[PREFIX + name] for name in self._specs}
        self.groups = {name: memory.group_of(PREFIX + name) for name in self._specs}

    def use_graphs(self, graphs: GraphPool) -> None:
        from penstock.runner.drafters.loop import DraftLoop  # needs Triton

        self._loop = DraftLoop(self, self._tables, self._sampler, graphs)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The tokens that may be drafted; None: all of the target's."""
        return None

    def begin(
        self, slots: torch.Tensor, last_rows: torch.Tensor, room: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        """Drafts of these requests follow, see `DraftStep` and `DraftBatch`. Slot -1 is padding.

        Returns the slots, -1 also for requests whose rows must leave no state.
        """
        raise NotImplementedError

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Hidden:
        """Compute tokens in the current context."""
        raise NotImplementedError

    def logits(self, hidden: Hidden, rows: torch.Tensor | slice) -> torch.Tensor:
        """The logits of some of the tokens, over `vocabulary`."""
        raise NotImplementedError

    def end(self, drafts: torch.Tensor) -> None:
        """The drafts [n, num_drafts] of the requests that `begin` named."""

    def context(
        self,
        groups: Mapping[int, AttentionMetadata],
        shape: AttentionMetadata,  # what those of all groups have in common
        slots: torch.Tensor,  # of the requests
        token_slots: torch.Tensor,
    ) -> ForwardContext:
        """The context of a pass over the draft layers."""
        attention = {name: groups[group] for name, group in self.groups.items()}
        starts, states = shape.query_starts, self.states
        if states is None:
            return ForwardContext(self.caches, attention, starts, token_slots)
        attention |= states.metadata(shape, slots)
        return ForwardContext(
            self.caches, attention, starts, token_slots, states.layers, states.block_sizes
        )

    def _room(self, slots: IntArray) -> IntArray:
        """Positions below have a place in the cache of the draft layers."""
        room = np.full(len(slots), self.max_positions)
        for group in set(self.groups.values()):
            num_rows = self._tables.num_blocks(group, slots) * self._block_size(group)
            room = np.minimum(room, num_rows)
        return room

    def _batch(self, step: DraftStep) -> DraftBatch:
        tables, slots = self._tables, step.slots.long()
        max_position = int(tables.computed_bound[step.host_slots].max()) + 1 + step.num_drafts
        block_tables = {}
        for group in set(self.groups.values()):
            num_blocks, size = tables.num_blocks(group, step.host_slots), self._block_size(group)
            # A reused slot has old blocks behind its own, which belong to others by now.
            columns = torch.arange(-(-max_position // size), device=tables.device)
            is_own = columns < to_device(num_blocks, tables.device)[:, None]
            table = tables.block_tables[group][slots, : len(columns)]
            block_tables[group] = table * is_own[:, : table.shape[1]]
        return DraftBatch(
            slots,
            step.host_slots,
            tables.num_tokens[slots].long(),
            to_device(self._room(step.host_slots), tables.device),
            block_tables,
            max_position,
        )

    def _block_size(self, group: int) -> int:
        return self._tables.groups[group].block_size

    def _draft(self, batch: DraftBatch, logits: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Draft one token after the other, the first from `logits` [n, vocab]: [n, num_drafts]."""
        drafts = []
        one_each = np.ones(len(batch.host_slots), dtype=np.int64)
        for index in range(num_drafts):
            positions = batch.num_tokens + index
            if index == 1 and self.states is not None:
                self.states.begin_drafts(batch.slots)
            if index > 0:
                logits = self._forward(batch, positions - 1, one_each)
            rows = SamplingRows(batch.slots, positions, batch.host_slots, batch.max_position)
            drafts.append(self._sampler.draft(logits, rows))
            # The next row reads it, and so do penalties.
            self._tables.token_ids[batch.slots, positions] = drafts[-1].int()
        return torch.stack(drafts, dim=1)

    def _forward(self, batch: DraftBatch, first: torch.Tensor, counts: IntArray) -> torch.Tensor:
        """Compute `counts` [n] rows of each request from position `first` [n] on.

        Returns the logits of each request's last row.
        """
        tables, device = self._tables, batch.slots.device
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        num_rows, is_decode = int(starts[-1]), int(starts[-1]) == len(counts)
        owners = to_device(np.repeat(np.arange(len(counts)), counts), device)  # request of each row
        offsets = np.arange(num_rows) - np.repeat(starts[:-1], counts)
        positions = first[owners] + to_device(offsets, device)
        slots = batch.slots[owners]
        token_ids = tables.token_ids[slots, positions]
        # Rows without a place in the cache are written to the null block. Their drafts are poor.
        has_place = positions < batch.room[owners]
        positions = positions.clamp(max=self.max_positions - 1)
        seq_lens = (first + to_device(counts, device)).clamp(max=self.max_positions).int()
        query_starts = to_device(starts.astype(np.int32), device)
        shape = AttentionMetadata(
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_table=torch.empty(0),
            slot_mapping=positions,
            num_decodes=int((counts == 1).sum()),
            max_query_len=int(counts.max()),
            max_seq_len=min(batch.max_position, self.max_positions),
        )
        attention = {}
        for group, table in batch.block_tables.items():
            size = self._block_size(group)
            column = (positions // size).clamp(max=table.shape[1] - 1)
            blocks = table[owners, column] * has_place
            mapping = blocks.long() * size + positions % size
            attention[group] = replace(shape, block_table=table, slot_mapping=mapping)
        context = self.context(attention, shape, batch.slots, slots)
        last = slice(0, num_rows) if is_decode else to_device(starts[1:] - 1, device)
        with forward_context(context):
            hidden = self.compute(token_ids, positions)
        logits = self.logits(hidden, last)
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)
