"""Suffix drafts on a GPU, where the tokens are: steps need not wait for the host to see them."""

from __future__ import annotations

import hashlib

import torch

from penstock.ops.triton.suffix import PastRing, append_output, suffix_drafts
from penstock.protocol.step import NewRequest
from penstock.runner.drafter import Drafter, Drafts, DraftStep
from penstock.runner.kv_memory import KVMemory
from penstock.runner.sampler import Sampler
from penstock.runner.tables import RequestTables

MOST_CACHED_TOKENS = 1 << 19  # of past outputs; each takes 12 bytes


def salt_number(salt: str | None) -> int:
    """A salt in 63 bits. Requests see past outputs of their own salt only."""
    if salt is None:
        return 0
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "big") >> 1


class DeviceSuffixDrafter(Drafter):
    """Like `SuffixDrafter`, on the device. A request without a match gets drafts all the same.

    The host cannot know which requests have one before the next step is planned.
    """

    def __init__(
        self,
        num_drafts: int,
        max_tree_depth: int,
        max_requests: int,
        max_tokens: int = MOST_CACHED_TOKENS,
    ) -> None:
        self.num_drafts = num_drafts
        self._longest = max_tree_depth - 1
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._num_outputs = 0  # that were kept
        self._salts: dict[int, int] = {}  # by slot, of requests that speculate

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        self._tables = tables
        self._slot_salts = torch.zeros(
            len(tables.num_tokens), dtype=torch.int64, device=tables.device
        )
        capacity = self._max_tokens if self._max_requests else 1
        self._past = PastRing.make(capacity, max(self._max_requests, 1), tables.device)

    def add(self, slot: int, request: NewRequest) -> None:
        if request.sampling.speculative:
            self._salts[slot] = salt = salt_number(request.cache_salt)
            self._slot_salts[slot].fill_(salt)  # an assignment would wait for the device

    def remove(self, slot: int) -> None:
        salt = self._salts.pop(slot, None)
        if salt is None or not self._max_requests:
            return
        tables = self._tables
        append_output(
            self._past, tables.token_ids, tables.num_tokens, tables.num_prompt_tokens, slot, salt,
            self._num_outputs,
        )  # fmt: skip
        self._num_outputs += 1

    def propose(self, step: DraftStep) -> Drafts:
        tables = self._tables
        sizes = step.num_drafts, self._longest
        return Drafts(
            suffix_drafts(
                step.slots,
                tables.token_ids,
                tables.num_tokens,
                self._slot_salts,
                self._past,
                *sizes,
            )
        )
