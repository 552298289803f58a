"""Items of responses: reasoning, texts and calls of a model that says what it is told."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from response_events import CALL_EVENTS, MESSAGE_EVENTS, REASONING_EVENTS, TOOLS, types_of
from server_process import ServerProcess
from waiting import eventually

CALL = '<tool_call>{"name": "get_time", "arguments": {"zone": "utc"}}</tool_call>'


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
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
        scripted.responses.create(**options)
    response = scripted.responses.create(truncation="auto", max_output_tokens=32, **options)
    assert response.output_text == "Fits."
    assert response.usage is not None
    assert 3000 < response.usage.input_tokens <= 4096 - 32


def test_a_response_that_fails_on_its_way_says_so_last(scripted: openai.OpenAI) -> None:
    endless: Any = {"model": "scripted", "input": "[[And on and on...]]", "stream": True}
    for timeout_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):  # for the first token, not for thousands
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
        model="scripted", input="[[And on and on...]]", stream=True
    ) as stream:
        assert next(iter(stream)).type == "response.created"
    eventually(scripted_server.is_idle)
