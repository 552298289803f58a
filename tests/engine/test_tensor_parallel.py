"""Two and four ranks give one rank's tokens."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.points import FaultPoints
from tiny_engine import open_llm
from tiny_models import config_of, make_checkpoint

from penstock import LLM, SamplingParams
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.calls import Call
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.executor.nodes import framed
from penstock.layers.build import Build
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.calls import encode
from penstock.protocol.errors import ConfigError, EngineDeadError, ModelError
from penstock.protocol.step import NewRequest, ScheduledRequest, StepFailure, StepPlan

LONG_STEPS = {"max_num_batched_tokens": 64}


def generate(llm: LLM) -> list[list[int]]:
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(250) for _ in range(n)]} for n in (2, 9, 33, 60)]
    params = [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, repetition_penalty=1.1),
        SamplingParams(temperature=0.9, seed=2, max_tokens=16, top_k=20, top_p=0.9, logprobs=1),
    ]
    outputs = llm.generate(
        [prompt for prompt in prompts for _ in params], params * len(prompts), use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary does not split evenly, and it has fewer key heads than ranks."""
    odd = {"vocab_size": 251, "num_key_value_heads": 1}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama_tied_biased", **odd)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with open_llm(model, **LONG_STEPS) as llm:
        return generate(llm)


def test_four_ranks_give_one_ranks_tokens_until_one_dies(
    model: Path, expected: list[list[int]]
) -> None:
    with open_llm(model, tensor_parallel_size=4, **LONG_STEPS) as llm:
        assert generate(llm) == expected
        executor_of(llm)._processes[1].kill()
        with pytest.raises(EngineDeadError, match="worker"):
            generate(llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("llama_tied_biased", {"num_key_value_heads": 2}),
        ("qwen2_windowed", {}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
        ("mamba2", {}),
        ("qwen3_next", {"linear_num_key_heads": 4}),
    ],
)
def test_four_ranks_give_one_ranks_tokens(
    variant: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path, variant, vocab_size=251, **sizes)
    with open_llm(model, **LONG_STEPS) as llm:
        expected = generate(llm)
    with open_llm(model, tensor_parallel_size=4, **LONG_STEPS) as llm:
        assert generate(llm) == expected


def executor_of(llm: LLM) -> MultiProcessExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, MultiProcessExecutor)
    return executor


@pytest.fixture(scope="module")
def shared_llm(model: Path) -> Iterator[LLM]:
    with open_llm(model, tensor_parallel_size=2, async_scheduling=True, **LONG_STEPS) as llm:
        assert llm.engine.limits.max_in_flight == 2
        yield llm


@pytest.fixture
def ranks(shared_llm: LLM) -> Iterator[LLM]:
    """Two ranks for tests that leave them running. They have forgotten the test before."""
    yield shared_llm
    executor_of(shared_llm).call("reset")


def test_two_steps_in_flight_give_one_ranks_tokens(ranks: LLM, expected: list[list[int]]) -> None:
    assert generate(ranks) == expected


def plan_of(step_id: int, request_id: str, masked: bool = False, num_known: int = 3) -> StepPlan:
    """A request's first step."""
    request = NewRequest(
        request_id=request_id, token_ids=[1, 2, 3, *[4] * (num_known - 3)],
        num_prompt_tokens=num_known, num_computed_tokens=0,
        params=SamplingParams(temperature=0), seed=1,
    )  # fmt: skip
    scheduled = ScheduledRequest(request_id, 0, 3, True, [[step_id]])
    return StepPlan(step_id=step_id, scheduled=[scheduled], new_requests=[request], masked=masked)


def test_a_step_that_fails_on_all_ranks_is_a_result_and_later_ones_are_skipped(ranks: LLM) -> None:
    executor = executor_of(ranks)
    executor.launch(plan_of(1, "a"))
    executor.launch(plan_of(2, "b", masked=True))
    executor.sample(None)  # a step that waits for masks, and gets none
    executor.launch(plan_of(3, "c"))
    results = [executor.collect() for _ in range(3)]
    failures = [result.failure for result in results]
    assert failures == [None, StepFailure.ERROR, StepFailure.SKIPPED]
    (first,) = results[0].results
    executor.call("reset")
    executor.launch(plan_of(4, "a"))  # the ranks have forgotten it
    (again,) = executor.collect().results
    assert again.token_ids == first.token_ids


FORWARD = "penstock.runner.forward:forward"


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultPoints:
    """`FORWARD` can be made to fail, on whichever rank comes first."""
    points = FaultPoints(tmp_path, FORWARD)
    for name, value in points.env.items():
        monkeypatch.setenv(name, value)
    return points


def test_a_step_that_fails_on_one_rank_alone_ends_the_group(
    model: Path, points: FaultPoints
) -> None:
    """A rank that reads no more keeps nobody waiting, not even with a message that is larger than
    what fits between two processes."""
    with open_llm(model, tensor_parallel_size=2) as llm:
        executor = executor_of(llm)
        processes = list(executor._processes)
        points.raise_at(FORWARD)  # the other rank waits for it in a collective
        executor.launch(plan_of(1, "a"))
        executor.launch(plan_of(2, "b", num_known=4_000_000))
        with pytest.raises(EngineDeadError, match=r"did not come back|not on others"):
            executor.collect()
        assert [process.wait(60) for process in processes] == [-signal.SIGKILL] * 2


def test_a_message_larger_than_what_fits_between_processes_arrives(ranks: LLM) -> None:
    executor = executor_of(ranks)
    executor.launch(plan_of(1, "a"))
    executor.launch(plan_of(2, "b", num_known=4_000_000))
    executor.launch(plan_of(3, "c"))
    failures = [executor.collect().failure for _ in range(3)]
    assert failures == [None, StepFailure.ERROR, StepFailure.SKIPPED]


def test_a_call_after_one_whose_wait_was_interrupted_gets_its_own_result(
    ranks: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_of(ranks)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    executor.launch(plan_of(1, "a"))
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.collect()
    executor.call("reset")
    executor.launch(plan_of(2, "b"))
    assert executor.collect().step_id == 2


class InterruptedSocket:
    """Interrupts this process each time that bytes have gone to a rank."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, data: bytearray) -> int:
        num_sent = self._end.send(data)
        signal.raise_signal(signal.SIGINT)
        return num_sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_repeats_nothing_that_was_sent(ranks: LLM) -> None:
    executor = executor_of(ranks)
    sockets, wrapped = executor._sockets, [InterruptedSocket(e) for e in executor._sockets]
    executor._sockets = wrapped  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        executor.launch(plan_of(1, "a"))
    executor._sockets = sockets
    assert not any(executor._unsent), "all ranks have all of it"
    assert executor.collect().step_id == 1


def test_ranks_are_in_step_after_two_interrupts(
    ranks: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in a step, and one while the ranks are made to forget it."""
    prompt = {"prompt_token_ids": [1, 2, 3]}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    executor = executor_of(ranks)
    (expected,) = ranks.generate(prompt, params, use_tqdm=False)
    send = executor._send

    def interrupted(method: str, *args: Any, **options: Any) -> None:
        send(method, *args, **options)
        if method in interrupts:
            interrupts.remove(method)
            raise KeyboardInterrupt

    interrupts = ["launch", "reset"]
    monkeypatch.setattr(executor, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.generate(prompt, params, use_tqdm=False)
    assert not interrupts
    for _ in range(2):
        (found,) = ranks.generate(prompt, params, use_tqdm=False)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_ranks_that_do_not_divide_the_model_are_refused() -> None:
    mesh = Mesh(RankGroup(rank=0, size=3))
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"), mesh=mesh)
    with pytest.raises(ConfigError, match="tensor_parallel_size must divide the model's 4"):
        build_model(config_of("llama"), build)


def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_llm(model, tensor_parallel_size=2)


def test_what_a_rank_said_last_is_told_though_a_message_to_it_fails_first(model: Path) -> None:
    """All end with it at once, though the others could go on."""
    with open_llm(model, tensor_parallel_size=2) as llm:
        executor = executor_of(llm)
        processes = list(executor._processes)
        executor._unsent[1] += framed(encode(Call("no_such_method", [])))
        executor._flush()
        processes[1].wait(60)
        with pytest.raises(EngineDeadError, match="no_such_method"):
            executor.launch(plan_of(1, "a"))
        assert processes[0].wait(60) == -signal.SIGKILL
