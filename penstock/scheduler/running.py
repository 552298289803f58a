"""RunningRequests: owns the order of the running requests."""

from __future__ import annotations

from operator import attrgetter

from penstock.scheduler.request import RequestState

_rank = attrgetter("rank")


class RunningRequests:
    """Running requests, first served first, first preempted last.

    Add, remove and pop are O(1), apart from the sort after inserts by rank.
    """

    def __init__(self) -> None:
        self._states: dict[RequestState, None] = {}
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._states)

    def append(self, state: RequestState) -> None:
        """Add a request that is served last and preempted first."""
        self._states[state] = None

    def insert_by_rank(self, state: RequestState) -> None:
        """Add a request at its rank. All others must have been added this way, too."""
        last = next(reversed(self._states), None)
        self._is_sorted = self._is_sorted and (last is None or last.rank < state.rank)
        self._states[state] = None

    def in_order(self) -> list[RequestState]:
        """A copy of the running requests, first served first."""
        if not self._is_sorted:  # one sort covers all requests inserted since the last one
            self._states = dict.fromkeys(sorted(self._states, key=_rank))
            self._is_sorted = True
        return list(self._states)

    def share(self, num_stages: int) -> list[RequestState]:
        """The requests that a step may continue, first served first.

        With pipeline stages, as many steps as stages divide the running requests among them. A
        request has at most one token in flight: all stages need it for the next one.
        """
        running = self.in_order()
        if num_stages == 1:
            return running
        settled = [state for state in running if state.num_placeholders == 0]
        return settled[: -(-len(running) // num_stages)]

    def pop(self) -> RequestState:
        """Remove and return the request to preempt."""
        if not self._is_sorted:
            self.in_order()
        return self._states.popitem()[0]

    def remove(self, state: RequestState) -> None:
        del self._states[state]

    def clear(self) -> None:
        self._states.clear()
