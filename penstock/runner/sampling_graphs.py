"""Captured graphs of sampling: choose tokens and append them to the tables in one launch.

There is one graph per row bucket and sampling kind. It is separate from the graph of the forward
pass, because logits may change in between. A grammar mask changes them in place, and these graphs
still apply. Features of single requests (penalties, logits processors, ...) use `Sampler.sample`
instead.
"""

from __future__ import annotations

import torch

from penstock.runner.device_batch import StepBuffers
from penstock.runner.graphs import GraphPool, at_least, decode_sizes
from penstock.runner.sampler import SampledTokens, Sampler, SamplingKind, SamplingRows
from penstock.runner.tables import RequestTables

Chosen = tuple[torch.Tensor, torch.Tensor]  # tokens [rows] int64, faulted [rows] bool


class SamplingGraphs:
    """Samples from rows of `logits`, whose slots are in `StepBuffers`."""

    def __init__(
        self,
        buffers: StepBuffers,
        logits: torch.Tensor,  # [rows, vocab_size]
        tables: RequestTables,
        sampler: Sampler,
        graphs: GraphPool,
    ) -> None:
        self._buffers = buffers
        self._logits = logits
        self._tables = tables
        self._sampler = sampler
        self._graphs = graphs
        self._sizes = decode_sizes(buffers.max_num_seqs)
        self._captured: dict[tuple[int, SamplingKind], tuple[torch.cuda.CUDAGraph, Chosen]] = {}

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> SampledTokens | None:
        """Choose one token per row and append it to the tables; None if a graph does not suffice.

        Each row belongs to a different request. Results are valid until the next step.
        """
        kind = self._sampler.kind_of(rows)
        size = at_least(self._sizes, len(rows))
        if kind is None or size is None or logits.data_ptr() != self._logits.data_ptr():
            return None
        tokens, faulted = self._run(size, kind)
        return self._sampler.with_logprobs(logits, tokens[: len(rows)], faulted[: len(rows)], rows)

    def _run(self, size: int, kind: SamplingKind) -> Chosen:
        key = size, kind
        if key not in self._captured:
            if not self._graphs.is_due(key):
                return self._compute(size, kind)  # compiles new kernels
            self._captured[key] = self._graphs.capture(lambda: self._compute(size, kind))
        graph, chosen = self._captured[key]
        graph.replay()
        return chosen

    def _compute(self, size: int, kind: SamplingKind) -> Chosen:
        slots = self._buffers.sample_slots[:size]  # -1 in padding rows, which write to no table
        positions = self._buffers.sample_positions[:size]
        tokens, faulted = self._sampler.choose(self._logits[:size], slots, positions, kind)
        self._tables.append_tokens(slots, tokens)
        return tokens, faulted
