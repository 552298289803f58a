"""AdapterStore: owns a worker's LoRA adapters, in host memory and in the device's slots."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from penstock.layers.lora import AdapterWeights, LayerSlots
from penstock.platforms.platform import is_out_of_memory
from penstock.protocol.adapter import (
    Adapter,
    AdapterJob,
    DropAdapter,
    FetchAdapter,
    FinishedJob,
    PlaceAdapter,
)
from penstock.protocol.errors import AdapterError, EngineDeadError, PenstockError

logger = logging.getLogger(__name__)

Shares = dict[str, Any]  # this rank's share of an adapter, by layer; see `LayerSlots.prepare`


class AdapterStore:
    """Runs the jobs of plans, in order.

    Adapters are read in a thread, beside the steps. A failure there becomes a text for the client.
    Steps and placements run in one thread and on one stream, so a placed slot is read by the steps
    after it and by none before.

    Replicas that share experts each have a store on every rank: with the adapters of its requests,
    in all layers or, as a guest on another replica's rank, in the experts there.
    """

    def __init__(
        self,
        slots: Mapping[str, LayerSlots],  # by layer
        num_slots: int,
        read: Callable[[Adapter], AdapterWeights],
        tower: str | None = None,  # the module that encodes media
        lane: int = 0,  # of the replica
        guests: Sequence[AdapterStore] = (),  # on this rank, by lane
        changeable: Container[str] | None = None,  # layers, also on other ranks; None: `slots`
    ) -> None:
        self.num_slots = num_slots
        self._slots = slots
        self._needs_rows = False
        self._read = read
        self._tower = tower
        self.lane = lane
        self._by_lane = {store.lane: store for store in (self, *guests)}
        self._changeable = slots if changeable is None else changeable
        self._lock = threading.Lock()  # held for all that follows
        self._fetches: deque[Adapter] = deque()  # the first one is being read
        self._shares: dict[str, Shares] = {}  # by digest
        self._dropped: set[str] = set()  # while they were to be fetched
        self._finished: list[FinishedJob] = []

    def run(self, jobs: Sequence[AdapterJob]) -> None:
        for job in jobs:
            store = self._by_lane[job.lane]
            if isinstance(job, FetchAdapter):
                store._fetch(job.adapter)
            elif isinstance(job, PlaceAdapter):
                store._place(job)
            else:
                assert isinstance(job, DropAdapter)
                store._drop(job.digest)

    def take_finished(self) -> list[FinishedJob]:
        """The fetches that have ended since the last call."""
        return [job for store in self._by_lane.values() for job in store._take_finished()]

    def _take_finished(self) -> list[FinishedJob]:
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    @property
    def needs_rows(self) -> bool:
        """See `LayerSlots.needs_rows`."""
        return self._needs_rows

    @property
    def digests(self) -> set[str]:
        """The adapters in host memory."""
        with self._lock:
            return set(self._shares)

    def _fetch(self, adapter: Adapter) -> None:
        """A fetch may be repeated after a failed step. It is reported once all the same."""
        with self._lock:
            self._dropped.discard(adapter.digest)
            reported = any(job.digest == adapter.digest for job in self._finished)
            if reported or any(other.digest == adapter.digest for other in self._fetches):
                return
            self._fetches.append(adapter)
            is_first = len(self._fetches) == 1
        if is_first:
            threading.Thread(target=self._serve, name="adapters", daemon=True).start()

    def _place(self, job: PlaceAdapter) -> None:
        try:
            with self._lock:
                shares = self._shares[job.digest]
            for name, slots in self._slots.items():
                slots.place(job.slot, shares.get(name))
            self._needs_rows = any(slots.needs_rows for slots in self._slots.values())
        except Exception as error:  # the slot is neither the old adapter nor the new one
            raise EngineDeadError(
                f"adapter slot {job.slot} could not be filled: {error}"
            ) from error

    def _drop(self, digest: str) -> None:
        with self._lock:
            self._shares.pop(digest, None)
            self._finished = [job for job in self._finished if job.digest != digest]
            if any(adapter.digest == digest for adapter in self._fetches):
                self._dropped.add(digest)

    def _serve(self) -> None:
        """Fetch one adapter after the other, until none is left.

        Every fetch is reported once, unless the adapter was dropped meanwhile.

        A thread that waited for more would keep the model alive after its engine has closed.
        """
        while True:
            with self._lock:
                if not self._fetches:
                    return
                adapter = self._fetches[0]
                is_needed = adapter.digest not in (self._shares.keys() | self._dropped)
            error, shares = None, None
            if is_needed:
                try:
                    shares = self._load(adapter)
                except Exception as failure:
                    error = _text_of(adapter, failure)
            with self._lock:
                self._fetches.popleft()
                if adapter.digest in self._dropped:
                    self._dropped.discard(adapter.digest)
                    continue
                if shares is not None:
                    self._shares[adapter.digest] = shares
                elif error is None and adapter.digest not in self._shares:
                    self._fetches.append(adapter)  # dropped, and then wanted again
                    continue
                changed = self._shares.get(adapter.digest, ())
                changes_tower = any(name.startswith(f"{self._tower}.") for name in changed)
                self._finished.append(FinishedJob(adapter.digest, error, changes_tower, self.lane))

    @torch.inference_mode()
    def _load(self, adapter: Adapter) -> Shares:
        weights = self._read(adapter)
        changed = {name for name, _ in weights.linear}
        changed.update(weights.embedding, weights.replaced, weights.experts)
        if missing := sorted(name for name in changed if name not in self._changeable):
            raise AdapterError(
                f"the adapter {adapter.name!r} changes {missing[0]}, which adapters cannot change "
                "in this engine: serve it merged into the model instead (penstock merge)"
            )
        shares = {name: slots.prepare(weights) for name, slots in self._slots.items()}
        return {name: share for name, share in shares.items() if share is not None}


def _text_of(adapter: Adapter, failure: Exception) -> str:
    """What a client is told of a failed fetch."""
    if isinstance(failure, PenstockError):
        return str(failure)
    logger.error("The adapter %s could not be loaded", adapter.name, exc_info=failure)
    reason = "out of memory" if is_out_of_memory(failure) else failure
    return f"the adapter {adapter.name!r} could not be loaded: {reason}"
