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
from penstock.runner.graphs import GraphRunner
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
    ) -> None:
        self.model = model
        self.memory = memory
        self.buffers = StepBuffers(tables, max_num_batched_tokens, num_drafts)
        self.graphs = None
        if capture_graphs:
            self.graphs = GraphRunner(model, vocab_size, self.buffers, self._context)

    def run(
        self, plan: StepPlan, model_states: Sequence[ModelState]
    ) -> tuple[StepBatch, Hidden, torch.Tensor | None]:
        batch = self.buffers.lay_out(plan)
        bucket = None
        if self.graphs is not None and not model_states:  # those come between layout and model
            bucket = self.graphs.bucket_for(batch)
        logits = None
        if self.graphs is not None and bucket is not None:
            self.graphs.ensure(bucket)
            self.buffers.send(batch)
            hidden, logits = self.graphs.run(bucket, batch)
        else:
            self.buffers.send(batch)
            hidden = self._run_eagerly(batch, model_states)
        self.buffers.fill_sample_rows(len(batch.logits_rows))
        return batch, hidden, logits

    def _run_eagerly(self, batch: StepBatch, model_states: Sequence[ModelState]) -> Hidden:
        bucket = Bucket(len(batch.token_ids), len(batch.requests), decode=False)
        self.buffers.fill(bucket)
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
