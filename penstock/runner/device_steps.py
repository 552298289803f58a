"""Steps on a GPU: inputs laid out by a kernel, forward passes replayed from graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.layers.context import ForwardContext, forward_context
from penstock.models.base import Hidden, Model
from penstock.ops.attention import AttentionMetadata
from penstock.protocol.step import StepPlan
from penstock.runner.batch import StepBatch
from penstock.runner.device_batch import Bucket, StepBuffers
from penstock.runner.graphs import GraphPool, GraphRunner, decode_sizes
from penstock.runner.kv_memory import KVMemory
from penstock.runner.model_state import ModelState
from penstock.runner.tables import RequestTables


class DeviceSteps:
    def __init__(
        self,
        model: Model,
        vocab_size: int,
        tables: RequestTables,
        memory: KVMemory,
        max_num_batched_tokens: int,
        num_drafts: int,
        capture_graphs: bool,
        dtype: torch.dtype,  # of the logits
    ) -> None:
        self.model = model
        self.memory = memory
        self.buffers = StepBuffers(tables, max_num_batched_tokens, num_drafts)
        self.pool = GraphPool(capture_graphs)
        size = decode_sizes(self.buffers.max_num_seqs)[-1]
        # Where the logits lie, of steps that have no more rows of them.
        self.logits = torch.zeros((size, vocab_size), dtype=dtype, device=tables.device)
        self.graphs = GraphRunner(
            model,
            self.buffers,
            self.logits,
            self._context,
            self.pool,
            # How recurrent layers cut longer queries is decided on the host.
            decodes_only=memory.layout.is_recurrent,
        )

    def run(
        self, plan: StepPlan, model_states: Sequence[ModelState]
    ) -> tuple[StepBatch, Hidden, torch.Tensor | None]:
        batch = self.buffers.lay_out(plan)
        # A model's own state comes between layout and model: there is no bucket for that.
        bucket = None if model_states else self.graphs.bucket_for(batch)
        if bucket is not None:
            self.graphs.prepare(bucket)
        self.buffers.send(batch)
        if bucket is None:
            hidden = self._run_as_it_is(batch, model_states)
        else:
            has_single_tokens = batch.attention[0].num_decodes > 0
            hidden = self.graphs.run(bucket, has_single_tokens)
        return batch, hidden, self._logits_of(batch, hidden, bucket)

    def _logits_of(
        self, batch: StepBatch, hidden: Hidden, bucket: Bucket | None
    ) -> torch.Tensor | None:
        num_logits = len(batch.logits_rows)
        if num_logits == 0 or num_logits > len(self.logits):
            return None
        logits = self.logits[:num_logits]
        if bucket is None or not bucket.decode:
            self.model.logits(hidden, batch.logits_rows, out=logits)
        return logits

    def _run_as_it_is(self, batch: StepBatch, model_states: Sequence[ModelState]) -> Hidden:
        bucket = Bucket(len(batch.token_ids), len(batch.requests), decode=False)
        self.buffers.fill(bucket)
        self.buffers.fill_sample_rows()
        for state in model_states:
            state.prepare(batch)
        with forward_context(self._context(batch.attention, bucket)):
            return self.model.forward(self.model.embed(batch.token_ids), batch.positions)

    def _context(self, groups: list[AttentionMetadata], bucket: Bucket) -> ForwardContext:
        return self.memory.context(
            groups,
            self.buffers.query_starts[: bucket.num_requests + 1],
            self.buffers.token_slots[: bucket.num_rows],
        )
