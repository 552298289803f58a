"""Verification of drafts: the torch reference.

A draft is accepted if and only if it equals the token that the request's own noise selects.
Therefore the output is the same with and without speculation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SampleRows:
    """The samples of a step: those of a request are consecutive, one more than it has drafts."""

    token_ids: torch.Tensor  # [num_rows] int: the step's tokens
    rows: torch.Tensor  # [num_samples] int: the row that each sample follows
    slots: torch.Tensor  # [num_samples] int64
    starts: torch.Tensor  # [num_requests + 1] int: first sample of each request, and the end


@dataclass(frozen=True)
class Verified:
    """What a verified step gives each of its requests."""

    results: torch.Tensor  # [num_requests, 2 + width] int32: see `NUM_NEW`
    slots: torch.Tensor  # [num_requests] int64
    last_rows: torch.Tensor  # [num_requests] int64: the row of the last accepted token
    num_accepted: torch.Tensor  # [num_requests] int32: drafts

    def __getitem__(self, index: slice) -> Verified:
        return Verified(
            self.results[index], self.slots[index], self.last_rows[index], self.num_accepted[index]
        )


# Columns of `Verified.results`: how many tokens are new, whether one of them is faulted, and the
# tokens.
NUM_NEW, IS_FAULTED, FIRST_TOKEN = range(3)


def verify_drafts(
    samples: SampleRows,
    sampled: torch.Tensor,  # [num_samples] int64
    faulted: torch.Tensor,  # [num_samples] bool
    token_table: torch.Tensor,  # [slots, length] int32
    num_tokens: torch.Tensor,  # [slots] int32
    num_computed: torch.Tensor,  # [slots] int32
    width: int,  # most samples of a request
) -> Verified:
    """Keep each request's samples up to the first one that differs from its draft.

    Appends them to the tables, and counts rejected drafts as not computed. Entries of the token
    table behind the kept tokens are never read.
    """
    first, counts = samples.starts[:-1].long(), samples.starts.diff()
    column = torch.arange(width, device=sampled.device)
    exists = column < counts[:, None]  # [n, width]
    index = torch.where(exists, first[:, None] + column, first[:, None])
    tokens, rows = sampled[index], samples.rows[index].long()
    held = (tokens[:, :-1] == samples.token_ids[rows[:, 1:]]) & exists[:, 1:]
    num_accepted = held.int().cumprod(dim=1).sum(dim=1)
    is_kept = column <= num_accepted[:, None]
    slots = samples.slots[first]
    positions = num_tokens[slots].long()[:, None] + column
    token_table[slots[:, None], positions] = tokens.int()
    num_tokens[slots] += (num_accepted + 1).int()
    num_computed[slots] -= (counts - 1 - num_accepted).int()
    is_faulted = (faulted[index] & is_kept).any(dim=1)
    columns = [(num_accepted + 1)[:, None], is_faulted[:, None], tokens]
    return Verified(
        torch.cat([values.int() for values in columns], dim=1),
        slots,
        rows[:, 0] + num_accepted,
        num_accepted.int(),
    )
