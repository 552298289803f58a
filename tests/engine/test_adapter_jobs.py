"""Adapters and the core's loop: jobs beside the steps, on one rank and on several."""

from __future__ import annotations

import pytest
from kvcache.kv_fakes import ONE_GROUP, REGISTRY, layout_of
from scheduler.fake_device import FakeDevice, expected_output, make_adapter, make_request, salt_of
from test_core import MAX_MODEL_LEN, LateExecutor, make_limits

from penstock.engine import messages
from penstock.engine.core import EngineCore
from penstock.engine.group import NO_STEP
from penstock.engine.messages import CallResult
from penstock.executor.finished_jobs import FinishedJobs
from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.adapter import FinishedJob
from penstock.protocol.delta import EngineDelta
from penstock.protocol.errors import EngineDeadError, InputError, RequestFault
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import StepPlan
from penstock.scheduler.scheduler import Scheduler


def make_core(depth: int) -> tuple[EngineCore, FakeDevice]:
    manager = KVCacheManager(layout_of(ONE_GROUP, 64), registry=REGISTRY)
    scheduler = Scheduler(make_limits(depth), manager, max_loras=1, max_cpu_loras=2)
    executor = LateExecutor(depth)
    return EngineCore(scheduler, executor), executor.runner.device


def add(core: EngineCore, device: FakeDevice, name: str) -> EngineRequest:
    request = make_request(f"for {name}", [2, 3], adapter=make_adapter(name))
    device.salts[request.request_id] = salt_of(request)
    assert request.adapter is not None
    device.adapters[request.request_id] = request.adapter.digest
    core.add(request)
    return request


def begin_fetch(core: EngineCore, device: FakeDevice) -> None:
    """Run steps until the device has begun to fetch: it runs a step when that is collected."""
    while not device.fetching:
        core.step()


def run(core: EngineCore) -> list[EngineDelta]:
    deltas = []
    while core.has_work():
        deltas += core.step()
    return deltas


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_without_tokens_bring_back_a_fetch_for_which_all_requests_wait(depth: int) -> None:
    core, device = make_core(depth)
    request = add(core, device, "A")
    for _ in range(10):
        assert core.step() == []
        assert core.has_work()
    device.end_fetches()
    tokens = [token for delta in run(core) for token in delta.token_ids]
    assert tokens == expected_output(request, MAX_MODEL_LEN)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_adapter_can_be_loaded_ahead_and_unloaded_while_nothing_runs(depth: int) -> None:
    core, device = make_core(depth)
    answer = core.load_adapter(make_adapter("A"))
    assert core.has_work()
    begin_fetch(core, device)
    assert not answer.done()
    device.end_fetches()
    run(core)
    assert answer.result(timeout=0) is None
    assert device.copies == {make_adapter("A").digest}
    stats = core.adapter_stats()
    assert stats is not None
    assert (stats.num_loads, stats.num_copies) == (1, 1)
    core.unload_adapter(make_adapter("A").digest)
    core.unload_adapter("unknown")
    run(core)
    assert device.copies == set()


def test_a_load_that_fails_raises_the_callers_error() -> None:
    core, device = make_core(1)
    answer = core.load_adapter(make_adapter("A"))
    begin_fetch(core, device)
    device.end_fetch(make_adapter("A").digest, "it is a pickle")
    run(core)
    with pytest.raises(InputError, match="LoRA adapter 'A' cannot be loaded: it is a pickle"):
        answer.result(timeout=0)
    assert not core.has_work()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_leaves_its_fetch_to_the_next_one(depth: int) -> None:
    core, device = make_core(depth)
    first = add(core, device, "A")
    begin_fetch(core, device)
    core.abort([first.request_id])
    run(core)
    device.end_fetches()
    second = make_request("second", [2], adapter=first.adapter)
    device.salts["second"], device.adapters["second"] = salt_of(second), first.adapter.digest  # type: ignore[union-attr]
    core.add(second)
    tokens = [token for delta in run(core) for token in delta.token_ids]
    assert tokens == expected_output(second, MAX_MODEL_LEN)[0]
    stats = core.adapter_stats()
    assert stats is not None
    assert stats.num_loads == 1


def test_a_step_that_a_core_only_joined_brings_back_its_fetches() -> None:
    """Its own steps would never tell: the worker reports a fetch once."""
    core, device = make_core(1)
    first = add(core, device, "A")
    begin_fetch(core, device)
    core.abort([first.request_id])
    device.end_fetches()
    core.join_step(StepPlan(step_id=NO_STEP, scheduled=[]))
    assert core.end_step(None, []) == []
    stats = core.adapter_stats()
    assert stats is not None
    assert stats.num_loads == 1


def test_a_job_has_ended_once_all_ranks_have_reported_it() -> None:
    jobs = FinishedJobs()
    assert jobs.merge([[FinishedJob("x")], []]) == []
    assert jobs.merge([[FinishedJob("y")], []]) == []
    assert jobs.merge([[], [FinishedJob("y"), FinishedJob("x")]]) == [
        FinishedJob("x"),
        FinishedJob("y"),
    ]
    assert jobs.merge([[], []]) == []


def test_a_job_that_two_replicas_gave_ends_for_each_of_them() -> None:
    jobs, first, second = FinishedJobs(), FinishedJob("x"), FinishedJob("x", lane=1)
    assert jobs.merge([[second], [first]]) == []
    assert jobs.merge([[], [second]]) == [second]
    assert jobs.merge([[first], []]) == [first]


def test_one_rank_that_has_the_tower_tells_that_an_adapter_changes_it() -> None:
    tells = FinishedJob("x", changes_tower=True)
    assert FinishedJobs().merge([[tells], [FinishedJob("x")]]) == [tells]


def test_a_job_that_failed_on_one_rank_has_failed() -> None:
    jobs = FinishedJobs()
    assert jobs.merge([[], [FinishedJob("x", "out of memory")]]) == []
    assert jobs.merge([[FinishedJob("x")], []]) == [FinishedJob("x", "out of memory")]


def test_reports_from_before_a_reset_do_not_count() -> None:
    jobs = FinishedJobs()
    jobs.merge([[FinishedJob("x")], []])
    jobs.clear()
    assert jobs.merge([[], [FinishedJob("x")]]) == []
    assert jobs.merge([[FinishedJob("x")], []]) == [FinishedJob("x")]


def test_a_call_result_keeps_whose_error_it_was() -> None:
    class Answer:
        def set_exception(self, error: Exception) -> None:
            self.error = error

    answer = Answer()
    sent = messages.encode(messages.Outputs(calls=[CallResult.of_error(1, InputError("no", "x"))]))
    (received,) = messages.decode_message(sent).calls  # type: ignore[union-attr]
    received.settle(answer)  # type: ignore[arg-type]
    assert isinstance(answer.error, InputError)
    assert answer.error.field == "x"
    CallResult.of_error(1, EngineDeadError("gone")).settle(answer)  # type: ignore[arg-type]
    assert isinstance(answer.error, RequestFault)
