"""Anthropic's API through its official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import jsonschema  # type: ignore[import-untyped]
import pytest
from server_process import ServerProcess

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}]
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
COLD: Any = {"extra_body": {"temperature": 0.0}}
GREEDY: Any = {"max_tokens": 16, **COLD}
GREEDY_BODY: Any = {"max_tokens": 16, "temperature": 0.0}
INPUT = {"city": "Paris", "days": 2}
CALL = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': INPUT})}\n</tool_call>"


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(scripted_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    url = scripted_server.base_url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def say(script: str) -> Any:
    return [{"role": "user", "content": f"[[{script}]]"}]


def test_a_message_equals_the_chat_completion(
    client: anthropic.Anthropic, server: ServerProcess, default_model: str
) -> None:
    message = client.messages.create(model=default_model, messages=MESSAGES, **GREEDY)
    same = server.post("/v1/chat/completions", {"messages": MESSAGES, **GREEDY_BODY}).json()
    (block,) = message.content
    assert block.type == "text"
    assert block.text == same["choices"][0]["message"]["content"]
    assert message.role == "assistant"
    assert message.model == "SmolLM2-135M-Instruct"
    reasons = {"stop": "end_turn", "length": "max_tokens"}
    assert message.stop_reason == reasons[same["choices"][0]["finish_reason"]]
    usage = message.usage
    num_input = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert num_input == same["usage"]["prompt_tokens"]
    assert usage.output_tokens == same["usage"]["completion_tokens"]


def test_a_stream_adds_up_to_the_whole_message(
    client: anthropic.Anthropic, default_model: str
) -> None:
    options: Any = {"model": default_model, "messages": MESSAGES, "system": "Be brief.", **GREEDY}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_the_official_order(client: anthropic.Anthropic, default_model: str) -> None:
    options: Any = {"model": default_model, "messages": MESSAGES, "stream": True, **GREEDY}
    kinds = [event.type for event in client.messages.create(**options)]
    assert kinds[:2] == ["message_start", "content_block_start"]  # the client drops pings
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_events_have_their_names_on_the_wire(server: ServerProcess, default_model: str) -> None:
    body = {"model": default_model, "messages": MESSAGES, "stream": True, **GREEDY_BODY}
    text = server.post("/v1/messages", body).text
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert "[DONE]" not in text


def test_stop_sequences_end_the_message(client: anthropic.Anthropic, default_model: str) -> None:
    options: Any = {"model": default_model, "messages": MESSAGES, **GREEDY}
    text = client.messages.create(**options).content[0].text
    word = text.split()[2]
    message = client.messages.create(stop_sequences=[word], **options)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == text[: text.index(word)]


def test_a_last_message_of_the_assistant_is_continued(
    client: anthropic.Anthropic, default_model: str
) -> None:
    begun = {"role": "assistant", "content": "The capital of France is the city of"}
    messages: Any = [*MESSAGES, begun]
    message = client.messages.create(model=default_model, messages=messages, **GREEDY)
    assert message.content[0].text.startswith(" Paris")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_tool_is_used_with_valid_input(
    client: anthropic.Anthropic, default_model: str, choice: Any
) -> None:
    options: Any = {
        "model": default_model, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 128,
        "tool_choice": {**choice, "disable_parallel_tool_use": True}, **COLD,
    }  # fmt: skip
    message = client.messages.create(**options)
    (block,) = message.content
    assert block.type == "tool_use"
    assert message.stop_reason == "tool_use"
    jsonschema.validate(block.input, SCHEMA)
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    (again,) = streamed.content
    assert again.type == "tool_use"
    assert again.input == block.input


def test_tokens_are_counted_as_the_model_sees_them(
    client: anthropic.Anthropic, default_model: str
) -> None:
    counted = client.messages.count_tokens(model=default_model, messages=MESSAGES, system="Hi")
    usage = client.messages.create(
        model=default_model, messages=MESSAGES, system="Hi", max_tokens=1
    ).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_thinking_and_tools_are_blocks_of_their_own(scripted: anthropic.Anthropic) -> None:
    options: Any = {
        "model": "scripted", "messages": say(f"<think>Look.</think>I look.{CALL}"),
        "tools": TOOLS, "max_tokens": 400,
    }  # fmt: skip
    whole = scripted.messages.create(**options)
    thinking, text, use = whole.content
    assert (thinking.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert thinking.thinking == "Look."
    assert text.text == "I look."
    assert (use.name, use.input) == ("get_weather", INPUT)
    with scripted.messages.stream(**options) as stream:
        kinds = [event.content_block.type for event in stream if event.type == "content_block_stop"]
        final = stream.get_final_message()
    assert kinds == ["thinking", "text", "tool_use"]
    assert final.content[0] == thinking
    assert final.content[1].text == "I look."  # type: ignore[union-attr]
    assert final.content[2].input == INPUT  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "disabled"}}])
def test_blocks_stand_in_the_order_they_were_written_streamed_and_not(
    scripted: anthropic.Anthropic, thinking: Any
) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    script = f"Before.{call}Between. <think>Hm.</think>Still.{call}{call}After."
    options: Any = {
        "model": "scripted", "max_tokens": 400, "messages": say(script), "tools": TOOLS,
        **thinking,
    }  # fmt: skip
    whole = scripted.messages.create(**options)
    with scripted.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    told = [
        [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]
        for message in (whole, streamed)
    ]
    assert told[0] == told[1]
    kinds = [block["type"] for block in told[0]]
    between = ["text"] if thinking else ["text", "thinking", "text"]
    assert kinds == ["text", "tool_use", *between, "tool_use", "tool_use", "text"]


def test_thinking_has_a_budget_and_can_be_turned_off(scripted: anthropic.Anthropic) -> None:
    def ask(script: str, thinking: Any) -> Any:
        return scripted.messages.create(
            model="scripted", messages=say(script), thinking=thinking, max_tokens=40
        ).content

    first, *_ = ask("so it goes, on and on", {"type": "enabled", "budget_tokens": 5})
    assert (first.type, first.thinking) == ("thinking", "so it")
    (only,) = ask("yes", {"type": "disabled"})
    assert (only.type, only.text) == ("text", "yes")


def test_results_of_tools_reach_the_model(scripted: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "get_weather", "input": INPUT},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "[[It rains.]]"},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    message = scripted.messages.create(
        model="scripted", messages=messages, tools=TOOLS, max_tokens=40
    )
    assert message.content[0].text == "It rains."  # type: ignore[union-attr]


def test_an_answer_can_be_held_to_a_schema(server: ServerProcess, default_model: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {
        "model": default_model, "messages": MESSAGES, "max_tokens": 96, "temperature": 0,
        "output_config": {"format": form},
    }  # fmt: skip
    (block,) = server.post("/v1/messages", body).json()["content"]
    jsonschema.validate(json.loads(block["text"]), SCHEMA)


def test_errors_are_the_clients_own_kinds(client: anthropic.Anthropic, default_model: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        client.messages.create(model="other", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="temperature must be") as caught:
        client.messages.create(
            model=default_model, messages=MESSAGES, max_tokens=1, extra_body={"temperature": -1.0}
        )
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == caught.value.request_id or body["request_id"]
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(model=default_model, messages=image, max_tokens=1)


def test_a_key_may_come_in_either_header(serve_tiny: Callable[..., ServerProcess]) -> None:
    server = serve_tiny("--api-key", "secret")
    body = {"model": None, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    refused = server.post("/v1/messages", body)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
        assert server.get("/v1/models", headers=headers).status_code == 200
    assert server.get("/v1/models", headers={"x-api-key": "other"}).status_code == 401
