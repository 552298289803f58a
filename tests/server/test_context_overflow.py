"""A prompt that is too long is told so in the words by which clients know it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from server_process import ServerProcess

NUM_TOKENS = 4096  # the scripted model's context
LONG = "x" * NUM_TOKENS  # a byte is a token
MESSAGES = [{"role": "user", "content": LONG}]

OPENAI_ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}, "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": [1] * NUM_TOKENS}, "prompt"),
    ("/v1/responses", {"input": LONG}, "input"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field"), OPENAI_ROUTES, ids=["chat", "text", "ids", "responses"]
)
def test_openai_routes_have_its_sentence_and_its_code(
    scripted_server: ServerProcess, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    response = scripted_server.post(path, {**body, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert (error["type"], error["param"]) == ("BadRequestError", field)
    # litellm's ContextWindowExceededError is raised for this text, in whatever case
    # (ExceptionCheckers.is_error_str_context_window_exceeded); litellm excludes openai>=3.
    expected = (
        f"This model's maximum context length is {NUM_TOKENS} tokens. However, you requested "
    )
    assert error["message"].startswith(expected)
    assert error["message"].endswith(f"Please reduce the length of the {field}.")
    num_prompt = int(error["message"].partition(" tokens (")[2].partition(" in the ")[0])
    assert num_prompt >= NUM_TOKENS
    assert f"you requested {num_prompt + 1} tokens" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_have_anthropics_sentence(scripted_server: ServerProcess, stream: bool) -> None:
    body = {"model": "scripted", "messages": MESSAGES, "max_tokens": 8, "stream": stream}
    response = scripted_server.post("/v1/messages", body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    # Also what litellm looks for where it speaks this API (_map_anthropic_exception).
    start, _, end = error["message"].partition(" tokens > ")
    assert int(start.removeprefix("prompt is too long: ")) >= NUM_TOKENS
    assert end == f"{NUM_TOKENS - 1} maximum"


def test_a_prompt_that_is_far_too_long_is_told_a_lower_bound(
    scripted_server: ServerProcess,
) -> None:
    prompt = "x" * 1_000_000  # which is not tokenized to the end
    error = scripted_server.post("/v1/completions", {"prompt": prompt}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    found = re.search(r"you requested at least (\d+) tokens", error["message"])
    assert found
    assert NUM_TOKENS < int(found[1]) <= len(prompt) + 1


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_langchain_raises_its_overflow_error(
    scripted_server: ServerProcess, kind: str, stream: bool
) -> None:
    options: Any = {"model": "scripted", "api_key": "none", "max_retries": 0}
    model: Any
    if kind == "messages":
        model = ChatAnthropic(base_url=scripted_server.base_url, **options)
    else:
        url = f"{scripted_server.base_url}/v1"
        model = ChatOpenAI(base_url=url, use_responses_api=kind == "responses", **options)
    with pytest.raises(ContextOverflowError):
        list(model.stream(LONG)) if stream else model.invoke(LONG)
