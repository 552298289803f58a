"""ModelDrafter: drafts with layers of its own, whose KV cache lies beside the target's.

Row p of a draft layer's cache belongs to the token at position p, like a row of the target's. So
the target's block tables, prefix cache, preemption and rollback serve the draft layers, too.

The drafter reads tokens from the request tables when it proposes: first those that its cache lacks,
then its own drafts, one after the other. It takes no part in the target's steps. So a step after
which nothing is proposed costs nothing, and its tokens are caught up with later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.layers.context import ForwardContext, forward_context
from penstock.models.base import Model
from penstock.ops.attention import AttentionMetadata
from penstock.protocol.kv import KVCacheSpec
from penstock.protocol.step import NewRequest, StepPlan
from penstock.runner.drafter import Drafter, Drafts, DraftStep
from penstock.runner.kv_memory import KVMemory
from penstock.runner.sampler import Sampler, SamplingRows
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import IntArray, RequestTables

PREFIX = "draft."  # of the layers' names in the KV cache
NO_TOKEN = -1


@dataclass(frozen=True)
class _Batch:
    """The requests for which tokens are drafted."""

    slots: torch.Tensor  # [n] int64
    host_slots: IntArray  # [n], the same
    num_tokens: torch.Tensor  # [n] int64: known tokens
    room: torch.Tensor  # [n] int64: positions below have a place in the cache of the draft layers
    block_tables: dict[int, torch.Tensor]  # by KV group: [n, max_blocks] int32
    max_position: int  # an upper bound of the positions of drafts

    def take(self, index: IntArray) -> _Batch:
        where = to_device(index, self.slots.device)
        return _Batch(
            self.slots[where],
            self.host_slots[index],
            self.num_tokens[where],
            self.room[where],
            {group: table[where] for group, table in self.block_tables.items()},
            self.max_position,
        )


class ModelDrafter(Drafter):
    """Drafts with a model that takes tokens only."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.num_lookahead = num_drafts

    def use(self, model: Model, kv_dtype: str, max_rows: int, max_positions: int) -> None:
        """Draft with `model`, at most `max_rows` rows at once, for positions below a maximum."""
        self.model = model
        self._max_rows, self._max_positions = max_rows, max_positions
        self._specs = model.kv_specs(kv_dtype)

    def kv_specs(self) -> dict[str, KVCacheSpec]:
        return {PREFIX + name: spec for name, spec in self._specs.items()}

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        self._tables = tables
        self._sampler = sampler
        self._caches = {name: memory.caches[PREFIX + name] for name in self._specs}
        self._groups = {name: memory.group_of(PREFIX + name) for name in self._specs}
        # By slot: how many leading tokens have rows in the cache, and the drafts behind them that
        # have rows, too. Those rows count where the drafts turned out to be the request's tokens.
        slots, device = len(tables.num_tokens), tables.device
        self._num_done = torch.zeros(slots, dtype=torch.int64, device=device)
        self._drafted = torch.full((slots, self.num_drafts), NO_TOKEN, device=device)
        # By KV group: blocks all of whose rows the draft layers have. A cached block may lack some,
        # if its request ended before the drafter had caught up.
        num_blocks = memory.layout.num_blocks
        self._is_full = {
            group: torch.zeros(num_blocks, dtype=torch.bool, device=device)
            for group in set(self._groups.values())
        }
        self._unchecked: set[int] = set()  # slots whose cached blocks were not looked at yet

    def add(self, slot: int, request: NewRequest) -> None:
        self._num_done[slot] = request.num_computed_tokens  # cached blocks have draft rows, too
        self._drafted[slot] = NO_TOKEN
        if request.num_computed_tokens:
            self._unchecked.add(slot)

    def remove(self, slot: int) -> None:
        self._unchecked.discard(slot)

    def take_blocks(self, plan: StepPlan) -> None:
        cached = {request.request_id: request.num_computed_tokens for request in plan.new_requests}
        for group, is_full in self._is_full.items():
            new: list[int] = []
            for item in plan.scheduled:
                if item.new_block_ids:
                    num_cached = cached.get(item.request_id, 0) // self._block_size(group)
                    new += item.new_block_ids[group][num_cached:]
            if new:
                is_full[to_device(np.array(new), is_full.device)] = False

    def propose(self, step: DraftStep) -> Drafts:
        everyone, num_drafts = self._batch(step), step.num_drafts
        if self._unchecked:
            self._check_cached(everyone)
        drafts = torch.zeros_like(everyone.slots)[:, None].repeat(1, num_drafts)
        device = drafts.device
        known = torch.stack([self._num_valid(everyone), everyone.num_tokens, everyone.room])
        num_valid, num_tokens, room = known.cpu().numpy()  # a GPU waits here
        # Requests that have no place for the next row, or too many rows to compute first, get none.
        counts = np.where(room < num_tokens, 0, num_tokens - num_valid)
        counts = self._share_rows(counts)
        reached = num_valid + counts
        has_drafts = reached == num_tokens
        order = np.argsort(counts > 1, kind="stable")  # requests with one row go first
        order = order[counts[order] > 0]
        if len(order):
            batch = everyone.take(order)
            logits = self._forward(batch, to_device(num_valid[order], device), counts[order])
            if has_drafts.any():
                drafts[to_device(order, device)] = self._draft(batch, logits, num_drafts)
        # The last draft has no row yet, and others may have no place for theirs.
        num_rows = np.where(has_drafts, np.clip(room - num_tokens, 0, num_drafts - 1), 0)
        has_row = torch.arange(num_drafts, device=device) < to_device(num_rows, device)[:, None]
        self._num_done[everyone.slots] = to_device(reached, device)
        self._mark_full(everyone, num_valid, reached)
        self._drafted[everyone.slots] = NO_TOKEN
        self._drafted[everyone.slots, :num_drafts] = drafts.masked_fill(~has_row, NO_TOKEN)
        if device.type != "cpu":
            return Drafts(drafts)  # the host plans ahead, and uses no counts
        num_good = np.where(has_drafts, np.clip(room - num_tokens + 1, 0, num_drafts), 0)
        return Drafts(drafts, None if (num_good == num_drafts).all() else num_good)

    def _batch(self, step: DraftStep) -> _Batch:
        tables, slots = self._tables, step.slots.long()
        max_position = int(tables.computed_bound[step.host_slots].max()) + 1 + step.num_drafts
        room = np.full(len(step.host_slots), self._max_positions)
        block_tables = {}
        for group in set(self._groups.values()):
            num_blocks, size = tables.num_blocks(group, step.host_slots), self._block_size(group)
            room = np.minimum(room, num_blocks * size)
            # A reused slot has old blocks behind its own, which belong to others by now.
            columns = torch.arange(-(-max_position // size), device=tables.device)
            is_own = columns < to_device(num_blocks, tables.device)[:, None]
            table = tables.block_tables[group][slots, : len(columns)]
            block_tables[group] = table * is_own[:, : table.shape[1]]
        return _Batch(
            slots,
            step.host_slots,
            tables.num_tokens[slots].long(),
            to_device(room, tables.device),
            block_tables,
            max_position,
        )

    def _block_size(self, group: int) -> int:
        return self._tables.groups[group].block_size

    def _num_valid(self, batch: _Batch) -> torch.Tensor:
        """How many leading tokens of each request have rows. The last token is never among them."""
        num_done, drafted = self._num_done[batch.slots], self._drafted[batch.slots]
        positions = num_done[:, None] + torch.arange(self.num_drafts, device=num_done.device)
        positions = positions.clamp(max=self._tables.token_ids.shape[1] - 1)
        held = drafted == self._tables.token_ids[batch.slots[:, None], positions]
        num_valid = num_done + held.int().cumprod(dim=1).sum(dim=1)
        return torch.minimum(num_valid, batch.num_tokens - 1)

    def _check_cached(self, batch: _Batch) -> None:
        """Count only the leading cached blocks of new requests that have all draft rows."""
        own = [i for i, slot in enumerate(batch.host_slots.tolist()) if slot in self._unchecked]
        self._unchecked.difference_update(batch.host_slots.tolist())
        index = to_device(np.array(own, dtype=np.int64), batch.slots.device)
        slots = batch.slots[index]
        for group, is_full in self._is_full.items():
            num_full = is_full[batch.block_tables[group][index]].int().cumprod(dim=1).sum(dim=1)
            num_rows = num_full * self._block_size(group)
            self._num_done[slots] = torch.minimum(self._num_done[slots], num_rows)

    def _mark_full(self, batch: _Batch, before: IntArray, reached: IntArray) -> None:
        for group, is_full in self._is_full.items():
            size = self._block_size(group)
            index = np.flatnonzero(reached // size > before // size)
            if len(index):
                where, end = (to_device(x, is_full.device) for x in (index, reached[index] // size))
                table = batch.block_tables[group][where]
                columns = torch.arange(table.shape[1], device=is_full.device)
                is_full[torch.where(columns < end[:, None], table, 0)] = True

    def _share_rows(self, missing: IntArray) -> IntArray:
        """How many of its missing rows each request gets now, of `max_rows` in all.

        So a long prompt delays others by no more than one of the target's steps does.
        """
        before = np.cumsum(missing) - missing
        shared: IntArray = np.clip(self._max_rows - before, 0, missing)
        return shared

    def _draft(self, batch: _Batch, logits: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Draft one token after the other, the first from `logits` [n, vocab]: [n, num_drafts]."""
        drafts = []
        one_each = np.ones(len(batch.host_slots), dtype=np.int64)
        for index in range(num_drafts):
            positions = batch.num_tokens + index
            if index > 0:
                logits = self._forward(batch, positions - 1, one_each)
            rows = SamplingRows(batch.slots, positions, batch.host_slots, batch.max_position)
            drafts.append(self._sampler.draft(logits, rows))
            # The next row reads it, and so do penalties.
            self._tables.token_ids[batch.slots, positions] = drafts[-1].int()
        return torch.stack(drafts, dim=1)

    def _forward(self, batch: _Batch, first: torch.Tensor, counts: IntArray) -> torch.Tensor:
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
        positions = positions.clamp(max=self._max_positions - 1)
        seq_lens = (first + to_device(counts, device)).clamp(max=self._max_positions).int()
        query_starts = to_device(starts.astype(np.int32), device)
        attention = {}
        for group, table in batch.block_tables.items():
            size = self._block_size(group)
            column = (positions // size).clamp(max=table.shape[1] - 1)
            blocks = table[owners, column] * has_place
            attention[group] = AttentionMetadata(
                query_starts=query_starts,
                seq_lens=seq_lens,
                block_table=table,
                slot_mapping=blocks.long() * size + positions % size,
                num_decodes=int((counts == 1).sum()),
                max_query_len=int(counts.max()),
                max_seq_len=min(batch.max_position, self._max_positions),
            )
        context = ForwardContext(
            self._caches,
            {name: attention[group] for name, group in self._groups.items()},
            query_starts,
            slots,
        )
        last = slice(0, num_rows) if is_decode else to_device(starts[1:] - 1, device)
        with forward_context(context):
            return self._logits(token_ids, positions, last)

    def _logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | slice
    ) -> torch.Tensor:
        """Compute tokens in the current context. Returns the logits of `rows`."""
        hidden = self.model.forward(self.model.embed(token_ids), positions)
        return self.model.logits(hidden, rows)
