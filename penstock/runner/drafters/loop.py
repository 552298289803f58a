"""DraftLoop: all drafts of a step on a GPU, padded and replayed from one graph.

The host sends the requests and what place they have in the cache, in one copy. Everything else is
on the device, so the loop never waits. There is one graph per number of requests, number of drafts
and sampling kind, captured the second time it comes up, in a memory pool of its own: a replay must
not overwrite what the step's other graphs leave for the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.layers.context import forward_context
from penstock.models.base import Hidden
from penstock.ops.attention import AttentionMetadata
from penstock.ops.triton.drafting import draft_rows
from penstock.protocol.kv import AttentionSpec
from penstock.runner.graphs import GraphPool, at_least, decode_sizes
from penstock.runner.sampler import Sampler, SamplingKind
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import IntArray, RequestTables

if TYPE_CHECKING:
    from penstock.runner.drafters.model import ModelDrafter

Key = tuple[int, int, SamplingKind]  # requests, drafts, kind


class DraftLoop:
    def __init__(
        self, drafter: ModelDrafter, tables: RequestTables, sampler: Sampler, graphs: GraphPool
    ) -> None:
        self._drafter, self._tables = drafter, tables
        self._sampler, self._graphs = sampler, graphs
        self._captured: dict[Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        device, seqs = tables.device, len(tables.num_tokens)
        self._sizes = decode_sizes(seqs)

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(seqs, dtype=dtype, device=device)

        # Inputs. Graphs read them, so they never move.
        self._sent = torch.zeros(2 * seqs, dtype=torch.int64, device=device)
        self._last_rows = column(torch.int64)
        # Rows of a draft.
        self._token_ids, self._seq_lens = column(torch.int32), column(torch.int32)
        self._positions, self._next_positions = column(torch.int64), column(torch.int64)
        self._query_starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        # Positions and tokens are laid out with a group, also if no layer uses one.
        groups = set(drafter.groups.values()) or {0}
        self._mappings = {group: column(torch.int64) for group in groups}
        self._block_tables = {
            group: torch.zeros_like(tables.block_tables[group]) for group in self._mappings
        }
        specs = drafter.kv_specs().values()
        heads = [spec.num_kv_heads for spec in specs if isinstance(spec, AttentionSpec)]
        size = seqs * max(heads, default=1)
        self._arrived = torch.zeros(size, dtype=torch.int32, device=device)

    def propose(
        self, host_slots: IntArray, last_rows: torch.Tensor, room: IntArray, num_drafts: int
    ) -> torch.Tensor | None:
        """Drafts [n, num_drafts], valid until the next call.

        None if sampling needs more than a graph has.
        """
        num, kind = len(host_slots), self._sampler.draft_kind(host_slots)
        size = at_least(self._sizes, num)
        if kind is None or size is None:
            return None
        sent = np.full((2, size), -1, dtype=np.int64)
        sent[:, :num] = host_slots, room
        self._sent[: 2 * size].copy_(to_device(sent.ravel(), self._sent.device))
        self._last_rows[:num].copy_(last_rows)
        return self._run(size, num_drafts, kind)[:num]

    def _run(self, size: int, num_drafts: int, kind: SamplingKind) -> torch.Tensor:
        key = size, num_drafts, kind
        if key not in self._captured:
            if not self._graphs.is_due(key):
                return self._compute(*key)  # compiles new kernels
            self._captured[key] = self._graphs.capture(lambda: self._compute(*key))
        graph, drafts = self._captured[key]
        graph.replay()
        return drafts

    def _compute(self, size: int, num_drafts: int, kind: SamplingKind) -> torch.Tensor:
        drafter = self._drafter
        slots, room = self._sent[:size], self._sent[size : 2 * size]
        ready = drafter.begin(slots, self._last_rows[:size], room, num_drafts)
        if drafter.states is not None:
            drafter.states.use_known()
        num_rows = num_drafts + drafter.keeps_last
        options: dict[str, torch.Tensor] = {}
        if drafter.vocabulary is not None:
            options["token_ids"] = drafter.vocabulary.token_ids
        drafts: list[torch.Tensor] = []
        for index in range(num_rows):
            self._lay_out(slots, room, drafts[-1] if drafts else None, index, num_rows)
            if index == 1 and drafter.states is not None:
                drafter.states.begin_drafts(ready)
            hidden = self._forward(slots, ready)
            if index < num_drafts:
                logits = drafter.logits(hidden, slice(0, size))
                positions = self._next_positions[:size]
                chosen, _ = self._sampler.choose(logits, slots, positions, kind, **options)
                drafts.append(chosen)
        proposed = torch.stack(drafts, dim=1)
        drafter.end(proposed)
        return proposed

    def _lay_out(
        self,
        slots: torch.Tensor,
        room: torch.Tensor,
        drafted: torch.Tensor | None,
        index: int,
        num_rows: int,
    ) -> None:
        tables, size = self._tables, len(slots)
        for group, mapping in self._mappings.items():
            draft_rows(
                slots, room, drafted, tables.token_ids, tables.num_tokens,
                tables.block_tables[group], tables.groups[group].block_size, index, num_rows,
                self._drafter.max_positions, self._token_ids[:size], self._positions[:size],
                self._next_positions[:size], mapping[:size], self._seq_lens[:size],
                self._block_tables[group][:size],
            )  # fmt: skip

    def _forward(self, slots: torch.Tensor, ready: torch.Tensor) -> Hidden:
        drafter, size = self._drafter, len(slots)
        shape = AttentionMetadata(
            query_starts=self._query_starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=torch.empty(0),
            slot_mapping=self._positions[:size],
            num_decodes=size,
            max_query_len=1,
            max_seq_len=drafter.max_positions,
            arrived=self._arrived,
        )
        attention = {
            group: replace(
                shape,
                block_table=table[:size],
                slot_mapping=self._mappings[group][:size],
                max_seq_len=table.shape[1] * self._tables.groups[group].block_size,
            )
            for group, table in self._block_tables.items()
        }
        with forward_context(drafter.context(attention, shape, ready, slots)):
            return drafter.compute(self._token_ids[:size], self._positions[:size])
