"""Replicas come, go and change their model while requests run on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from fake_engines import Bench, on_a_loop

from penstock.config import EngineConfig
from penstock.engine import replica_operations
from penstock.engine.ledger import DeltaStream
from penstock.engine.replica_operations import ReplicaOperations
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import EngineDeadError, InputError, ModelError

NEW = EngineConfig.from_options({"model": "new"})
BROKEN = EngineConfig.from_options({"model": "broken"})


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_operations, "LOOK_INTERVAL_S", 0)


class Site:
    """Replicas, and an operator. Engines let go of requests at once when they are told to."""

    def __init__(self, num_replicas: int = 3, **options: Any) -> None:
        self.bench = Bench(num_replicas=num_replicas, **options)
        self.replicas = self.bench.replicas
        self.replicas.config = EngineConfig()
        self.operations = ReplicaOperations(self.replicas)

    def start(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(work)

    async def turn(self) -> None:
        """Let tasks and engines get on."""
        for _ in range(10):
            await asyncio.sleep(0)
            for index, item in self.replicas.members.items():
                if item.dispatch.is_healthy:
                    self.bench.let_go(index)

    def place_of(self, request_id: str) -> int | None:
        return self.bench.client.records[request_id].replica

    def states(self) -> list[str]:
        return [item.state for _, item in sorted(self.replicas.members.items())]

    def models(self) -> list[str | None]:
        """The models that engines were loaded with; None: not by an operation."""
        supervisors: list[Any] = [
            item.dispatch._supervisor for _, item in sorted(self.replicas.members.items())
        ]
        return [item.config.model.model if item.config else None for item in supervisors]

    async def end(self, stream: DeltaStream, *tokens: int) -> None:
        """End all requests with one more token. `tokens` is what they got, all in all."""
        for record in list(self.bench.client.records.values()):
            assert record.replica is not None
            self.bench.say(
                record.request_id, 9, replica=record.replica, finish_reason=FinishReason.STOP
            )
        got: dict[str, list[int]] = {}
        async for deltas in stream:
            for delta in deltas:
                got.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert set(map(tuple, got.values())) == {tokens}


@on_a_loop
async def test_a_replica_is_drained_when_its_last_request_has_ended() -> None:
    site = Site()
    stream = site.bench.submit("a", rank=1)
    draining = site.start(site.operations.drain(1, timeout_s=3600))
    await site.turn()
    site.bench.submit("b", "c", "d", rank=1)
    assert {site.place_of(name) for name in "bcd"} <= {0, 2}
    assert site.states() == ["serving", "draining", "serving"]
    assert not draining.done()
    site.bench.say("a", 1, replica=1, finish_reason=FinishReason.STOP)
    await draining
    assert [delta.token_ids async for deltas in stream for delta in deltas] == [[1]]


@on_a_loop
async def test_after_the_time_is_over_requests_go_on_elsewhere() -> None:
    site = Site(num_replicas=2)
    stream = site.bench.submit("a", "b", rank=0)
    for name in "ab":
        site.bench.say(name, 5, replica=0)
    draining = site.start(site.operations.drain(0, timeout_s=0))
    await site.turn()
    await draining
    assert site.place_of("a") == site.place_of("b") == 1
    assert ("add", "a", [5]) in site.bench.engine_of(1).sent
    assert site.bench.told.count("on_replay") == 2
    await site.end(stream, 5, 9)


@on_a_loop
async def test_the_last_replica_that_takes_requests_stays() -> None:
    site = Site(num_replicas=2)
    await site.operations.drain(0, timeout_s=0)
    for refused in (site.operations.drain(1, 0), site.operations.remove(1, 0)):
        with pytest.raises(InputError, match="no replica but 1 takes requests now: add another"):
            await refused
    assert site.states() == ["draining", "serving"]
    await site.operations.restart(0, timeout_s=0)
    assert site.states() == ["serving", "serving"]
    with pytest.raises(InputError, match="there is no replica 7 here, only 0, 1"):
        await site.operations.restart(7, timeout_s=0)


@on_a_loop
async def test_replicas_are_added_and_removed() -> None:
    site = Site(num_replicas=1)
    stream = site.bench.submit("a")
    followed: list[int] = []  # what they have cached
    site.replicas._follow = followed.append  # type: ignore[method-assign]
    assert await site.operations.add() == 1
    assert followed == [0, 1]
    site.bench.submit("b")
    assert site.place_of("b") == 1, "the first has more to do"
    removing = site.start(site.operations.remove(0, timeout_s=0))
    await site.turn()
    await removing
    assert list(site.replicas.members) == [1]
    assert "on_gone" in site.bench.told
    assert site.place_of("a") == 1
    assert await site.operations.add() == 0
    assert site.bench.client.max_num_seqs == 16
    await site.end(stream, 9)


@on_a_loop
async def test_a_replica_that_cannot_be_added_leaves_nothing() -> None:
    site = Site()
    site.operations._config = BROKEN
    with pytest.raises(ModelError, match="this model is broken"):
        await site.operations.add()
    assert site.states() == ["serving"] * 3


@on_a_loop
async def test_a_rolling_restart_loses_nothing() -> None:
    site = Site()
    stream = site.bench.submit(*"abcdef")
    for record in list(site.bench.client.records.values()):
        assert record.replica is not None
        site.bench.say(record.request_id, 5, replica=record.replica)
    before = [item.dispatch for item in site.replicas.members.values()]
    rolling = site.start(site.operations.rolling_restart(timeout_s=0))
    while not rolling.done():
        await site.turn()
    await rolling
    assert not {id(item.dispatch) for item in site.replicas.members.values()} & set(map(id, before))
    closed: list[Any] = [item._supervisor for item in before]
    assert all(item.is_closed for item in closed)
    assert site.states() == ["serving"] * 3
    assert "on_restart" not in site.bench.told, "that counts crashes"
    await site.end(stream, 5, 9)


@on_a_loop
async def test_a_single_replica_is_restarted_while_its_requests_wait() -> None:
    site = Site(num_replicas=1)
    stream = site.bench.submit("a")
    site.bench.say("a", 5)
    restarting = site.start(site.operations.restart(0, timeout_s=3600))
    await site.turn()
    await restarting
    assert site.bench.engine.sent == [("add", "a", [5])]
    assert not site.bench.client.is_lost
    await site.end(stream, 5, 9)


@on_a_loop
async def test_a_single_replica_that_does_not_come_back_is_the_end() -> None:
    site = Site(num_replicas=1)
    site.operations._config = BROKEN
    stream = site.bench.submit("a")
    restarting = site.start(site.operations.restart(0, timeout_s=0))
    await site.turn()
    with pytest.raises(ModelError):
        await restarting
    assert site.bench.client.is_lost
    with pytest.raises(EngineDeadError, match="the last replica was not restarted"):
        await stream.__anext__()


# -- versions


@on_a_loop
async def test_requests_end_with_the_version_that_they_began_with() -> None:
    site = Site(num_replicas=2)
    old = site.bench.submit("old", rank=0)
    site.bench.say("old", 5, replica=0)
    fresh = site.bench.submit("fresh", rank=0)  # has no token yet
    rolling = site.start(site.operations.rolling_restart(0, NEW))
    await site.turn()
    assert site.place_of("old") == 1, "where its version is"
    assert site.place_of("fresh") == 0, "it may begin with the new version"
    assert site.models() == ["new", None]
    assert not rolling.done(), "nobody else can end `old`"
    new = site.bench.submit("new")
    assert site.place_of("new") == 0
    site.bench.say("old", 9, replica=1, finish_reason=FinishReason.STOP)
    await site.turn()
    await rolling
    assert site.models() == ["new", "new"]
    assert [delta.token_ids async for deltas in old for delta in deltas] == [[5], [9]]
    for stream in (fresh, new):
        stream.close()


@on_a_loop
async def test_the_last_replica_of_a_version_that_dies_is_waited_for() -> None:
    site = Site(num_replicas=2)
    stream = site.bench.submit("old", rank=1)
    site.bench.say("old", 5, replica=1)
    rolling = site.start(site.operations.rolling_restart(0, NEW))
    await site.turn()
    assert site.models() == ["new", None]
    site.bench.die("old", replica=1)
    assert site.place_of("old") is None, "the other replica has another version"
    await site.turn()
    site.bench.revive(1)  # with the version that it had
    assert site.place_of("old") == 1
    await site.end(stream, 5, 9)
    await site.turn()
    await rolling


@on_a_loop
async def test_requests_of_a_version_that_is_gone_fail() -> None:
    site = Site(num_replicas=2, restart_engine=False)
    old = site.bench.submit("old", rank=1)
    site.bench.say("old", 5, replica=1)
    site.start(site.operations.rolling_restart(0, NEW))
    await site.turn()
    fresh = site.bench.submit("fresh")
    assert [delta.token_ids for delta in await old.__anext__()] == [[5]]
    site.bench.die(replica=1)
    site.bench.lose(1)
    with pytest.raises(EngineDeadError, match="for good"):
        await old.__anext__()
    assert site.place_of("fresh") == 0
    fresh.close()
    await site.turn()
    assert site.states() == ["serving", "serving"], "the restart goes on"


@on_a_loop
async def test_a_version_that_does_not_load_changes_nothing() -> None:
    site = Site(num_replicas=2)
    stream = site.bench.submit("a", "b")
    rolling = site.start(site.operations.rolling_restart(0, BROKEN))
    while not rolling.done():
        await site.turn()
    with pytest.raises(ModelError, match="this model is broken"):
        await rolling
    assert site.states() == ["serving", "serving"]
    assert "broken" not in site.models()
    assert {item.version for item in site.replicas.members.values()} == {0}
    await site.end(stream, 9)


@on_a_loop
async def test_a_drained_replica_is_used_again_when_it_is_the_last() -> None:
    site = Site(num_replicas=2, restart_engine=False)
    await site.operations.drain(0, timeout_s=0)
    stream = site.bench.submit("a")
    site.bench.say("a", 5, replica=1)
    site.bench.die(replica=1)
    site.bench.lose(1)
    assert site.states() == ["serving", "failed"]
    await site.end(stream, 5, 9)
