"""The core's queue of steps, over a device that delivers late."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from kvcache.kv_fakes import ONE_GROUP, REGISTRY, layout_of
from scheduler.fake_device import FakeDevice, expected_output, make_request, random_requests

from penstock.engine.core import EngineCore
from penstock.executor.step_queue import StepQueue
from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.limits import StepLimits
from penstock.protocol.step import Job, StepFailure, StepPlan, StepResult
from penstock.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 40


class LateRunner:
    """Computes a step only when it is collected: everything about it is known as late as can be."""

    def __init__(self) -> None:
        self.device = FakeDevice(ONE_GROUP, MAX_MODEL_LEN)
        self.deepest = 0

    def launch(self, plan: StepPlan) -> StepPlan:
        self.device.launch(plan)
        self.deepest = max(self.deepest, len(self.device.in_flight))
        return plan

    def sample(self, handle: StepPlan, masks: Any) -> None: ...

    def collect(self, handle: StepPlan) -> StepResult:
        result: StepResult = self.device.collect()
        assert result.step_id == handle.step_id, "steps are collected in the order of their launch"
        return result

    def run_jobs(self, jobs: Sequence[Job]) -> None:
        assert not jobs, "no request has an adapter here"

    def skip(self, plan: StepPlan) -> None:
        self.run_jobs(plan.jobs)

    def hand_on_failure(self, plan: StepPlan, failure: StepFailure) -> None:
        """There is no other pipeline stage."""

    def reset(self) -> None:
        self.device.reset()


class LateExecutor:
    """A worker's own queue of steps over such a runner."""

    def __init__(self, depth: int, runner: LateRunner | None = None) -> None:
        self.depth = depth  # steps in flight
        self.runner = runner or LateRunner()
        self._steps = StepQueue(self.runner)  # type: ignore[arg-type]
        self.sample, self.collect = self._steps.sample, self._steps.collect

    def launch(self, plan: StepPlan) -> None:
        self._steps.launch(plan)
        if not plan.masked:
            self._steps.sample(None)

    def call(self, method: str) -> None:
        assert method == "reset"
        self._steps.reset()

    def check_alive(self) -> None: ...
    def close(self) -> None: ...


def make_limits(depth: int, **limits: Any) -> StepLimits:
    own = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": MAX_MODEL_LEN}
    return StepLimits(max_in_flight=depth, **(own | limits))


def make_core(depth: int, num_blocks: int = 64, policy: Any = "fcfs") -> EngineCore:
    manager = KVCacheManager(layout_of(ONE_GROUP, num_blocks), registry=REGISTRY)
    return EngineCore(Scheduler(make_limits(depth), manager, policy=policy), LateExecutor(depth))


class Client:
    """Keeps what the engine told it."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}

    def hear(self, deltas: list[EngineDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.reasons, "nothing comes after the end"
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_late_stops_aborts_and_preemptions_change_nothing(
    depth: int, num_blocks: int, policy: str
) -> None:
    rng = random.Random(depth * 100 + num_blocks)
    core, client = make_core(depth, num_blocks, policy), Client()
    requests = random_requests(rng, 30, longest=23)
    aborted = set()
    waiting = list(requests)
    while waiting or core.has_work():
        for _ in range(min(rng.randrange(3), len(waiting))):
            core.add(waiting.pop())
        client.hear(core.step())
        running = [r.request_id for r in requests if r.request_id not in client.reasons]
        if running and rng.random() < 0.1:
            victim = rng.choice(running)
            deltas = core.abort([victim])
            aborted |= {delta.request_id for delta in deltas}
            client.hear(deltas)
    executor = core.executor
    assert isinstance(executor, LateExecutor)
    assert executor.runner.deepest == depth
    assert aborted
    for request in requests:
        tokens, reason, _ = expected_output(request, MAX_MODEL_LEN)
        if request.request_id in aborted:
            assert client.reasons[request.request_id] is FinishReason.ABORT
            assert (
                client.tokens[request.request_id]
                == tokens[: len(client.tokens[request.request_id])]
            )
        else:
            assert client.reasons[request.request_id] is reason
            assert client.tokens[request.request_id] == tokens
    assert core.stats().kv_cache_usage == 0.0
    assert (core.stats().num_preemptions > 0) == (num_blocks == 12)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "sample", "collect"])
def test_a_request_whose_step_is_interrupted_goes_on(
    method: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is to blame for Ctrl-C, not even a request that was alone in the step."""
    core, client = make_core(depth), Client()
    executor = core.executor
    assert isinstance(executor, LateExecutor)
    original, calls = getattr(executor.runner, method), []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) in (3, 4):
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(executor.runner, method, interrupted)
    request = make_request("alone", [2, 3, 4], max_tokens=12, ignore_eos=True, seed=1)
    core.add(request)
    num_interrupts = 0
    while core.has_work():
        try:
            client.hear(core.step())
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 2
    tokens, reason, _ = expected_output(request, MAX_MODEL_LEN)
    assert client.tokens["alone"] == tokens
    assert client.reasons["alone"] is reason
    assert core.stats().num_steps_in_flight == 0


def test_an_engine_without_work_does_nothing() -> None:
    core = make_core(2)
    assert not core.has_work()
    assert core.step() == []
