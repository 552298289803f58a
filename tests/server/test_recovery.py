"""Engines die in every way there is: requests go on, and their answers are those of a calm run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from eagle_heads import make_head
from faults.bodies import default_model_bodies
from faults.saboteur import Fault, seed_of
from faults.streams import Answer, Body, Streams
from faults.subject import GREEDY, HELD, SAMPLED, SEEDED, Subject, start_subject
from faults.tiny_checkpoint import make_tiny_checkpoint
from server_process import ServerProcess, is_running
from waiting import eventually

KINDS: list[Body] = [
    *SAMPLED,
    {**GREEDY, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {**SEEDED, "min_tokens": 120, "ignore_eos": False, "stop_token_ids": list(range(0, 256, 2))},
    {**SEEDED, "bad_words": ["e", "ab"], "logit_bias": {"40": 3, "41": -9}},
    {**SEEDED, "seed": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 120, "seed": 3, "n": 2,
     "logprobs": True, "top_logprobs": 2, "temperature": 0.9, "ignore_eos": True},
    {**SEEDED, "seed": 14, "structured_outputs": {"regex": "([a-z]{3} )*"}, "max_tokens": 120},
    {**SEEDED, "stream": False, "seed": 13, "n": 2, "logprobs": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


Serve = Callable[..., Subject]


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; ends them all."""
    subjects: list[Subject] = []

    def start(*flags: str, model: Path = model, **options: Any) -> Subject:
        folder = tmp_path / f"server{len(subjects)}"
        folder.mkdir()
        subjects.append(start_subject(model, folder, *flags, **options))
        return subjects[-1]

    yield start
    for subject in subjects:
        subject.server.close()


@pytest.fixture(scope="module")
def subject(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    flags = ("--max-request-crashes", "1", "--spare-engine")
    subject = start_subject(model, tmp_path_factory.mktemp("subject"), *flags)
    yield subject
    subject.server.close()


@pytest.fixture
def tiny_server(subject: Subject) -> ServerProcess:
    return subject.server


@pytest.fixture(scope="module")
def calm_kinds(subject: Subject) -> list[Answer]:
    return Streams(subject.server).run(KINDS)


def counters(server: ServerProcess) -> dict[str, float]:
    """Restarts, replays and quarantines so far."""
    names = ("engine_restarts", "requests_replayed", "requests_quarantined")
    lines = server.get("/metrics").text.splitlines()
    return {
        name: float(line.split()[-1])
        for name in names
        for line in lines
        if line.startswith(f"penstock:{name}_total")
    }


def assert_whole(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.error is None
        assert answer.num_ends == 1
        assert all(choice["finish"] for choice in answer.choices.values())


def test_kills_at_random_moments_change_nothing(
    tiny_server: ServerProcess, calm_kinds: list[Answer]
) -> None:
    (seeded,) = Streams(tiny_server).run([SEEDED])
    text = seeded.choices[0]["text"]
    stops = [{**SEEDED, "stop": [text[at : at + 4]]} for at in range(20, 140, 40)]
    shown = [{**body, "include_stop_str_in_output": True} for body in stops]
    bodies = [*KINDS, *stops, *shown]
    calm = [*calm_kinds, *Streams(tiny_server).run(bodies[len(KINDS) :])]
    assert_whole(calm)
    assert {answer.choices[0]["finish"] for answer in calm[len(KINDS) :]} == {"stop"}
    before = counters(tiny_server)
    streams = Streams(tiny_server)
    for answers, undisturbed in zip(
        streams.run_during(bodies, streams.kills(2, (20, 300), seed=5)), calm, strict=True
    ):
        assert all(answer == undisturbed for answer in answers)
    now = counters(tiny_server)
    assert now["engine_restarts"] == before["engine_restarts"] + 2
    assert now["requests_replayed"] > before["requests_replayed"] + 2
    eventually(tiny_server.is_idle)


@pytest.mark.parametrize(
    "method",
    [
        "ngram",
        *(pytest.param(i, marks=pytest.mark.slow) for i in ("suffix", "draft_model", "eagle3")),
    ],
)
def test_kills_while_drafts_are_in_flight_change_nothing(
    calm_kinds: list[Answer], serve: Serve, model: Path, tmp_path: Path, method: str
) -> None:
    """The answers are those of a calm server without drafts."""
    config = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    if method == "ngram":
        config["prompt_lookup_min"] = 1
    elif method == "draft_model":  # its own KV cache is lost with the engine
        config["model"] = str(model)
    elif method == "eagle3":
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 0]}  # the model has a single one
        config["model"] = str(make_head(tmp_path / "head", model, **layers)[0])
    server = serve("--speculative-config", json.dumps(config), "--spare-engine").server
    streams = Streams(server)
    for answers, undisturbed in zip(
        streams.run_during(KINDS, streams.kills(1, (20, 200), seed=6)), calm_kinds, strict=True
    ):
        assert all(answer == undisturbed for answer in answers)
    assert counters(server)["requests_replayed"] > 1
    assert Streams(server).run(KINDS) == calm_kinds

    def num_drafts() -> float:
        name = "penstock:spec_decode_num_draft_tokens_total"
        lines = server.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    eventually(lambda: num_drafts() > 0)


def test_a_stopped_process_is_a_dead_one(serve: Serve) -> None:
    subject = serve("--engine-heartbeat-timeout-s", "6")
    server = subject.server
    calm = Streams(server).run([HELD, SEEDED])

    def stop() -> None:
        pid = server.engine_pid
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: not is_running(pid))

    assert subject.run_held([SEEDED], stop) == calm
    eventually(lambda: server.has_logged("no sign of life"))


def test_a_step_without_end_is_a_death(serve: Serve) -> None:
    server = serve("--step-timeout-s", "6").server
    bodies = [GREEDY, SEEDED, {**GREEDY, "seed": seed_of(Fault.HANG_ONCE, 40)}]
    answers = Streams(server).run(bodies)
    assert_whole(answers)
    assert answers == Streams(server).run(bodies)  # it hangs once
    eventually(lambda: server.has_logged("a step took longer"))


def test_a_request_that_kills_the_engine_fails_alone(tiny_server: ServerProcess) -> None:
    good = [GREEDY, SEEDED, {**SEEDED, "n": 2, "seed": 5}]
    calm = Streams(tiny_server).run(good)
    before = counters(tiny_server)
    poison = [
        {**GREEDY, "prompt": "at once", "seed": seed_of(Fault.KILL, 0)},
        {**GREEDY, "prompt": "later", "seed": seed_of(Fault.ABORT, 30)},
    ]
    *answers, at_once, later = Streams(tiny_server).run([*good, *poison])
    assert answers == calm
    for answer in (at_once, later):
        assert answer.error is not None
        assert (answer.error["code"], answer.error["type"]) == (500, "InternalServerError")
        assert "this request crashed the engine" in answer.error["message"]
        assert "no other request beside it" in answer.error["message"]
    assert not at_once.choices
    (harmless,) = Streams(tiny_server).run([{**poison[1], "seed": 0}])
    received = later.choices[0]["token_ids"]  # what an engine sends just before it dies may be lost
    assert 0 < len(received) <= 30
    assert received == harmless.choices[0]["token_ids"][: len(received)]
    assert counters(tiny_server)["requests_quarantined"] > before["requests_quarantined"]
    eventually(tiny_server.is_idle)


def test_a_client_may_leave_while_the_engine_is_away(subject: Subject) -> None:
    server = subject.server
    subject.gate.close()
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**HELD, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        subject.kill()
        assert server.get("/load").json()["server_load"] > 0
    eventually(lambda: server.get("/load").json()["server_load"] == 0)
    assert server.get("/health").status_code == 503
    subject.gate.open()

    async def come_back(_: Streams) -> None:
        def has_arrived() -> bool:
            return bool(server.get("/load").json()["server_load"] == 1)

        await asyncio.to_thread(eventually, has_arrived)
        subject.start_gate.open()

    assert_whole(Streams(server).run([GREEDY], come_back))  # it waited for the engine
    eventually(server.is_idle)


def test_while_the_engine_is_away_requests_wait_up_to_the_limit(serve: Serve) -> None:
    subject = serve("--max-num-seqs", "2", "--max-queued-requests", "2")
    server = subject.server
    refused: list[httpx.Response] = []

    def kill() -> None:
        subject.kill()
        refused.append(server.get("/ready"))
        # As many as there is room for, and one of those that came before is there at least.
        refused.append(server.post("/v1/completions", {**GREEDY, "n": 4}))
        subject.start_gate.open()

    assert_whole(subject.run_held([SEEDED], kill))
    ready, too_many = refused
    assert ready.status_code == 503
    assert (too_many.status_code, too_many.json()["error"]["code"]) == (503, 503)
    assert int(too_many.headers["retry-after"]) >= 1
    assert "restarting" in too_many.json()["error"]["message"]
    assert server.get("/ready").status_code == 200


def test_sigterm_lets_requests_finish_though_their_engine_is_away(serve: Serve) -> None:
    subject = serve("--shutdown-timeout", "600")
    server = subject.server
    engines = [server.engine_pid]
    calm = Streams(server).run([HELD, SEEDED])

    def kill() -> None:
        subject.kill()
        engines.append(server.engine_pid)
        server.process.send_signal(signal.SIGTERM)
        subject.start_gate.open()

    assert subject.run_held([SEEDED], kill) == calm
    assert server.wait() == 0
    assert not any(is_running(engine) for engine in engines)


def test_an_engine_that_never_comes_back_ends_the_server(
    model: Path, tmp_path: Path, serve: Serve
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    subject = serve("--max-engine-failures", "1", model=copy)
    server = subject.server

    def break_for_good() -> None:
        (copy / "config.json").unlink()
        os.kill(server.engine_pid, signal.SIGKILL)

    (answer,) = subject.run_held([], break_for_good)
    assert answer.error is not None
    assert answer.error["code"] == 503
    assert answer.num_ends == 1
    assert server.wait() == 3
    assert "Giving up: the engine died 2 times in a row" in "".join(server.log)
    assert "config.json" in "".join(server.log)


def test_without_restarts_the_server_ends_with_its_engine(serve: Serve) -> None:
    server = serve("--no-restart-engine").server
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait() == 3
    assert not server.has_logged("Traceback")


def test_two_deaths_in_a_row_and_a_sigterm_between_them_lose_nothing(serve: Serve) -> None:
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "1", "--queue-timeout-s", "600")
    subject = serve(*flags, "--shutdown-timeout", "600")
    server = subject.server
    calm = Streams(server).run([HELD, SEEDED])  # as many as there is room for

    def kill_twice() -> None:
        first = server.engine_pid
        subject.kill()
        eventually(lambda: server.engine_pids() not in ({first}, set()))
        server.process.send_signal(signal.SIGTERM)
        os.kill(server.engine_pid, signal.SIGKILL)  # while it loads
        subject.start_gate.open()

    assert subject.run_held([SEEDED], kill_twice) == calm
    assert server.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_kills_under_32_streams_lose_nothing(server: ServerProcess) -> None:
    """The long form. Run alone on a machine, it also says how long the service was away."""
    bodies = default_model_bodies(32)
    streams = Streams(server, timeout_s=1200)
    calm = streams.run(bodies)
    assert_whole(calm)
    before = counters(server)
    answers = streams.run_during(bodies, streams.kills_at_any_time(20, 6.0, seed=20))
    num_wrong = sum(one != calm[index] for index, many in enumerate(answers) for one in many)
    now = counters(server)
    changes = {name: now[name] - before[name] for name in now}
    times_s = sorted(streams.times_back_s)
    print(
        f"\n{sum(map(len, answers))} streams, {num_wrong} lost or wrong; {changes}\n"
        f"back after {times_s[0]:.2f} to {times_s[-1]:.2f} s, median {times_s[10]:.2f} s: "
        + " ".join(f"{seconds:.2f}" for seconds in streams.times_back_s)
    )
    assert num_wrong == 0
    assert changes["engine_restarts"] == 20
    assert times_s[-1] <= 5.0
