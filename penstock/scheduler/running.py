"""The requests that run, in the order in which they are served."""

from __future__ import annotations

from operator import attrgetter

from penstock.scheduler.request import RequestState

_rank = attrgetter("rank")


class RunningRequests:
    """From the most to the least deserving. Adding, removing and taking the last one is O(1)."""

    def __init__(self) -> None:
        self._states: dict[RequestState, None] = {}
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._states)

    def append(self, state: RequestState) -> None:
        """Add the least deserving one."""
        self._states[state] = None

    def insert_by_rank(self, state: RequestState) -> None:
        """Add one between those of lower and of higher rank, as all others were."""
        last = next(reversed(self._states), None)
        self._is_sorted = self._is_sorted and (last is None or last.rank < state.rank)
        self._states[state] = None

    def in_order(self) -> list[RequestState]:
        """All of them, as they are now."""
        if not self._is_sorted:  # once for all that came since: they are few
            self._states = dict.fromkeys(sorted(self._states, key=_rank))
            self._is_sorted = True
        return list(self._states)

    def pop(self) -> RequestState:
        """Take out the least deserving one."""
        if not self._is_sorted:
            self.in_order()
        return self._states.popitem()[0]

    def remove(self, state: RequestState) -> None:
        del self._states[state]

    def clear(self) -> None:
        self._states.clear()
