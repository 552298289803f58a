"""The Responses API through the official client: on the default model, which is held to calls and
schemas by grammar; and on one that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from server_process import ServerProcess, eventually

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": WEATHER},
    {"type": "function", "name": "get_time", "parameters": TIME},
]
SCHEMAS: Any = {"get_weather": WEATHER, "get_time": TIME}
CALL = '<tool_call>{"name": "get_time", "arguments": {"zone": "utc"}}</tool_call>'


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(scripted_server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{scripted_server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def types_of(events: Any) -> list[str]:
    """Types in their order, repeated deltas once."""
    types: list[str] = []
    for event in events:
        if not types or types[-1] != event.type:
            types.append(event.type)
    return types


MESSAGE_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


# -- the default model


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


# -- a model that says what it is told


def test_reasoning_text_and_calls_are_items_in_the_order_they_were_written(
    scripted: openai.OpenAI,
) -> None:
    options: Any = {
        "model": "scripted", "tools": TOOLS, "reasoning": {"effort": "low", "summary": "auto"},
        "input": f"[[<think>Hm, well.</think>Let me see.{CALL}]]",
    }  # fmt: skip
    whole = scripted.responses.create(**options)
    events = list(scripted.responses.create(stream=True, **options))
    assert types_of(events) == [
        "response.created", "response.in_progress",
        *REASONING_EVENTS, *MESSAGE_EVENTS, *CALL_EVENTS, "response.completed",
    ]  # fmt: skip
    streamed = events[-1].response  # type: ignore[union-attr]
    for response in (whole, streamed):
        reasoning, message, call = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text == "Hm, well."
        assert message.type == "message"
        assert response.output_text == "Let me see."
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"zone": "utc"}
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 5
        assert response.reasoning is not None
        assert response.reasoning.effort == "low"


def test_the_stream_helper_follows_reasoning_and_calls(scripted: openai.OpenAI) -> None:
    with scripted.responses.stream(
        model="scripted", tools=TOOLS, input=f"[[<think>Hm.</think>Well.{CALL}{CALL}]]"
    ) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"zone": "utc"}] * 2
    assert calls[0].call_id != calls[1].call_id


def test_a_call_that_turns_out_malformed_is_text(scripted: openai.OpenAI) -> None:
    script = '<tool_call>{"name": "get_time", "arguments": {"zone": oops</tool_call> Sorry.'
    options: Any = {"model": "scripted", "tools": TOOLS, "input": f"[[{script}]]"}
    whole = scripted.responses.create(**options)
    streamed = list(scripted.responses.create(stream=True, **options))[-1].response  # type: ignore[union-attr]
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["message"]
        assert response.output_text.endswith("Sorry.")


def test_nothing_said_is_an_empty_message(scripted: openai.OpenAI) -> None:
    response = scripted.responses.create(model="scripted", input="[[]]")
    assert response.output[0].type == "message"
    assert response.output_text == ""


def test_items_of_every_kind_reach_the_template(scripted: openai.OpenAI) -> None:
    conversation: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "A clock is needed."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "It is noon.", "annotations": []}]},
        {"role": "user", "content": "[[Fine.]]"},
    ]  # fmt: skip
    response = scripted.responses.create(
        model="scripted", input=conversation, instructions="Be brief.", tools=TOOLS
    )
    assert response.output_text == "Fine."
    chat = scripted.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "What time is it?"},
            {
                "role": "assistant",
                "reasoning": "A clock is needed.",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "get_time", "arguments": "{}"},
                    }
                ],
            },  # type: ignore[typeddict-unknown-key]
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
            {"role": "assistant", "content": "It is noon."},
            {"role": "user", "content": "[[Fine.]]"},
        ],
        tools=[
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in TOOLS
        ],
    )
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_only_allowed_tools_are_offered(scripted: openai.OpenAI) -> None:
    def num_tokens(**options: Any) -> int:
        response = scripted.responses.create(model="scripted", input="[[Hi.]]", **options)
        assert response.usage is not None
        return response.usage.input_tokens

    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    assert num_tokens(tools=TOOLS, tool_choice=choice) == num_tokens(tools=TOOLS[1:])
    assert num_tokens(tools=TOOLS, tool_choice="none") == num_tokens()


def test_truncation_leaves_out_the_oldest_messages(scripted: openai.OpenAI) -> None:
    conversation: Any = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"message {i} " + "x" * 500}
        for i in range(20)
    ]
    conversation.append({"role": "user", "content": "[[Fits.]]"})
    options: Any = {"model": "scripted", "input": conversation, "instructions": "Be brief."}
    with pytest.raises(openai.BadRequestError, match="input must be shorter than"):
        scripted.responses.create(**options)
    response = scripted.responses.create(truncation="auto", max_output_tokens=32, **options)
    assert response.output_text == "Fits."
    assert response.usage is not None
    assert 3000 < response.usage.input_tokens <= 4096 - 32


def test_a_response_that_fails_on_its_way_says_so_last(scripted: openai.OpenAI) -> None:
    endless: Any = {"model": "scripted", "input": "Write without end.", "stream": True}
    for timeout_s in (0.1, 0.2, 0.4, 0.8, 1.6):  # time for the first token, and not for the last
        try:
            body = {"timeout": timeout_s}
            events = list(scripted.responses.create(extra_body=body, **endless))
            break
        except openai.APIStatusError as error:
            if error.status_code != 408:
                raise
    assert events[0].type == "response.created"
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"
    assert f"took longer than {timeout_s} s" in failed.error.message
    assert scripted.responses.retrieve(failed.id).status == "failed"


def test_a_client_that_leaves_ends_its_response(
    scripted: openai.OpenAI, scripted_server: ServerProcess
) -> None:
    with scripted.responses.create(
        model="scripted", input="Write without end.", stream=True
    ) as stream:
        assert next(iter(stream)).type == "response.created"
    eventually(scripted_server.is_idle)


# -- what is kept


def test_a_response_that_is_deleted_or_not_stored_is_gone(scripted: openai.OpenAI) -> None:
    kept = scripted.responses.create(model="scripted", input="[[Hi.]]")
    scripted.responses.delete(kept.id)
    unkept = scripted.responses.create(model="scripted", input="[[Hi.]]", store=False)
    for response in (kept, unkept):
        with pytest.raises(openai.NotFoundError):
            scripted.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            scripted.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            scripted.responses.cancel(response.id)
        with pytest.raises(openai.BadRequestError) as caught:
            scripted.responses.create(
                model="scripted", input="[[Hi.]]", previous_response_id=response.id
            )
        assert caught.value.param == "previous_response_id"


def test_a_response_in_the_background_is_fetched_when_it_is_done(scripted: openai.OpenAI) -> None:
    begun = scripted.responses.create(model="scripted", input="[[Done.]]", background=True)
    assert begun.status == "in_progress"
    assert begun.background
    eventually(lambda: scripted.responses.retrieve(begun.id).status != "in_progress")
    done = scripted.responses.retrieve(begun.id)
    assert done.status == "completed"
    assert done.output_text == "Done."
    assert scripted.responses.cancel(begun.id).status == "completed"
    next_one = scripted.responses.create(
        model="scripted", input="[[More.]]", previous_response_id=begun.id
    )
    with pytest.raises(openai.BadRequestError, match="background"):
        scripted.responses.cancel(next_one.id)


def test_a_response_in_the_background_can_be_cancelled(
    scripted: openai.OpenAI, scripted_server: ServerProcess
) -> None:
    endless: Any = {
        "model": "scripted", "input": "Write without end.", "background": True,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }  # fmt: skip
    begun = scripted.responses.create(**endless)
    with pytest.raises(openai.BadRequestError, match="in progress"):
        scripted.responses.create(model="scripted", input="[[Hi.]]", previous_response_id=begun.id)
    cancelled = scripted.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    eventually(scripted_server.is_idle)
    assert scripted.responses.retrieve(begun.id).status == "cancelled"
    begun = scripted.responses.create(**endless)
    scripted.responses.delete(begun.id)
    eventually(scripted_server.is_idle)
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(begun.id)


def test_one_key_cannot_reach_the_responses_of_another(
    serve_tiny: Callable[..., ServerProcess],
) -> None:
    server = serve_tiny("--api-key", "alice", "--api-key", "bob", "--max-stored-responses", "2")
    url = f"{server.base_url}/v1"
    alice, bob = (
        openai.OpenAI(base_url=url, api_key=key, max_retries=0) for key in ("alice", "bob")
    )
    options: Any = {"model": alice.models.list().data[0].id, "max_output_tokens": 2}
    hers = alice.responses.create(input="a", **options)
    assert alice.responses.retrieve(hers.id).id == hers.id
    for reach in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            reach(hers.id)
    with pytest.raises(openai.NotFoundError):
        list(bob.responses.input_items.list(hers.id))
    with pytest.raises(openai.BadRequestError):
        bob.responses.create(input="b", previous_response_id=hers.id, **options)
    for _ in range(2):  # which is what there is room for
        bob.responses.create(input="b", **options)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(hers.id)


# -- what is wrong


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"input": [{"role": "user"}]}, "input[0].content", "Field required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "must be an object of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "text only",
        ),
        ({"input": []}, "input", "at least one"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search is not built in here"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0]", "--tool-server"),
        ({"tools": [{"type": "magic"}]}, "tools[0]", "function or mcp"),
        (
            {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://10.0.0.1/mcp"}]},
            "tools[0]",
            "there is no tool server",
        ),
        ({"tools": TOOLS[:1] * 2}, "tools", "names of their own"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice", "'x'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"top_logprobs": 1000}, "top_logprobs", "top_logprobs must be"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "at most 64"),
        ({"background": True, "store": False}, "background", "needs store"),
        ({"background": True, "stream": True}, "stream", "exclude each other"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
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
