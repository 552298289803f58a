"""A step's view of the tables: which tokens stand in which rows, and where their cache is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.ops.attention import AttentionMetadata
from penstock.protocol.step import ScheduledRequest, StepPlan
from penstock.runner.sampler import SamplingRows
from penstock.runner.tables import IntArray, RequestTables


@dataclass(frozen=True)
class StepBatch:
    """Rows are tokens, request by request; requests that compute one token come first."""

    requests: list[ScheduledRequest]  # in row order
    host_slots: IntArray  # [num_requests]
    tenancies: IntArray  # [num_requests]: requests that each one's slot has had, it included
    slots: torch.Tensor  # the same on the device, int64
    host_starts: IntArray  # [num_requests + 1]: first row of each request, and the end
    query_starts: torch.Tensor  # the same on the device, int32
    token_slots: torch.Tensor  # [num_tokens] int64
    token_ids: torch.Tensor  # [num_tokens] int32
    positions: torch.Tensor  # [num_tokens] int64
    attention: list[AttentionMetadata]  # one for each KV group
    sampling: IntArray  # indexes of the requests that sample
    rows_per_sample: IntArray  # logits rows of each of those: 1 + drafts
    logits_rows: torch.Tensor  # [num_logits_rows] int
    host_logits_rows: IntArray  # the same on the host
    sampling_rows: SamplingRows


def make_batch(plan: StepPlan, tables: RequestTables) -> StepBatch:
    """Lay out a plan whose requests all have slots and blocks; counts its tokens as computed.

    The tables are in host memory here. They are read as arrays: for a handful of numbers, numpy
    takes a fraction of torch's time.
    """
    requests = sorted(plan.scheduled, key=lambda item: item.num_tokens > 1)
    host_slots = np.array(tables.slots_of(requests), dtype=np.int64)
    host_counts = np.array([item.num_tokens for item in requests], dtype=np.int64)
    host_starts = np.zeros(len(requests) + 1, dtype=np.int64)
    np.cumsum(host_counts, out=host_starts[1:])
    token_request = np.repeat(np.arange(len(requests)), host_counts)
    token_slots = host_slots[token_request]
    tables.computed_bound[host_slots] += host_counts
    max_seq_len = int(tables.computed_bound[host_slots].max(initial=0))

    computed = tables.num_computed.numpy()[host_slots]
    positions = np.arange(host_starts[-1]) + (computed - host_starts[:-1])[token_request]
    slots = torch.from_numpy(host_slots)
    starts = torch.from_numpy(host_starts.astype(np.int32))
    counts = torch.from_numpy(host_counts.astype(np.int32))
    seq_lens = torch.from_numpy(computed + host_counts.astype(np.int32))
    tables.advance(slots, counts)
    num_decodes = int((host_counts == 1).sum())
    max_query_len = int(host_counts.max(initial=0))
    attention = []
    for group, table in zip(tables.groups, tables.block_tables, strict=True):
        size, blocks = group.block_size, table.numpy()
        of_tokens = blocks[token_slots, positions // size].astype(np.int64)
        attention.append(
            AttentionMetadata(
                query_starts=starts,
                seq_lens=seq_lens,
                block_table=torch.from_numpy(blocks[host_slots, : -(-max_seq_len // size)]),
                slot_mapping=torch.from_numpy(of_tokens * size + positions % size),
                num_decodes=num_decodes,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
            )
        )
    sampling, rows_per_sample, host_rows = logits_rows_of(requests, host_starts)
    sampling_slots = token_slots[host_rows]
    return StepBatch(
        requests=requests,
        host_slots=host_slots,
        tenancies=tables.tenancies[host_slots],
        slots=slots,
        host_starts=host_starts,
        query_starts=starts,
        token_slots=torch.from_numpy(token_slots),
        token_ids=torch.from_numpy(tables.token_ids.numpy()[token_slots, positions]),
        positions=torch.from_numpy(positions),
        attention=attention,
        sampling=sampling,
        rows_per_sample=rows_per_sample,
        logits_rows=torch.from_numpy(host_rows),
        host_logits_rows=host_rows,
        sampling_rows=SamplingRows(
            slots=torch.from_numpy(sampling_slots),
            positions=torch.from_numpy(positions[host_rows] + 1),
            host_slots=sampling_slots,
            max_position=max_seq_len + 1,
        ),
    )


def logits_rows_of(
    requests: list[ScheduledRequest], host_starts: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Which requests sample, how many rows each, and those rows: the last of each request."""
    samples = np.array([item.samples for item in requests], dtype=bool)
    sampling = np.nonzero(samples)[0]
    rows_per_sample = 1 + np.array([item.num_drafts for item in requests], dtype=np.int64)[samples]
    ends = np.cumsum(rows_per_sample)
    within = np.arange(ends[-1] if len(ends) else 0)
    first = host_starts[1:][samples] - rows_per_sample  # row of each request's first sample
    rows = within + np.repeat(first - (ends - rows_per_sample), rows_per_sample)
    return sampling, rows_per_sample, rows
