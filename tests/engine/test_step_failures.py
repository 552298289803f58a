"""Steps that fail: who is to blame fails alone, and everyone else gets the tokens they would have
got anyway."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kvcache.kv_fakes import ONE_GROUP, REGISTRY, layout_of
from scheduler.fake_device import expected_output, make_request, random_requests
from test_core import MAX_MODEL_LEN, Client, LateExecutor, LateRunner, make_limits
from tiny_engine import OPTIONS

from penstock import LLM, SamplingParams
from penstock.engine.core import EngineCore
from penstock.executor.in_process import InProcessExecutor
from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import EngineDeadError, OutOfMemory
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import StepMasks, StepPlan
from penstock.protocol.structured import StructuredOutputsParams
from penstock.runner.layout import StepLayout
from penstock.scheduler.gates import READY
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step_retries import STEPS_UNTIL_LARGER

PROMPTS = [{"prompt_token_ids": [index + 1, 2, 3, index + 5]} for index in range(5)]


class FailingRunner(LateRunner):
    def __init__(self, why: Callable[[StepPlan], Exception | None]) -> None:
        super().__init__()
        self.why = why
        self.num_failures = 0

    def launch(self, plan: StepPlan) -> StepPlan:
        error = self.why(plan)
        if error is not None:
            self.num_failures += 1
            raise error
        return super().launch(plan)


class FailingExecutor(LateExecutor):
    """Fails the steps that `why` finds something wrong with."""

    def __init__(self, depth: int, why: Callable[[StepPlan], Exception | None]) -> None:
        self.failing = FailingRunner(why)
        super().__init__(depth, self.failing)
        self.is_closed = False

    @property
    def num_failures(self) -> int:
        return self.failing.num_failures

    def close(self) -> None:
        self.is_closed = True


def make_core(executor: FailingExecutor, policy: Any = "fcfs", **limits: Any) -> EngineCore:
    scheduler = Scheduler(
        make_limits(executor.depth, **limits),
        KVCacheManager(layout_of(ONE_GROUP, 24), registry=REGISTRY),
        policy=policy,
    )
    return EngineCore(scheduler, executor)


def make_requests(rng: random.Random, count: int = 20) -> list[EngineRequest]:
    return random_requests(rng, count, longest=13)


def run(core: EngineCore, requests: list[EngineRequest], rng: random.Random) -> Client:
    client, waiting, num_steps = Client(), list(requests), 0
    while waiting or core.has_work():
        for _ in range(min(rng.randrange(3), len(waiting))):
            core.add(waiting.pop())
        client.hear(core.step())
        num_steps += 1
        assert num_steps < 5000, "every request ends"
    assert core.stats().kv_cache_usage == 0.0
    assert core.stats().num_waiting == core.stats().num_running == 0
    return client


def check(client: Client, request: EngineRequest) -> None:
    tokens, reason, _ = expected_output(request, MAX_MODEL_LEN)
    assert client.reasons[request.request_id] is reason
    assert client.tokens[request.request_id] == tokens


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_only_requests_that_make_every_step_fail_are_failed(depth: int, policy: str) -> None:
    rng = random.Random(depth)
    requests = make_requests(rng)
    culprits = {"r3", "r11"}
    executor = FailingExecutor(
        depth,
        lambda plan: next(
            (ValueError(i.request_id) for i in plan.scheduled if i.request_id in culprits), None
        ),
    )
    client = run(make_core(executor, policy), requests, rng)
    assert executor.num_failures >= 2
    for request in requests:
        if request.request_id in culprits:
            assert client.reasons[request.request_id] is FinishReason.ERROR
        else:
            check(client, request)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_that_fail_now_and_then_cost_nobody_a_token(depth: int, policy: str) -> None:
    rng = random.Random(depth)
    requests = make_requests(rng)
    was_alone = Counter[str]()

    def fail_together(plan: StepPlan) -> Exception | None:
        if len(plan.scheduled) == 1:
            was_alone[plan.scheduled[0].request_id] += 1
            return None
        return RuntimeError("flaky") if rng.random() < 0.4 else None

    executor = FailingExecutor(depth, fail_together)
    client = run(make_core(executor, policy), requests, rng)
    assert executor.num_failures > 2
    assert len(was_alone) > 3
    for request in requests:
        check(client, request)


@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_does_not_fit_into_memory_is_tried_again_smaller(
    depth: int, enable_chunked_prefill: bool
) -> None:
    rng = random.Random(depth)
    requests = make_requests(rng)
    largest = 3 if enable_chunked_prefill else 13

    def fail_large(plan: StepPlan) -> Exception | None:
        return OutOfMemory("too large") if plan.num_tokens > largest else None

    executor = FailingExecutor(depth, fail_large)
    limits = {} if enable_chunked_prefill else {"enable_chunked_prefill": False}
    scheduler = Scheduler(
        make_limits(depth, max_num_batched_tokens=MAX_MODEL_LEN, **limits),
        KVCacheManager(layout_of(ONE_GROUP, 24), registry=REGISTRY),
    )
    core = EngineCore(scheduler, executor)
    client = run(core, requests, rng)
    assert executor.num_failures > 0
    failed = [r for r in requests if client.reasons[r.request_id] is FinishReason.ERROR]
    if enable_chunked_prefill:
        assert not failed
    for request in requests:
        if request in failed:  # preempted, its prompt has grown beyond what fits in one piece
            assert len(request.prompt_token_ids) + request.max_tokens > largest
        else:
            check(client, request)


def test_a_request_that_never_fits_into_memory_fails_after_few_attempts_and_alone() -> None:
    rng = random.Random(0)
    requests = make_requests(rng)
    executor = FailingExecutor(
        1,
        lambda plan: (
            OutOfMemory("no") if any(item.request_id == "r7" for item in plan.scheduled) else None
        ),
    )
    client = run(make_core(executor), requests, rng)
    assert executor.num_failures <= 6  # 16 tokens, 8, 4, 2, 1: and it is out
    assert client.reasons.pop("r7") is FinishReason.ERROR
    for request in requests:
        if request.request_id != "r7":
            check(client, request)


def test_steps_grow_again_when_memory_is_back() -> None:
    state = {"largest": 2}
    executor = FailingExecutor(
        1,
        lambda plan: OutOfMemory("too large") if plan.num_tokens > state["largest"] else None,
    )
    core, client = make_core(executor), Client()
    sizes = []
    for index in range(200):
        core.add(make_request(f"r{index}", [1] * 16, max_tokens=2))
    while core.has_work():
        before = core.scheduler.num_scheduled_tokens
        client.hear(core.step())
        sizes.append(core.scheduler.num_scheduled_tokens - before)
        if len(sizes) == STEPS_UNTIL_LARGER:
            state["largest"] = 16
    assert max(sizes[10:STEPS_UNTIL_LARGER]) <= 2
    assert 16 in sizes[-20:]


# -- grammars


class BrokenGrammars:
    """Grammars that allow everything, except that some raise where no library should."""

    def __init__(self, no_mask: str, no_progress: str) -> None:
        self.no_mask = no_mask
        self.no_progress = no_progress
        self.num_accepted = Counter[str]()

    def poll(self, request: EngineRequest) -> Any:
        return READY

    def masks(self, plan: StepPlan) -> StepMasks:
        if any(item.request_id == self.no_mask and item.samples for item in plan.scheduled):
            raise KeyError("a matcher's state")
        return StepMasks(request_ids=[], num_rows=[], bits=memoryview(b""))

    def start_masks(self, plan: StepPlan) -> Future[StepMasks]:
        future: Future[StepMasks] = Future()
        try:
            future.set_result(self.masks(plan))
        except KeyError as error:
            future.set_exception(error)
        return future

    def accept(self, request_id: str, token_ids: list[int], drafts: list[int]) -> None:
        self.num_accepted[request_id] += 1
        if request_id == self.no_progress and self.num_accepted[request_id] == 2:
            raise IndexError("a matcher's state")

    def is_complete(self, request_id: str) -> bool:
        return False

    def drop(self, request_id: str) -> None: ...
    def wait(self, timeout_s: float) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_fails_in_the_middle_of_a_step_fails_its_request_alone(depth: int) -> None:
    rng = random.Random(depth)
    spec = StructuredOutputsParams(choice=["a"])
    requests = [
        make_request(
            f"r{index}", [2, 3, index % 5], max_tokens=9, ignore_eos=True, seed=index,
            structured_outputs=spec if index % 2 else None,
        )
        for index in range(12)
    ]  # fmt: skip
    grammars: Any = BrokenGrammars(no_mask="r3", no_progress="r7")
    executor = LateExecutor(depth)
    scheduler = Scheduler(
        make_limits(executor.depth),
        KVCacheManager(layout_of(ONE_GROUP, 48), registry=REGISTRY),
        grammars=grammars,
    )
    client = run(EngineCore(scheduler, executor, grammars), requests, rng)
    for request in requests:
        if request.request_id in ("r3", "r7"):
            assert client.reasons[request.request_id] is FinishReason.ERROR
        else:
            check(client, request)
    assert client.tokens["r3"] == []
    assert len(client.tokens["r7"]) == 1


class SlowGrammars(BrokenGrammars):
    """Fills masks in another thread, which is not done when the launch beside it has failed."""

    def __init__(self) -> None:
        super().__init__(no_mask="", no_progress="")
        self.has_failed = threading.Event()
        self.filled: Future[StepMasks] | None = None
        self.pool = ThreadPoolExecutor(1)

    def start_masks(self, plan: StepPlan) -> Future[StepMasks]:
        self.filled = self.pool.submit(self.fill, plan)
        return self.filled

    def fill(self, plan: StepPlan) -> StepMasks:
        assert self.has_failed.wait(60.0)
        sum(range(1_000_000))  # until well after
        return self.masks(plan)

    def close(self) -> None:
        self.pool.shutdown()
        raise OSError("made up")


def test_masks_are_not_filled_beside_what_follows_a_failed_launch() -> None:
    grammars: Any = SlowGrammars()

    def fail(plan: StepPlan) -> Exception | None:
        grammars.has_failed.set()
        return RuntimeError("made up")

    executor = FailingExecutor(1, fail)
    scheduler = Scheduler(
        make_limits(executor.depth),
        KVCacheManager(layout_of(ONE_GROUP, 48), registry=REGISTRY),
        grammars=grammars,
    )
    core = EngineCore(scheduler, executor, grammars)
    spec = StructuredOutputsParams(choice=["a"])
    core.add(make_request("r", [2, 3], structured_outputs=spec))
    core.step()
    assert grammars.filled.done()
    with pytest.raises(OSError, match="made up"):
        core.close()
    assert executor.is_closed


# -- real models, both CPU paths

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=7, max_tokens=8, ignore_eos=True, logprobs=1)


def answers(llm: LLM, params: Any) -> list[Any]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        output.outputs[0].token_ids if output.error is None else output.error for output in outputs
    ]


@pytest.fixture(params=["auto", "torch"])
def llm(tiny_llama: str, request: pytest.FixtureRequest) -> Any:
    with LLM(tiny_llama, max_model_len=64, cpu_backend=request.param, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError("no more"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["gpu", "host", "torch-cpu"],
)
def test_a_step_out_of_memory_changes_no_token(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    mixed = [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY]
    expected = answers(llm, mixed)
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    run_steps, failures = executor.runner.steps.run, []

    def run_if_small(layout: StepLayout, handed: Any = None) -> Any:
        if layout.num_rows > 3:
            failures.append(layout.num_rows)
            raise error
        return run_steps(layout)

    monkeypatch.setattr(executor.runner.steps, "run", run_if_small)
    assert answers(llm, mixed) == expected
    assert 0 < len(failures) <= 8
    assert llm.engine.stats().kv_cache_usage == 0.0


@pytest.mark.parametrize("where", ["launch", "sample"])
def test_a_request_that_breaks_the_step_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = answers(llm, GREEDY)
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    runner = executor.runner
    run_steps, finish = runner.steps.run, runner.head.finish

    def is_broken(items: Any) -> bool:
        slots = runner.tables.slots_of(items)
        return any(int(runner.tables.token_ids[slot, 0]) == 3 for slot in slots)

    def break_launch(layout: StepLayout, handed: Any = None) -> Any:
        if where == "launch" and is_broken(layout.requests):
            raise IndexError("a kernel's assertion")
        return run_steps(layout)

    def break_sample(pending: Any, batch: Any, masks: Any) -> Any:
        if where == "sample" and is_broken(batch.layout.requests):
            raise IndexError("a kernel's assertion")
        return finish(pending, batch, masks)

    monkeypatch.setattr(runner.steps, "run", break_launch)
    monkeypatch.setattr(runner.head, "finish", break_sample)
    found = answers(llm, GREEDY)
    assert found[2] == "the engine failed to run this request", "internals go to the log"
    assert found[:2] + found[3:] == expected[:2] + expected[3:]


def test_a_device_that_is_lost_is_an_engine_that_is_dead(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)

    def lose(layout: StepLayout, handed: Any = None) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(executor.runner.steps, "run", lose)
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
