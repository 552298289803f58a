"""A worker's adapters: fetched beside the steps, placed in order, and failures that harm nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from waiting import eventually

from penstock.layers.lora import AdapterWeights, PartDelta
from penstock.protocol.adapter import (
    Adapter,
    DropAdapter,
    FetchAdapter,
    FinishedJob,
    PlaceAdapter,
)
from penstock.protocol.errors import EngineDeadError, ModelError
from penstock.runner.adapters import AdapterStore


class Recorder:
    """A layer's slots that remember what they were given."""

    def __init__(self) -> None:
        self.placed: dict[int, Any] = {}

    needs_rows = False

    def prepare(self, weights: AdapterWeights) -> Any:
        delta = weights.linear.get(("layer", ""))
        return None if delta is None else float(delta.a.sum())

    def place(self, slot: int, own: Any) -> None:
        self.placed[slot] = own


def adapter(name: str) -> Adapter:
    return Adapter(name, f"digest-{name}", f"/adapters/{name}")


def weights(value: float, module: str = "layer") -> AdapterWeights:
    delta = PartDelta(torch.full((1, 1), value), torch.ones(1, 1))
    return AdapterWeights(1, linear={(module, ""): delta})


def store_of(read: Callable[[Adapter], AdapterWeights]) -> tuple[AdapterStore, Recorder]:
    layer = Recorder()
    return AdapterStore({"layer": layer}, 2, read), layer


def finish(store: AdapterStore, count: int) -> list[FinishedJob]:
    """Wait for so many reports."""
    reports: list[FinishedJob] = []

    def has_all() -> bool:
        reports.extend(store.take_finished())
        return len(reports) >= count

    eventually(has_all)
    return reports


def test_an_adapter_is_fetched_then_placed_and_slots_outlive_the_copy() -> None:
    store, layer = store_of(lambda one: weights(3.0))
    store.run([FetchAdapter(adapter("a"))])
    assert finish(store, 1) == [FinishedJob("digest-a")]
    store.run([PlaceAdapter("digest-a", 1), DropAdapter("digest-a")])
    assert layer.placed == {1: 3.0}
    assert store.digests == set()


def test_fetching_does_not_block_other_jobs() -> None:
    may_go_on = threading.Event()

    def read(one: Adapter) -> AdapterWeights:
        if one.name == "slow":
            assert may_go_on.wait(60)
        return weights(1.0)

    store, layer = store_of(read)
    store.run([FetchAdapter(adapter("a"))])
    finish(store, 1)
    store.run([FetchAdapter(adapter("slow")), PlaceAdapter("digest-a", 0)])
    assert layer.placed == {0: 1.0}
    assert store.take_finished() == []
    may_go_on.set()
    assert finish(store, 1) == [FinishedJob("digest-slow")]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModelError("rank 32 is above max_lora_rank (16)"), "rank 32 is above max_lora_rank (16)"),
        (RuntimeError("no luck"), "the adapter 'bad' could not be loaded: no luck"),
        (MemoryError(), "the adapter 'bad' could not be loaded: out of memory"),
    ],
)
def test_a_failed_fetch_is_reported_and_later_ones_succeed(error: Exception, text: str) -> None:
    def read(one: Adapter) -> AdapterWeights:
        if one.name == "bad":
            raise error
        return weights(1.0)

    store, _ = store_of(read)
    store.run([FetchAdapter(adapter("bad")), FetchAdapter(adapter("good"))])
    assert finish(store, 2) == [FinishedJob("digest-bad", text), FinishedJob("digest-good")]
    assert store.digests == {"digest-good"}
    store.run([FetchAdapter(adapter("bad"))])  # each fetch is tried and reported
    assert finish(store, 1) == [FinishedJob("digest-bad", text)]


def test_an_adapter_of_a_layer_without_slots_is_refused() -> None:
    store, _ = store_of(lambda one: weights(1.0, "model.kv_b_proj"))
    store.run([FetchAdapter(adapter("a"))])
    (report,) = finish(store, 1)
    assert report.error is not None
    assert "changes model.kv_b_proj" in report.error
    assert "penstock merge" in report.error


def store_that_fetches_a() -> tuple[AdapterStore, threading.Event]:
    """It is in the middle of reading "a", and goes on when the event is set."""
    begun, may_go_on = threading.Event(), threading.Event()

    def read(one: Adapter) -> AdapterWeights:
        begun.set()
        assert may_go_on.wait(60)
        return weights(1.0)

    store, _ = store_of(read)
    store.run([FetchAdapter(adapter("a"))])
    assert begun.wait(60)
    return store, may_go_on


def test_an_adapter_dropped_while_it_is_fetched_leaves_no_copy() -> None:
    store, may_go_on = store_that_fetches_a()
    store.run([DropAdapter("digest-a")])
    may_go_on.set()
    store.run([FetchAdapter(adapter("b"))])
    assert finish(store, 1) == [FinishedJob("digest-b")]
    assert store.digests == {"digest-b"}
    store.run([FetchAdapter(adapter("a"))])
    finish(store, 1)
    assert store.digests == {"digest-a", "digest-b"}


def test_a_repeated_fetch_is_reported_once() -> None:
    store, may_go_on = store_that_fetches_a()
    store.run([FetchAdapter(adapter("a")), DropAdapter("digest-a"), FetchAdapter(adapter("a"))])
    may_go_on.set()
    eventually(lambda: store.digests == {"digest-a"})
    store.run([FetchAdapter(adapter("a")), FetchAdapter(adapter("b"))])
    assert finish(store, 2) == [FinishedJob("digest-a"), FinishedJob("digest-b")]
    store.run([FetchAdapter(adapter("a"))])
    assert finish(store, 1) == [FinishedJob("digest-a")]


def test_a_slot_that_cannot_be_filled_ends_the_engine() -> None:
    store, _ = store_of(lambda one: weights(1.0))
    with pytest.raises(EngineDeadError, match="slot 0 could not be filled"):
        store.run([PlaceAdapter("digest-unknown", 0)])


def test_replicas_that_share_a_layer_have_slots_and_copies_of_their_own() -> None:
    """The layers that they do not share are not asked for."""
    names = ["layer", "experts"]
    own = {name: Recorder() for name in names}
    guest = Recorder()

    def read(one: Adapter) -> AdapterWeights:
        return weights(3.0)

    others = AdapterStore({"experts": guest}, 2, read, lane=0, changeable=own)
    store = AdapterStore(own, 2, read, lane=1, guests=[others])
    store.run([FetchAdapter(adapter("a"), lane=1), FetchAdapter(adapter("a"), lane=0)])
    reports = finish(store, 2)
    assert sorted(job.lane for job in reports) == [0, 1]
    assert [job.error for job in reports] == [None, None]
    jobs = [PlaceAdapter("digest-a", 1, lane=1), DropAdapter("digest-a", lane=1)]
    store.run([*jobs, PlaceAdapter("digest-a", 0, lane=0)])
    assert own["layer"].placed == {1: 3.0}
    assert list(own["experts"].placed) == [1]
    assert list(guest.placed) == [0]
    assert (store.digests, others.digests) == (set(), {"digest-a"})


def test_an_idle_store_has_no_thread() -> None:
    store, _ = store_of(lambda one: weights(1.0))
    store.run([FetchAdapter(adapter("a")), FetchAdapter(adapter("b"))])
    finish(store, 2)
    eventually(lambda: all(thread.name != "adapters" for thread in threading.enumerate()))
