"""Who comes first: the order of the waiting, and of the running when blocks run out."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from penstock.scheduler.request import RequestState
from penstock.scheduler.running import RunningRequests


class Policy(Protocol):
    """Ranks requests; the lowest rank is served first."""

    def rank(self, state: RequestState) -> tuple[float, ...]:
        """The place of a request that has not run yet."""

    def rank_preempted(self, state: RequestState) -> tuple[float, ...]:
        """The place of a request that has just lost its blocks."""

    def insert_running(self, running: RunningRequests, state: RequestState) -> None:
        """Say what place a request has among those that run: the last is preempted."""


class FirstComeFirstServed(Policy):
    def __init__(self) -> None:
        self._front = itertools.count(-1, -1)

    def rank(self, state: RequestState) -> tuple[float, ...]:
        return (state.sequence,)

    def rank_preempted(self, state: RequestState) -> tuple[float, ...]:
        return (next(self._front),)

    def insert_running(self, running: RunningRequests, state: RequestState) -> None:
        running.append(state)


class PriorityThenArrival(Policy):
    def rank(self, state: RequestState) -> tuple[float, ...]:
        return (state.request.priority, state.request.arrival_time, state.sequence)

    def rank_preempted(self, state: RequestState) -> tuple[float, ...]:
        return self.rank(state)

    def insert_running(self, running: RunningRequests, state: RequestState) -> None:
        running.insert_by_rank(state)


MAX_COUNTED_OUTPUT = 512  # tokens: max_tokens is often left at all that the model allows


class FairShare(Policy):
    """Tenants take turns, in proportion to what their requests ask for (start-time fair queueing).

    Each tenant has a clock that its requests advance by their tokens, and the request with the
    lowest reading goes first. A tenant that comes late begins at the reading of the request that
    was last let in: nobody saves up for later, and nobody waits for what was before.
    """

    def __init__(self) -> None:
        self._front = itertools.count(1)
        self._now = 0.0
        self._clocks: dict[str, float] = {}  # of tenants whose requests are ahead of now

    def rank(self, state: RequestState) -> tuple[float, ...]:
        tenant, request = state.request.tenant, state.request
        start = max(self._clocks.get(tenant, 0.0), self._now)
        num_output = min(request.max_tokens, MAX_COUNTED_OUTPUT)
        self._clocks[tenant] = start + len(request.prompt_token_ids) + num_output
        return (start, state.sequence)

    def rank_preempted(self, state: RequestState) -> tuple[float, ...]:
        return (-1.0, -next(self._front))  # before all who have not run yet

    def insert_running(self, running: RunningRequests, state: RequestState) -> None:
        running.append(state)
        if state.rank[0] > self._now:
            self._now = state.rank[0]
            ahead = self._clocks.items()
            self._clocks = {tenant: at for tenant, at in ahead if at > self._now}


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {"fcfs": FirstComeFirstServed, "priority": PriorityThenArrival, "fair": FairShare}
)


class WaitingQueue:
    """Requests by rank. Pushing and popping is O(log n), removal amortized so."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], RequestState]] = []
        self._members: set[RequestState] = set()  # the heap may hold others, which have left

    def __len__(self) -> int:
        return len(self._members)

    def push(self, state: RequestState) -> None:
        state.rank = self._policy.rank(state)
        self.put_back(state)

    def push_preempted(self, state: RequestState) -> None:
        state.rank = self._policy.rank_preempted(state)
        self.put_back(state)

    def put_back(self, state: RequestState) -> None:
        """Return a request that was popped to its old place."""
        self._members.add(state)
        heapq.heappush(self._heap, (state.rank, state))

    def peek(self) -> RequestState:
        while self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> RequestState:
        state = self.peek()
        heapq.heappop(self._heap)
        self.remove(state)
        return state

    def remove(self, state: RequestState) -> None:
        """Take out a request, wherever it is; one that is not here is ignored."""
        self._members.discard(state)
        if not self._members:  # what the heap holds still has left
            self._heap.clear()
        elif len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
