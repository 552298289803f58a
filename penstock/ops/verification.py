"""Verification of drafts: the reference, in host memory.

A draft is accepted if and only if it equals the token that the request's own noise selects.
Therefore the output is the same with and without speculation. The reference is in numpy: for small
arrays, numpy takes a fraction of torch's time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
    starts, tokens_by_row = samples.starts.numpy(), samples.token_ids.numpy()
    first, counts = starts[:-1], np.diff(starts)
    column = np.arange(width)
    exists = column < counts[:, None]  # [n, width]
    index = np.where(exists, first[:, None] + column, first[:, None])
    tokens, rows = sampled.numpy()[index], samples.rows.numpy()[index]
    held = (tokens[:, :-1] == tokens_by_row[rows[:, 1:]]) & exists[:, 1:]
    num_accepted = np.logical_and.accumulate(held, axis=1).sum(axis=1)
    slots = samples.slots.numpy()[first]
    lengths, computed = num_tokens.numpy(), num_computed.numpy()
    token_table.numpy()[slots[:, None], lengths[slots][:, None] + column] = tokens
    lengths[slots] += num_accepted + 1
    computed[slots] -= counts - 1 - num_accepted
    results = np.empty((len(slots), 2 + width), dtype=np.int32)
    results[:, NUM_NEW] = num_accepted + 1
    results[:, IS_FAULTED] = (faulted.numpy()[index] & (column <= num_accepted[:, None])).any(
        axis=1
    )
    results[:, FIRST_TOKEN:] = tokens
    return Verified(
        torch.from_numpy(results),
        torch.from_numpy(slots),
        torch.from_numpy(rows[:, 0] + num_accepted),
        torch.from_numpy(num_accepted.astype(np.int32)),
    )
