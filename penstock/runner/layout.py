"""Decides which rows of a step belong to which request. Computed once, on the host, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.protocol.step import NO_SLOT, ScheduledRequest, StepPlan
from penstock.runner.tables import IntArray, RequestTables

# A step's requests are ordered: decodes, new prompts, later chunks, then those with drafts.
DECODE, PROMPT, CHUNK, DRAFTING = range(4)


@dataclass(frozen=True)
class StepLayout:
    """The rows of a step. A row is a token; the rows of a request are consecutive."""

    requests: list[ScheduledRequest]  # in row order
    slots: IntArray  # [num_requests]
    tenancies: IntArray  # [num_requests]: tenancy of each slot, including this request
    counts: IntArray  # [num_requests]: rows of each request
    starts: IntArray  # [num_requests + 1]: first row of each request, then the number of rows
    seq_lens: IntArray  # [num_requests]: tokens after the step; pending drafts count as accepted
    num_decodes: int  # leading requests with one row each
    num_prompts: int  # requests after those, with nothing in the cache yet
    num_drafting: int  # last requests, with one token and its drafts each
    sampling: IntArray  # indexes of the requests that sample
    rows_per_sample: IntArray  # logits rows of each sampling request: 1 + drafts
    logits_rows: IntArray  # [num_logits_rows]: the last rows of each sampling request
    sample_slots: IntArray  # [num_logits_rows]
    adapter_slots: IntArray | None = None  # [num_rows]: NO_SLOT without one; None: no row has one
    num_drafts: int = 0  # to propose after the step
    least_chance: float = 0.0  # see StepPlan

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    @property
    def num_prompt_rows(self) -> int:
        end = self.num_decodes + self.num_prompts
        return int(self.starts[end] - self.starts[self.num_decodes])

    @property
    def num_drafting_rows(self) -> int:
        return int(self.starts[-1] - self.starts[len(self.requests) - self.num_drafting])

    @property
    def max_query_len(self) -> int:
        return int(self.counts.max())

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())

    @property
    def sample_starts(self) -> IntArray:
        """The first row of logits of each sampling request, then their number."""
        starts = np.zeros(len(self.sampling) + 1, dtype=np.int64)
        np.cumsum(self.rows_per_sample, out=starts[1:])
        return starts

    @property
    def has_drafts(self) -> bool:
        return len(self.logits_rows) > len(self.sampling)

    @property
    def is_decode(self) -> bool:
        """Whether every request has one row and samples."""
        return len(self.requests) == self.num_rows == len(self.logits_rows)

    @property
    def is_verify(self) -> bool:
        """Whether every row samples, and some request has drafts."""
        return len(self.requests) < self.num_rows == len(self.logits_rows)


def lay_out(plan: StepPlan, tables: RequestTables) -> StepLayout:
    """Lay out a non-empty plan whose requests have slots. Counts its tokens as computed."""
    requests = plan.scheduled
    slots = np.array(tables.slots_of(requests), dtype=np.int64)
    counts = np.array([item.num_tokens for item in requests], dtype=np.int64)
    num_decodes, num_prompts, num_drafting = len(requests), 0, 0
    if counts.max() > 1:
        is_new = tables.computed_bound[slots] == 0
        places = np.where(counts == 1, DECODE, np.where(is_new, PROMPT, CHUNK))
        places[[item.num_drafts > 0 for item in requests]] = DRAFTING
        order = np.argsort(places, kind="stable")
        requests = [requests[index] for index in order.tolist()]
        slots, counts = slots[order], counts[order]
        num_decodes, num_prompts, num_drafting = (
            int((places == place).sum()) for place in (DECODE, PROMPT, DRAFTING)
        )
    starts = np.zeros(len(requests) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    tables.computed_bound[slots] += counts
    sampling, rows_per_sample, logits_rows = _logits_rows(requests, starts)
    return StepLayout(
        requests=requests,
        slots=slots,
        tenancies=tables.tenancies[slots],
        counts=counts,
        starts=starts,
        seq_lens=tables.computed_bound[slots],
        num_decodes=num_decodes,
        num_prompts=num_prompts,
        num_drafting=num_drafting,
        sampling=sampling,
        rows_per_sample=rows_per_sample,
        logits_rows=logits_rows,
        sample_slots=slots[np.repeat(sampling, rows_per_sample)],
        adapter_slots=_adapter_slots(slots, counts, tables) if tables.num_with_adapters else None,
        num_drafts=plan.num_drafts,
        least_chance=plan.least_chance,
    )


def _adapter_slots(slots: IntArray, counts: IntArray, tables: RequestTables) -> IntArray | None:
    """The adapter slot of each row, or None if no row has one."""
    by_request = tables.adapter_slots[slots]
    if by_request.max() == NO_SLOT:
        return None
    return np.repeat(by_request, counts)


def _logits_rows(
    requests: list[ScheduledRequest], starts: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """The sampling requests, the number of logits rows of each, and those rows: the last ones."""
    samples = np.array([item.samples for item in requests], dtype=bool)
    sampling = np.nonzero(samples)[0]
    rows_per_sample = 1 + np.array([item.num_drafts for item in requests], dtype=np.int64)[samples]
    ends = np.cumsum(rows_per_sample)
    within = np.arange(ends[-1] if len(ends) else 0)
    first = starts[1:][samples] - rows_per_sample  # row of each request's first sample
    rows = within + np.repeat(first - (ends - rows_per_sample), rows_per_sample)
    return sampling, rows_per_sample, rows
