"""StageLink: hands the states of a step's rows on from one pipeline stage to the next."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from penstock.distributed.mesh import RankGroup
from penstock.protocol.step import StepFailure

_FAILURES = list(StepFailure)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WORDS = 5  # of a header: failure, rows, columns, dtypes of x and residual
_NONE = -1

States = tuple[torch.Tensor, torch.Tensor | None]  # x and residual, [num_rows, hidden_size]


class EarlierStageFailed(Exception):
    """The step failed, or was skipped, on an earlier stage."""

    def __init__(self, failure: StepFailure) -> None:
        super().__init__(failure.value)
        self.failure = failure


class StageLink:
    """One rank's links to the stages before and behind it.

    Every step with rows crosses each link once, even if it failed or was skipped: so both ends stay
    in step. A header says on the host what follows on the device. A sender does not wait for the
    receiver.
    """

    def __init__(self, stages: RankGroup, device: torch.device) -> None:
        self._stages = stages
        self._device = device
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # must live until they arrive
        self._owes = False  # whether the next stage has heard nothing of this step yet

    @property
    def is_first(self) -> bool:
        return self._stages.rank == 0

    @property
    def is_last(self) -> bool:
        return self._stages.rank == self._stages.size - 1

    def receive(self) -> States | None:
        """The states from the stage before; None on the first stage.

        Raises `EarlierStageFailed` if that stage has none. Must be called first in each step.
        """
        self._owes = not self.is_last
        if self.is_first:
            return None
        header = torch.empty(_WORDS, dtype=torch.int64)
        self._receive(header)
        failure, num_rows, num_columns, *dtypes = header.tolist()
        if failure != _NONE:
            raise EarlierStageFailed(_FAILURES[failure])
        states = []
        for dtype in dtypes:
            if dtype != _NONE:
                shape = (num_rows, num_columns)
                states.append(torch.empty(shape, dtype=_DTYPES[dtype], device=self._device))
                self._receive(states[-1])
        return states[0], states[1] if len(states) > 1 else None

    def send(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Hand states on to the next stage. They must not be changed any more."""
        self._owes = False
        states = [x] if residual is None else [x, residual]
        dtypes = [_DTYPES.index(each.dtype) for each in states]
        dtypes += [_NONE] * (2 - len(states))
        self._send(torch.tensor([_NONE, *x.shape, *dtypes]))
        for each in states:
            self._send(each.contiguous())

    def send_failure(self, failure: StepFailure) -> None:
        """Tell the next stage, if it still waits for this step's states, that there are none."""
        if self._owes:
            self._owes = False
            self._send(torch.tensor([_FAILURES.index(failure)] + [_NONE] * (_WORDS - 1)))

    def _receive(self, tensor: torch.Tensor) -> None:
        stages = self._stages
        dist.recv(tensor, group=stages.process_group, group_src=stages.rank - 1)

    def _send(self, tensor: torch.Tensor) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        stages = self._stages
        work = dist.isend(tensor, group=stages.process_group, group_dst=stages.rank + 1)
        self._sent.append((work, tensor))
