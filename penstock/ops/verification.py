"""Verification of drafts: the reference, in host memory.

A draft is accepted if and only if it equals the token that the request's own noise selects.
Therefore the output is the same with and without speculation. The reference loops over requests in
Python: for a few of them, this takes a fraction of the time of numpy's or torch's operations.
"""

from __future__ import annotations

import itertools
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
    starts, rows = samples.starts.tolist(), samples.rows.tolist()
    slots_by_row, drafts = samples.slots.tolist(), samples.token_ids.tolist()
    chosen, faults = sampled.tolist(), faulted.tolist()
    table, lengths, computed = token_table.numpy(), num_tokens.numpy(), num_computed.numpy()
    results, slots, last_rows, num_accepted = [], [], [], []
    for first, end in itertools.pairwise(starts):
        last = first
        while last + 1 < end and chosen[last] == drafts[rows[last + 1]]:
            last += 1
        slot, tokens = slots_by_row[first], chosen[first : last + 1]
        length = lengths.item(slot)
        table[slot, length : length + len(tokens)] = tokens
        lengths[slot] = length + len(tokens)
        computed[slot] -= end - 1 - last
        padding = [0] * (width - len(tokens))
        results.append([len(tokens), any(faults[first : last + 1]), *tokens, *padding])
        slots.append(slot)
        last_rows.append(rows[last])
        num_accepted.append(last - first)
    return Verified(
        torch.tensor(results, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(last_rows, dtype=torch.int64),
        torch.tensor(num_accepted, dtype=torch.int32),
    )
