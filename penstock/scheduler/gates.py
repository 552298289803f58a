"""Gates: decide when a new request may enter the waiting queue.

A gate covers work that must finish first, such as compiling a grammar. A request that waits at a
gate does not delay other requests.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.protocol.request import EngineRequest
from penstock.scheduler.request import RequestState


class GateStatus(enum.Enum):
    READY = "ready"
    PENDING = "pending"


READY = GateStatus.READY
PENDING = GateStatus.PENDING


@dataclass(frozen=True)
class GateFailed:
    """The request cannot pass. `error` is for the client; `field` is the invalid field, if any."""

    error: str
    field: str | None = None
    can_retry: bool = False  # not the request's fault: the client may send it again


class Gate(Protocol):
    def poll(self, request: EngineRequest) -> GateStatus | GateFailed:
        """Must not block. Not called again for a request after READY or GateFailed."""


class Gatekeeper:
    """Holds new requests until they have passed every gate."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = list(gates)
        self._num_passed: dict[RequestState, int] = {}  # gates passed, by request

    def __len__(self) -> int:
        return len(self._num_passed)

    def push(self, state: RequestState) -> None:
        self._num_passed[state] = 0

    def remove(self, state: RequestState) -> None:
        """Forget a request. Unknown requests are ignored."""
        self._num_passed.pop(state, None)

    def poll(self) -> tuple[list[RequestState], list[tuple[RequestState, GateFailed]]]:
        """Return the requests that passed every gate and those that failed, in arrival order."""
        ready, failed = [], []
        for state in list(self._num_passed):
            status = self._advance(state)
            if status is PENDING:
                continue
            del self._num_passed[state]
            if isinstance(status, GateFailed):
                failed.append((state, status))
            else:
                ready.append(state)
        return ready, failed

    def _advance(self, state: RequestState) -> GateStatus | GateFailed:
        for gate in self._gates[self._num_passed[state] :]:
            try:
                status = gate.poll(state.request)
            except Exception as error:  # a broken gate fails this request, not the engine
                return GateFailed(f"{type(gate).__name__} failed: {error}")
            if status is not READY:
                return status
            self._num_passed[state] += 1
        return READY
