"""Per-model device state beyond the KV cache: what vision, recurrent and encoder models need."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.protocol.step import NewRequest
from penstock.runner.batch import StepBatch


class ModelState(Protocol):
    """Keeps a model's own state for each slot, in step with the request tables."""

    def add(self, slot: int, request: NewRequest) -> None:
        """A request enters the slot: start from nothing."""

    def prepare(self, batch: StepBatch) -> None:
        """Make ready what the forward pass of this batch will read."""

    def rollback(self, slots: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """The last `num_tokens` computed in each slot were drafts that did not hold."""
