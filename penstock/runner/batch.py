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
    """Lay out a plan whose requests all have slots and blocks; counts its tokens as computed."""
    requests = sorted(plan.scheduled, key=lambda item: item.num_tokens > 1)
    device = tables.device
    host_slots = np.array([tables.slot_of(item.request_id) for item in requests], dtype=np.int64)
    host_counts = np.array([item.num_tokens for item in requests], dtype=np.int64)
    host_starts = np.concatenate([[0], np.cumsum(host_counts)])
    token_request = np.repeat(np.arange(len(requests)), host_counts)
    within = np.arange(host_starts[-1]) - host_starts[token_request]
    tables.computed_bound[host_slots] += host_counts
    max_seq_len = int(tables.computed_bound[host_slots].max(initial=0))

    slots = _to(device, host_slots)
    counts = _to(device, host_counts).to(torch.int32)
    token_slots = _to(device, host_slots[token_request])
    positions = tables.num_computed[token_slots] + _to(device, within)
    starts = _to(device, host_starts).to(torch.int32)
    seq_lens = tables.num_computed[slots] + counts
    tables.advance(slots, counts)
    attention = []
    for group, table in zip(tables.groups, tables.block_tables, strict=True):
        blocks = table[token_slots, positions // group.block_size]
        attention.append(
            AttentionMetadata(
                query_starts=starts,
                seq_lens=seq_lens,
                block_table=table[slots, : -(-max_seq_len // group.block_size)],
                slot_mapping=blocks.long() * group.block_size + positions % group.block_size,
                num_decodes=int((host_counts == 1).sum()),
                max_query_len=int(host_counts.max(initial=0)),
                max_seq_len=max_seq_len,
            )
        )
    sampling, rows_per_sample, host_rows = logits_rows_of(requests, host_starts)
    logits_rows = _to(device, host_rows)
    return StepBatch(
        requests=requests,
        host_slots=host_slots,
        slots=slots,
        host_starts=host_starts,
        query_starts=starts,
        token_slots=token_slots,
        token_ids=tables.token_ids[token_slots, positions],
        positions=positions,
        attention=attention,
        sampling=sampling,
        rows_per_sample=rows_per_sample,
        logits_rows=logits_rows,
        host_logits_rows=host_rows,
        sampling_rows=SamplingRows(
            slots=token_slots[logits_rows],
            positions=positions[logits_rows] + 1,
            host_slots=host_slots[token_request[host_rows]],
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


def _to(device: torch.device, array: IntArray) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
