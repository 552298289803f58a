"""The input buffers of a GPU step.

The host sends a few numbers per request in one copy. Kernels fill the other buffers from the
request tables. The buffers never move, so captured graphs can read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.ops.attention import AttentionMetadata, HostLens
from penstock.ops.triton import inputs
from penstock.ops.triton.lora_tiles import DeviceAdapterStep
from penstock.ops.verification import SampleRows
from penstock.protocol.kv import AttentionSpec
from penstock.protocol.step import NO_SLOT
from penstock.runner.forward import ForwardInputs, StepBatch
from penstock.runner.kv_memory import KVMemory
from penstock.runner.layout import StepLayout
from penstock.runner.sampler import SamplingRows
from penstock.runner.tables import IntArray, RequestTables

WHOLE = 2**30  # a block size that no sequence exceeds


@dataclass(frozen=True)
class Bucket:
    """The size that a step is padded to. Padding rows have no request and use the null block."""

    num_rows: int
    num_requests: int
    decode: bool  # every row samples
    width: int = 1  # most rows of a decode, with its drafts: a power of two
    adapters: bool = False  # some rows may have an adapter
    observed: bool = False  # by the drafter


class StepBuffers:
    """The inputs of one step. They are valid until the next step is laid out."""

    def __init__(
        self,
        tables: RequestTables,
        memory: KVMemory,
        max_num_batched_tokens: int,
        num_drafts: int = 0,
        num_adapter_slots: int = 0,
    ) -> None:
        self.tables = tables
        self.memory = memory
        device, seqs = tables.device, len(tables.num_computed)
        self.max_num_seqs = seqs
        self.max_rows = rows = max(max_num_batched_tokens, seqs)
        # The host's decisions arrive in one copy: query_starts, slots, logits_rows, sample_starts.
        num_starts = seqs + 1 if num_drafts else 0
        self._sections = np.cumsum(
            [0, seqs + 1, seqs, seqs * (1 + num_drafts), num_starts]
        ).tolist()
        self.packed = torch.zeros(self._sections[-1], dtype=torch.int32, device=device)
        self.query_starts, self.slots, self.logits_rows, self.sample_starts = (
            self.packed[start:end]
            for start, end in zip(self._sections, self._sections[1:], strict=False)
        )
        self.token_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self.positions, self.token_slots = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(seqs, dtype=torch.int32, device=device)
        # Block size and block table of each group. A model without groups gets one block per
        # request.
        sizes = [group.block_size for group in tables.groups]
        self._groups = list(zip(sizes, tables.block_tables, strict=True)) or [
            (WHOLE, torch.zeros((seqs, 1), dtype=torch.int32, device=device))
        ]
        self.slot_mappings = [
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in self._groups
        ]
        self.block_tables = [torch.zeros_like(table) for _, table in self._groups]
        # Attention kernels count finished programs here and leave zeros behind.
        specs = [group.spec for group in tables.groups]
        specs += memory.layout.draft_layers.values()
        heads = max(
            (spec.num_kv_heads for spec in specs if isinstance(spec, AttentionSpec)), default=1
        )
        self.arrived = torch.zeros(seqs * heads, dtype=torch.int32, device=device)
        # For each row of logits: its slot, and the position of the token to be sampled.
        self.sample_slots, self.sample_positions = torch.zeros(
            2, len(self.logits_rows), dtype=torch.int64, device=device
        )
        # The adapter slot of each row; NO_SLOT in padding.
        self.num_adapter_slots = num_adapter_slots
        size = rows if num_adapter_slots else 0
        self.adapter_slots = torch.full((size,), NO_SLOT, dtype=torch.int32, device=device)

    def null_step(self) -> None:
        """Describe a step that consists of padding only."""
        self.packed.zero_()
        self.slots.fill_(-1)
        self.logits_rows.fill_(-1)
        self.adapter_slots.fill_(NO_SLOT)

    def fill(self, bucket: Bucket) -> None:
        """Lay out the step that `packed` describes, and count its tokens as computed."""
        tables, last = self.tables, len(self._groups) - 1
        rows, requests = bucket.num_rows, bucket.num_requests
        for index, (block_size, table) in enumerate(self._groups):
            inputs.prepare_rows(
                self.query_starts[: requests + 1],
                self.slots[:requests],
                tables.token_ids,
                tables.num_computed,
                table,
                block_size,
                self.token_ids[:rows],
                self.positions[:rows],
                self.token_slots[:rows],
                self.slot_mappings[index][:rows],
                self.seq_lens[:requests],
                self.block_tables[index][:requests],
                tokens=index == 0,
                advance=index == last,
            )
        # Map each row of logits to its slot; rows past the last get slot -1.
        inputs.sample_rows(
            self.logits_rows,
            self.token_slots,
            self.positions,
            self.sample_slots,
            self.sample_positions,
        )

    def inputs(
        self,
        bucket: Bucket,
        num_decodes: int,
        max_query_len: int,
        *,
        any_order: bool = False,
        num_prompts: int = 0,
        num_prompt_rows: int = 0,
        decode_rows: int = 1,
        host_lens: HostLens | None = None,
        num_drafting: int = 0,
    ) -> ForwardInputs:
        """The buffers' first rows, with metadata for each KV group."""
        query_starts = self.query_starts[: bucket.num_requests + 1]
        attention = [
            AttentionMetadata(
                query_starts=query_starts,
                seq_lens=self.seq_lens[: bucket.num_requests],
                block_table=table[: bucket.num_requests],
                slot_mapping=mapping[: bucket.num_rows],
                num_decodes=num_decodes,
                max_query_len=max_query_len,
                max_seq_len=table.shape[1] * group.block_size,
                any_order=any_order,
                num_prompts=num_prompts,
                num_prompt_rows=num_prompt_rows,
                decode_rows=decode_rows,
                arrived=self.arrived,
                host_lens=host_lens,
                num_drafting=num_drafting,
            )
            for group, table, mapping in zip(
                self.tables.groups, self.block_tables, self.slot_mappings, strict=False
            )
        ]
        rows = bucket.num_rows
        adapters = None
        if bucket.adapters:
            slots = self.adapter_slots[:rows]
            adapters = DeviceAdapterStep.empty(slots, self.num_adapter_slots)
        context = self.memory.context(attention, query_starts, self.token_slots[:rows], adapters)
        return ForwardInputs(self.token_ids[:rows], self.positions[:rows], context)

    def batch(self, layout: StepLayout) -> StepBatch:
        """The tensors of a layout: views of the buffers, without padding.

        Their contents are valid after `send` and `fill`, those of adapters after `group`.
        """
        num_logits = len(layout.logits_rows)
        exact = exact_bucket(layout)
        return StepBatch(
            layout,
            self.inputs(
                exact,
                layout.num_decodes,
                layout.max_query_len,
                num_prompts=layout.num_prompts,
                num_prompt_rows=layout.num_prompt_rows,
                host_lens=HostLens(layout.starts, layout.seq_lens),
                num_drafting=layout.num_drafting,
            ),
            logits_rows=self.logits_rows[:num_logits],
            sampling_rows=SamplingRows(
                slots=self.sample_slots[:num_logits],
                positions=self.sample_positions[:num_logits],
                host_slots=layout.sample_slots,
                max_position=layout.max_seq_len + 1,
            ),
            sample_starts=(
                self.sample_starts[: len(layout.sampling) + 1] if layout.has_drafts else None
            ),
        )

    def samples(self, num_samples: int) -> SampleRows:
        """The samples of a step with drafts, padded to `num_samples`."""
        num_requests = min(num_samples, self.max_num_seqs)
        return SampleRows(
            self.token_ids,
            self.logits_rows[:num_samples],
            self.sample_slots[:num_samples],
            self.sample_starts[: num_requests + 1],
        )

    def send(self, layout: StepLayout) -> None:
        """Copy the host's decisions to the device without waiting."""
        if layout.adapter_slots is not None:
            self._send_adapters(layout.adapter_slots)
        staged = torch.empty(self._sections[-1], dtype=torch.int32, pin_memory=self.packed.is_cuda)
        view = staged.numpy()
        decided = [(layout.starts, layout.starts[-1]), (layout.slots, -1), (layout.logits_rows, -1)]
        if layout.has_drafts:
            decided.append((layout.sample_starts, len(layout.logits_rows)))
        for index, (values, rest) in enumerate(decided):
            section = view[self._sections[index] : self._sections[index + 1]]
            section[: len(values)] = values
            section[len(values) :] = rest
        self.packed.copy_(staged, non_blocking=True)

    def _send_adapters(self, slots: IntArray) -> None:
        size = len(self.adapter_slots)
        staged = torch.full((size,), NO_SLOT, dtype=torch.int32, pin_memory=self.packed.is_cuda)
        staged.numpy()[: len(slots)] = slots
        self.adapter_slots.copy_(staged, non_blocking=True)


def exact_bucket(layout: StepLayout) -> Bucket:
    """The bucket of a step without padding."""
    has_adapters = layout.adapter_slots is not None
    return Bucket(layout.num_rows, len(layout.requests), decode=False, adapters=has_adapters)
