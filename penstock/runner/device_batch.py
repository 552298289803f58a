"""A step's batch on a GPU: one copy of a few numbers a request, then one kernel fills the rest.

All of it lies in buffers that stay where they are, so that captured graphs can read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.ops.attention import AttentionMetadata, HostLens
from penstock.ops.triton import inputs
from penstock.protocol.kv import AttentionSpec
from penstock.protocol.step import ScheduledRequest, StepPlan
from penstock.runner.batch import StepBatch, logits_rows_of
from penstock.runner.sampler import SamplingRows
from penstock.runner.tables import RequestTables

# The order of a step's requests: one token, the beginning of a prompt, tokens behind others.
SINGLE, PROMPT, CHUNK = range(3)


@dataclass(frozen=True)
class Bucket:
    """The size that a step is padded to. Padding rows belong to nobody and use the null block."""

    num_rows: int
    num_requests: int
    decode: bool  # every request computes one token


class StepBuffers:
    """Where a step's inputs lie. They are good until the next step is laid out."""

    def __init__(
        self, tables: RequestTables, max_num_batched_tokens: int, num_drafts: int = 0
    ) -> None:
        self.tables = tables
        device, seqs = tables.device, len(tables.num_computed)
        self.max_num_seqs = seqs
        self.max_rows = rows = max(max_num_batched_tokens, seqs)
        # One copy brings what the host decides: query_starts, slots, logits_rows.
        self._sections = np.cumsum([0, seqs + 1, seqs, seqs * (1 + num_drafts)]).tolist()
        self.packed = torch.zeros(self._sections[-1], dtype=torch.int32, device=device)
        self.query_starts, self.slots, self.logits_rows = (
            self.packed[start:end]
            for start, end in zip(self._sections, self._sections[1:], strict=False)
        )
        self.token_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self.positions, self.token_slots = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(seqs, dtype=torch.int32, device=device)
        self.slot_mappings = [
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in tables.groups
        ]
        self.block_tables = [torch.zeros_like(table) for table in tables.block_tables]
        # Attention counts here which programs are done; it leaves zeros behind.
        specs = [group.spec for group in tables.groups]
        heads = max(spec.num_kv_heads if isinstance(spec, AttentionSpec) else 1 for spec in specs)
        self.arrived = torch.zeros(seqs * heads, dtype=torch.int32, device=device)
        # Of each row of logits: the request, and where the token to be sampled will stand.
        self.sample_slots, self.sample_positions = torch.zeros(
            2, len(self.logits_rows), dtype=torch.int64, device=device
        )

    def null_step(self) -> None:
        """As if a step of padding alone were asked for."""
        self.packed.zero_()
        self.slots.fill_(-1)
        self.logits_rows.fill_(-1)

    def fill(self, bucket: Bucket) -> None:
        """Lay out the step that `packed` describes; counts its tokens as computed."""
        tables, last = self.tables, len(self.tables.groups) - 1
        rows, requests = bucket.num_rows, bucket.num_requests
        for index, group in enumerate(tables.groups):
            inputs.prepare_rows(
                self.query_starts[: requests + 1],
                self.slots[:requests],
                tables.token_ids,
                tables.num_computed,
                tables.block_tables[index],
                group.block_size,
                self.token_ids[:rows],
                self.positions[:rows],
                self.token_slots[:rows],
                self.slot_mappings[index][:rows],
                self.seq_lens[:requests],
                self.block_tables[index][:requests],
                tokens=index == 0,
                advance=index == last,
            )

    def fill_sample_rows(self) -> None:
        """After `fill`: whose token each row of logits gives. Behind the last: slot -1."""
        inputs.sample_rows(
            self.logits_rows,
            self.token_slots,
            self.positions,
            self.sample_slots,
            self.sample_positions,
        )

    def metadata(
        self,
        bucket: Bucket,
        num_decodes: int,
        max_query_len: int,
        *,
        any_order: bool = False,
        num_prompts: int = 0,
        num_prompt_rows: int = 0,
        host_lens: HostLens | None = None,
    ) -> list[AttentionMetadata]:
        """One for each KV group, on the buffers' first rows."""
        return [
            AttentionMetadata(
                query_starts=self.query_starts[: bucket.num_requests + 1],
                seq_lens=self.seq_lens[: bucket.num_requests],
                block_table=table[: bucket.num_requests],
                slot_mapping=mapping[: bucket.num_rows],
                num_decodes=num_decodes,
                max_query_len=max_query_len,
                max_seq_len=table.shape[1] * group.block_size,
                any_order=any_order,
                num_prompts=num_prompts,
                num_prompt_rows=num_prompt_rows,
                arrived=self.arrived,
                host_lens=host_lens,
            )
            for group, table, mapping in zip(
                self.tables.groups, self.block_tables, self.slot_mappings, strict=True
            )
        ]

    def lay_out(self, plan: StepPlan) -> StepBatch:
        """A plan's batch. Its tensors are views of the buffers, without padding.

        They hold what they should after `send`, then `fill`, then `fill_sample_rows`.
        """
        tables = self.tables
        requests = plan.scheduled
        counts = [item.num_tokens for item in requests]
        num_prompts = 0
        if max(counts) > 1:
            requests = sorted(requests, key=self._place)
            counts = [item.num_tokens for item in requests]
            num_prompts = [self._place(item) for item in requests].count(PROMPT)
        n = len(requests)
        host_counts = np.array(counts, dtype=np.int64)
        host_slots = np.array(tables.slots_of(requests), dtype=np.int64)
        host_starts = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(host_counts, out=host_starts[1:])
        num_rows = int(host_starts[-1])
        sampling, rows_per_sample, host_rows = logits_rows_of(requests, host_starts)
        num_logits = len(host_rows)

        tables.computed_bound[host_slots] += host_counts
        token_request = np.repeat(np.arange(n), host_counts) if num_rows != n else None
        logits_request = host_rows if token_request is None else token_request[host_rows]
        exact = Bucket(num_rows, n, decode=num_rows == n)
        num_decodes = n if num_rows == n else int((host_counts == 1).sum())
        num_prompt_rows = int(host_counts[num_decodes : num_decodes + num_prompts].sum())
        max_seq_len = int(tables.computed_bound[host_slots].max())
        return StepBatch(
            requests=requests,
            host_slots=host_slots,
            tenancies=tables.tenancies[host_slots],
            slots=self.slots[:n],
            host_starts=host_starts,
            query_starts=self.query_starts[: n + 1],
            token_slots=self.token_slots[:num_rows],
            token_ids=self.token_ids[:num_rows],
            positions=self.positions[:num_rows],
            attention=self.metadata(
                exact,
                num_decodes,
                max(counts),
                num_prompts=num_prompts,
                num_prompt_rows=num_prompt_rows,
                host_lens=HostLens(host_starts, tables.computed_bound[host_slots]),
            ),
            sampling=sampling,
            rows_per_sample=rows_per_sample,
            logits_rows=self.logits_rows[:num_logits],
            host_logits_rows=host_rows,
            sampling_rows=SamplingRows(
                slots=self.sample_slots[:num_logits],
                positions=self.sample_positions[:num_logits],
                host_slots=host_slots[logits_request],
                max_position=max_seq_len + 1,
            ),
        )

    def _place(self, item: ScheduledRequest) -> int:
        """Where it stands among the step's requests; `computed_bound` is before the step."""
        if item.num_tokens == 1:
            return SINGLE
        slot = self.tables.slot_of(item.request_id)
        return PROMPT if self.tables.computed_bound[slot] == 0 else CHUNK

    def send(self, batch: StepBatch) -> None:
        """Copy what the host decided to the device, without waiting for it."""
        n, num_logits = len(batch.requests), len(batch.host_logits_rows)
        staged = torch.empty(self._sections[-1], dtype=torch.int32, pin_memory=self.packed.is_cuda)
        view = staged.numpy()
        starts, slots, rows = (
            view[start:end] for start, end in zip(self._sections, self._sections[1:], strict=False)
        )
        starts[: n + 1] = batch.host_starts
        starts[n + 1 :] = batch.host_starts[-1]
        slots[:n] = batch.host_slots
        slots[n:] = -1
        rows[:num_logits] = batch.host_logits_rows
        rows[num_logits:] = -1
        self.packed.copy_(staged, non_blocking=True)
