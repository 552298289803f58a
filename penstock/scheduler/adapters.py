"""Adapters: decides which LoRA adapters are in host memory and which are in device slots.

A request with an adapter is admitted once all workers hold a host copy of it, and a slot has it or
is free. Until then the request is parked: requests behind it go on, and it is not looked at again
before something changes that may admit it.

A parked request may be overtaken: a later request is admitted whose adapter is available. The
first parked request in the policy's order is overtaken at most `max_overtakes` times. After that no
later request with an adapter is admitted before it. Running requests end, so it gets a slot, and
the next one is the first. So a request with k parked requests before it is overtaken at most
(k + 1) * max_overtakes times. Loading holds up nobody: while its copy is being fetched, a parked
request does not count as waiting for others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.protocol.adapter import (
    Adapter,
    AdapterJob,
    DropAdapter,
    FetchAdapter,
    FinishedJob,
    PlaceAdapter,
)
from penstock.protocol.errors import InputError
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import NO_SLOT, Job
from penstock.scheduler.device_slots import AdapterState, Copy, DeviceSlots
from penstock.scheduler.policy import Policy, WaitingQueue
from penstock.scheduler.request import RequestState
from penstock.scheduler.stats import AdapterStats

BEFORE_ALL: tuple[float, ...] = ()  # a rank


@dataclass
class _Wait:
    """A request's wait for its adapter, from the first parking to the admission."""

    since: float
    num_overtakes: int = 0
    is_parked: bool = True  # else it is in the scheduler's queue again


class Adapters:
    """Owns host copies, device slots and the requests that wait for either.

    The scheduler's queue holds a request until it is `park`ed, and again after `wake` returned it.
    Requests without an adapter may always run. Without slots, LoRA is off. `max_copies` may be
    exceeded by one adapter that is loaded without a request.
    """

    def __init__(self, max_loras: int, max_copies: int, max_overtakes: int, policy: Policy) -> None:
        self._max_copies = max_copies
        self._max_overtakes = max_overtakes
        self._policy = policy
        self._entries: dict[str, AdapterState] = {}  # by digest
        self._copies: dict[str, AdapterState] = {}  # fetching or ready, least recently used first
        self._slots = DeviceSlots(max_loras)
        self._for_copy = WaitingQueue(policy)  # the stuck request of each adapter without a copy
        self._for_slot = WaitingQueue(policy)  # and of each with one
        self._waits: dict[RequestState, _Wait] = {}  # from the first parking to the admission
        self._jobs: list[AdapterJob] = []
        self._unloading: set[str] = set()  # drop these once no request uses them
        self._loads: deque[AdapterState] = (
            deque()
        )  # wait for a place in host memory, without a request
        self.num_parked = 0  # requests
        self._may_wake = False  # something changed since `wake`
        self._num_loads = self._num_evictions = self._num_placements = 0
        self._num_waits = self._most_overtakes = 0
        self._longest_wait_s = 0.0

    @property
    def is_enabled(self) -> bool:
        return len(self._slots) > 0

    # -- requests

    def check(self, request: EngineRequest) -> None:
        """Raise InputError if the request has an adapter and LoRA is off."""
        if request.adapter is not None:
            self._check_enabled(request.adapter, "model")

    def enqueue(self, state: RequestState) -> None:
        """A request was queued, new or preempted. Fetches its adapter if there is a place."""
        if state.adapter is None:
            return
        entry = self._entry(state.adapter)
        entry.queue.put_back(state)
        entry.key_media(state)
        if entry.copy is Copy.ABSENT:
            entry.adapter = state.adapter  # the latest path for this content
            if not self._for_copy:
                self._fetch(entry)
        self._file(entry)

    def can_admit(self, state: RequestState) -> bool:
        """Whether the request may run now, as far as adapters are concerned."""
        if state.adapter is None:
            return True
        first = self._first_stuck()
        if first is None or state.rank <= first.rank:
            return self._is_available(self._entry_of(state))
        is_bound = self._waits[first].num_overtakes >= self._max_overtakes
        return not is_bound and self._is_available(self._entry_of(state))

    def demand(self, state: RequestState) -> bool:
        """Whether a request may run before all others. If not, its adapter is fetched."""
        if state.adapter is None:
            return True
        entry = self._entry_of(state)
        if entry.copy is Copy.ABSENT:
            self._fetch(entry, BEFORE_ALL)
        return self._is_available(entry)

    def park(self, state: RequestState) -> None:
        """Keep a request that cannot be admitted until `wake` returns it."""
        wait = self._waits.get(state)
        if wait is None:
            wait = self._waits[state] = _Wait(time.monotonic())
            self._num_waits += 1
        else:
            wait.is_parked = True
        self.num_parked += 1
        self._file(self._entry_of(state))
        if self._for_copy and self._for_copy.peek() is state:
            self._may_wake = True  # its copy may be fetched at the cost of later requests

    def unpark(self, state: RequestState) -> None:
        """The caller keeps the request from now on. Others are ignored."""
        wait = self._waits.get(state)
        if wait is not None and wait.is_parked:
            wait.is_parked = False
            self.num_parked -= 1
            self._file(self._entry_of(state))

    def wake(self) -> list[RequestState]:
        """Take the parked requests that can be admitted now, at most one of each adapter."""
        if not self._may_wake:
            return []
        self._may_wake = False
        self._fetch_for_parked()
        woken = []
        for _ in range(self._slots.num_free):
            if not self._for_slot or not self.can_admit(state := self._for_slot.peek()):
                break
            self.unpark(state)
            woken.append(state)
        for entry in self._slots.adapters():
            if entry.stuck is not None and self.can_admit(entry.stuck):
                woken.append(entry.stuck)
                self.unpark(entry.stuck)
        return woken

    def admit(self, state: RequestState) -> int:
        """Take a slot for a request whose adapter is available. Returns the slot.

        A slot is overwritten although a step in flight may read it. That is safe: every worker
        runs a plan's jobs after the steps before it, and no request of a later step has the slot.
        """
        if state.adapter is None:
            return NO_SLOT
        first = self._first_stuck()
        if first is not None and first.rank < state.rank:
            wait = self._waits[first]
            wait.num_overtakes += 1
            self._most_overtakes = max(self._most_overtakes, wait.num_overtakes)
        entry = self._entry_of(state)
        entry.queue.remove(state)
        if (own := self._waits.pop(state, None)) is not None:
            self._longest_wait_s = max(self._longest_wait_s, time.monotonic() - own.since)
        if entry.slot is None:
            self._jobs.append(PlaceAdapter(entry.adapter.digest, self._slots.fill(entry)))
            self._num_placements += 1
        self._slots.hold(entry)
        entry.num_running += 1
        state.tower_slot = entry.slot if entry.changes_tower else None
        digest = entry.adapter.digest
        self._copies[digest] = self._copies.pop(digest)  # the most recently used
        self._file(entry)
        self._may_wake = True
        assert entry.slot is not None
        return entry.slot

    def release(self, state: RequestState) -> None:
        """A running request was preempted or has ended. Its adapter may leave its slot."""
        if state.adapter is None:
            return
        entry = self._entry_of(state)
        entry.num_running -= 1
        self._slots.let_go(entry)
        self._may_wake = True

    def forget(self, state: RequestState) -> None:
        """A request ended while it did not run."""
        entry = self._entries.get(state.adapter.digest) if state.adapter is not None else None
        if entry is None:
            return  # it has no adapter, or did not get past the gates
        self.unpark(state)
        self._waits.pop(state, None)
        entry.queue.remove(state)
        self._file(entry)
        self._tidy(entry)
        self._may_wake = True

    @property
    def has_work(self) -> bool:
        """Whether a step must be planned though no request needs one."""
        return bool(self._jobs or self._loads) or bool(self._unloadable()) or self.must_poll

    @property
    def must_poll(self) -> bool:
        """Whether someone waits for a copy that is being fetched."""
        fetching = (entry for entry in self._copies.values() if entry.copy is Copy.FETCHING)
        return any(entry.queue or entry.loads for entry in fetching)

    # -- copies without requests

    def load(self, adapter: Adapter, pin: bool = False) -> Future[None]:
        """Fetch an adapter. The answer is due once all workers hold it, or cannot."""
        self._check_enabled(adapter, "lora_name")
        if pin:
            self._pin(adapter)
        answer = Future[None]()
        entry = self._entry(adapter)
        self._unloading.discard(adapter.digest)
        if entry.copy is Copy.READY:
            answer.set_result(None)
            return answer
        entry.loads.append(answer)
        if entry.copy is Copy.ABSENT:
            entry.adapter = adapter
            self._loads.append(entry)
        return answer

    def unload(self, digest: str) -> None:
        """Unpin an adapter, and drop it once no request uses it. Unknown ones are ignored."""
        entry = self._entries.get(digest)
        if entry is None:
            return
        self._unloading.add(digest)
        entry.is_pinned = False
        self._slots.let_go(entry)
        self._may_wake = True

    def _pin(self, adapter: Adapter) -> None:
        pinned = [entry for entry in self._entries.values() if entry.is_pinned]
        entry = self._entry(adapter)
        if len(pinned) + (not entry.is_pinned) >= len(self._slots):
            self._tidy(entry)
            names = ", ".join(entry.adapter.name for entry in pinned) or "none"
            raise InputError(
                f"adapter {adapter.name!r} cannot be pinned: one of {len(self._slots)} slots must "
                f"be left for others (pinned: {names}); raise max_loras",
                "lora_name",
            )
        entry.is_pinned = True
        self._slots.hold(entry)

    # -- workers

    def take_jobs(self) -> list[AdapterJob]:
        """Return what workers must do before the next step, in order."""
        for digest in self._unloadable():
            self._drop(self._entries[digest])
        while self._loads and self._fetch_extra(self._loads[0]):
            self._loads.popleft()
        jobs, self._jobs = self._jobs, []
        return jobs

    def finish(self, job: FinishedJob) -> list[tuple[RequestState, str]]:
        """A fetch ended in all workers. Returns the requests that fail with it, and why."""
        entry = self._entries.get(job.digest)
        if entry is None or entry.copy is not Copy.FETCHING:
            return []
        self._may_wake = True
        loads, entry.loads = entry.loads, []
        if job.error is None:
            entry.copy = Copy.READY
            entry.learn(job.changes_tower)
            self._num_loads += 1
            for answer in loads:
                answer.set_result(None)
            self._file(entry)
            if len(self._copies) > self._max_copies:
                self._evict(None)
            return []
        entry.is_pinned = False
        self._drop(entry)  # some workers may hold it
        error = f"LoRA adapter {entry.adapter.name!r} cannot be loaded: {job.error}"
        for answer in loads:
            answer.set_exception(InputError(error, "lora_path"))
        return [(state, error) for state in entry.queue.in_order()]

    def failed_fetches(self, error: str) -> list[FinishedJob]:
        """For `finish`, to give up all fetches under way."""
        fetching = [digest for digest, e in self._copies.items() if e.copy is Copy.FETCHING]
        return [FinishedJob(digest, error) for digest in fetching]

    def reset(self, lost: Iterable[Job]) -> None:
        """Workers were reset and no request runs. `lost` are the jobs of steps that may not have
        run.

        Host copies outlive a reset. Slots are filled again, because a failed step may have left
        any content there. Jobs can be repeated: a worker that holds an adapter answers at once.
        """
        drops: list[AdapterJob] = [
            job for job in (*lost, *self._jobs) if isinstance(job, DropAdapter)
        ]
        fetching = (entry for entry in self._copies.values() if entry.copy is Copy.FETCHING)
        self._jobs = drops + [FetchAdapter(entry.adapter) for entry in fetching]
        self._slots.reset()
        self._may_wake = True

    def stats(self) -> AdapterStats:
        entries = self._entries.values()
        return AdapterStats(
            max_loras=len(self._slots),
            running=sorted({entry.adapter.name for entry in entries if entry.num_running}),
            waiting=sorted({entry.adapter.name for entry in entries if entry.queue}),
            num_copies=len(self._copies),
            num_loads=self._num_loads,
            num_evictions=self._num_evictions,
            num_placements=self._num_placements,
            num_waits=self._num_waits,
            longest_wait_s=self._longest_wait_s,
            most_overtakes=self._most_overtakes,
        )

    # -- details

    def _check_enabled(self, adapter: Adapter, field: str) -> None:
        if not self.is_enabled:
            raise InputError(f"adapter {adapter.name!r} needs an engine with enable_lora", field)

    def _unloadable(self) -> list[str]:
        entries = ((digest, self._entries[digest]) for digest in self._unloading)
        return [d for d, e in entries if e.is_idle and e.copy is not Copy.FETCHING]

    def _entry(self, adapter: Adapter) -> AdapterState:
        entry = self._entries.get(adapter.digest)
        if entry is None:
            entry = AdapterState(adapter, WaitingQueue(self._policy))
            self._entries[adapter.digest] = entry
        return entry

    def _entry_of(self, state: RequestState) -> AdapterState:
        assert state.adapter is not None
        return self._entries[state.adapter.digest]

    def _is_available(self, entry: AdapterState) -> bool:
        """Whether an adapter has a slot or can be given one."""
        has_slot = entry.slot is not None or self._slots.num_free > 0
        return entry.copy is Copy.READY and has_slot

    def _first_stuck(self) -> RequestState | None:
        """The first parked request, without those whose copy is being fetched."""
        stuck = [queue.peek() for queue in (self._for_copy, self._for_slot) if queue]
        return min(stuck, key=lambda state: state.rank, default=None)

    def _file(self, entry: AdapterState) -> None:
        """Update the queue that the adapter's first request is stuck in."""
        stuck, queue = None, None
        if entry.queue and entry.copy is not Copy.FETCHING:
            first = entry.queue.peek()
            wait = self._waits.get(first)
            if wait is not None and wait.is_parked:
                stuck = first
                queue = self._for_slot if entry.copy is Copy.READY else self._for_copy
        if (stuck, queue) == (entry.stuck, entry.stuck_in):
            return
        if entry.stuck is not None and entry.stuck_in is not None:
            entry.stuck_in.remove(entry.stuck)
        if stuck is not None and queue is not None:
            queue.put_back(stuck)
        entry.stuck, entry.stuck_in = stuck, queue

    def _fetch_for_parked(self) -> None:
        """Fetch for parked requests in order. The first may displace copies of later ones."""
        while self._for_copy:
            state = self._for_copy.peek()
            rank = state.rank if state is self._first_stuck() else None
            if not self._fetch(self._entry_of(state), rank):
                return

    def _fetch(self, entry: AdapterState, rank: tuple[float, ...] | None = None) -> bool:
        """Begin to fetch if there is a place or one can be made. See `_evict` for `rank`."""
        while len(self._copies) >= self._max_copies:
            if not self._evict(rank):
                return False
        self._begin(entry)
        return True

    def _fetch_extra(self, entry: AdapterState) -> bool:
        """Fetch without a request, if need be as one more copy than the limit."""
        if entry.copy is Copy.ABSENT and entry.loads and not self._fetch(entry):
            if len(self._copies) > self._max_copies:
                return False
            self._begin(entry)
        return True

    def _begin(self, entry: AdapterState) -> None:
        entry.copy = Copy.FETCHING
        self._copies[entry.adapter.digest] = entry
        self._jobs.append(FetchAdapter(entry.adapter))
        self._file(entry)

    def _evict(self, rank: tuple[float, ...] | None) -> bool:
        """Drop the least recently used copy that no request needs.

        With a rank, one that only waiting requests behind this rank need may be dropped, too.
        """
        victim = None
        for entry in self._copies.values():
            if entry.copy is not Copy.READY or entry.num_running or entry.is_pinned:
                continue
            if not entry.queue:
                victim = entry
                break
            if victim is None and rank is not None and entry.queue.peek().rank > rank:
                victim = entry
        if victim is None:
            return False
        self._drop(victim)
        self._num_evictions += 1
        return True

    def _drop(self, entry: AdapterState) -> None:
        """Drop the host copy, and with it the slot: a running request always has both."""
        if entry.copy is not Copy.ABSENT:
            del self._copies[entry.adapter.digest]
            self._jobs.append(DropAdapter(entry.adapter.digest))
        entry.copy = Copy.ABSENT
        self._slots.empty(entry)
        self._file(entry)
        self._tidy(entry)

    def _tidy(self, entry: AdapterState) -> None:
        """Forget an adapter that nobody uses."""
        unused = entry.is_idle and entry.copy is Copy.ABSENT
        if unused and not entry.loads and not entry.is_pinned:
            self._entries.pop(entry.adapter.digest, None)
            self._unloading.discard(entry.adapter.digest)
