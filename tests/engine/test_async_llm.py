"""AsyncLLM: what LLM gives, from an event loop, through an engine's death."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.killed import GREEDY, HELD, generate_killed
from faults.saboteur import Gate
from tiny_engine import OPTIONS
from tiny_models import make_checkpoint

from penstock import LLM, AsyncLLM, PoolingParams, RequestOutput, SamplingParams
from penstock.protocol.errors import (
    ConfigError,
    EngineDeadError,
    InputError,
    ModelError,
    RequestFault,
)
from penstock.text.frontend import PreparedRequest

PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7, 8]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of the engine that tests share."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def shared_gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    flag = tmp_path_factory.mktemp("gate") / "flag"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SABOTEUR_FLAG", str(flag))
        yield Gate(flag)


@pytest.fixture(scope="module")
def shared_llm(
    model: str, loop: asyncio.AbstractEventLoop, shared_gate: Gate
) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(model, logits_processors=["faults.saboteur:Saboteur"], **OPTIONS)
    loop.run_until_complete(llm.start())
    yield llm
    loop.run_until_complete(llm.close())


@pytest.fixture
def llm(shared_llm: AsyncLLM) -> Iterator[AsyncLLM]:
    """Running; each test leaves it without requests."""
    yield shared_llm
    assert not shared_llm._client.records


@pytest.fixture
def gate(shared_gate: Gate) -> Gate:
    """Of `llm`; closed."""
    shared_gate.close()
    return shared_gate


async def last(llm: AsyncLLM, prompt: dict[str, list[int]]) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, GREEDY)]
    assert outputs[-1].finished
    return outputs[-1]


def test_requests_side_by_side_give_what_the_offline_engine_gives(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, model: str
) -> None:
    with LLM(model, **OPTIONS) as offline:
        expected = offline.generate(PROMPTS, GREEDY, use_tqdm=False)

    async def run() -> list[RequestOutput]:
        outputs = await asyncio.gather(*(last(llm, prompt) for prompt in PROMPTS))
        await llm.reset_prefix_cache()
        return list(outputs)

    found = loop.run_until_complete(run())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_vectors_are_those_of_the_offline_engine(model: str) -> None:
    with LLM(model, runner="pooling", **OPTIONS) as llm:
        expected = llm.encode(PROMPTS, use_tqdm=False)

    async def run() -> None:
        async with AsyncLLM(model, runner="pooling", **OPTIONS) as llm:
            found = await asyncio.gather(*(llm.encode(prompt) for prompt in PROMPTS))
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.prompt_token_ids == theirs.prompt_token_ids
                np.testing.assert_allclose(ours.outputs.data, theirs.outputs.data, atol=1e-6)
            named = await llm.encode(PROMPTS[0], PoolingParams(vectors=["dense"]))
            assert list(named.outputs.vectors) == ["dense"]
            with pytest.raises(InputError, match="dimensions"):
                await llm.encode(PROMPTS[0], PoolingParams(dimensions=3))
            aborted = asyncio.ensure_future(llm.encode(PROMPTS[0], request_id="mine"))
            await asyncio.sleep(0)  # it is being prepared
            await llm.abort("mine")
            with pytest.raises(RequestFault, match="request mine was aborted"):
                await aborted
            again = await llm.encode(PROMPTS[0], request_id="mine")
            assert again.request_id == "mine"
            with pytest.raises(InputError, match="pool"):
                await last(llm, PROMPTS[0])

    asyncio.run(run())


def test_a_request_outlives_its_engine(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, gate: Gate
) -> None:
    expected = loop.run_until_complete(last(llm, PROMPTS[0]))
    found = loop.run_until_complete(generate_killed(llm, gate, PROMPTS[0]))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_request_that_is_aborted_ends_and_others_go_on(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, gate: Gate
) -> None:
    async def run() -> None:
        outputs = []
        async for output in llm.generate(PROMPTS[0], HELD, "mine"):
            outputs.append(output)
            await llm.abort("mine")
            await llm.abort("nobody's")
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert len(outputs[-1].outputs[0].token_ids) <= 12
        gate.open()
        await last(llm, PROMPTS[1])

    loop.run_until_complete(run())


def test_a_loop_that_is_left_aborts_its_request(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, gate: Gate
) -> None:
    async def run() -> None:
        async for _ in llm.generate(PROMPTS[0], HELD):
            break
        while llm._client.records:
            await asyncio.sleep(0.01)
        gate.open()
        await last(llm, PROMPTS[1])

    loop.run_until_complete(run())


def test_what_is_wrong_is_said_at_once(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, model: str, tmp_path: Path
) -> None:
    async def run() -> None:
        not_started = AsyncLLM(model, **OPTIONS)
        with pytest.raises(ConfigError, match="there is no tokenizer: skip_tokenizer_init"):
            not_started.get_tokenizer()
        with pytest.raises(ConfigError, match="start"):
            await not_started.reset_prefix_cache()
        await not_started.abort("nobody's")
        with pytest.raises(ConfigError, match="running already"):
            await llm.start()
        with pytest.raises(InputError, match="temperature"):
            await anext(llm.generate(PROMPTS[0], SamplingParams(temperature=-1)))
        running = llm.generate(PROMPTS[0], GREEDY, "mine")
        await anext(running)
        with pytest.raises(InputError, match="running already"):
            await anext(llm.generate(PROMPTS[0], GREEDY, "mine"))
        await running.aclose()
        missing = AsyncLLM(str(tmp_path / "missing"), **OPTIONS)
        with pytest.raises(ModelError, match="missing"):
            await missing.start()

    loop.run_until_complete(run())


def test_a_request_that_is_aborted_while_it_is_prepared_ends(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_preparing, may_go_on = threading.Event(), threading.Event()
    prepare = llm.frontend.prepare

    def prepare_late(*args: Any, **options: Any) -> PreparedRequest:
        is_preparing.set()
        may_go_on.wait()
        return prepare(*args, **options)

    monkeypatch.setattr(llm.frontend, "prepare", prepare_late)

    async def run() -> None:
        outputs = llm.generate(PROMPTS[0], GREEDY, "mine")
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.to_thread(is_preparing.wait)
        await llm.abort("mine")
        may_go_on.set()
        output = await first
        assert output.finished
        assert output.request_id == "mine"
        assert output.outputs[0].finish_reason == "abort"
        assert not llm._client.records

    loop.run_until_complete(run())


def test_close_ends_an_engine_that_is_starting(model: str) -> None:
    async def run() -> None:
        llm = AsyncLLM(model, **OPTIONS)
        for num_turns in (1, 5, 50):  # of the event loop: the start gets further each time
            start = asyncio.ensure_future(llm.start())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            replicas = getattr(llm._client, "replicas", None)
            await llm.close()
            assert (replicas is None) == (num_turns == 1)
            if replicas is not None:
                engine = replicas.members[0].dispatch._engine
                assert engine.process.poll() is not None, "it is gone"
            with pytest.raises(EngineDeadError, match="closed while it was starting"):
                await start
        async with llm:  # it can be started again
            await last(llm, PROMPTS[0])

    asyncio.run(run())


def test_a_start_that_is_cancelled_leaves_no_engine(model: str) -> None:
    async def run() -> None:
        llm = AsyncLLM(model, **OPTIONS)
        start = asyncio.ensure_future(llm.start())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine = llm._client.replicas.members[0].dispatch._engine.process
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert engine.poll() is not None
        await llm.close()

    asyncio.run(run())


def test_an_id_of_the_callers_own_is_never_taken(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    async def run() -> None:
        unnamed = llm.generate(PROMPTS[0], GREEDY)  # has its id until it is closed
        own = (await anext(unnamed)).request_id
        assert uuid.UUID(own.removeprefix("request-")).version == 4
        for name in ("request-0", "request-1", "0"):
            named = llm.generate(PROMPTS[0], GREEDY, name)
            assert (await anext(named)).request_id == name
            await named.aclose()
        await unnamed.aclose()

    loop.run_until_complete(run())


def test_an_id_is_free_again_once_its_generator_is_closed(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    other = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    async def run() -> None:
        expected = await last(llm, PROMPTS[0])
        for _ in range(5):
            left = llm.generate(PROMPTS[1], other, "mine")
            await anext(left)
            await left.aclose()
            assert not llm._client.records
            # What the engine still says of the one before is not taken for this one's.
            outputs = [output async for output in llm.generate(PROMPTS[0], GREEDY, "mine")]
            assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids

    loop.run_until_complete(run())


def test_replicas_give_the_tokens_of_one_engine(model: str) -> None:
    async def run(**options: Any) -> list[list[int]]:
        async with AsyncLLM(model, **OPTIONS, **options) as llm:
            outputs = await asyncio.gather(*(last(llm, prompt) for prompt in PROMPTS * 2))
            return [list(output.outputs[0].token_ids) for output in outputs]

    assert asyncio.run(run(data_parallel_size=2)) == asyncio.run(run())
