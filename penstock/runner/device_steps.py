"""Runs steps on a GPU: eager, or by replaying a captured graph.

A step in which every row samples is a decode step: requests have one row, or more if they have
drafts to verify. All other steps are mixed.

A step is padded to a bucket. A bucket's graph is captured the second time the bucket occurs: a
bucket that occurs once is not worth a capture, and the first token does not wait for one. Until
then, and where graphs are disabled, the same padded step runs eagerly, so graphs do not change a
bit of the output.

A graph reads the step's buffers, which never move. It ends at the logits, because the host may
still change them (`sampling_graphs` follows). Steps larger than every bucket run without padding:
for them the device is slower than the host. Models without a KV cache have larger buckets. Steps
with adapters that need the host, such as those of experts, also run without padding, and so do
steps with prompts that have media. A step without
adapters has graphs of its own, which know nothing of them, and so has one that the drafter does not
observe.

On a pipeline stage behind the first, a padded step reads what the stage before hands on from
buffers that do not move either. Receiving and sending are no part of a graph.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace

import torch

from penstock.distributed.stage_link import States
from penstock.layers.linear import Linear
from penstock.layers.recurrent import recurrent_layers, replay_drafts
from penstock.models.base import Hidden, Model
from penstock.ops.triton.lora_tiles import DeviceAdapterStep
from penstock.runner.adapters import AdapterStore
from penstock.runner.device_batch import Bucket, StepBuffers, exact_bucket
from penstock.runner.drafter import Drafter
from penstock.runner.forward import ForwardInputs, StepBatch, forward
from penstock.runner.forward import logits as logits_of
from penstock.runner.graphs import (
    DECODE_SIZES,
    LEAST_ROWS,
    NUM_REQUESTS,
    GraphPool,
    at_least,
    decode_sizes,
    mixed_sizes,
)
from penstock.runner.kv_memory import KVMemory
from penstock.runner.layout import StepLayout
from penstock.runner.media import MediaStore, StepMedia
from penstock.runner.tables import RequestTables

logger = logging.getLogger(__name__)


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
        has_logits: bool = True,
        adapters: AdapterStore | None = None,
        drafter: Drafter | None = None,
        media: MediaStore | None = None,
        keeps_drafts: bool = False,  # see HostSteps
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.drafter = drafter
        self.media = media
        self.keeps_drafts = keeps_drafts
        self.metrics = Counter[str]()
        num_slots = 0 if adapters is None else adapters.num_slots
        self.buffers = StepBuffers(tables, memory, max_num_batched_tokens, num_drafts, num_slots)
        self.pool = GraphPool(capture_graphs)
        self._decode_sizes = decode_sizes(self.buffers.max_num_seqs)
        # The host decides how recurrent layers split longer queries into chunks.
        self._mixed_sizes: list[int] = []
        self._has_cache = bool(tables.groups)
        if not memory.layout.is_recurrent:
            mean_weights = None if self._has_cache else _mean_weights(model)
            self._mixed_sizes = mixed_sizes(self.buffers.max_rows, mean_weights)
        # Rows of a decode bucket with drafts, at most.
        self._max_verified = 0
        if num_drafts:
            most = self.buffers.max_num_seqs * (1 + num_drafts)
            self._max_verified = min(most, self.buffers.max_rows, DECODE_SIZES[-1])
        # Fewer rows per request gain attention little, and each width needs graphs of its own.
        self._least_width = min(1 << num_drafts.bit_length(), LEAST_ROWS)
        # Output buffer for the logits of decode buckets.
        self._has_logits = has_logits
        num_logits = max(self._decode_sizes[-1], self._max_verified)
        shard = model.vocab_shard if has_logits else None
        shape = (num_logits if has_logits else 0, vocab_size if shard is None else shard.width)
        self.logits = torch.zeros(shape, dtype=dtype, device=tables.device)
        # What an earlier pipeline stage hands on, of the rows of a padded step.
        most = max(self._decode_sizes[-1], self._max_verified, *self._mixed_sizes)
        handed = (model.num_handed, most, model.hidden_size)
        self._handed = torch.zeros(handed, dtype=dtype, device=tables.device)
        self._captured: dict[Bucket, tuple[torch.cuda.CUDAGraph, Hidden]] = {}
        self._recurrent = recurrent_layers(model)
        self._last_bucket: Bucket | None = None  # of the last step
        self._num_accepted = torch.zeros_like(self.buffers.seq_lens)  # drafts of each request
        self._replays: dict[Bucket, torch.cuda.CUDAGraph] = {}

    def run(
        self, layout: StepLayout, handed: States | None = None
    ) -> tuple[StepBatch, Hidden, torch.Tensor | None]:
        """See `Steps`. Hidden states and logits are valid until the next step."""
        batch = self.buffers.batch(layout)
        found = None if self.media is None else self.media.find(layout)
        bucket = self._bucket_for(layout) if found is None else None
        observed = self.drafter is not None and self.drafter.sees(layout)
        if bucket is None:
            self.metrics["eager_steps"] += 1
            self.buffers.send(layout)
            exact = replace(exact_bucket(layout), observed=observed)
            hidden = self._compute(exact, replace(batch.inputs, handed=handed), found)
        else:
            bucket = replace(bucket, observed=observed)
            hidden = self._run_padded(bucket, layout, handed)
        self._last_bucket = bucket
        if self.keeps_drafts and layout.has_drafts:
            batch = batch.keep_drafts(self._recurrent, is_padded=bucket is not None)
        num_logits = len(layout.logits_rows)
        if num_logits == 0 or num_logits > len(self.logits):
            return batch, hidden, None
        logits = self.logits[:num_logits]
        if bucket is None or not bucket.decode:
            logits_of(self.model, hidden, batch.logits_rows, logits)
        return batch, hidden, logits

    def replay(self, batch: StepBatch, num_accepted: torch.Tensor) -> None:
        """See `Steps`. A padded step has a graph for this, too."""
        bucket = self._last_bucket
        if bucket is None or self.keeps_drafts:
            own = num_accepted[-batch.layout.num_drafting :]
            replay_drafts(self._recurrent, batch.inputs.context, own)
            return
        assert len(num_accepted) == len(batch.layout.requests), "every row samples"
        self._num_accepted[: len(num_accepted)] = num_accepted
        self._num_accepted[len(num_accepted) :] = 0
        if bucket not in self._replays:
            if not self.pool.is_due(("replay", bucket)):
                self._replay(bucket)
                return
            self._replays[bucket], _ = self.pool.capture(lambda: self._replay(bucket))
        self._replays[bucket].replay()

    def _replay(self, bucket: Bucket) -> None:
        own = self._num_accepted[: bucket.num_requests]
        replay_drafts(self._recurrent, self._inputs(bucket).context, own)

    def _bucket_for(self, layout: StepLayout) -> Bucket | None:
        """The smallest bucket that holds the step; None if the step runs without padding."""
        adapters = layout.adapter_slots is not None
        if adapters and self.adapters is not None and self.adapters.needs_rows:
            return None
        if layout.is_decode:
            size = at_least(self._decode_sizes, layout.num_rows)
            return None if size is None else Bucket(size, size, decode=True, adapters=adapters)
        if layout.is_verify and layout.num_rows <= self._max_verified:
            return self._verify_bucket(layout, adapters)
        size = at_least(self._mixed_sizes, layout.num_rows)
        if size is None:
            return None
        num_requests = min(size, self.buffers.max_num_seqs)
        if not self._has_cache:  # fewer programs without work
            fewer = at_least([*NUM_REQUESTS], len(layout.requests))
            num_requests = min(num_requests, fewer or num_requests)
        width = self._least_width if layout.has_drafts else 1
        return Bucket(size, num_requests, decode=False, width=width, adapters=adapters)

    def _verify_bucket(self, layout: StepLayout, adapters: bool) -> Bucket | None:
        """Requests padded as without drafts, and the same number of rows for each, on average.

        The rows of padding are behind all others, so few graphs serve any numbers of drafts.
        """
        size = at_least(self._decode_sizes, len(layout.requests))
        if size is None:
            return None
        rows = max(size * -(-layout.num_rows // size), LEAST_ROWS)
        return Bucket(
            min(rows, self._max_verified),
            size,
            decode=True,
            width=max(1 << (layout.max_query_len - 1).bit_length(), self._least_width),
            adapters=adapters,
        )

    def _run_padded(self, bucket: Bucket, layout: StepLayout, handed: States | None) -> Hidden:
        if bucket not in self._captured and self.pool.is_due(bucket):
            self._capture(bucket)
        self.buffers.send(layout)
        self._take(handed, bucket.num_rows)
        if bucket not in self._captured:
            self.metrics["eager_steps"] += 1
            has_decodes = bucket.width > 1 or layout.num_decodes > 0
            return self._compute(bucket, self._inputs(bucket, has_decodes))
        self.metrics["graph_steps"] += 1
        graph, hidden = self._captured[bucket]
        graph.replay()
        return hidden

    def _take(self, handed: States | None, num_rows: int) -> None:
        """Copy what an earlier pipeline stage hands on to its buffers, with zeros for padding."""
        if handed is None:
            return
        for buffer, states in zip(self._handed, handed, strict=True):
            buffer[: len(states)] = states
            buffer[len(states) : num_rows] = 0

    def _capture(self, bucket: Bucket) -> None:
        started = time.perf_counter()

        def compute() -> Hidden:
            return self._compute(bucket, self._inputs(bucket))

        self.buffers.null_step()
        self._handed.zero_()
        compute()  # compile kernels before the capture
        self._captured[bucket] = self.pool.capture(compute)
        logger.debug("Captured %s in %.3f s", bucket, time.perf_counter() - started)

    def _inputs(self, bucket: Bucket, has_decodes: bool = True) -> ForwardInputs:
        inputs = self.buffers.inputs(
            bucket,
            # Without decodes, their kernel has no work. Skipping it saves a first prompt its
            # compilation.
            num_decodes=bucket.num_requests if has_decodes else 0,
            max_query_len=bucket.width if bucket.decode else bucket.num_rows,
            any_order=not bucket.decode,
            decode_rows=bucket.width,
        )
        if not len(self._handed):
            return inputs
        return replace(inputs, handed=self._handed[:, : bucket.num_rows].unbind())

    def _compute(
        self, bucket: Bucket, inputs: ForwardInputs, media: StepMedia | None = None
    ) -> Hidden:
        """Compute the step that was sent.

        A decode bucket writes its logits, row by row, to `logits`.
        """
        self.buffers.fill(bucket)
        if isinstance(inputs.context.adapters, DeviceAdapterStep):
            inputs.context.adapters.group()
        if self.media is not None:
            inputs = self.media.attach(inputs, media)
        hidden = forward(self.model, inputs)
        if self.drafter is not None and bucket.observed:
            self.drafter.observe(inputs, hidden)
        if bucket.decode and self._has_logits:
            # Every row samples, in order. The logits of padding rows are never read.
            everything = slice(0, bucket.num_rows)
            logits_of(self.model, hidden, everything, self.logits[everything])
        return hidden


def _mean_weights(model: Model) -> float:
    """Of a matmul."""
    sizes = [m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear)]
    return sum(sizes) / len(sizes) if sizes else 0.0
