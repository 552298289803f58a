"""Several engines behind one server: real processes, some of which are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.saboteur import Fault, seed_of
from faults.streams import Answer, Body, Streams
from faults.subject import GREEDY, SAMPLED, SEEDED, Subject, start_subject
from faults.tiny_checkpoint import make_tiny_checkpoint
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, is_running, refused
from waiting import eventually

KINDS: list[Body] = [
    *SAMPLED,
    {**GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 120, "seed": 3, "n": 2,
     "logprobs": True, "top_logprobs": 2, "temperature": 0.9, "ignore_eos": True},
    {**SEEDED, "seed": 14, "structured_outputs": {"regex": "([a-z]{3} )*"}, "max_tokens": 120},
    {**SEEDED, "stream": False, "seed": 13, "n": 2, "logprobs": 1},
]  # fmt: skip
RESTARTS = "engine_restarts_total"
CORE = str(min(os.sched_getaffinity(0)))
THREE = ("-dp", "3", "--max-request-crashes", "1")
# Servers here have different policies, so the tokens through each are those of one engine.
LEAST_LOADED = ("--data-parallel-routing", "least-loaded")
ROUND_ROBIN = ("--data-parallel-routing", "round-robin")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The answers of a single engine."""
    subject = start_subject(model, tmp_path_factory.mktemp("calm"))
    with subject.server as server:
        return Streams(server).run(KINDS)


@pytest.fixture(scope="module")
def subject(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Three replicas."""
    subject = start_subject(model, tmp_path_factory.mktemp("three"), *THREE)
    with subject.server:
        yield subject


@pytest.fixture
def server(subject: Subject) -> ServerProcess:
    eventually(lambda: states(subject.server) == ["serving"] * 3)
    return subject.server


def states(server: ServerProcess) -> list[str]:
    return [item["state"] for item in server.get("/load").json()["replicas"]]


def by_engine(server: ServerProcess, name: str) -> dict[str, float]:
    """A metric's values by the label `engine`."""
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == f"penstock:{name}"
    }


def kill_one(
    server: ServerProcess, after_tokens: int, seed: int
) -> Callable[[Streams], Awaitable[None]]:
    """Kill an engine, whichever, once some tokens have come. Over when it is back, or lost."""

    def num_seen() -> float:
        return sum(by_engine(server, RESTARTS).values()) + states(server).count("failed")

    async def kill(streams: Streams) -> None:
        before = await asyncio.to_thread(num_seen)
        await streams.until(lambda: streams.num_tokens >= after_tokens)
        pids = await asyncio.to_thread(server.engine_pids)
        os.kill(random.Random(seed).choice(sorted(pids)), signal.SIGKILL)
        while await asyncio.to_thread(num_seen) == before:
            await asyncio.sleep(0.05)

    return kill


def test_tokens_are_those_of_a_single_engine(server: ServerProcess, calm: list[Answer]) -> None:
    assert Streams(server).run(KINDS * 3) == calm * 3
    computed = by_engine(server, "iteration_tokens_total_count")
    assert sorted(computed) == ["0", "1", "2"]
    assert all(computed.values()), "all have had something to do"
    eventually(server.is_idle)


def test_a_named_replica_runs_the_requests_with_the_same_tokens(
    server: ServerProcess, calm: list[Answer]
) -> None:
    for rank in "021":
        before = by_engine(server, "iteration_tokens_total_sum")
        streams = Streams(server, headers={"X-data-parallel-rank": rank})
        assert streams.run(SAMPLED) == calm[: len(SAMPLED)]
        eventually(server.is_idle)
        after = by_engine(server, "iteration_tokens_total_sum")
        assert [engine for engine in after if after[engine] > before[engine]] == [rank]


@pytest.mark.parametrize("rank", ["3", "-1", "x", "0" * 5000, "1.0", ""])
def test_a_replica_that_is_not_there_is_refused(server: ServerProcess, rank: str) -> None:
    answer = server.post("/v1/completions", GREEDY, headers={"X-data-parallel-rank": rank})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "there is no replica" in error["message"]
    assert "only 0, 1, 2" in error["message"]
    assert error["param"] == "X-data-parallel-rank"
    assert server.get("/health", params={"replica": rank}).status_code == 400


def test_sessions_are_any_text(server: ServerProcess) -> None:
    for session in ("a", "", "x" * 5000):
        headers = {"X-Session-ID": session}
        assert server.post("/v1/completions", GREEDY, headers=headers).status_code == 200


def test_the_load_is_shown_by_replica_and_in_sum(subject: Subject, server: ServerProcess) -> None:
    body = {**GREEDY, "seed": seed_of(Fault.WAIT, 3)}

    async def look(streams: Streams) -> None:
        load = {"server_load": 0}
        while load["server_load"] < 6:  # none of them ends while the gate is closed
            load = (await asyncio.to_thread(server.get, "/load")).json()
        replicas: Any = load["replicas"]
        assert [item["engine"] for item in replicas] == [0, 1, 2]
        assert sum(item["server_load"] for item in replicas) == 6
        subject.gate.open()

    subject.gate.close()
    Streams(server).run([body] * 6, look)
    assert server.get("/health", params={"replica": 2}).status_code == 200
    eventually(server.is_idle)


def test_the_death_of_a_replica_changes_nothing(server: ServerProcess, calm: list[Answer]) -> None:
    streams = Streams(server)
    for number in range(2):
        fault = kill_one(server, after_tokens=streams.num_tokens + 200, seed=number)
        for answers, undisturbed in zip(streams.run_during(KINDS, fault), calm, strict=True):
            assert all(answer == undisturbed for answer in answers)
        eventually(lambda: states(server) == ["serving"] * 3)
    assert sum(by_engine(server, RESTARTS).values()) >= 2
    assert Streams(server).run(KINDS) == calm
    eventually(server.is_idle)


def test_a_request_that_crashes_its_engine_leaves_the_other_replicas_alone(
    server: ServerProcess, calm: list[Answer]
) -> None:
    poison = {**GREEDY, "seed": seed_of(Fault.KILL, 0)}
    before = by_engine(server, RESTARTS)
    *answers, failed = Streams(server).run([*KINDS, poison])
    assert answers == calm
    assert failed.error is not None
    assert "crashed the engine 2 times, 1 of them with no other" in failed.error["message"]
    eventually(lambda: states(server) == ["serving"] * 3)
    after = by_engine(server, RESTARTS)
    assert sorted(after[engine] - before[engine] for engine in after) == [0, 0, 2]
    eventually(server.is_idle)


def test_without_restarts_the_others_go_on(model: Path, calm: list[Answer], tmp_path: Path) -> None:
    subject = start_subject(model, tmp_path, "-dp", "2", "--no-restart-engine", *LEAST_LOADED)
    with subject.server as server:
        assert Streams(server).run(KINDS) == calm
        streams = Streams(server)
        fault = kill_one(server, after_tokens=200, seed=1)
        for answers, undisturbed in zip(streams.run_during(KINDS, fault), calm, strict=True):
            assert all(answer == undisturbed for answer in answers)
        assert sorted(states(server)) == ["failed", "serving"]
        assert server.get("/health").status_code == 200
        lost = states(server).index("failed")
        assert server.get("/health", params={"replica": lost}).status_code == 503
        assert str(lost) not in by_engine(server, "num_requests_running")
        assert Streams(server).run(KINDS) == calm
        for pid in server.engine_pids():
            os.kill(pid, signal.SIGKILL)
        assert server.wait() == 3


def test_a_replica_that_keeps_dying_is_taken_out_and_the_others_go_on(
    model: Path, calm: list[Answer], tmp_path: Path
) -> None:
    subject = start_subject(model, tmp_path, "-dp", "2", "--max-engine-failures", "1", *ROUND_ROBIN)
    with subject.server as server:
        assert Streams(server).run(KINDS) == calm
        other, victim = server.engine_pids()

        async def kill_again_and_again(streams: Streams) -> None:
            await streams.until(lambda: streams.num_begun == len(SAMPLED))
            subject.start_gate.close()
            while "failed" not in await asyncio.to_thread(states, server):
                for pid in server.engine_pids() - {other}:
                    os.kill(pid, signal.SIGKILL)

        assert Streams(server).run(SAMPLED, kill_again_and_again) == calm[: len(SAMPLED)]
        assert not is_running(victim)
        assert server.engine_pids() == {other}
        assert sorted(states(server)) == ["failed", "serving"]
        lost = states(server).index("failed")
        assert server.has_logged(f"Engine {lost} is taken out; 1 others go on")
        assert server.get("/health").status_code == 200
        assert server.get("/health", params={"replica": lost}).status_code == 503
        assert Streams(server).run(KINDS) == calm


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("restarts", [True, False], ids=["restarts", "no_restarts"])
def test_one_of_three_is_killed_under_48_streams(
    model: Path, tmp_path: Path, restarts: bool
) -> None:
    """Nothing is lost or wrong, and the gaps of the others' streams stay what they were."""
    flags = () if restarts else ("--no-restart-engine",)
    bodies = [{**SEEDED, "seed": seed, "max_tokens": 200} for seed in range(48)]
    with start_subject(model, tmp_path, "-dp", "3", *flags).server as server:
        calm = Streams(server).run(bodies)
        before, during = Gaps(server), Gaps(server)
        assert before.run(bodies) == calm
        fault = kill_one(server, after_tokens=48 * 50, seed=1)
        for answers, undisturbed in zip(during.run_during(bodies, fault), calm, strict=True):
            assert all(answer == undisturbed for answer in answers)
        print(f"99th percentile of gaps: {before.p99_s():.4f} s, killed {during.p99_s():.4f} s")
        assert during.p99_s() <= 4 * before.p99_s()


class Gaps(Streams):
    """Streams that also note the time between events of each."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server)
        self._gaps_s: list[float] = []

    def on_event(self, gap_s: float) -> None:
        self._gaps_s.append(gap_s)

    def p99_s(self) -> float:
        return sorted(self._gaps_s)[int(0.99 * len(self._gaps_s))]


# -- bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-dp", "1000", "--device", "cpu"], "replicas (data_parallel_size) are more than the"),
        (["-dp", "2", "--replica-devices", "0"], "one value for each of the 2 engines"),
        (
            ["-dp", "2", "--device", "cpu", "--replica-devices", CORE, "--replica-devices", "9999"],
            "replica_devices names core 9999",
        ),
    ],
)
def test_replicas_that_cannot_be_are_refused_in_one_line(
    model: Path, flags: list[str], message: str
) -> None:
    ended = refused(str(model), "--port", "0", *flags)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if "error:" in line]
    assert message in line


def test_llm_refuses_replicas_and_says_who_has_them(model: Path) -> None:
    from penstock import LLM
    from penstock.protocol.errors import ConfigError

    options: dict[str, Any] = {"data_parallel_size": 2}
    with pytest.raises(ConfigError, match="use AsyncLLM, penstock run-batch or penstock serve"):
        LLM(str(model), **options)
