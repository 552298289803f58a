"""HandOver: what follows the last layer on a pipeline stage before the last."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.distributed.stage_link import StageLink
from penstock.models.base import Hidden
from penstock.protocol.step import NewRequest, RequestResult, StepMasks
from penstock.runner.forward import StepBatch
from penstock.runner.layout import StepLayout
from penstock.runner.tables import RequestTables


class HandOver:
    """Hands a step's states on. Its tokens come back once the last stage's are collected."""

    def __init__(self, link: StageLink, tables: RequestTables) -> None:
        self._link = link
        self._tables = tables
        self._expected: dict[int, StepLayout] = {}  # collected steps, by id

    def add(self, slot: int, request: NewRequest) -> None:
        pass

    def remove(self, slot: int) -> None:
        pass

    def begin(self, hidden: Hidden, batch: StepBatch, logits: torch.Tensor | None) -> None:
        self._link.send(hidden.states, hidden.residual)

    def finish(self, pending: None, batch: StepBatch, masks: StepMasks | None) -> None:
        pass

    def results(self, output: None, layout: StepLayout) -> list[RequestResult]:
        return []

    def expect(self, step_id: int, layout: StepLayout) -> None:
        """A step was collected. `settle` follows."""
        self._expected[step_id] = layout

    def settle(self, step_id: int, token_ids: Mapping[str, int]) -> None:
        """Append each request's token, unless its slot has another request by now."""
        layout = self._expected.pop(step_id, None)
        if layout is None or not token_ids:
            return
        is_same = self._tables.tenancies[layout.slots] == layout.tenancies
        slots, tokens = [], []
        for item, slot, same in zip(layout.requests, layout.slots, is_same, strict=True):
            if same and item.request_id in token_ids:
                slots.append(int(slot))
                tokens.append(token_ids[item.request_id])
        if slots:
            device = self._tables.device
            self._tables.append_tokens(
                torch.tensor(slots, device=device), torch.tensor(tokens, device=device)
            )

    def reset(self) -> None:
        self._expected.clear()
