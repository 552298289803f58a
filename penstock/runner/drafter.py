"""The interface of a drafter, which proposes tokens for the next step to verify."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.runner.tables import RequestTables


class Drafter(Protocol):
    """Proposes `num_drafts` tokens for each request that has just sampled."""

    num_drafts: int

    def propose(
        self,
        tables: RequestTables,
        hidden: torch.Tensor,  # [num_logits_rows, hidden_size]
        sampled: torch.Tensor,  # [num_requests] last token of each request
        slots: torch.Tensor,  # [num_requests]
        num_accepted: torch.Tensor,  # [num_requests] accepted drafts of the last step
    ) -> torch.Tensor:  # [num_requests, num_drafts]
        ...
