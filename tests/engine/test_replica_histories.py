"""Any order of arrivals, steps, deaths and operations: each token comes once, the right one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from fake_engines import Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import EngineConfig
from penstock.engine import replica_operations
from penstock.engine.ledger import DeltaStream
from penstock.engine.messages import Outputs
from penstock.engine.replica_operations import ReplicaOperations
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import CrashFault, EngineDeadError, InputError, ModelError

NUM_REPLICAS, NUM_TOKENS = 3, 4
VERSION = 100  # added to a token for each version of the model

which = st.integers(0, NUM_REPLICAS)
steps = st.tuples(st.just("step"), which)
faults = st.tuples(st.sampled_from(["kill", "revive", "vacate"]), which)
arrivals = st.tuples(st.just("submit"), st.integers(0, 5))  # 0 and 1 kill
operations = st.tuples(st.sampled_from(["add", "drain", "restart", "remove", "roll"]), which)
histories = st.lists(st.one_of(arrivals, steps, steps, steps, faults), max_size=60)
operated = st.lists(st.one_of(arrivals, steps, steps, steps, faults, operations), max_size=60)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_operations, "LOOK_INTERVAL_S", 0)


class World:
    """Replicas whose engines compute: the next token is how many there are.

    A request whose id ends in `!` kills its engine after a token, one in `!!` before its first.
    """

    def __init__(self, restarts: bool) -> None:
        self.bench = Bench(num_replicas=NUM_REPLICAS, restart_engine=restarts)
        self.bench.replicas.config = EngineConfig()
        self.operator = ReplicaOperations(self.bench.replicas)
        self.restarts = restarts
        self.streams: dict[str, DeltaStream] = {}
        self.changes: list[asyncio.Future[Any]] = []

    @property
    def indexes(self) -> list[int]:
        return list(self.bench.replicas.members)

    async def happen(self, what: str, index: int) -> None:
        is_there = index in self.indexes
        if what in ("submit", "add", "drain", "restart", "remove", "roll") or is_there:
            getattr(self, what)(index)
        for _ in range(3):
            await asyncio.sleep(0)

    def submit(self, kind: int) -> None:
        name = f"{len(self.streams)}{ {0: '!!', 1: '!'}.get(kind, '') }"
        if not self.bench.client.is_lost:
            self.streams[name] = self.bench.submit(name)

    # -- engines

    def step(self, index: int) -> None:
        bench, engine = self.bench, self.bench.engine_of(index)
        if not engine.is_ready:
            return
        bench.let_go(index)
        self.check_trial(index)
        if any(self.is_fatal(name, num) for name, num in engine.running.items()):
            self.kill(index)
            return
        version, deltas = bench.replicas.members[index].version, []
        for name, num in list(engine.running.items()):
            engine.running[name] += 1
            is_last = num + 1 == NUM_TOKENS
            reason = FinishReason.STOP if is_last else None
            token = num + VERSION * version
            deltas.append(EngineDelta(request_id=name, token_ids=[token], finish_reason=reason))
            if is_last:
                del engine.running[name]
        bench.dispatch_of(index)._on_outputs(Outputs(deltas))

    def is_fatal(self, name: str, num_tokens: int) -> bool:
        return name.endswith("!!") or (name.endswith("!") and num_tokens == 1)

    def check_trial(self, index: int) -> None:
        """A suspect is alone on its engine, or still waits for that."""
        suspects = set(self.bench.dispatch_of(index).suspects)
        running = set(self.bench.engine_of(index).running)
        assert not (suspects & running) or len(running) == 1

    def kill(self, index: int) -> None:
        engine = self.bench.engine_of(index)
        if engine.is_ready:
            self.bench.die(*engine.running, replica=index)
            if not self.restarts:
                self.bench.lose(index)

    def revive(self, index: int) -> None:
        supervisor: Any = self.bench.dispatch_of(index)._supervisor
        is_dead = not supervisor.engine.is_ready and not supervisor.is_closed
        if is_dead and self.restarts:
            self.bench.revive(index)

    def vacate(self, index: int) -> None:
        self.bench.dispatch_of(index).vacate()

    # -- operations

    def _start(self, work: Awaitable[Any]) -> None:
        self.changes.append(asyncio.ensure_future(work))

    def add(self, _: int) -> None:
        if len(self.indexes) <= NUM_REPLICAS:
            self._start(self.operator.add())

    def drain(self, index: int) -> None:
        self._start(self.operator.drain(index, timeout_s=0))

    def restart(self, index: int) -> None:
        self._start(self.operator.restart(index, timeout_s=0))

    def remove(self, index: int) -> None:
        self._start(self.operator.remove(index, timeout_s=0))

    def roll(self, index: int) -> None:
        model = "broken" if index == 0 else f"version {index}"
        config = EngineConfig.from_options({"model": model})
        self._start(self.operator.rolling_restart(0, config))

    # -- the end

    async def end(self) -> None:
        """Let all that is left come to its end."""
        for _ in range(3000):
            if self.bench.client.is_lost:
                break
            for index in self.indexes:
                await self.happen("revive", index)
                await self.happen("step", index)
            if not self.bench.client.records and all(item.done() for item in self.changes):
                break
        assert not self.bench.client.records, "some do not end"
        for change in self.changes:
            change.cancel()
        for result in await asyncio.gather(*self.changes, return_exceptions=True):
            if isinstance(result, Exception):
                assert isinstance(result, (InputError, EngineDeadError, ModelError)), result

    async def check(self) -> None:
        members = self.bench.replicas.members.values()
        assert not any(item.num_requests for item in members)
        num_left = sum(not item.dispatch.is_lost for item in members)
        for name, stream in self.streams.items():
            tokens, num_ends, error = await ending_of(stream)
            versions = {token // VERSION for token in tokens}
            assert len(versions) < 2, "two versions of the model"
            assert [token % VERSION for token in tokens] == list(range(len(tokens)))
            if error is None:
                assert (len(tokens), num_ends) == (NUM_TOKENS, 1)
                assert not name.endswith("!"), "the guilty get no further"
            elif self.restarts:
                assert name.endswith("!")
                assert isinstance(error, CrashFault)
            else:  # too few replicas were left, or none of its version
                is_excused = num_left <= 1 or self.operator._version > 0 or self.changes
                assert name.endswith("!") or is_excused


async def ending_of(stream: DeltaStream) -> tuple[list[int], int, Exception | None]:
    """A stream's tokens, how often it ended, and its error."""
    tokens: list[int] = []
    num_ends = 0
    try:
        async for deltas in stream:
            for delta in deltas:
                tokens += delta.token_ids
                num_ends += delta.finish_reason is not None
    except (CrashFault, EngineDeadError) as error:
        return tokens, num_ends, error
    return tokens, num_ends, None


def play(history: list[tuple[str, int]], restarts: bool) -> None:
    async def run() -> None:
        world = World(restarts)
        for what, index in history:
            await world.happen(what, index)
        await world.end()
        await world.check()

    asyncio.run(run())


@settings(deadline=None)
@given(history=histories, restarts=st.booleans())
def test_whatever_dies_each_token_comes_once_and_only_the_guilty_fail(
    history: list[tuple[str, int]], restarts: bool
) -> None:
    play(history, restarts)


@settings(deadline=None)
@given(history=operated, restarts=st.booleans())
def test_so_it_is_while_replicas_come_go_and_change_their_model(
    history: list[tuple[str, int]], restarts: bool
) -> None:
    play(history, restarts)
