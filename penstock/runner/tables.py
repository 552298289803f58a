"""Request state on the device: the runner's only copy of tokens, lengths and block tables.

A request has a slot, a row in every table, from the step that adds it to the step that releases it.
Positions and input tokens derive from these tables on the device. Therefore a step can be launched
before the host knows the tokens of the previous step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.kvcache.groups import rules_for
from penstock.ops.verification import SampleRows, Verified, verify_drafts
from penstock.protocol.kv import KVCacheGroup
from penstock.protocol.step import NO_SLOT, NewRequest, ScheduledRequest

IntArray = npt.NDArray[np.int64]
NO_SEGMENT = 2**30  # larger than any position


def _table_width(group: KVCacheGroup, num_tokens: int) -> int:
    """The columns that a request of this many tokens may need.

    A layer may attend to another sequence, which may have more blocks than the request's own.
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
        self.width = 1 + num_drafts  # most samples of a request in a step
        # Drafts at a request's last position may reach past the end. They are never used.
        width = max_model_len + 1 + num_drafts

        def table(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.token_ids = table(max_num_seqs, width)
        self.num_tokens = table(max_num_seqs)  # prompt and sampled tokens on the device
        self.num_prompt_tokens = table(max_num_seqs)
        self.num_computed = table(max_num_seqs)
        self.block_tables = [table(max_num_seqs, _table_width(group, width)) for group in groups]
        self._slots: dict[str, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._num_blocks = np.zeros((len(groups), max_num_seqs), dtype=np.int64)
        # Upper bounds of num_computed, for sizes that the host must choose.
        self.computed_bound: IntArray = np.zeros(max_num_seqs, dtype=np.int64)
        self.second_segments: torch.Tensor | None = None  # by slot: see ForwardContext
        self._segmented: set[int] = set()  # slots whose requests have a second text
        self.tenancies: IntArray = np.zeros(max_num_seqs, dtype=np.int64)  # requests a slot has had
        self.adapter_slots: IntArray = np.full(max_num_seqs, NO_SLOT, dtype=np.int64)
        self.num_with_adapters = 0  # requests

    def mark_segments(self) -> torch.Tensor:
        """Start to record where the second text of each request's pair begins."""
        self.second_segments = torch.full_like(self.num_computed, NO_SEGMENT)
        return self.second_segments

    def slots_of(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        slots = self._slots
        return [slots[item.request_id] for item in scheduled]

    def add(self, request: NewRequest) -> int:
        """Give the request a slot and write its known state."""
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
        self.adapter_slots[slot] = request.adapter_slot
        self.num_with_adapters += request.adapter_slot != NO_SLOT
        second = request.second_segment
        # A write is a launch on a GPU, and most requests have no second text.
        if self.second_segments is not None and (second is not None or slot in self._segmented):
            self.second_segments[slot] = NO_SEGMENT if second is None else second
            (self._segmented.discard if second is None else self._segmented.add)(slot)
        return slot

    def release(self, request_id: str) -> int | None:
        """Free the slot. Returns None if the request never had one."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self.num_with_adapters -= int(self.adapter_slots[slot] != NO_SLOT)
        return slot

    @property
    def request_ids(self) -> list[str]:
        return list(self._slots)

    def append_blocks(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Append new blocks to each request's block tables."""
        for index, table in enumerate(self.block_tables):
            entries = self._new_entries(index, scheduled)
            if entries:
                where = torch.tensor(entries)
                table[where[0], where[1]] = where[2].to(table.dtype)

    def _new_entries(self, group: int, scheduled: Sequence[ScheduledRequest]) -> list[list[int]]:
        """Slots, columns and blocks that the plan adds to a group's table; [] if none."""
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

    def num_blocks(self, group: int, slots: IntArray) -> IntArray:
        """How many blocks of a group each slot's request has. Those behind are not its own."""
        num_blocks: IntArray = self._num_blocks[group, slots]
        return num_blocks

    def advance(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        """Count `counts` more tokens of each slot as computed."""
        self.num_computed[slots] += counts

    def lower_bounds(self, slots: IntArray, tenancies: IntArray, counts: IntArray) -> None:
        """Subtract tokens that were counted as computed but are not.

        Steps are collected late. A slot that has a new request by then is left unchanged.
        """
        same = self.tenancies[slots] == tenancies
        self.computed_bound[slots[same]] -= counts[same]

    def append_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Append one sampled token to each slot. Slots are distinct."""
        position = self.num_tokens[slots].long()
        self.token_ids[slots, position] = token_ids.to(torch.int32)
        self.num_tokens[slots] += 1

    def verify(self, samples: SampleRows, sampled: torch.Tensor, faulted: torch.Tensor) -> Verified:
        """Append the sampled tokens of each request up to the first that is not its draft."""
        return verify_drafts(
            samples, sampled, faulted, self.token_ids, self.num_tokens, self.num_computed,
            self.width,
        )  # fmt: skip

    def write_drafts(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Write drafts [n, k] behind the known tokens, where the next step reads them."""
        columns = torch.arange(drafts.shape[1], device=self.device)
        positions = self.num_tokens[slots].long()[:, None] + columns
        self.token_ids[slots[:, None], positions] = drafts.to(torch.int32)

    def read_drafts(self, slots: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """What is behind the known tokens, [n, num_drafts]: drafts, and then any tokens."""
        columns = torch.arange(num_drafts, device=self.device)
        positions = self.num_tokens[slots].long()[:, None] + columns
        return self.token_ids[slots[:, None], positions]
