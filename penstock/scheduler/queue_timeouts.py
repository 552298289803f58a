"""QueueTimeouts: decides which new requests have waited too long to be started."""

from __future__ import annotations

import time
from collections import deque

from penstock.scheduler.request import RequestState, RequestStatus


class QueueTimeouts:
    """Finds requests that exceeded the queue timeout before their first step.

    Time counts from the request's arrival, including time before it reached this engine. A
    replayed request has run before and does not time out.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._states: deque[RequestState] = deque()  # roughly in order of arrival

    def add(self, state: RequestState) -> None:
        if self.timeout_s is not None and state.request.is_new:
            self._states.append(state)

    def take_late(self) -> list[RequestState]:
        """Return requests that timed out, once each, the longest wait first."""
        if not self._states:
            return []
        assert self.timeout_s is not None
        late = []
        latest = time.monotonic() - self.timeout_s
        while self._states:
            state = self._states[0]
            waits = state.status is RequestStatus.WAITING and state.incarnation == 0
            if waits and state.request.arrival_time >= latest:
                break  # all behind it arrived later
            self._states.popleft()
            if waits:
                late.append(state)
        return late
