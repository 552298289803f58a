"""Request tables on a GPU: gathers updates on the host and writes each kind with one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.ops.triton import inputs, verification
from penstock.ops.verification import SampleRows, Verified
from penstock.protocol.step import NewRequest, ScheduledRequest
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import RequestTables


class DeviceTables(RequestTables):
    """`RequestTables` that never synchronize with the device and need few launches."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self._entering: list[tuple[int, NewRequest]] = []

    def add(self, request: NewRequest) -> int:
        """Give the request a slot. The tables contain it after the next `append_blocks`."""
        slot = self._take_slot(request)
        self._entering.append((slot, request))
        return slot

    def release(self, request_id: str) -> int | None:
        slot = super().release(request_id)
        # A failed step may leave an entry here. It must not overwrite the slot's next request.
        self._entering = [entry for entry in self._entering if entry[0] != slot]
        return slot

    def append_blocks(self, scheduled: Sequence[ScheduledRequest]) -> None:
        if self._entering:
            self._write_requests()
        for index, table in enumerate(self.block_tables):
            where = self._new_entries(index, scheduled)
            if where:
                inputs.write_blocks(to_device(np.array(where, dtype=np.int32), self.device), table)

    def append_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        inputs.append_tokens(slots, token_ids, self.token_ids, self.num_tokens)

    def verify(self, samples: SampleRows, sampled: torch.Tensor, faulted: torch.Tensor) -> Verified:
        return verification.verify_drafts(
            samples, sampled, faulted, self.token_ids, self.num_tokens, self.num_computed,
            self.width,
        )  # fmt: skip

    def write_drafts(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        drafts = drafts.to(self.device, non_blocking=True)
        verification.write_drafts(slots, drafts, self.token_ids, self.num_tokens)

    def _write_requests(self) -> None:
        rows, tokens = [], []
        start = 0
        for slot, request in self._entering:
            length = len(request.token_ids)
            rows += [
                slot, start, length, request.num_prompt_tokens, request.num_computed_tokens
            ]  # fmt: skip
            tokens.append(np.array(request.token_ids, dtype=np.int32))
            start += length
        packed = np.concatenate([np.array(rows, dtype=np.int32), *tokens])
        inputs.write_requests(
            to_device(packed, self.device),
            len(self._entering),
            self.token_ids,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_computed,
        )
        self._entering = []
