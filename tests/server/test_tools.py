"""Tools and reasoning through the official client: forced on the default model, which holds to
them by grammar; and chosen freely by a model that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pydantic
import pytest
from server_process import ServerProcess, events
from tool_schemas import SCHEMAS, TIME, WEATHER

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
ARGUMENTS = {"city": "Paris", "unit": "celsius"}
CALLED = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
CALL = f"<tool_call>\n{CALLED}\n</tool_call>"


def say(script: str, *before: Any) -> Any:
    return [*before, {"role": "user", "content": f"[[{script}]]"}]


def join(chunks: Any) -> dict[str, Any]:
    """What the first choice's chunks add up to."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or []:
                known = message["calls"].setdefault(
                    call.index, {"id": call.id, "name": "", "arguments": ""}
                )
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
    return message


# -- enforced, on the default model


@pytest.mark.parametrize("seed", [1, 2])
def test_a_required_call_is_one_of_the_tools_with_arguments_of_its_schema(
    client: openai.OpenAI, default_model: str, seed: int
) -> None:
    answer = client.chat.completions.create(
        model=default_model, messages=MESSAGES, tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False, seed=seed, max_tokens=128,
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_named_call_is_of_that_tool_streamed_and_not(
    client: openai.OpenAI, default_model: str
) -> None:
    options: Any = {
        "model": default_model, "messages": MESSAGES, "tools": TOOLS, "seed": 5, "max_tokens": 128,
        "tool_choice": {"type": "function", "function": {"name": "get_time"}},
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_time"
    jsonschema.validate(json.loads(call.function.arguments), TIME)
    pieces = join(client.chat.completions.create(stream=True, **options))
    assert pieces["calls"][0]["name"] == "get_time"
    assert pieces["calls"][0]["arguments"] == call.function.arguments
    assert pieces["finish_reason"] == whole.finish_reason == "stop"
    assert pieces["content"] == ""


def test_several_choices_each_have_a_call(client: openai.OpenAI, default_model: str) -> None:
    answer = client.chat.completions.create(
        model=default_model, messages=MESSAGES, tools=TOOLS[:1], tool_choice="required",
        parallel_tool_calls=False, n=2, logprobs=True, seed=3, max_tokens=128,
    )  # fmt: skip
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        assert choice.logprobs is not None
        assert choice.logprobs.content


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=150)


def test_the_clients_parse_helper_gets_an_object(client: openai.OpenAI, default_model: str) -> None:
    parsed = client.chat.completions.parse(
        model=default_model, messages=MESSAGES, response_format=Person, max_tokens=96, seed=1
    )
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person)


def test_the_clients_stream_helper_gets_an_object(
    client: openai.OpenAI, default_model: str
) -> None:
    with client.chat.completions.stream(
        model=default_model, messages=MESSAGES, response_format=Person, max_tokens=96, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "among"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": TOOLS[:1] * 1025}, "at most 1024"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": []}}}
                ]
            },
            "must be of type object",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "description": "x" * 2**20}}
                ]
            },
            "at most 1048576 characters",
        ),
        ({"thinking_token_budget": 10}, "reasoning_parser"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    server: ServerProcess, fields: dict[str, Any], match: str
) -> None:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert response.status_code == 400
    assert match in response.json()["error"]["message"]


# -- chosen by the model


def test_a_call_that_the_model_writes_is_read_streamed_and_not(scripted: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "messages": say(f"Let me look. {CALL}"), "tools": TOOLS}
    whole = scripted.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me look."
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    chunks = list(scripted.chat.completions.create(stream=True, **options))
    pieces = join(chunks)
    assert pieces["content"] == "Let me look."
    assert json.loads(pieces["calls"][0]["arguments"]) == ARGUMENTS
    assert pieces["calls"][0]["id"]
    assert pieces["finish_reason"] == "tool_calls"


def test_several_calls_come_unless_only_one_may(scripted: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "messages": say(f"{CALL}\n{CALL}"), "tools": TOOLS}
    both = scripted.chat.completions.create(**options).choices[0].message.tool_calls or []
    assert len({call.id for call in both}) == 2
    one = scripted.chat.completions.create(parallel_tool_calls=False, **options)
    assert len(one.choices[0].message.tool_calls or []) == 1
    broken = '<tool_call>{"name": "get_time", "arguments": {oops</tool_call>'
    options["messages"] = say(f"{broken}{CALL}{CALL}{broken}")
    message = scripted.chat.completions.create(parallel_tool_calls=False, **options)
    assert message.choices[0].message.content == broken + broken
    (call,) = message.choices[0].message.tool_calls or []
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "get_weather"


def test_a_malformed_call_is_text(scripted: openai.OpenAI) -> None:
    broken = '<tool_call>\n{"name": "get_weather", "arg'
    options: Any = {"model": "scripted", "messages": say(f"{broken}</tool_call>."), "tools": TOOLS}
    whole = scripted.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "stop"
    assert not whole.message.tool_calls
    assert whole.message.content == f"{broken}</tool_call>."


def test_reasoning_is_apart_from_content_and_counted(scripted: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "messages": say("<think>hm, hm</think>\n\nYes <other>!")}
    whole = scripted.chat.completions.create(**options)
    message: Any = whole.choices[0].message
    assert (message.reasoning, message.content) == ("hm, hm", "Yes !")
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("hm, hm")
    pieces = join(scripted.chat.completions.create(stream=True, **options))
    assert (pieces["reasoning"], pieces["content"]) == ("hm, hm", "Yes !")
    hidden = scripted.chat.completions.create(extra_body={"include_reasoning": False}, **options)
    assert getattr(hidden.choices[0].message, "reasoning", None) is None
    assert hidden.choices[0].message.content == "Yes !"


@pytest.mark.parametrize(
    ("script", "content", "reasoning"),
    [
        ("Hi <think>secret</think>you.", "Hi you.", "secret"),
        ("<think>a</think>Hi. <think>b", "Hi. ", "ab"),
        ("Write `<think>` and <th", "Write `<think>` and <th", ""),
    ],
)
def test_reasoning_that_comes_again_is_no_content(
    scripted: openai.OpenAI, script: str, content: str, reasoning: str
) -> None:
    options: Any = {"model": "scripted", "messages": say(script), "tools": TOOLS}
    message: Any = scripted.chat.completions.create(**options).choices[0].message
    assert (message.content, getattr(message, "reasoning", None) or "") == (content, reasoning)
    pieces = join(scripted.chat.completions.create(stream=True, **options))
    assert (pieces["content"], pieces["reasoning"]) == (content, reasoning)


def test_a_call_within_thinking_that_was_never_ended_is_made(scripted: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "messages": say(f"<think>So: {CALL}"), "tools": TOOLS}
    choice: Any = scripted.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning, choice.message.content) == ("So:", None)
    assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS


def test_a_call_that_ends_too_early_is_text_and_one_that_is_cut_off_is_none(
    scripted: openai.OpenAI,
) -> None:
    begun = '<tool_call>{"name": "get_time", "arguments": {"zone": "u'
    options: Any = {"model": "scripted", "messages": say(begun), "tools": TOOLS}
    ended = scripted.chat.completions.create(**options).choices[0]
    assert (ended.message.content, ended.finish_reason) == (begun, "stop")
    cut_off = scripted.chat.completions.create(max_tokens=45, **options).choices[0]
    assert cut_off.finish_reason == "length"
    (call,) = cut_off.message.tool_calls or []
    assert call.type == "function"
    assert '{"zone": "u'.startswith(call.function.arguments)


def test_thinking_that_the_template_has_begun_is_reasoning(scripted: openai.OpenAI) -> None:
    body: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = scripted.chat.completions.create(
        model="scripted", messages=say("so</think>no"), extra_body=body
    )
    message: Any = answer.choices[0].message
    assert (message.reasoning, message.content) == ("so", "no")


def test_reasoning_and_calls_go_together(scripted: openai.OpenAI) -> None:
    answer = scripted.chat.completions.create(
        model="scripted", messages=say(f"<think>I must look.</think>{CALL}"), tools=TOOLS
    )
    message: Any = answer.choices[0].message
    assert message.reasoning == "I must look."
    assert len(message.tool_calls) == 1


def test_a_budget_brings_thinking_to_its_end(scripted_server: ServerProcess) -> None:
    def ask(budget: int, script: str = "<think>" + "a" * 50, **fields: Any) -> Any:
        body = {"messages": say(script), "thinking_token_budget": budget, "max_tokens": 60}
        reply = scripted_server.post("/v1/chat/completions", {**body, **fields}).json()
        return reply["choices"][0]["message"], reply["usage"]["completion_tokens_details"]

    message, counted = ask(7)
    assert message["reasoning"] == "a" * 7
    assert counted["reasoning_tokens"] == 7 + len("\n")  # the closing's own
    assert message["content"].startswith("aaaa")  # the script goes on
    assert ask(0)[0].get("reasoning") is None
    assert ask(-1)[0]["reasoning"] == "a" * 50
    message = ask(9, "<think>so</think>yes")[0]
    assert (message["content"], message["reasoning"]) == ("yes", "so")


def test_an_answers_form_holds_after_the_reasoning(scripted_server: ServerProcess) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "t", "schema": TIME}}

    def ask(script: str, **fields: Any) -> Any:
        body = {"messages": say(script), "response_format": form, "max_tokens": 90, "seed": 2}
        body |= fields
        choice = scripted_server.post("/v1/chat/completions", body).json()["choices"][0]
        jsonschema.validate(json.loads(choice["message"]["content"]), TIME)
        return choice["message"].get("reasoning")

    assert ask('<think>no JSON here</think>{"zone": "utc"}') == "no JSON here"
    assert ask('{"zone": "utc"}') is None
    assert ask("Neither JSON nor reasoning.") is None
    assert ask("<think>" + "x" * 40, thinking_token_budget=3) == "xxx"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask("<think>not now</think>", **off) is None


def test_an_answers_form_leaves_room_for_calls(scripted_server: ServerProcess) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "t", "schema": TIME}}
    body = {"messages": say(CALL), "response_format": form, "tools": TOOLS, "max_tokens": 200}
    choice = scripted_server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    unknown = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": unknown}}
    body |= {"messages": say('{"a": 1}'), "response_format": {"type": "json_object"}}
    answer = scripted_server.post("/v1/chat/completions", {**body, "tools": [tool]})
    assert answer.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    strict = {"type": "json_schema", "json_schema": {"name": "t", "schema": TIME, "strict": True}}
    body |= {"messages": say('{"zone": "utc"}'), "response_format": strict}
    answer = scripted_server.post("/v1/chat/completions", {**body, "tools": [tool]})
    assert answer.json()["choices"][0]["message"]["content"] == '{"zone": "utc"}'
    nonsense = {"type": "object", "properties": {"x": {"type": "nonsense"}}}
    wrong = {"type": "function", "function": {"name": "g", "parameters": nonsense}}
    for fields in ({}, {"tool_choice": "required", "response_format": None}):
        answer = scripted_server.post(
            "/v1/chat/completions", {**body, "tools": [tool, wrong], **fields}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools")
        assert "the parameters of the tool 'g' cannot be used" in error["message"]


def test_a_conversation_with_calls_and_results_reaches_the_template(
    scripted_server: ServerProcess,
) -> None:
    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    messages: list[Any] = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "I look.",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    body = {"messages": messages, "tools": TOOLS[1:], "reasoning_effort": "low"}
    ids = scripted_server.post("/tokenize", body).json()["tokens"]
    prompt = scripted_server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert '"name": "get_time"' in prompt
    assert "<think>I look.</think>" in prompt
    assert f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}' in prompt
    assert "tool: rain" in prompt
    assert prompt.endswith("assistant:(low) ")
    wrong = [{**messages[1], "tool_calls": [{"function": {"arguments": "{}"}}]}]
    refused = scripted_server.post("/v1/chat/completions", {"messages": wrong})
    assert refused.status_code == 400
    assert "function.name" in refused.json()["error"]["message"]


def test_a_templates_own_error_is_the_clients(scripted_server: ServerProcess) -> None:
    body = {"messages": [{"role": "bad", "content": "x"}]}
    refused = scripted_server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "there is no role bad here" in refused.json()["error"]["message"]


def test_no_tool_choice_keeps_tools_out_of_the_prompt(scripted_server: ServerProcess) -> None:
    body = {"messages": say(CALL), "tools": TOOLS, "tool_choice": "none"}
    choice = scripted_server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"] is None


def test_a_streams_usage_counts_reasoning(scripted_server: ServerProcess) -> None:
    body = {
        "messages": say("<think>ab</think>c"),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *_, last, _ = events(scripted_server.post("/v1/chat/completions", body).text)
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_a_request_may_bring_a_template_where_the_operator_allows_it(
    serve_tiny: Callable[..., ServerProcess],
) -> None:
    server = serve_tiny(
        "--trust-request-chat-template",
        *("--default-chat-template-kwargs", '{"mood": "happy", "day": "Monday"}'),
    )
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template": "{{ mood }} {{ day }} {{ messages[0].content }}",
        "chat_template_kwargs": {"day": "Sunday"},
    }
    ids = server.post("/tokenize", body).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "happy Sunday x"
    assert server.post("/v1/chat/completions", {**body, "max_tokens": 1}).status_code == 200
    broken = server.post("/v1/chat/completions", {**body, "chat_template": "{% if %}"})
    assert broken.status_code == 400
    assert "broken" in broken.json()["error"]["message"]
