"""HostDrafter: the base of drafters that look at tokens on the host, one request at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from penstock.protocol.step import NewRequest
from penstock.runner.drafter import Drafter, Drafts, DraftStep


class HostDrafter(Drafter):
    """Follows the tokens of each request, and tells how many drafts each one has.

    It looks at a request only in steps that draft. What it missed comes with the next such step.
    Drafts are a function of the tokens alone, so all ranks propose the same.
    """

    is_on_host = True

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._num_seen: dict[int, int] = {}  # by slot: tokens that `extend` was given
        self._entered: dict[int, NewRequest] = {}  # by slot: requests that were not looked at yet

    @abstractmethod
    def enter(self, slot: int, request: NewRequest) -> None:
        """The first step that drafts for this request. Its known tokens are in `request`."""

    @abstractmethod
    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """The request's next tokens."""

    @abstractmethod
    def draft(self, slot: int, num_drafts: int) -> list[int]:
        """At most `num_drafts` tokens that may come next."""

    def add(self, slot: int, request: NewRequest) -> None:
        if request.sampling.speculative:
            self._entered[slot] = request

    def remove(self, slot: int) -> None:
        self._entered.pop(slot, None)
        self._num_seen.pop(slot, None)

    def propose(self, step: DraftStep) -> Drafts:
        slots = step.host_slots.tolist()
        for slot in slots:
            request = self._entered.pop(slot, None)
            if request is not None:
                self.enter(slot, request)
                self._num_seen[slot] = len(request.token_ids)
        rows = [row for row, slot in enumerate(slots) if slot in self._num_seen]
        token_ids = np.zeros((len(slots), step.num_drafts), dtype=np.int64)
        counts = np.zeros(len(slots), dtype=np.int64)
        for row, new in zip(rows, self._take_new(step, rows), strict=True):
            self.extend(slots[row], new)
            drafts = self.draft(slots[row], step.num_drafts)
            if drafts:
                counts[row] = len(drafts)
                token_ids[row, : len(drafts)] = drafts
        return Drafts(torch.from_numpy(token_ids).to(step.slots.device), counts)

    def _take_new(self, step: DraftStep, rows: list[int]) -> list[list[int]]:
        """The tokens of these requests that `extend` was not given yet."""
        if not rows:
            return []
        tables, slots = step.tables, step.host_slots[rows].tolist()
        starts = [self._num_seen[slot] for slot in slots]
        if tables.device.type == "cpu":
            ends = tables.num_tokens.numpy()[slots].tolist()
            tokens = tables.token_ids.numpy()
            new = [
                tokens[slot, start:end].tolist()
                for slot, start, end in zip(slots, starts, ends, strict=True)
            ]
        else:
            own = step.slots[torch.tensor(rows).to(tables.device)]
            ends = tables.num_tokens[own].tolist()
            width = max(end - start for start, end in zip(starts, ends, strict=True))
            columns = torch.tensor(starts)[:, None] + torch.arange(width)
            columns = columns.clamp(max=tables.token_ids.shape[1] - 1).to(tables.device)
            texts = tables.token_ids[own[:, None], columns].tolist()
            new = [
                text[: end - start] for text, start, end in zip(texts, starts, ends, strict=True)
            ]
        self._num_seen.update(zip(slots, ends, strict=True))
        return new
