"""DeviceSlots: decides which adapter lies in which device slot."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.protocol.adapter import Adapter
from penstock.scheduler.policy import WaitingQueue
from penstock.scheduler.request import RequestState


class Copy(enum.Enum):
    """The host copy of an adapter, in all workers."""

    ABSENT = "absent"
    FETCHING = "fetching"
    READY = "ready"


@dataclass(eq=False)
class AdapterState:
    """One adapter that requests use, or that is in host memory."""

    adapter: Adapter
    queue: WaitingQueue  # its requests that do not run
    copy: Copy = Copy.ABSENT
    slot: int | None = None  # holds it; implies that the copy is ready
    num_running: int = 0  # requests; implies a slot
    is_pinned: bool = False
    changes_tower: bool = False  # known once the copy is ready
    stuck: RequestState | None = None  # its first request, if that is parked
    stuck_in: WaitingQueue | None = None  # among the stuck requests of other adapters
    loads: list[Future[None]] = field(default_factory=list)  # answered once the copy is ready

    def learn(self, changes_tower: bool) -> None:
        """Its copy is ready, and tells whether the embeddings of media depend on it."""
        self.changes_tower = changes_tower
        for state in self.queue.in_order():
            self.key_media(state)

    def key_media(self, state: RequestState) -> None:
        if self.changes_tower and state.media:
            state.key_media_by_adapter()

    @property
    def is_idle(self) -> bool:
        return not self.queue and not self.num_running


class DeviceSlots:
    """A slot is free if no running request reads it and its adapter is not pinned."""

    def __init__(self, num_slots: int) -> None:
        self._adapters: list[AdapterState | None] = [None] * num_slots
        self._free: dict[int, None] = dict.fromkeys(range(num_slots))  # least recently used first

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def adapters(self) -> list[AdapterState]:
        """What the slots hold."""
        return [adapter for adapter in self._adapters if adapter is not None]

    def fill(self, adapter: AdapterState) -> int:
        """Give an adapter the free slot that was least recently used. Returns the slot."""
        slot = next(iter(self._free))
        adapter.slot = slot
        before, self._adapters[slot] = self._adapters[slot], adapter
        if before is not None:
            before.slot = None
        return slot

    def hold(self, adapter: AdapterState) -> None:
        """Keep the adapter in its slot, if it has one."""
        if adapter.slot is not None:
            self._free.pop(adapter.slot, None)

    def let_go(self, adapter: AdapterState) -> None:
        """Others may have the adapter's slot, unless the adapter is pinned or runs."""
        if adapter.slot is not None and not adapter.is_pinned and not adapter.num_running:
            self._free[adapter.slot] = None

    def empty(self, adapter: AdapterState) -> None:
        """Take the adapter out of its slot, if it has one. The slot is filled next."""
        if adapter.slot is not None:
            self._adapters[adapter.slot] = None
            self._free.pop(adapter.slot, None)
            self._free = {adapter.slot: None, **self._free}
            adapter.slot = None

    def reset(self) -> None:
        """Empty all slots. No request runs."""
        for adapter in self.adapters():
            adapter.slot = None
        self._adapters = [None] * len(self._adapters)
        self._free = dict.fromkeys(range(len(self._adapters)))
