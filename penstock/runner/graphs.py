"""Captured steps: the whole forward pass as one launch, for the step sizes that come again.

A graph is captured the second time a step of its size comes up: one of a kind is not worth it, and
the first token need not wait for it. It reads the step's buffers, which
never move, and ends at the logits, so that what changes logits on the host's word can still come
in between. Larger steps run eagerly: there the device is slower than the host.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.layers.context import ForwardContext, forward_context
from penstock.models.base import Hidden, Model
from penstock.ops.attention import AttentionMetadata
from penstock.runner.batch import StepBatch
from penstock.runner.device_batch import Bucket, StepBuffers

logger = logging.getLogger(__name__)

# cuBLAS is no faster for two to seven rows than for eight.
DECODE_SIZES = (
    1, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240,
    256, 288, 320, 352, 384, 416, 448, 480, 512,
)  # fmt: skip
MIXED_SIZES = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Hidden  # of all rows of the bucket
    logits: torch.Tensor | None  # [num_requests, vocab_size] of a decode bucket


class GraphRunner:
    """Runs steps that fit a bucket; `bucket_for` says whether one does."""

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        buffers: StepBuffers,
        context: Callable[[list[AttentionMetadata], Bucket], ForwardContext],
    ) -> None:
        self.model = model
        self.buffers = buffers
        self._context = context
        seqs = buffers.max_num_seqs
        self._decode_sizes = [size for size in DECODE_SIZES if size < seqs]
        self._decode_sizes.append(min(seqs, DECODE_SIZES[-1]))
        self._mixed_sizes = [size for size in MIXED_SIZES if size <= buffers.max_rows]
        device = buffers.packed.device
        self._logits = torch.empty(
            (self._decode_sizes[-1], vocab_size), dtype=torch.float32, device=device
        )
        self._graphs: dict[Bucket, Captured] = {}
        self._seen: set[Bucket] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def bucket_for(self, batch: StepBatch) -> Bucket | None:
        """The smallest bucket that holds the step; None for one that is to run eagerly."""
        bucket = self._smallest(batch)
        if bucket is None or bucket in self._seen:
            return bucket
        self._seen.add(bucket)
        return None

    def _smallest(self, batch: StepBatch) -> Bucket | None:
        num_rows, num_requests = len(batch.token_ids), len(batch.requests)
        if num_rows == num_requests and len(batch.logits_rows) == num_rows:
            size = _at_least(self._decode_sizes, num_rows)
            return None if size is None else Bucket(size, size, decode=True)
        size = _at_least(self._mixed_sizes, num_rows)
        if size is None:
            return None
        return Bucket(size, min(size, self.buffers.max_num_seqs), decode=False)

    def run(self, bucket: Bucket, batch: StepBatch) -> tuple[Hidden, torch.Tensor | None]:
        """Lay the step out and compute it; results are good until the next step."""
        captured = self._graphs[bucket]
        captured.graph.replay()
        if captured.logits is None:
            return captured.hidden, None
        return captured.hidden, captured.logits[: len(batch.logits_rows)]

    def ensure(self, bucket: Bucket) -> None:
        """Capture the bucket's graph if that has not been done. Call before a step is sent."""
        if bucket in self._graphs:
            return
        started = time.perf_counter()
        self.buffers.null_step()
        self._compute(bucket)  # compiles what is new, outside of the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden, logits = self._compute(bucket)
        self._graphs[bucket] = Captured(graph, hidden, logits)
        logger.debug("Captured %s in %.3f s", bucket, time.perf_counter() - started)

    def _compute(self, bucket: Bucket) -> tuple[Hidden, torch.Tensor | None]:
        buffers, rows = self.buffers, bucket.num_rows
        buffers.fill(bucket)
        metadata = buffers.metadata(
            bucket,
            num_decodes=bucket.num_requests,
            max_query_len=1 if bucket.decode else rows,
            any_order=not bucket.decode,
        )
        with forward_context(self._context(metadata, bucket)):
            embedded = self.model.embed(buffers.token_ids[:rows])
            hidden = self.model.forward(embedded, buffers.positions[:rows])
        if not bucket.decode:
            return hidden, None
        # Every row samples, and in order; padding's logits are nobody's.
        everything = slice(0, bucket.num_requests)
        logits = self.model.logits(hidden, everything, out=self._logits[everything])
        return hidden, logits


def _at_least(sizes: list[int], wanted: int) -> int | None:
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
