"""The head of pooling models: turns hidden states into vectors and results.

A prompt may arrive in chunks. A column of the request table keeps the state of its pooling: the
float32 sum of all rows so far (MEAN), or the first row (CLS). A request that is recomputed, after a
preemption or on another engine, restarts at its first token and resets the column.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.layers.context import adapter_context
from penstock.models.base import Hidden
from penstock.models.pooler import Pooler
from penstock.protocol.pooling import Payload, PoolingTask, VectorName
from penstock.protocol.step import NewRequest, RequestResult, StepMasks
from penstock.runner.forward import StepBatch
from penstock.runner.layout import StepLayout
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import IntArray, RequestTables

FAULT = "the vector is not returned: the model gave NaN or infinite numbers for this input"
WHOLE = ""  # the name of vectors that are a request's only ones
Pieces = dict[str, list[torch.Tensor]]


@dataclass
class _PoolingTarget:
    """The vectors that one request asks for."""

    task: PoolingTask
    dimensions: int | None
    use_activation: bool | None
    vectors: tuple[VectorName, ...] = ()  # further ones, which come of every token
    token_ids: IntArray | None = None  # of the prompt, where sparse vectors are wanted
    # Token-wise: rows of earlier chunks, by the name of the vectors.
    pieces: Pieces = field(default_factory=lambda: defaultdict(list))
    num_unpooled: int = 0  # tokens at the beginning that a mean leaves out
    positions: IntArray | None = None  # token-wise: positions to return; None: all

    @property
    def by_token(self) -> bool:
        """Whether there is no vector for the whole prompt."""
        return self.task in ("token_embed", "token_classify")

    @property
    def keeps_tokens(self) -> bool:
        return self.by_token or bool(self.vectors)


@dataclass
class PooledVectors:
    """A step's vectors, being copied to the host."""

    whole: list[tuple[list[int], torch.Tensor]]  # request indexes, and a row for each
    by_token: dict[int, Pieces]  # by request index: rows of its tokens, chunk by chunk
    token_ids: dict[int, IntArray]  # of requests with sparse vectors


class PoolingHead:
    """Pools the hidden states of every row, in float32."""

    def __init__(self, pooler: Pooler, tables: RequestTables) -> None:
        self.pooler = pooler
        self.tables = tables
        self._targets: dict[int, _PoolingTarget] = {}  # by slot
        self._num_by_token = 0  # requests among them that want vectors of tokens
        self._num_cut = 0  # those whose first tokens are not pooled
        self._kind = pooler.info.pooling_type
        # By slot: the sum of the rows so far, or the first row.
        self._sums: torch.Tensor | None = None
        if pooler.may_chunk and self._kind in ("MEAN", "CLS"):
            shape = (len(tables.num_computed), pooler.hidden_size)
            self._sums = torch.zeros(shape, dtype=torch.float32, device=tables.device)

    def add(self, slot: int, request: NewRequest) -> None:
        params = request.pooling
        target = _PoolingTarget(
            params.task or self.pooler.info.tasks[0], params.dimensions, params.use_activation
        )
        tag = self.pooler.step_tag_id
        if target.by_token and tag is not None:
            target.positions = np.nonzero(np.array(request.token_ids) == tag)[0]
        target.vectors = tuple(
            name for name in dict.fromkeys(params.vectors or ()) if name != "dense"
        )
        if "sparse" in target.vectors:
            target.token_ids = np.array(request.token_ids, dtype=np.int64)
        if target.task == "embed" and self._kind == "MEAN":
            target.num_unpooled = request.num_unpooled
            self._num_cut += target.num_unpooled > 0
        self._targets[slot] = target
        self._num_by_token += target.keeps_tokens

    def remove(self, slot: int) -> None:
        target = self._targets.pop(slot, None)
        if target is not None:
            self._num_by_token -= target.keeps_tokens
            self._num_cut -= target.num_unpooled > 0

    def begin(
        self, hidden: Hidden, batch: StepBatch, logits: torch.Tensor | None = None
    ) -> PooledVectors:
        """Pool the step's rows. Returns the vectors of the requests that the step completes."""
        layout = batch.layout
        states = hidden.states[: layout.num_rows]
        by_token = self._take_tokens(states, hidden, layout) if self._num_by_token else {}
        token_ids = {
            index: ids
            for index in by_token
            if (ids := self._target(layout, index).token_ids) is not None
        }
        done = layout.sampling
        if self._num_by_token:
            done = np.array(
                [i for i in done.tolist() if not self._target(layout, i).by_token], dtype=np.int64
            )
        if self._kind == "ALL":
            return PooledVectors([], by_token, token_ids)
        pooled = self._pool(states, batch, done)
        whole = []
        if len(done):
            whole = [
                (indexes, self._project(pooled, hidden, layout, done, indexes, target))
                for indexes, target in self._alike(layout, done)
            ]
        return PooledVectors(whole, by_token, token_ids)

    def finish(
        self, pending: PooledVectors, batch: StepBatch, masks: StepMasks | None
    ) -> PooledVectors:
        """Start the copies to the host."""
        return PooledVectors(
            [(indexes, _to_host(vectors)) for indexes, vectors in pending.whole],
            {
                index: {name: [_to_host(piece) for piece in found] for name, found in rows.items()}
                for index, rows in pending.by_token.items()
            },
            pending.token_ids,
        )

    def results(self, output: PooledVectors, layout: StepLayout) -> list[RequestResult]:
        """One result per scheduled request, in row order.

        The copies to the host must be complete.
        """
        payloads: dict[int, Payload] = {}
        named: dict[int, dict[str, Payload]] = {}
        faults: dict[int, str] = {}
        for indexes, vectors in output.whole:
            matrix = vectors.numpy()
            is_good = np.isfinite(matrix).all(axis=1).tolist()
            for index, row, good in zip(indexes, matrix, is_good, strict=True):
                if good:
                    payloads[index] = _payload(row)
                else:
                    faults[index] = FAULT
        for index, pieces in output.by_token.items():
            found = {name: torch.cat(rows).numpy() for name, rows in pieces.items()}
            if not all(np.isfinite(matrix).all() for matrix in found.values()):
                faults[index] = FAULT
                continue
            if WHOLE in found:
                payloads[index] = _payload(found.pop(WHOLE))
            if "sparse" in found:
                ids, weights = _merge(
                    output.token_ids[index], found.pop("sparse")[:, 0], self.pooler.unweighted_ids
                )
                found |= {"sparse_token_ids": ids, "sparse_weights": weights}
            named[index] = {name: _payload(matrix) for name, matrix in found.items()}
        return [
            RequestResult(
                request_id=item.request_id,
                incarnation=item.incarnation,
                payload=payloads.get(index) if index not in faults else None,
                named=named.get(index, {}),
                fault=faults.get(index),
            )
            for index, item in enumerate(layout.requests)
        ]

    def _target(self, layout: StepLayout, index: int) -> _PoolingTarget:
        return self._targets[int(layout.slots[index])]

    def _alike(self, layout: StepLayout, done: IntArray) -> list[tuple[list[int], _PoolingTarget]]:
        """Requests with identical parameters, with those parameters. Nearly always one entry."""
        groups: dict[tuple[object, ...], tuple[list[int], _PoolingTarget]] = {}
        for index in done.tolist():
            target = self._target(layout, index)
            key = (target.task, target.dimensions, target.use_activation)
            groups.setdefault(key, ([], target))[0].append(index)
        return list(groups.values())

    def _project(
        self,
        pooled: torch.Tensor,
        hidden: Hidden,
        layout: StepLayout,
        done: IntArray,
        indexes: list[int],
        target: _PoolingTarget,
    ) -> torch.Tensor:
        if len(indexes) < len(done):
            rows = np.searchsorted(done, np.array(indexes))
            pooled = pooled[to_device(rows, pooled.device)]
        with self._adapters(hidden, to_device(layout.starts[indexes], pooled.device)):
            return self.pooler(pooled, target.task, target.dimensions, target.use_activation)

    def _adapters(self, hidden: Hidden, rows: torch.Tensor | slice) -> AbstractContextManager[None]:
        """Let a classifier see the adapters of these rows of the step."""
        is_empty = isinstance(rows, slice) and rows.start == rows.stop
        if hidden.adapters is None or self.pooler.classifier is None or is_empty:
            return nullcontext()
        return adapter_context(hidden.adapters.take(rows))

    # -- one vector for a prompt

    def _pool(self, states: torch.Tensor, batch: StepBatch, done: IntArray) -> torch.Tensor:
        """[len(done), hidden_size] float32, of requests whose prompt is complete."""
        layout, device = batch.layout, states.device
        if self._kind == "LAST":
            if len(done) == len(layout.sampling):
                return states[batch.logits_rows].float()
            return states[to_device(layout.starts[1:][done] - 1, device)].float()
        num_before = layout.seq_lens - layout.counts
        is_whole = len(done) == len(layout.requests) and not num_before.any()
        if self._kind == "CLS":
            rows = states[to_device(layout.starts[:-1], device)].float()
        else:
            unpooled = self._unpooled(layout)
            if self._num_cut:
                states = _without(states, layout, unpooled - num_before)
            rows = _segment_sums(states, batch)
        if not is_whole:
            if self._sums is not None:  # prompts that are never chunked leave no state
                slots = to_device(layout.slots, device)
                is_first = to_device(num_before == 0, device)[:, None]
                before = torch.where(is_first, 0.0, self._sums[slots])
                if self._kind == "CLS":
                    rows = torch.where(is_first, rows, before)
                else:
                    rows = before + rows
                self._sums[slots] = rows
            rows = rows[to_device(done, device)]
        if self._kind == "CLS":
            return rows
        lengths = to_device((layout.seq_lens - unpooled)[done].astype(np.float32), device)
        return rows / lengths[:, None]

    def _unpooled(self, layout: StepLayout) -> IntArray:
        """By request: how many of its first tokens are not pooled."""
        if not self._num_cut:
            return np.zeros_like(layout.seq_lens)
        targets = (self._target(layout, index) for index in range(len(layout.requests)))
        return np.array([target.num_unpooled for target in targets], layout.seq_lens.dtype)

    # -- a vector for each token

    def _take_tokens(
        self, states: torch.Tensor, hidden: Hidden, layout: StepLayout
    ) -> dict[int, Pieces]:
        """Collect the rows of token-wise requests. They are kept until the prompt is complete."""
        found = {}
        starts = layout.starts.tolist()
        firsts = (layout.seq_lens - layout.counts).tolist()  # positions
        for index, item in enumerate(layout.requests):
            target = self._target(layout, index)
            if not target.keeps_tokens:
                continue
            rows = states[starts[index] : starts[index + 1]]
            if target.positions is not None:
                own = target.positions - firsts[index]
                own = own[(own >= 0) & (own < len(rows))]
                rows = rows[to_device(own, rows.device)]
            rows = rows.to(torch.float32, copy=True)  # the next step may overwrite these rows
            if target.by_token:
                # All rows of a request have its adapter.
                with self._adapters(hidden, slice(starts[index], starts[index] + len(rows))):
                    piece = self.pooler(rows, target.task, target.dimensions, target.use_activation)
                target.pieces[WHOLE].append(piece)
            for name in target.vectors:
                # ColBERT's begin behind the first token, whose state is the dense vector.
                own_rows = rows[1:] if name == "colbert" and firsts[index] == 0 else rows
                vectors = self.pooler.token_vectors(name, own_rows, target.use_activation)
                target.pieces[name].append(vectors)
            if item.samples:
                found[index] = target.pieces
        return found


def _payload(array: Any) -> Payload:
    return Payload(list(array.shape), array.tobytes(), array.dtype.name)


def _merge(token_ids: IntArray, weights: Any, unweighted_ids: IntArray) -> tuple[Any, Any]:
    """The largest weight of each token ID, of those that have one above 0; by ascending ID."""
    is_kept = (weights > 0) & ~np.isin(token_ids, unweighted_ids)
    ids, inverse = np.unique(token_ids[is_kept], return_inverse=True)
    merged = np.zeros(len(ids), np.float32)
    np.maximum.at(merged, inverse, weights[is_kept])
    return ids.astype(np.int32), merged


def _without(states: torch.Tensor, layout: StepLayout, counts: IntArray) -> torch.Tensor:
    """float32, with 0 in place of so many first rows of each request (none if negative)."""
    is_kept = np.ones((len(states), 1), np.float32)
    for start, end, count in zip(layout.starts[:-1], layout.starts[1:], counts, strict=True):
        is_kept[start : min(start + max(count, 0), end)] = 0
    return states.float() * to_device(is_kept, states.device)


def _segment_sums(states: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    """[num_requests, hidden_size] float32: the sum of each request's rows.

    torch's own op is several times slower on every device.
    """
    if states.device.type == "cpu":
        starts = batch.layout.starts[:-1]
        return torch.from_numpy(np.add.reduceat(states.float().numpy(), starts, axis=0))
    from penstock.ops.triton.pointwise import segment_sums  # needs Triton

    return segment_sums(states, batch.inputs.context.query_starts)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy that is complete after a synchronization."""
    if values.device.type == "cpu":
        return values.contiguous()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
