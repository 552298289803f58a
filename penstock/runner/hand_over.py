"""HandOver: what follows the last layer on a pipeline stage before the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from penstock.distributed.stage_link import StageLink
from penstock.models.base import Hidden
from penstock.protocol.step import NewRequest, RequestResult, Settled, StepMasks
from penstock.runner.forward import StepBatch
from penstock.runner.layout import StepLayout
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import IntArray, RequestTables


class HandOver:
    """Hands a step's states on. Its tokens come back once the last stage's are collected."""

    # Of models with recurrent layers: `Steps.replay`.
    replay: Callable[[StepBatch, torch.Tensor], None] | None = None

    def __init__(self, link: StageLink, tables: RequestTables) -> None:
        self._link = link
        self._tables = tables
        self._expected: dict[int, StepBatch] = {}  # collected steps, by id

    def add(self, slot: int, request: NewRequest) -> None:
        pass

    def remove(self, slot: int) -> None:
        pass

    def begin(self, hidden: Hidden, batch: StepBatch, logits: torch.Tensor | None) -> None:
        num_rows = batch.layout.num_rows  # without padding, which other stages may have less of
        self._link.send(tuple(states[:num_rows] for states in hidden.handed))

    def finish(self, pending: None, batch: StepBatch, masks: StepMasks | None) -> None:
        pass

    def results(self, output: None, layout: StepLayout) -> list[RequestResult]:
        return []

    def expect(self, step_id: int, batch: StepBatch) -> None:
        """A step was collected. `settle` follows."""
        self._expected[step_id] = batch

    def settle(self, step_id: int, settled: Mapping[str, Settled]) -> None:
        """Do what the last stage did: append each request's tokens and the drafts behind them,
        and count its rejected drafts as not computed."""
        batch = self._expected.pop(step_id, None)
        if batch is None or not settled:
            return
        layout = batch.layout
        own = [settled[layout.requests[index].request_id] for index in layout.sampling]
        num_new = np.array([len(each.token_ids) for each in own], dtype=np.int64)
        if self.replay is not None and layout.has_drafts:
            num_accepted = (num_new - 1).astype(np.int32)
            self.replay(batch, to_device(num_accepted, self._tables.device))
        slots, tenancies = layout.slots[layout.sampling], layout.tenancies[layout.sampling]
        is_same = self._tables.tenancies[slots] == tenancies  # others have new requests by now
        num_rejected = layout.rows_per_sample - num_new
        self._tables.lower_bounds(slots, tenancies, num_rejected)
        if is_same.any():
            texts = [[*own[row].token_ids, *own[row].drafts] for row in np.flatnonzero(is_same)]
            self._write(slots[is_same], texts, num_new[is_same], num_rejected[is_same])

    def _write(
        self, slots: IntArray, texts: Sequence[list[int]], num_new: IntArray, num_rejected: IntArray
    ) -> None:
        tables, device = self._tables, self._tables.device
        lengths = [len(text) for text in texts]
        of_tokens = [
            np.repeat(slots, lengths),
            [offset for length in lengths for offset in range(length)],
            [token for text in texts for token in text],
        ]
        where, offsets, token_ids = to_device(np.array(of_tokens, dtype=np.int64), device)
        rows, added, rejected = to_device(np.array([slots, num_new, num_rejected]), device)
        tables.token_ids[where, tables.num_tokens[where].long() + offsets] = token_ids.int()
        tables.num_tokens[rows] += added.int()
        tables.num_computed[rows] -= rejected.int()

    def reset(self) -> None:
        self._expected.clear()
