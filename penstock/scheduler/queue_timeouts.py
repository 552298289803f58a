"""QueueTimeouts: requests that wait for their first turn, and how long they may."""

from __future__ import annotations

import time
from collections import deque

from penstock.scheduler.request import RequestState, RequestStatus


class QueueTimeouts:
    """Finds requests that have waited for too long, before anything is done for them.

    Time counts from a request's arrival, also that which it spent before it came to this engine.
    A replay has had its turn and is no newcomer.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._states: deque[RequestState] = deque()  # by arrival, near enough

    def add(self, state: RequestState) -> None:
        if self.timeout_s is not None and state.request.is_new:
            self._states.append(state)

    def take_late(self) -> list[RequestState]:
        """Those that have waited for too long, once each; the longest wait comes first."""
        if not self._states:
            return []
        assert self.timeout_s is not None
        late = []
        latest = time.monotonic() - self.timeout_s
        while self._states:
            state = self._states[0]
            waits = state.status is RequestStatus.WAITING and state.incarnation == 0
            if waits and state.request.arrival_time >= latest:
                break  # and so are all behind it
            self._states.popleft()
            if waits:
                late.append(state)
        return late
