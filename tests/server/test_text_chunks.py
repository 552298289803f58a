"""Chunks that hold nothing but text are written as if each were made as an object."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ServerConfig
from penstock.conversation.output import TurnStep, TurnUsage
from penstock.protocol.outputs import CompletionOutput, RequestOutput
from penstock.server.openai.chat import ChatAnswer
from penstock.server.openai.completions import CompletionAnswer
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    Completion,
    CompletionChoice,
    CompletionRequest,
)
from penstock.server.openai.stream import Exchange, TextChunks, UsageCounter, UsageOptions
from penstock.text.parsing.deltas import ContentDelta

TEXTS = ["Hello", " there", ', "you"\n', "\\\x00\x1f", "é\u2028🙂"]


def completion(index: int, text: str) -> Completion:
    choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
    return Completion(id="cmpl-1", created=1, model='a "model"', choices=[choice])


@given(st.lists(st.tuples(st.integers(0, 2), st.text()), min_size=1))
def test_a_chunk_reads_as_the_object_would(pieces: list[tuple[int, str]]) -> None:
    chunks = TextChunks()
    for index, text in pieces:
        written = chunks.write(index, text, lambda text, index=index: completion(index, text))  # type: ignore[misc]
        assert json.loads(written) == json.loads(
            completion(index, text).model_dump_json(exclude_unset=True)
        )


class Service:
    """As much of the server's as an answer asks for. `outputs` are those of a fake engine."""

    fingerprint = "fp"
    server_config = ServerConfig()
    frontend = SimpleNamespace(tokenizer=None)

    def shows_token_ids(self, asked: bool | None) -> bool:
        return False

    async def outputs(self, prepared: Any, timeout: Any) -> Any:
        for number, text in enumerate(TEXTS):
            reason = "stop" if number == len(TEXTS) - 1 else None
            item = CompletionOutput(0, text, [number], finish_reason=reason)
            yield 0, RequestOutput("r", "prompt", [1], [item], reason is not None)


class Turn:
    """A turn that says the texts one by one."""

    prompt_logprobs = None
    usage = TurnUsage(num_prompt=1)

    def __init__(self) -> None:
        self.prompt_token_ids = [1]

    async def steps(self) -> Any:
        for number, text in enumerate(TEXTS):
            reason: Any = "stop" if number == len(TEXTS) - 1 else None
            yield TurnStep(0, [ContentDelta(text)], [number], None, reason, None)


async def _all(answer: Any) -> list[Any]:
    return [json.loads(chunk) async for chunk in answer.chunks()]


def stream(options: dict[str, Any], chat: bool) -> list[Any]:
    answer: Any
    if chat:
        messages = [{"role": "user", "content": "x"}]
        body: Any = ChatCompletionRequest.model_validate({"messages": messages, **options})
        answer = ChatAnswer(Exchange(Service(), body, "model", "id"), Turn())  # type: ignore[arg-type]
    else:
        body = CompletionRequest.model_validate({"prompt": "x", **options})
        answer = CompletionAnswer(Exchange(Service(), body, "model", "id"), [])  # type: ignore[arg-type]
    return asyncio.run(_all(answer))


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_a_stream_is_the_same_however_its_chunks_are_written(
    chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: TextChunks, index: int, text: str, make: Any) -> str:
        written: str = make(text).model_dump_json(exclude_unset=True)
        return written

    monkeypatch.setattr("time.time", lambda: 1)
    fast = stream({"stream": True}, chat)
    monkeypatch.setattr(TextChunks, "write", write)
    assert fast == stream({"stream": True}, chat)
    parts = [chunk["choices"][0] for chunk in fast]
    said = [part["delta"].get("content", "") if chat else part["text"] for part in parts]
    assert "".join(said) == "".join(TEXTS)
    assert parts[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_objects_are_made_for_the_first_of_many_chunks_and_for_the_last(
    chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ChatAnswer if chat else CompletionAnswer
    make, num_made = kind._chunk, 0

    def counting(*args: Any) -> Any:
        nonlocal num_made
        num_made += 1
        return make(*args)

    monkeypatch.setattr(kind, "_chunk", counting)
    monkeypatch.setattr(f"{__name__}.TEXTS", TEXTS * 20)
    assert len(stream({"stream": True}, chat)) >= len(TEXTS) == 100
    assert num_made <= 3


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_a_chunk_with_more_than_text_has_it_in_every_chunk(chat: bool) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream({"stream": True, "stream_options": usage}, chat)
    assert all(chunk["usage"]["prompt_tokens"] == 1 for chunk in chunks)
    chunks = stream({"stream": True, "return_token_ids": True}, chat)
    pieces = chunks[1:] if chat else chunks
    assert [chunk["choices"][0]["token_ids"] for chunk in pieces] == [
        [number] for number in range(len(TEXTS))
    ]


def test_usage_counts_each_prompt_once_and_what_was_cached_of_it_last() -> None:
    counter = UsageCounter(UsageOptions(at_end=True, in_every_chunk=True, with_details=True))
    for index, num_cached in [(0, 0), (1, 0), (0, 2), (1, 1), (0, 2)]:
        items = [CompletionOutput(0, "x", [7]), CompletionOutput(1, "y", [7, 8])]
        output = RequestOutput("r", "p", [1, 2, 3 + index][: 2 + index], items, False)
        output.num_cached_tokens = num_cached
        counter.count(index, output)
    used = counter.so_far()
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (5, 15, 20)
    assert used.prompt_tokens_details is not None
    assert used.prompt_tokens_details.cached_tokens == 3
