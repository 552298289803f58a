"""Which replica runs a request, and who goes on where when one of them dies."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engines import Bench, on_a_loop

from penstock.config import EngineConfig
from penstock.engine.replicas import replica_config
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import ConfigError, CrashFault, EngineDeadError


def placed(bench: Bench) -> dict[str, int | None]:
    return {record.request_id: record.replica for record in bench.client.records.values()}


def forget_sent(bench: Bench) -> None:
    for index in bench.replicas.members:
        bench.engine_of(index).take()


@on_a_loop
async def test_requests_are_spread_over_the_replicas() -> None:
    bench = Bench(num_replicas=3)
    bench.submit("a", "b", "c", "d")
    assert sorted(len(bench.engine_of(index).running) for index in range(3)) == [1, 1, 2]
    bench.say("b", 1, replica=1, finish_reason=FinishReason.STOP)
    bench.submit("e")
    assert placed(bench)["e"] == 1, "it has the least to do"


@on_a_loop
async def test_a_client_may_name_a_replica_but_does_not_wait_for_it() -> None:
    bench = Bench(num_replicas=2)
    bench.submit("a", "b", "c", rank=1)
    assert placed(bench) == dict.fromkeys("abc", 1)
    bench.die(replica=1)
    bench.submit("d", rank=1)
    assert placed(bench)["d"] == 0


@on_a_loop
async def test_requests_of_a_dead_replica_go_on_at_once_on_the_others() -> None:
    bench = Bench(num_replicas=3)
    bench.submit("a", "b", "c")
    bench.say("b", 5, 6, replica=1)
    forget_sent(bench)
    bench.die("b", replica=1)
    assert bench.engine_of(0).take() == [("add", "b", [5, 6])]
    assert bench.client.is_healthy
    bench.submit("d")
    assert placed(bench)["d"] == 2, "nobody is sent to a replica that restarts"
    assert bench.revive(replica=1) == []


@on_a_loop
async def test_suspects_wait_for_the_restart_and_run_alone_there() -> None:
    bench = Bench(num_replicas=2)
    bench.submit("a")
    stream = bench.submit("b")
    forget_sent(bench)
    bench.die("b", replica=1)
    bench.submit("c")
    assert bench.engine_of(0).take() == [("add", "c", [])], "b runs beside nobody"
    assert bench.revive(replica=1) == [("add", "b", [])]
    bench.submit("d")
    assert placed(bench)["d"] == 0, "the replica is b's alone"
    bench.say("b", 7, replica=1)
    bench.let_go(1)
    assert placed(bench)["b"] == 1, "it may run anywhere by now, and here is nobody"
    bench.say("b", 8, replica=1, finish_reason=FinishReason.STOP)
    tokens = [token async for deltas in stream for delta in deltas for token in delta.token_ids]
    assert tokens == [7, 8]


@on_a_loop
async def test_one_that_always_kills_its_engine_kills_those_of_one_replica() -> None:
    bench = Bench(num_replicas=3, max_request_crashes=2)
    others = bench.submit("a", "b")
    poison = bench.submit("poison")
    assert placed(bench)["poison"] == 2
    forget_sent(bench)
    for _ in range(3):
        assert bench.engine_of(0).take() == bench.engine_of(1).take() == []
        bench.die("poison", replica=2)
        bench.revive(replica=2)
    with pytest.raises(CrashFault, match="crashed the engine 3 times, 2 of them with no other"):
        await poison.__anext__()
    others.close()
    assert not bench.client.records


@on_a_loop
async def test_one_that_kills_engines_before_any_step_kills_two_at_most_in_company() -> None:
    bench = Bench(num_replicas=3, max_request_crashes=1)
    poison = bench.submit("poison")
    bench.die(replica=0)
    assert placed(bench)["poison"] == 1
    bench.die(replica=1)
    assert bench.engine_of(2).take() == [], "it is suspected by now"
    assert bench.revive(replica=1) == [("add", "poison", [])]
    assert bench.die(replica=1)
    with pytest.raises(CrashFault):
        await poison.__anext__()


@on_a_loop
async def test_while_no_replica_runs_requests_wait_for_the_first_that_is_back() -> None:
    bench = Bench(num_replicas=2)
    bench.submit("a", "b")
    bench.say("a", 1, replica=0)
    bench.say("b", 2, replica=1)
    for index in range(2):
        bench.die(replica=index)
    bench.submit("c")
    assert not bench.client.is_healthy
    assert not bench.client.is_lost
    assert bench.revive(replica=1) == [("add", "a", [1]), ("add", "b", [2]), ("add", "c", [])]


@on_a_loop
async def test_a_replica_that_keeps_dying_is_taken_out_and_the_others_go_on() -> None:
    bench = Bench(num_replicas=2)
    bench.submit("a", "b")
    bench.say("b", 2, replica=1)
    bench.die(replica=1)
    bench.lose(1)
    assert [item.state for item in bench.replicas.members.values()] == ["serving", "failed"]
    assert placed(bench) == {"a": 0, "b": 0}
    assert "on_gone" in bench.told
    assert not bench.client.is_lost
    stream = bench.submit("c")
    bench.die(replica=0)
    error = bench.lose(0)
    assert bench.client.is_lost
    assert await bench.client.wait_until_lost() is error
    with pytest.raises(EngineDeadError, match="for good"):
        await stream.__anext__()


@on_a_loop
async def test_without_restarts_suspects_run_alone_on_a_replica_that_the_others_leave() -> None:
    bench = Bench(num_replicas=3, restart_engine=False)
    stream = bench.submit("a", "b", "c")
    for index, request_id in enumerate("ab"):
        bench.say(request_id, 1, replica=index)
    forget_sent(bench)
    bench.die("c", replica=2)
    assert forget_all(bench) == []
    bench.lose(2)
    assert bench.engine_of(0).take() == [("finish", "a")]
    bench.say("a", 2)  # was under way
    assert forget_all(bench) == [], "c waits until a has left"
    bench.let_go(0)
    assert bench.engine_of(0).take() == [("add", "c", [])]
    assert bench.engine_of(1).take() == [("add", "a", [1, 2])]
    bench.say("c", 9, replica=0)
    bench.let_go(0)
    assert placed(bench) == {"a": 1, "b": 1, "c": 0}
    for request_id, replica in placed(bench).items():
        assert replica is not None
        bench.say(request_id, 3, replica=replica, finish_reason=FinishReason.STOP)
    tokens: dict[str, list[int]] = {}
    async for deltas in stream:
        for delta in deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert tokens == {"a": [1, 2, 3], "b": [1, 3], "c": [9, 3]}


@on_a_loop
async def test_without_restarts_the_last_replica_is_not_risked_for_a_suspect() -> None:
    bench = Bench(num_replicas=2, restart_engine=False)
    bench.submit("a")
    suspect = bench.submit("b")
    bench.die("b", replica=1)
    bench.lose(1)
    with pytest.raises(EngineDeadError):
        await suspect.__anext__()
    assert list(bench.client.records) == ["a"]


@on_a_loop
async def test_calls_reach_all_replicas_that_run() -> None:
    bench = Bench(num_replicas=3)
    bench.die(replica=1)
    calls: list[tuple[int, str]] = []

    def answer_as(index: int, error: Exception | None) -> Any:
        async def call(method: str, *args: Any) -> int:
            calls.append((index, method))
            if error is not None:
                raise error
            return index

        return call

    errors: list[Exception | None] = [EngineDeadError("it died"), None, None]
    for index, error in enumerate(errors):
        bench.dispatch_of(index).call = answer_as(index, error)  # type: ignore[method-assign]
    assert await bench.client.call("reset_prefix_cache") == 2
    assert [index for index, method in calls if method == "reset_prefix_cache"] == [0, 2]
    assert await bench.client.call("load_adapter", replica=1) == 1
    bench.dispatch_of(2).call = answer_as(2, ValueError("bad"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="bad"):
        await bench.client.call("load_adapter")


def forget_all(bench: Bench) -> list[tuple[Any, ...]]:
    """What the engines were sent since the last time."""
    return [sent for index in bench.replicas.members for sent in bench.engine_of(index).take()]


# -- where a replica computes


def test_each_replica_has_devices_of_its_own() -> None:
    config = EngineConfig.from_options({"data_parallel_size": 3, "tensor_parallel_size": 2})
    assert [replica_config(config, i).device.first_gpu for i in range(3)] == [0, 2, 4]
    assert [replica_config(config, i).parallel.data_parallel_rank for i in range(3)] == [0, 1, 2]
    named = EngineConfig.from_options(
        {"data_parallel_size": 2, "replica_devices": ["0-2,8", "4,5"]}
    )
    assert replica_config(named, 0).device.device_ids == (0, 1, 2, 8)
    assert replica_config(named, 1).device.device_ids == (4, 5)
    alone = EngineConfig()
    assert replica_config(alone, 0) is alone
    added = replica_config(alone, 1).device
    assert (added.first_gpu, added.num_replicas) == (1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1, got 0"),
        (
            {"data_parallel_size": 3, "replica_devices": ["0"]},
            "replica_devices must have one value for each of the 3 engines",
        ),
        ({"replica_devices": ["0-"]}, "numbers and ranges such as 0-3,8, got '0-'"),
        ({"replica_devices": ["1,1"]}, "must name each number once, got '1,1'"),
        ({"replica_devices": ["3-1"]}, "must name each number once, got '3-1'"),
        ({"replica_devices": ["-1"]}, "numbers and ranges such as 0-3,8, got '-1'"),
    ],
)
def test_devices_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)
