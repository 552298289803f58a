"""What a request waits for before it may compete for a step.

One mechanism for grammars that compile, adapters that load, encoders and remote KV. A request
that waits at a gate holds up nobody else.
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
    """The request cannot pass; `error` is for its client, whose `field` was wrong if any."""

    error: str
    field: str | None = None
    can_retry: bool = False  # it is not to blame, and may be sent again


class Gate(Protocol):
    def poll(self, request: EngineRequest) -> GateStatus | GateFailed:
        """Ask without blocking. Not asked again for a request once it said READY or GateFailed."""


class Gatekeeper:
    """Holds new requests until every gate has let them pass."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = list(gates)
        self._num_passed: dict[RequestState, int] = {}  # gates behind each request

    def __len__(self) -> int:
        return len(self._num_passed)

    def push(self, state: RequestState) -> None:
        self._num_passed[state] = 0

    def remove(self, state: RequestState) -> None:
        """Forget a request; one that is not here is ignored."""
        self._num_passed.pop(state, None)

    def poll(self) -> tuple[list[RequestState], list[tuple[RequestState, GateFailed]]]:
        """The requests that are through, in order of arrival, and those that failed, with why."""
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
            except Exception as error:  # a gate that breaks fails this request, not the engine
                return GateFailed(f"{type(gate).__name__} failed: {error}")
            if status is not READY:
                return status
            self._num_passed[state] += 1
        return READY
