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

    def pop(self) -> RequestState:
        """Remove and return the request to preempt."""
        if not self._is_sorted:
            self.in_order()
        return self._states.popitem()[0]

    def remove(self, state: RequestState) -> None:
        del self._states[state]

    def clear(self) -> None:
        self._states.clear()
