"""Captured graphs of sampling: choose tokens, verify drafts, append to the tables in one launch.

There is one graph per row bucket and sampling kind, with and without drafts. It is separate from
the graph of the forward pass, because logits may change in between. A grammar mask changes them in
place, and these graphs still apply. Features of single requests (penalties, logits processors, ...)
use `Sampler.sample` instead.
"""

from __future__ import annotations

import torch

from penstock.ops.verification import Verified
from penstock.runner.device_batch import StepBuffers
from penstock.runner.graphs import GraphPool, at_least, decode_sizes
from penstock.runner.sampler import SampledTokens, Sampler, SamplingKind, SamplingRows
from penstock.runner.tables import RequestTables

# Tokens [rows] int64, faulted [rows] bool, and what is kept of them if there are drafts.
Chosen = tuple[torch.Tensor, torch.Tensor, Verified | None]
Key = tuple[int, SamplingKind, bool]  # rows, kind, whether there are drafts


class SamplingGraphs:
    """Samples from rows of `logits`, whose slots are in `StepBuffers`."""

    def __init__(
        self,
        buffers: StepBuffers,
        logits: torch.Tensor,  # [rows, tokens of this rank]
        tables: RequestTables,
        sampler: Sampler,
        graphs: GraphPool,
    ) -> None:
        self._buffers = buffers
        self._logits = logits
        self._tables = tables
        self._sampler = sampler
        self._graphs = graphs
        self._sizes = decode_sizes(min(len(logits), len(buffers.sample_slots)))
        self._captured: dict[Key, tuple[torch.cuda.CUDAGraph, Chosen]] = {}

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, has_drafts: bool = False
    ) -> tuple[SampledTokens, Verified | None] | None:
        """Choose a token per row, and append those that are kept to the tables.

        None if a graph does not suffice. Without drafts, each row belongs to a different request.
        Results are valid until the next step.
        """
        kind = self._sampler.kind_of(rows)
        size = at_least(self._sizes, len(rows))
        if kind is None or size is None or logits.data_ptr() != self._logits.data_ptr():
            return None
        tokens, faulted, verified = self._run(size, kind, has_drafts)
        tokens, faulted = tokens[: len(rows)], faulted[: len(rows)]
        return self._sampler.with_logprobs(logits, tokens, faulted, rows), verified

    def _run(self, size: int, kind: SamplingKind, has_drafts: bool) -> Chosen:
        key = size, kind, has_drafts
        if key not in self._captured:
            if not self._graphs.is_due(key):
                return self._compute(*key)  # compiles new kernels
            self._captured[key] = self._graphs.capture(lambda: self._compute(*key))
        graph, chosen = self._captured[key]
        graph.replay()
        return chosen

    def _compute(self, size: int, kind: SamplingKind, has_drafts: bool) -> Chosen:
        slots = self._buffers.sample_slots[:size]  # -1 in padding rows, which write to no table
        positions = self._buffers.sample_positions[:size]
        tokens, faulted = self._sampler.choose_own(self._logits[:size], slots, positions, kind)
        if has_drafts:
            samples = self._buffers.samples(size)
            return tokens, faulted, self._tables.verify(samples, tokens, faulted)
        self._tables.append_tokens(slots, tokens)
        return tokens, faulted, None
