"""Pipeline stages in processes of their own: one rank's tokens, failed steps, and deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.points import FaultPoints
from tiny_engine import OPTIONS, greedy_tokens, open_llm, random_prompts
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.protocol.errors import EngineDeadError
from penstock.protocol.step import NewRequest, ScheduledRequest, StepFailure, StepPlan

PROMPTS = random_prompts(3, 2, 9, 33, 60, 7)
SEEDED = SamplingParams(temperature=0.9, seed=1, max_tokens=12, logprobs=2)
FORWARD = "penstock.runner.forward:forward"  # on the first stage, which comes first


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=3)


def tokens(llm: LLM) -> list[list[list[int]]]:
    seeded = llm.generate(PROMPTS, SEEDED, use_tqdm=False)
    return [greedy_tokens(llm, PROMPTS), [each.outputs[0].token_ids for each in seeded]]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[list[int]]]:
    with open_llm(model) as llm:
        return tokens(llm)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultPoints]:
    points = FaultPoints(tmp_path_factory.mktemp("faults"), FORWARD)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in points.env.items():
            patch.setenv(name, value, prepend=os.pathsep if name == "PYTHONPATH" else None)
        yield points


@pytest.fixture(scope="module")
def stages(model: Path, points: FaultPoints) -> Iterator[LLM]:
    """Two stages, which a test leaves as it found them."""
    with open_llm(model, pipeline_parallel_size=2, max_num_batched_tokens=32) as llm:
        yield llm


def executor_of(llm: LLM) -> MultiProcessExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, MultiProcessExecutor)
    return executor


def test_stages_give_one_ranks_tokens(stages: LLM, expected: list[list[list[int]]]) -> None:
    assert stages.engine.limits.max_in_flight == 2
    assert tokens(stages) == expected


def plan_of(step_id: int, request_id: str) -> StepPlan:
    """A request's first step."""
    request = NewRequest(
        request_id=request_id, token_ids=[1, 2, 3], num_prompt_tokens=3, num_computed_tokens=0,
        params=SamplingParams(temperature=0), seed=1,
    )  # fmt: skip
    scheduled = ScheduledRequest(request_id, 0, 3, True, [[step_id]])
    return StepPlan(step_id=step_id, scheduled=[scheduled], new_requests=[request])


def test_a_step_that_fails_on_one_stage_is_a_result(stages: LLM, points: FaultPoints) -> None:
    """All stages skip later steps, and are in step again after a reset."""
    executor = executor_of(stages)
    executor.launch(plan_of(1, "a"))
    (first,) = executor.collect().results
    points.raise_at(FORWARD)
    for step_id, name in ((2, "b"), (3, "c")):
        executor.launch(plan_of(step_id, name))
    assert executor.collect().failure == StepFailure.ERROR
    executor.call("reset")  # with a step in flight, as the engine does
    executor.launch(plan_of(4, "a"))
    (again,) = executor.collect().results
    assert again.token_ids == first.token_ids
    executor.call("reset")
    stages.reset_prefix_cache()  # its blocks were used


def test_requests_of_a_failed_step_are_retried(
    stages: LLM, points: FaultPoints, expected: list[list[list[int]]]
) -> None:
    points.raise_at(FORWARD, after_calls=9)
    assert tokens(stages) == expected
    assert points.has_struck(FORWARD)


@pytest.mark.slow
def test_stages_of_two_ranks_give_one_ranks_tokens_until_one_dies(
    model: Path, expected: list[list[list[int]]]
) -> None:
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **OPTIONS}
    with LLM(str(model), **options) as llm:
        assert tokens(llm) == expected
        processes = executor_of(llm)._processes
        os.kill(processes[1].pid, signal.SIGKILL)  # of the first stage, which reports nothing
        with pytest.raises(EngineDeadError, match=r"worker \d of 4"):
            llm.generate(PROMPTS, SEEDED, use_tqdm=False)
        assert [process.wait(60) for process in processes] == [-signal.SIGKILL] * 4
