"""The forward pass: its inputs, the one function that computes it, and the batch of a step.

Eager steps, captured steps and the profiling step differ only in where their inputs come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from penstock.distributed.stage_link import States
from penstock.layers.context import ForwardContext, adapter_context, forward_context
from penstock.layers.recurrent import (
    RecurrentLayer,
    keep_drafts,
    recurrent_layers,
    replay_drafts,
)
from penstock.models.base import Hidden, Model
from penstock.ops.attention import AttentionMetadata
from penstock.ops.lora import adapter_step
from penstock.ops.verification import SampleRows
from penstock.runner.kv_memory import KVMemory
from penstock.runner.layout import StepLayout
from penstock.runner.sampler import SamplingRows
from penstock.runner.tables import RequestTables

if TYPE_CHECKING:
    from penstock.runner.drafter import Drafter
    from penstock.runner.media import MediaStore


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of one forward pass."""

    token_ids: torch.Tensor  # [num_tokens] int
    positions: torch.Tensor  # [num_tokens] int64: index of each token in its sequence
    context: ForwardContext
    handed: States | None = None  # by an earlier pipeline stage, instead of embedded tokens
    rope_positions: torch.Tensor | None = None  # [num_tokens] or [3, num_tokens]; None: positions


def forward(model: Model, inputs: ForwardInputs) -> Hidden:
    with forward_context(inputs.context):
        positions = inputs.positions if inputs.rope_positions is None else inputs.rope_positions
        if inputs.handed is not None:
            hidden = model.resume(inputs.handed, positions)
        else:
            x = model.embed(inputs.token_ids)
            if inputs.context.media is not None:
                media = inputs.context.media
                width = min(x.shape[1], media.values.shape[1])  # of a dual encoder, either is less
                x[media.rows, :width] = media.values[:, :width].to(x.dtype)
            hidden = model.forward(x, positions)
    adapters = inputs.context.adapters
    return hidden if adapters is None else replace(hidden, adapters=adapters)


def logits(
    model: Model, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `Model.logits`. The head sees the adapters of these rows."""
    if hidden.adapters is None:
        return model.logits(hidden, rows, out)
    with adapter_context(hidden.adapters.take(rows)):
        return model.logits(hidden, rows, out)


def own_logits(model: Model, hidden: Hidden, rows: torch.Tensor) -> torch.Tensor:
    """The logits of this rank's tokens, [len(rows), tokens]."""
    shard, out = model.vocab_shard, None
    if shard is not None:
        out = hidden.states.new_empty((len(rows), shard.width))
    return logits(model, hidden, rows, out)


@dataclass(frozen=True)
class StepBatch:
    """A step layout with its tensors on the device."""

    layout: StepLayout
    inputs: ForwardInputs
    logits_rows: torch.Tensor  # [num_logits_rows] int
    sampling_rows: SamplingRows
    sample_starts: torch.Tensor | None = None  # [num_sampling + 1] int; None if none has drafts

    @property
    def samples(self) -> SampleRows:
        """The rows of a step with drafts."""
        assert self.sample_starts is not None
        return SampleRows(
            self.inputs.token_ids, self.logits_rows, self.sampling_rows.slots, self.sample_starts
        )

    def keep_drafts(self, layers: Sequence[RecurrentLayer], is_padded: bool = False) -> StepBatch:
        """This batch, for `replay` after later steps. Its step was the last one."""
        num_requests, num_rows = self.layout.num_drafting, self.layout.num_drafting_rows
        first_row = self.layout.num_rows - num_rows if is_padded else 0
        context = keep_drafts(layers, self.inputs.context, num_requests, num_rows, first_row)
        return replace(self, inputs=replace(self.inputs, context=context))


class Steps(Protocol):
    metrics: Counter[str]  # since the last collect, by metric name (`observability/metrics.py`)

    def run(
        self, layout: StepLayout, handed: States | None = None
    ) -> tuple[StepBatch, Hidden, torch.Tensor | None]:
        """Compute a step after the tables were updated for it, and count its tokens as computed.

        `handed`: the states of its rows from an earlier pipeline stage. Returns the batch, the
        hidden states of its rows, and the logits of the sampling rows if the step computed them.
        """

    def replay(self, batch: StepBatch, num_accepted: torch.Tensor) -> None:
        """Store the states of recurrent layers after the accepted drafts of the last step.

        `num_accepted`: [num_sampling] int32. Of an earlier step if these steps `keeps_drafts`.
        """


@dataclass
class HostSteps:
    """Steps on a CPU, with new tensors for each step.

    The tables are in host memory and are read as numpy arrays: for small arrays, numpy takes a
    fraction of torch's time.
    """

    model: Model
    tables: RequestTables
    memory: KVMemory
    num_adapter_slots: int = 0
    drafter: Drafter | None = None
    media: MediaStore | None = None
    keeps_drafts: bool = False  # of recurrent layers: what was accepted is known after later steps
    metrics: Counter[str] = field(default_factory=Counter)

    @cached_property
    def _recurrent(self) -> list[RecurrentLayer]:
        return recurrent_layers(self.model)

    def run(
        self, layout: StepLayout, handed: States | None = None
    ) -> tuple[StepBatch, Hidden, torch.Tensor | None]:
        self.metrics["eager_steps"] += 1
        batch = self.materialize(layout)
        inputs = batch.inputs if handed is None else replace(batch.inputs, handed=handed)
        if self.media is not None:
            inputs = self.media.attach(inputs, self.media.find(layout))
        hidden = forward(self.model, inputs)
        if self.drafter is not None and self.drafter.sees(layout):
            self.drafter.observe(batch.inputs, hidden)
        if self.keeps_drafts and layout.has_drafts:
            batch = batch.keep_drafts(self._recurrent)
        return batch, hidden, None

    def replay(self, batch: StepBatch, num_accepted: torch.Tensor) -> None:
        if num_accepted.any():
            own = num_accepted[-batch.layout.num_drafting :]
            replay_drafts(self._recurrent, batch.inputs.context, own)

    def materialize(self, layout: StepLayout) -> StepBatch:
        tables, slots, counts = self.tables, layout.slots, layout.counts
        token_slots = np.repeat(slots, counts)
        computed = tables.num_computed.numpy()[slots]
        first = np.repeat(computed - layout.starts[:-1], counts)  # position minus row
        positions = np.arange(layout.num_rows) + first
        tables.advance(torch.from_numpy(slots), torch.from_numpy(counts.astype(np.int32)))
        starts = torch.from_numpy(layout.starts.astype(np.int32))
        seq_lens = torch.from_numpy(computed + counts.astype(np.int32))
        max_query_len, max_seq_len = layout.max_query_len, layout.max_seq_len
        adapters = None
        if layout.adapter_slots is not None:
            adapters = adapter_step(layout.adapter_slots, self.num_adapter_slots)
        attention = []
        for group, table in zip(tables.groups, tables.block_tables, strict=True):
            size, blocks = group.block_size, table.numpy()
            of_tokens = blocks[token_slots, positions // size].astype(np.int64)
            attention.append(
                AttentionMetadata(
                    query_starts=starts,
                    seq_lens=seq_lens,
                    block_table=torch.from_numpy(blocks[slots, : -(-max_seq_len // size)]),
                    slot_mapping=torch.from_numpy(of_tokens * size + positions % size),
                    num_decodes=layout.num_decodes,
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                    num_drafting=layout.num_drafting,
                )
            )
        return StepBatch(
            layout,
            ForwardInputs(
                token_ids=torch.from_numpy(tables.token_ids.numpy()[token_slots, positions]),
                positions=torch.from_numpy(positions),
                context=self.memory.context(
                    attention, starts, torch.from_numpy(token_slots), adapters
                ),
            ),
            logits_rows=torch.from_numpy(layout.logits_rows),
            sampling_rows=SamplingRows(
                slots=torch.from_numpy(layout.sample_slots),
                positions=torch.from_numpy(positions[layout.logits_rows] + 1),
                host_slots=layout.sample_slots,
                max_position=max_seq_len + 1,
            ),
            sample_starts=torch.from_numpy(layout.sample_starts) if layout.has_drafts else None,
        )
