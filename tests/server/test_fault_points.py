"""Exceptions and stalls at named points of a real server: each harms only what it must."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.points import FaultPoints
from faults.streams import Answer, Body, Streams
from faults.tiny_checkpoint import make_tiny_checkpoint
from server_process import ServerProcess
from waiting import eventually

# In the engine: a step that cannot be launched is tried again, and what else goes wrong there
# costs a restart. Nobody's answer changes.
RETRIED = (
    "penstock.runner.runner:ModelRunner.launch",
    "penstock.runner.runner:ModelRunner.sample",
    "penstock.runner.runner:ModelRunner.collect",
    "penstock.runner.forward:HostSteps.run",
    "penstock.structured.manager:GrammarManager.start_masks",
)
RESTARTED = (
    "penstock.scheduler.scheduler:Scheduler.update",
    "penstock.engine.black_box:BlackBox.end",
    # In the server: an engine that nobody can listen to is replaced.
    "penstock.engine.messages:decode_message",
    "penstock.engine.ledger:Ledger._take_tokens",
)
RESTARTED_TOO = (  # as the first of those
    "penstock.executor.in_process:InProcessExecutor.collect",
    "penstock.scheduler.scheduler:Scheduler.schedule",
    "penstock.kvcache.manager:KVCacheManager.allocate",
)
# One request's own: it alone fails.
FATAL = (
    "penstock.text.output:OutputAssembler.add",
    "penstock.text.frontend:Frontend.prepare",
    "penstock.scheduler.scheduler:Scheduler.add",
)
LOADING = "penstock.models.assembly:load_weights"
STORING = "penstock.server.responses.store:MemoryStore.put"

GREEDY: Body = {"prompt": "Once", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
SEEDED: Body = {**GREEDY, "temperature": 1.0, "seed": 11}
BODIES: list[Body] = [
    GREEDY,
    {**SEEDED, "n": 2, "logprobs": 2},
    {**SEEDED, "structured_outputs": {"regex": "([a-z]{3} )*"}},
]


class Subject:
    """A server with fault points, and what it answers in peace."""

    def __init__(self, folder: Path) -> None:
        self.points = FaultPoints(
            folder, *RETRIED, *RESTARTED, *RESTARTED_TOO, *FATAL, LOADING, STORING
        )
        (folder / "model").mkdir()
        self.server = ServerProcess(
            str(make_tiny_checkpoint(folder / "model")),
            *("--kv-cache-memory-bytes", "64MiB", "--cpu-threads", "1"),
            *("--engine-heartbeat-timeout-s", "6"),
            env=self.points.env,
        )
        self.calm = Streams(self.server).run(BODIES)
        assert all(answer.error is None for answer in self.calm)

    def num_restarts(self) -> float:
        lines = self.server.get("/metrics").text.splitlines()
        (line,) = [one for one in lines if one.startswith("penstock:engine_restarts_total")]
        return float(line.split()[-1])

    def run(self, point: str, bodies: list[Body] = BODIES) -> list[Answer]:
        """Answers of requests in the midst of which `point` fails once."""
        self.points.raise_at(point, after_calls=20)  # of hundreds
        answers = Streams(self.server).run(bodies)
        assert self.points.has_struck(point)
        eventually(lambda: self.server.get("/health").status_code == 200)
        return answers


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = Subject(tmp_path_factory.mktemp("points"))
    yield subject
    subject.server.close()


@pytest.mark.parametrize("point", RETRIED, ids=lambda point: point.partition(":")[2])
def test_a_step_that_fails_is_tried_again(subject: Subject, point: str) -> None:
    before = subject.num_restarts()
    assert subject.run(point) == subject.calm
    assert subject.num_restarts() == before
    eventually(subject.server.is_idle)


@pytest.mark.parametrize(
    "point",
    [*RESTARTED, *(pytest.param(point, marks=pytest.mark.slow) for point in RESTARTED_TOO)],
    ids=lambda point: point.partition(":")[2],
)
def test_what_else_fails_in_an_engine_costs_a_restart(subject: Subject, point: str) -> None:
    before = subject.num_restarts()
    assert subject.run(point) == subject.calm
    assert subject.num_restarts() == before + 1
    eventually(subject.server.is_idle)


def test_an_answer_that_cannot_be_put_together_fails_alone(subject: Subject) -> None:
    before = subject.num_restarts()
    answers = subject.run(FATAL[0])
    failed = [answer for answer in answers if answer.error is not None]
    assert len(failed) == 1
    assert failed[0].error is not None
    assert failed[0].error["code"] == 500
    assert "injected" not in failed[0].error["message"].lower()
    assert all(
        answer == calm
        for answer, calm in zip(answers, subject.calm, strict=True)
        if answer.error is None
    )
    assert subject.num_restarts() == before
    eventually(subject.server.is_idle)


@pytest.mark.parametrize("point", FATAL[1:], ids=lambda point: point.partition(":")[2])
def test_a_request_that_cannot_be_taken_in_fails_alone(subject: Subject, point: str) -> None:
    before = subject.num_restarts()

    async def send_another(streams: Streams) -> None:
        await streams.until(lambda: streams.num_begun == len(BODIES))
        subject.points.raise_at(point)
        refused = subject.server.post("/v1/completions", GREEDY)
        assert refused.status_code == 500
        assert "njected" not in refused.text

    assert Streams(subject.server).run(BODIES, send_another) == subject.calm
    assert subject.points.has_struck(point)
    assert subject.num_restarts() == before
    eventually(subject.server.is_idle)


def test_a_disk_that_is_slow_to_load_the_model_is_waited_for(subject: Subject) -> None:
    """It stalls for longer than an engine that runs may be silent."""
    before = subject.num_restarts()
    subject.points.stall_at(LOADING, 9.0)
    assert subject.run(RESTARTED[0]) == subject.calm
    assert subject.points.has_struck(LOADING)
    assert subject.num_restarts() == before + 1, "it was not taken for dead meanwhile"


def test_a_store_that_is_slow_or_fails_concerns_its_own_request(subject: Subject) -> None:
    before = subject.num_restarts()
    question = {"input": "Once", "max_output_tokens": 8}
    subject.points.hold_at(STORING)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(subject.server.post, "/v1/responses", question)
        subject.points.wait_for(STORING)
        assert Streams(subject.server).run(BODIES) == subject.calm
        assert not slow.done()
        subject.points.release(STORING)
        assert slow.result().json()["status"] == "incomplete"
    subject.points.raise_at(STORING)
    assert subject.server.post("/v1/responses", question).status_code == 500
    assert subject.server.post("/v1/responses", question).status_code == 200
    assert subject.num_restarts() == before
    eventually(subject.server.is_idle)
