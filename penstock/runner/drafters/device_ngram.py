"""N-gram drafts on a GPU, where the tokens are: steps need not wait for the host to see them."""

from __future__ import annotations

import torch

from penstock.ops.triton.ngram import ngram_drafts
from penstock.runner.drafter import Drafter, Drafts, DraftStep


class DeviceNgramDrafter(Drafter):
    """`NgramDrafter` on the device. A request without a match gets drafts all the same.

    The host cannot know which requests have one before the next step is planned.
    """

    def __init__(self, num_drafts: int, shortest: int, longest: int) -> None:
        self.num_drafts = num_drafts
        self._lengths = shortest, longest
        self._best: torch.Tensor | None = None  # matches, zero between steps

    def propose(self, step: DraftStep) -> Drafts:
        tables = step.tables
        if self._best is None:
            self._best = torch.zeros(
                len(tables.num_tokens), dtype=torch.int64, device=tables.device
            )
        sizes = (step.num_drafts, *self._lengths)
        return Drafts(
            ngram_drafts(step.slots, tables.token_ids, tables.num_tokens, self._best, *sizes)
        )
