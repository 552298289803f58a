"""Captured steps: the whole forward pass as one launch, for the step sizes that come again.

A step is padded to a bucket, and a bucket's graph is captured the second time it comes up: one of
a kind is not worth it, and the first token need not wait for it. Until then, and where graphs are
turned off, the very same padded step is launched kernel by kernel, so that graphs change no bit of
it. A graph reads the step's buffers, which never move, and ends at the logits, so that what changes
logits on the host's word can still come in between (`sampling_graphs` is what follows). Larger
steps run without padding: there the device is slower than the host.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch

from penstock.layers.context import ForwardContext, forward_context
from penstock.models.base import Hidden, Model
from penstock.ops.attention import AttentionMetadata
from penstock.runner.batch import StepBatch
from penstock.runner.device_batch import Bucket, StepBuffers

logger = logging.getLogger(__name__)

T = TypeVar("T")

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


class GraphRunner:
    """Runs steps that fit a bucket; `bucket_for` says whether one does."""

    def __init__(
        self,
        model: Model,
        buffers: StepBuffers,
        logits: torch.Tensor,  # [rows, vocab_size]: where decode buckets leave theirs
        context: Callable[[list[AttentionMetadata], Bucket], ForwardContext],
        graphs: GraphPool,
        decodes_only: bool = False,
    ) -> None:
        self.model = model
        self.buffers = buffers
        self._logits = logits
        self._context = context
        self._graphs = graphs
        mixed_sizes = () if decodes_only else MIXED_SIZES
        self._mixed_sizes = [size for size in mixed_sizes if size <= buffers.max_rows]
        self._decode_sizes = decode_sizes(buffers.max_num_seqs)
        self._captured: dict[Bucket, Captured] = {}

    def bucket_for(self, batch: StepBatch) -> Bucket | None:
        """The smallest bucket that holds the step; None for one that is to run as it is."""
        num_rows, num_requests = len(batch.token_ids), len(batch.requests)
        if num_rows == num_requests and len(batch.logits_rows) == num_rows:
            size = at_least(self._decode_sizes, num_rows)
            return None if size is None else Bucket(size, size, decode=True)
        size = at_least(self._mixed_sizes, num_rows)
        if size is None:
            return None
        return Bucket(size, min(size, self.buffers.max_num_seqs), decode=False)

    def prepare(self, bucket: Bucket) -> None:
        """Capture the bucket's graph if it is time for that. Call before the step is sent."""
        if bucket in self._captured or not self._graphs.is_due(bucket):
            return
        started = time.perf_counter()
        self.buffers.null_step()
        self._compute(bucket)  # what is compiled, is compiled outside of the capture
        graph, hidden = self._graphs.capture(lambda: self._compute(bucket))
        self._captured[bucket] = Captured(graph, hidden)
        logger.debug("Captured %s in %.3f s", bucket, time.perf_counter() - started)

    def run(self, bucket: Bucket, has_single_tokens: bool) -> Hidden:
        """Lay the step out and compute it; results are good until the next step.

        A decode bucket leaves the logits of its rows, in order, where it was told to.
        """
        captured = self._captured.get(bucket)
        if captured is None:
            return self._compute(bucket, has_single_tokens)
        captured.graph.replay()
        return captured.hidden

    def _compute(self, bucket: Bucket, has_single_tokens: bool = True) -> Hidden:
        buffers, rows = self.buffers, bucket.num_rows
        buffers.fill(bucket)
        buffers.fill_sample_rows()
        metadata = buffers.metadata(
            bucket,
            # Without any, their kernel would do nothing: a first prompt need not wait for it.
            num_decodes=bucket.num_requests if has_single_tokens else 0,
            max_query_len=1 if bucket.decode else rows,
            any_order=not bucket.decode,
        )
        with forward_context(self._context(metadata, bucket)):
            embedded = self.model.embed(buffers.token_ids[:rows])
            hidden = self.model.forward(embedded, buffers.positions[:rows])
        if bucket.decode:
            # Every row samples, and in order; padding's logits are nobody's.
            everything = slice(0, bucket.num_requests)
            self.model.logits(hidden, everything, out=self._logits[everything])
        return hidden


class GraphPool:
    """Captures graphs that never run at the same time, in memory that they share."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._seen: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    def is_due(self, key: Hashable) -> bool:
        """Whether what `key` stands for has come up before."""
        if not self.enabled:
            return False
        is_known = key in self._seen
        self._seen.add(key)
        return is_known

    def capture(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what `compute` launches, and what it returned: the graph writes there."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        return graph, result


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The sizes that rows, one a request, are padded to, in order."""
    sizes = [size for size in DECODE_SIZES if size < max_num_seqs]
    return [*sizes, min(max_num_seqs, DECODE_SIZES[-1])]


def at_least(sizes: list[int], wanted: int) -> int | None:
    """The smallest of `sizes` that is no less; None if there is none."""
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
