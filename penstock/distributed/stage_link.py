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
_WORDS = 5  # of a header: failure, number of states, rows, columns, dtype
_NONE = -1

# x, residual, and the aux states of earlier layers in the layers' order (`Hidden.aux`), all of one
# type: [num_rows, hidden_size] each.
States = tuple[torch.Tensor, ...]


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

    `via_host`: states on a GPU go through the host's memory, as Gloo takes no others.
    """

    def __init__(self, stages: RankGroup, device: torch.device, via_host: bool = False) -> None:
        self._stages = stages
        self._device = device
        self._carrier = torch.device("cpu") if via_host else device
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
        failure, num_states, num_rows, num_columns, dtype = header.tolist()
        if failure != _NONE:
            raise EarlierStageFailed(_FAILURES[failure])
        shape = (num_states, num_rows, num_columns)
        states = torch.empty(shape, dtype=_DTYPES[dtype], device=self._carrier)
        self._receive(states)
        return states.to(self._device).unbind()

    def send(self, states: States) -> None:
        """Hand copies of states on to the next stage."""
        copies = torch.stack(states).to(self._carrier)
        self._owes = False
        self._send(torch.tensor([_NONE, *copies.shape, _DTYPES.index(copies.dtype)]))
        self._send(copies)

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
