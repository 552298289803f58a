"""Collects log-probabilities of prompt tokens, chunk by chunk as the prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.models.base import Hidden, Model
from penstock.ops.sampling import TopLogprobs
from penstock.protocol.step import NewRequest, PromptLogprobs
from penstock.runner.forward import logits as logits_of
from penstock.runner.layout import StepLayout
from penstock.runner.logprobs import prompt_logprobs, token_logprobs
from penstock.runner.tables import RequestTables

ROWS_AT_ONCE = 256  # bounds memory: the logits of a whole chunk would be large


@dataclass
class _Progress:
    """How much of a request's prompt is computed.

    Exact on the host: prompt tokens are all known.
    """

    num_top: int  # -1: the whole vocabulary
    num_prompt_tokens: int
    num_delivered: int  # prompt positions that an earlier incarnation delivered
    num_computed: int


@dataclass(frozen=True)
class PromptPiece:
    """One request's prompt positions of a step, still in device tensors."""

    start: int
    num_top: int
    values: list[TopLogprobs]  # consecutive rows

    def to_protocol(self) -> PromptLogprobs:
        positions = []
        for part in self.values:
            top = part.top_ids.shape[1]
            counts = [top if self.num_top < 0 else self.num_top] * len(part.token_ids)
            positions += token_logprobs(part, counts)
        return PromptLogprobs(self.start, positions)


class PromptLogprobsHead:
    """Costs nothing in steps that have no request for prompt logprobs."""

    def __init__(self, model: Model, tables: RequestTables) -> None:
        self.model = model
        self.tables = tables
        self._progress: dict[int, _Progress] = {}  # by slot

    def add(self, slot: int, request: NewRequest) -> None:
        num_top = request.sampling.prompt_logprobs
        if num_top is not None:
            self._progress[slot] = _Progress(
                num_top,
                request.num_prompt_tokens,
                request.num_prompt_logprobs,
                request.num_computed_tokens,
            )

    def remove(self, slot: int) -> None:
        self._progress.pop(slot, None)

    def run(self, hidden: Hidden, layout: StepLayout) -> dict[int, PromptPiece]:
        """Pieces by the index of their request in the batch."""
        if not self._progress:
            return {}
        asked = np.isin(layout.slots, np.fromiter(self._progress, dtype=np.int64))
        indexes = np.nonzero(asked)[0].tolist()
        pieces = {index: self._piece(hidden, layout, index) for index in indexes}
        return {index: piece for index, piece in pieces.items() if piece is not None}

    def _piece(self, hidden: Hidden, layout: StepLayout, index: int) -> PromptPiece | None:
        slot = int(layout.slots[index])
        progress = self._progress[slot]
        first_row, end_row = layout.starts[index : index + 2].tolist()
        position = progress.num_computed  # of the first row
        progress.num_computed += end_row - first_row
        # The row at position p predicts token p + 1; nothing predicts position 0.
        start = max(position + 1, progress.num_delivered + 1)
        end = min(progress.num_computed + 1, progress.num_prompt_tokens)
        if start >= end:
            return None
        rows = torch.arange(start - 1, end - 1, device=hidden.states.device)
        rows += first_row - position
        targets = self.tables.token_ids[slot, start:end].long()
        values = []
        for at in range(0, end - start, ROWS_AT_ONCE):
            part = slice(at, at + ROWS_AT_ONCE)
            logits = logits_of(self.model, hidden, rows[part])
            values.append(prompt_logprobs(logits, targets[part], progress.num_top).to_host())
        return PromptPiece(start, progress.num_top, values)
