"""Device-side request state: the runner's one copy of tokens, lengths and block tables.

A request has a slot, a row in every table, from the step that brings it to the step that
releases it. Positions and input tokens derive from here on the device, so a step can be launched
before the tokens of the step before it are known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.kvcache.groups import rules_for
from penstock.protocol.kv import KVCacheGroup
from penstock.protocol.step import NewRequest, ScheduledRequest

IntArray = npt.NDArray[np.int64]
NO_SEGMENT = 2**30  # a position that no request has


def _table_width(group: KVCacheGroup, num_tokens: int) -> int:
    """Columns that a request of so many tokens may need, or that may be looked up for one.

    Another sequence, to which a layer attends, may have more blocks than the request's own.
    """
    own = -(-num_tokens // group.block_size)
    return max(own, rules_for(group.spec, group.block_size).num_blocks(num_tokens))


class RequestTables:
    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[KVCacheGroup],
        device: torch.device,
        num_drafts: int = 0,
    ) -> None:
        self.device = device
        self.groups = groups
        # Drafts of a request at its last position may reach past the end: they are never used.
        width = max_model_len + 1 + num_drafts

        def table(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.token_ids = table(max_num_seqs, width)
        self.num_tokens = table(max_num_seqs)  # known on the device: prompt and sampled
        self.num_prompt_tokens = table(max_num_seqs)
        self.num_computed = table(max_num_seqs)
        self.block_tables = [table(max_num_seqs, _table_width(group, width)) for group in groups]
        self._slots: dict[str, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._num_blocks = np.zeros((len(groups), max_num_seqs), dtype=np.int64)
        # Upper bounds of num_computed, for what the host must size.
        self.computed_bound: IntArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.second_segments: torch.Tensor | None = None  # by slot: see ForwardContext
        self.tenancies: IntArray = np.zeros(max_num_seqs, dtype=np.int64)  # requests a slot has had

    def mark_segments(self) -> torch.Tensor:
        """Keep where the second text of each request's pair begins, from now on."""
        self.second_segments = torch.full_like(self.num_computed, NO_SEGMENT)
        return self.second_segments

    def slots_of(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        slots = self._slots
        return [slots[item.request_id] for item in scheduled]

    def add(self, request: NewRequest) -> int:
        """Give the request a slot and write what is known of it."""
        slot = self._take_slot(request)
        tokens = torch.tensor(request.token_ids, dtype=torch.int32)
        self.token_ids[slot, : len(tokens)] = tokens.to(self.device, non_blocking=True)
        self.num_tokens[slot] = len(tokens)
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed[slot] = request.num_computed_tokens
        return slot

    def _take_slot(self, request: NewRequest) -> int:
        slot = self._free.pop()
        self._slots[request.request_id] = slot
        self.tenancies[slot] += 1
        self.computed_bound[slot] = request.num_computed_tokens
        self._num_blocks[:, slot] = 0
        if self.second_segments is not None:
            second = request.second_segment
            self.second_segments[slot] = NO_SEGMENT if second is None else second
        return slot

    def release(self, request_id: str) -> int | None:
        """Take the slot back; None if the request never had one."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    @property
    def request_ids(self) -> list[str]:
        return list(self._slots)

    def append_blocks(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Put new blocks behind the ones that each request's tables already hold."""
        for index, table in enumerate(self.block_tables):
            entries = self._new_entries(index, scheduled)
            if entries:
                where = torch.tensor(entries)
                table[where[0], where[1]] = where[2].to(table.dtype)

    def _new_entries(self, group: int, scheduled: Sequence[ScheduledRequest]) -> list[list[int]]:
        """Slots, columns and blocks of what the plan adds to a group's table; [] for nothing."""
        slots: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for item in scheduled:
            if not item.new_block_ids or not item.new_block_ids[group]:
                continue
            slot, new = self._slots[item.request_id], item.new_block_ids[group]
            start = int(self._num_blocks[group, slot])
            slots += [slot] * len(new)
            columns += range(start, start + len(new))
            blocks += new
            self._num_blocks[group, slot] = start + len(new)
        return [slots, columns, blocks] if blocks else []

    def advance(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        """`counts` more tokens of each slot are computed."""
        self.num_computed[slots] += counts

    def lower_bounds(self, slots: IntArray, tenancies: IntArray, counts: IntArray) -> None:
        """So many tokens of each slot were counted as computed, and are not.

        Steps are collected late: a slot that has another request by now is left alone.
        """
        same = self.tenancies[slots] == tenancies
        self.computed_bound[slots[same]] -= counts[same]

    def append_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """One sampled token for each slot. Slots are distinct."""
        position = self.num_tokens[slots].long()
        self.token_ids[slots, position] = token_ids.to(torch.int32)
        self.num_tokens[slots] += 1

    def append_verified(
        self,
        slots: torch.Tensor,  # [n]
        token_ids: torch.Tensor,  # [n, 1 + drafts]
        num_new: torch.Tensor,  # [n] how many of them hold
        num_rejected: torch.Tensor,  # [n] drafts that were computed for nothing
    ) -> None:
        """Tokens of a verified step. What lies behind the ones that hold is never read."""
        self._write(slots, token_ids)
        self.num_tokens[slots] += num_new.int()
        self.num_computed[slots] -= num_rejected.int()

    def write_drafts(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Put drafts [n, k] behind the known tokens, where the next step will read them."""
        self._write(slots, drafts)

    def _write(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        columns = torch.arange(token_ids.shape[1], device=self.device)
        positions = self.num_tokens[slots].long()[:, None] + columns
        self.token_ids[slots[:, None], positions] = token_ids.to(torch.int32)
