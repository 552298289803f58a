"""The official client, sync and async, through every endpoint that it has a method for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_process import ServerProcess

from penstock import LLM, SamplingParams

PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def offline(default_model: str) -> Iterator[LLM]:
    options = {"cpu_threads": 1, "kv_cache_memory_bytes": "256MiB", "max_model_len": 2048}
    with LLM(default_model, **options) as llm:
        yield llm


@pytest.fixture
def model() -> str:
    return "SmolLM2-135M-Instruct"


def test_models_are_listed_and_found(client: openai.OpenAI, model: str) -> None:
    (card,) = client.models.list().data
    assert card.id == model
    assert client.models.retrieve(model) == card


def test_users_see_the_default_model_by_its_name(
    server: ServerProcess, client: openai.OpenAI, model: str, default_model: str
) -> None:
    assert server.banner[0] == f"Penstock serves {model}\n"
    for asked in (model, default_model):
        answer = client.chat.completions.create(model=asked, messages=MESSAGES, max_tokens=1)
        assert answer.model == model
        assert client.models.retrieve(asked).id == model
    labels = {
        line.partition('model_name="')[2].partition('"')[0]
        for line in server.get("/metrics").text.splitlines()
        if "model_name=" in line
    }
    assert labels == {model}
    refusal = server.post("/v1/chat/completions", {"model": "x", "messages": MESSAGES})
    assert refusal.json()["error"]["message"].endswith(f"there is {model}")


def test_a_greedy_chat_equals_the_offline_one(
    client: openai.OpenAI, model: str, offline: LLM
) -> None:
    (expected,) = offline.chat(MESSAGES, SamplingParams(**GREEDY), use_tqdm=False)
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    choice = answer.choices[0]
    assert choice.message.content == expected.outputs[0].text
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_a_streamed_chat_adds_up_to_the_whole_one(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_greedy_completion_equals_the_offline_one(
    client: openai.OpenAI, model: str, offline: LLM
) -> None:
    (expected,) = offline.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)
    answer = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    assert "Paris" in expected.outputs[0].text
    assert answer.choices[0].text == expected.outputs[0].text
    pieces = client.completions.create(model=model, prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == expected.outputs[0].text


def test_a_seed_gives_the_offline_samples(client: openai.OpenAI, model: str, offline: LLM) -> None:
    options: Any = {"temperature": 1.0, "max_tokens": 12, "seed": 11, "n": 3}
    (expected,) = offline.generate(PROMPT, SamplingParams(**options), use_tqdm=False)
    answer = client.completions.create(model=model, prompt=PROMPT, **options)
    assert [c.text for c in answer.choices] == [item.text for item in expected.outputs]
    assert len({c.text for c in answer.choices}) > 1


def test_the_async_client_gets_the_same(client: openai.OpenAI, model: str) -> None:
    async def ask() -> tuple[list[str], str, str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as aclient:
            models = [card.id async for card in aclient.models.list()]
            chat = await aclient.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
            stream = await aclient.completions.create(
                model=model, prompt=PROMPT, stream=True, **GREEDY
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            return models, chat.choices[0].message.content or "", text

    models, chat, text = asyncio.run(ask())
    assert models == [model]
    same = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    assert chat == same.choices[0].message.content
    assert text == client.completions.create(model=model, prompt=PROMPT, **GREEDY).choices[0].text


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1.0)
    assert caught.value.param == "temperature"
    assert caught.value.status_code == 400
