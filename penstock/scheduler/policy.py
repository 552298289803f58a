"""Policies: decide which waiting request is admitted first and which running one is preempted."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from penstock.scheduler.request import RequestState
from penstock.scheduler.running import RunningRequests


class Policy(Protocol):
    """Ranks requests. The lowest rank is served first."""

    def rank(self, state: RequestState) -> tuple[float, ...]:
        """The rank of a request that has not run yet."""

    def rank_preempted(self, state: RequestState) -> tuple[float, ...]:
        """The rank of a request that was just preempted."""

    def insert_running(self, running: RunningRequests, state: RequestState) -> None:
        """Insert a request into the running requests. The last one is preempted first."""


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


MAX_COUNTED_OUTPUT = 512  # tokens: max_tokens is often left at the model's maximum


class FairShare(Policy):
    """Start-time fair queueing: heavy tenants queue behind light tenants.

    Each tenant has a virtual clock. A request starts at its tenant's clock and advances it by the
    request's tokens. The lowest start goes first. The clock of an idle tenant is brought up to the
    start of the last admitted request: idle time earns no credit, and past use costs nothing.
    """

    def __init__(self) -> None:
        self._front = itertools.count(1)
        self._now = 0.0
        self._clocks: dict[str, float] = {}  # only of tenants ahead of `_now`

    def rank(self, state: RequestState) -> tuple[float, ...]:
        tenant, request = state.request.tenant, state.request
        start = max(self._clocks.get(tenant, 0.0), self._now)
        num_output = min(request.max_tokens, MAX_COUNTED_OUTPUT)
        self._clocks[tenant] = start + len(request.prompt_token_ids) + num_output
        return (start, state.sequence)

    def rank_preempted(self, state: RequestState) -> tuple[float, ...]:
        return (-1.0, -next(self._front))  # before every request that has not run yet

    def insert_running(self, running: RunningRequests, state: RequestState) -> None:
        running.append(state)
        if state.rank[0] > self._now:
            self._now = state.rank[0]
            ahead = self._clocks.items()
            self._clocks = {tenant: at for tenant, at in ahead if at > self._now}


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {"fcfs": FirstComeFirstServed, "priority": PriorityThenArrival, "fair": FairShare}
)


_Entry = tuple[tuple[float, ...], RequestState]  # a request and its rank


class WaitingQueue:
    """Requests by rank. Push and pop are O(log n), removal is amortized O(log n)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[_Entry] = []
        self._entries: dict[RequestState, _Entry] = {}  # the heap may also hold older entries

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, state: RequestState) -> None:
        state.rank = self._policy.rank(state)
        self.put_back(state)

    def push_preempted(self, state: RequestState) -> None:
        state.rank = self._policy.rank_preempted(state)
        self.put_back(state)

    def put_back(self, state: RequestState) -> None:
        """Queue a request at the rank it already has."""
        self._entries[state] = entry = (state.rank, state)
        heapq.heappush(self._heap, entry)

    def peek(self) -> RequestState:
        while self._entries.get(self._heap[0][1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> RequestState:
        state = self.peek()
        heapq.heappop(self._heap)
        self.remove(state)
        return state

    def in_order(self) -> list[RequestState]:
        """A copy, first served first."""
        return sorted(self._entries, key=lambda state: state.rank)

    def remove(self, state: RequestState) -> None:
        """Remove a request from any position. Unknown requests are ignored."""
        self._entries.pop(state, None)
        if not self._entries:  # only removed requests are left in the heap
            self._heap.clear()
        elif len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
