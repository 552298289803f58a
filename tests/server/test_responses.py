"""The Responses API through the official client, on the default model: which is held to calls and
schemas by grammar. And what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from response_events import CALL_EVENTS, MESSAGE_EVENTS, TOOLS, types_of
from server_process import ServerProcess
from tool_schemas import SCHEMAS


def test_a_text_is_answered_and_can_be_read_again(
    client: openai.OpenAI, default_model: str
) -> None:
    response = client.responses.create(
        model=default_model, input="What is the capital of France?", temperature=0,
        max_output_tokens=64, instructions="Answer in one sentence.", metadata={"a": "b"},
    )  # fmt: skip
    assert response.status == "completed"
    assert "Paris" in response.output_text
    (message,) = response.output
    assert message.type == "message"
    assert message.status == "completed"
    usage = response.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert response.metadata == {"a": "b"}
    assert response.instructions == "Answer in one sentence."
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()


def test_events_of_a_stream_have_the_official_order_and_add_up(
    client: openai.OpenAI, default_model: str
) -> None:
    options: Any = {
        "model": default_model, "input": "Count to five.", "temperature": 0,
        "max_output_tokens": 48, "store": False,
    }  # fmt: skip
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    last = f"response.{whole.status}"
    assert types_of(events) == ["response.created", "response.in_progress", *MESSAGE_EVENTS, last]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text != ""
    final: Any = events[-1]
    assert final.response.output_text == text
    assert final.response.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]
    assert events[0].response.status == "in_progress"  # type: ignore[union-attr]
    assert events[0].response.output == []  # type: ignore[union-attr]


def test_the_stream_helper_ends_with_the_whole_response(
    client: openai.OpenAI, default_model: str
) -> None:
    with client.responses.stream(
        model=default_model, input="Say hi.", temperature=0, max_output_tokens=512
    ) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1]
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_a_conversation_goes_on_after_a_stored_response_from_the_cache(
    client: openai.OpenAI, default_model: str
) -> None:
    first = client.responses.create(
        model=default_model, input="My name is Ada. " * 20 + "Say hello to me.", temperature=0,
        max_output_tokens=24, instructions="Forget this.",
    )  # fmt: skip
    options: Any = {"model": default_model, "temperature": 0, "max_output_tokens": 24}
    second = client.responses.create(
        input="What is my name?", previous_response_id=first.id, **options
    )
    resent = client.responses.create(
        input=[
            {"role": "user", "content": "My name is Ada. " * 20 + "Say hello to me."},
            *[item.to_dict() for item in first.output],  # type: ignore[list-item]
            {"role": "user", "content": "What is my name?"},
        ],
        **options,
    )
    assert second.output_text == resent.output_text
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert resent.usage is not None
    assert second.usage.input_tokens == resent.usage.input_tokens
    assert resent.usage.input_tokens_details.cached_tokens > 100
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items] == ["message"] * 3
    assert items[1].id == first.output[0].id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_time"}])
def test_a_call_that_is_demanded_is_made(
    client: openai.OpenAI, default_model: str, choice: Any, stream: bool
) -> None:
    options: Any = {
        "model": default_model, "input": "What time is it in Paris?", "tools": TOOLS,
        "extra_body": {"seed": 3},
        "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 128,
    }  # fmt: skip
    if stream:
        events = list(client.responses.create(stream=True, **options))
        assert types_of(events)[2:-1] == CALL_EVENTS
        response = events[-1].response  # type: ignore[union-attr]
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == response.output[0].arguments  # type: ignore[union-attr]
    else:
        response = client.responses.create(**options)
    assert response.status == "completed"
    (call,) = response.output
    assert call.type == "function_call"
    assert call.status == "completed"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    if choice != "required":
        assert call.name == "get_time"
    answer = client.responses.create(
        model=default_model, max_output_tokens=16, previous_response_id=response.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}],
    )  # fmt: skip
    assert answer.output[0].type == "message"


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=16)
    population: int = pydantic.Field(ge=0, le=99_999_999)


def test_parse_gives_an_object_of_the_schema(client: openai.OpenAI, default_model: str) -> None:
    response = client.responses.parse(
        model=default_model, input="Tell me about Paris.", text_format=City, extra_body={"seed": 1},
        max_output_tokens=96,
    )  # fmt: skip
    assert isinstance(response.output_parsed, City)


def test_json_object_gives_an_object(client: openai.OpenAI, default_model: str) -> None:
    response = client.responses.create(
        model=default_model, input="Answer with a very small JSON object.", extra_body={"seed": 1},
        max_output_tokens=256, text={"format": {"type": "json_object"}},
    )  # fmt: skip
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)
    assert response.output_text.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_of_the_tokens_of_the_text(
    client: openai.OpenAI, default_model: str, stream: bool
) -> None:
    options: Any = {
        "model": default_model, "input": "Count to three.", "temperature": 0,
        "max_output_tokens": 8, "top_logprobs": 2, "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    if stream:
        events = list(client.responses.create(stream=True, **options))
        response = events[-1].response  # type: ignore[union-attr]
    else:
        response = client.responses.create(**options)
    part: Any = response.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in part.logprobs)


def test_an_answer_at_its_limit_is_incomplete(client: openai.OpenAI, default_model: str) -> None:
    options: Any = {"model": default_model, "input": "Tell me a story.", "max_output_tokens": 4}
    for response in (
        client.responses.create(**options),
        list(client.responses.create(stream=True, **options))[-1].response,  # type: ignore[union-attr]
    ):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
        assert response.usage is not None
        assert response.usage.output_tokens == 4


# -- what is wrong


IMAGE_PART = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"input": [{"role": "user"}]}, "input[0].content", "Field required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "must be an object of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "must have image_url",
        ),
        (
            {"input": [{"role": "user", "content": [IMAGE_PART]}]},
            "input[0].content[0].image_url",
            "text only",
        ),
        ({"input": []}, "input", "at least one"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search is not built in here"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0]", "--tool-server"),
        ({"tools": [{"type": "magic"}]}, "tools[0]", "function, custom or mcp"),
        (
            {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://10.0.0.1/mcp"}]},
            "tools[0]",
            "there is no tool server",
        ),
        ({"tools": TOOLS[:1] * 2}, "tools", "names must be unique"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice", "'x'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"top_logprobs": 1000}, "top_logprobs", "top_logprobs must be"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "at most 64"),
        ({"background": True, "store": False}, "background", "needs store"),
        ({"background": True, "stream": True}, "stream", "cannot be combined"),
        ({"conversation": "conv_1"}, "conversation", "no conversation"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "text.format.schema",
            "",
        ),
    ],
)
def test_what_is_wrong_is_named(
    scripted_server: ServerProcess, options: Any, param: str, message: str
) -> None:
    answer = scripted_server.post("/v1/responses", {"input": "[[Hi.]]", **options})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert message in error["message"]
