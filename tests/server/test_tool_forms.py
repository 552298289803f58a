"""Every form in which clients offer tools to the chat API and are told of calls: custom tools,
allowed tools, functions from before there were tools; and tools of Anthropic's own."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from response_events import types_of
from server_process import ServerProcess, events
from test_tool_choice import CHAT_TOOLS, FUNCTIONS, HERMES, MESSAGE_TOOLS, PARIS

from penstock.server.openai.custom_tools import InputReader, arguments_of, input_of

CODE: Any = {"type": "custom", "custom": {"name": "run", "description": "Runs code."}}
DIGITS: Any = {
    "type": "custom",
    "custom": {
        "name": "dial",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{3}"}},
    },
}
PROGRAM = 'print("a\\b")\n# é 🌧'


def say(script: str, *before: Any) -> Any:
    return [*before, {"role": "user", "content": f"[[{script}]]"}]


def call_of(name: str, arguments: Any) -> str:
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


# -- custom tools


@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "custom": {"name": "run"}}])
def test_the_call_of_a_custom_tool_has_its_input_as_text(
    scripted: openai.OpenAI, choice: Any
) -> None:
    options: Any = {
        "model": "scripted", "messages": say(call_of("run", {"input": PROGRAM})),
        "tools": [CODE, *CHAT_TOOLS], "tool_choice": choice, "max_tokens": 300,
    }  # fmt: skip
    whole = scripted.chat.completions.create(**options).choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("run", PROGRAM)
    assert whole.finish_reason == ("tool_calls" if choice == "auto" else "stop")
    said, name = "", None
    for chunk in scripted.chat.completions.create(stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or []:
            custom = delta.model_dump()["custom"]
            said, name = said + custom["input"], name or custom.get("name")
            assert not chunk.choices[0].delta.content
    assert (name, said) == ("run", PROGRAM)


def test_a_regular_expression_of_a_custom_tool_is_enforced(scripted: openai.OpenAI) -> None:
    answer = scripted.chat.completions.create(
        model="scripted", messages=say(call_of("dial", {"input": "12x45"})), tools=[DIGITS],
        tool_choice="required", parallel_tool_calls=False, max_tokens=200,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert re.fullmatch("[0-9]{3}", call.custom.input)


def test_earlier_calls_of_custom_tools_reach_the_template(scripted_server: ServerProcess) -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "run", "input": PROGRAM}}
    messages = [
        {"role": "user", "content": "Run it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    tool = {"type": "custom", "custom": {"name": "lark", "format": lark}}
    body = {"messages": messages, "tools": [CODE, tool]}
    ids = scripted_server.post("/tokenize", body).json()["tokens"]
    prompt = scripted_server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert "Runs code." in prompt
    assert "Lark" in prompt
    assert '"name": "run", "arguments": {"input": ' in prompt


def test_a_grammar_that_is_announced_has_to_be_there(scripted_server: ServerProcess) -> None:
    tool = {"type": "custom", "custom": {"name": "run", "format": {"type": "grammar"}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    response = scripted_server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].custom.format"


@given(st.text(), st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_the_input_is_the_same_however_its_arguments_are_split(
    text: str, cuts: list[int], is_ascii: bool
) -> None:
    arguments = json.dumps({"input": text}) if is_ascii else arguments_of(text)
    bounds = [0, *sorted(at % (len(arguments) + 1) for at in cuts), len(arguments)]
    reader = InputReader()
    pieces = [reader.feed(arguments[begin:end]) for begin, end in itertools.pairwise(bounds)]
    assert "".join(pieces) + reader.finish() == text
    for end in range(len(arguments)):
        assert text.startswith(input_of(arguments[:end], is_complete=False))


def test_arguments_of_another_form_are_the_input() -> None:
    assert input_of('{"code": 1}', is_complete=True) == '{"code": 1}'
    assert input_of('{"code": 1', is_complete=False) == ""
    assert input_of('{"input": "\\ud83d"}', is_complete=True).isprintable() is True


RUN: Any = {"type": "custom", "name": "run", "description": "Runs code."}
CUSTOM_EVENTS = [
    "response.output_item.added",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.output_item.done",
]


@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "run"}])
def test_responses_call_custom_tools_with_a_text(scripted: openai.OpenAI, choice: Any) -> None:
    options: Any = {
        "model": "scripted", "input": f"[[{call_of('run', {'input': PROGRAM})}]]", "tools": [RUN],
        "tool_choice": choice, "max_output_tokens": 300,
    }  # fmt: skip
    whole = scripted.responses.create(**options)
    (item,) = whole.output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("run", PROGRAM)
    told = list(scripted.responses.create(stream=True, **options))
    of_call = [event for event in told if event.type in CUSTOM_EVENTS]
    assert types_of(of_call) == CUSTOM_EVENTS
    deltas = [event.delta for event in told if event.type == CUSTOM_EVENTS[1]]
    assert "".join(deltas) == PROGRAM
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    after = scripted.responses.create(
        model="scripted", previous_response_id=whole.id, tools=[RUN],
        input=[output, {"role": "user", "content": "[[Thanks.]]"}],  # type: ignore[list-item]
    )  # fmt: skip
    assert after.output_text == "Thanks."


def test_responses_hold_custom_tools_to_a_regular_expression(scripted: openai.OpenAI) -> None:
    form: Any = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
    options: Any = {"model": "scripted", "tool_choice": "required", "max_output_tokens": 200}
    answer = scripted.responses.create(
        input=f"[[{call_of('dial', {'input': '12x45'})}]]", parallel_tool_calls=False,
        tools=[{"type": "custom", "name": "dial", "format": form}], **options,
    )  # fmt: skip
    (item,) = answer.output
    assert item.type == "custom_tool_call"
    assert re.fullmatch("[0-9]{3}", item.input)
    del form["definition"]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].format"):
        scripted.responses.create(
            input="x", tools=[{"type": "custom", "name": "dial", "format": form}], **options
        )


# -- allowed tools


def test_only_allowed_tools_can_be_called(scripted_server: ServerProcess) -> None:
    def ask(mode: str, *names: str) -> Any:
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        body = {
            "messages": say(HERMES), "tools": CHAT_TOOLS, "tool_choice": choice,
            "max_tokens": 200, "parallel_tool_calls": False,
        }  # fmt: skip
        return scripted_server.post("/v1/chat/completions", body)

    both = ask("auto", "get_weather", "get_time").json()["choices"][0]
    assert both["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    other = ask("required", "get_time").json()["choices"][0]
    assert other["finish_reason"] == "tool_calls"
    assert other["message"]["tool_calls"][0]["function"]["name"] == "get_time"
    for refused, match in ((ask("auto"), "none of the tools"), (ask("auto", "x"), "'x'")):
        assert refused.status_code == 400
        assert match in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tool_choice": {"type": "nonsense"}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"functions": FUNCTIONS}, "functions"),
        ({"tools": None, "function_call": {"name": "x"}}, "function_call"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(
    scripted_server: ServerProcess, fields: Any, path: str
) -> None:
    body = {"messages": say("Hi."), "tools": CHAT_TOOLS, **fields}
    refused = scripted_server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == path


# -- functions


def test_functions_are_called_as_they_were_before_there_were_tools(
    scripted: openai.OpenAI,
) -> None:
    options: Any = {"model": "scripted", "functions": FUNCTIONS, "max_tokens": 300}
    script = say(f"I look.\n{HERMES}\n{HERMES}")
    whole = scripted.chat.completions.create(messages=script, **options).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("I look.", "function_call")
    assert whole.message.tool_calls is None
    assert whole.message.function_call is not None
    assert whole.message.function_call.name == "get_weather"
    assert json.loads(whole.message.function_call.arguments) == PARIS
    names, arguments, reason = [], "", None
    for chunk in scripted.chat.completions.create(messages=script, stream=True, **options):
        (choice,) = chunk.choices
        assert choice.delta.tool_calls is None
        reason = choice.finish_reason or reason
        if choice.delta.function_call is not None:
            names += [choice.delta.function_call.name] * bool(choice.delta.function_call.name)
            arguments += choice.delta.function_call.arguments or ""
    assert (names, json.loads(arguments), reason) == (["get_weather"], PARIS, "function_call")
    named = scripted.chat.completions.create(
        messages=say(call_of("get_time", {"zone": "utc"})),
        function_call={"name": "get_time"},
        **options,
    ).choices[0]
    assert named.finish_reason == "stop"
    assert named.message.function_call is not None
    assert named.message.function_call.name == "get_time"
    none = scripted.chat.completions.create(messages=say("Hi."), function_call="none", **options)
    assert none.choices[0].message.content == "Hi."


def test_earlier_calls_of_functions_reach_the_template(scripted_server: ServerProcess) -> None:
    function = {"name": "get_weather", "arguments": json.dumps(PARIS)}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "get_weather", "content": "rain"},
    ]
    ids = scripted_server.post("/tokenize", {"messages": messages}).json()["tokens"]
    prompt = scripted_server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert f'"name": "get_weather", "arguments": {json.dumps(PARIS)}' in prompt
    assert "tool: rain" in prompt


# -- Anthropic's own


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "files"},
    ],
)
def test_a_tool_of_anthropics_own_is_refused_by_name(
    scripted_server: ServerProcess, tool: Any
) -> None:
    with (
        anthropic.Anthropic(base_url=scripted_server.base_url, api_key="none") as client,
        pytest.raises(anthropic.BadRequestError) as caught,
    ):
        client.messages.create(
            model="scripted", messages=say("Hi."), tools=[*MESSAGE_TOOLS, tool], max_tokens=8
        )
    assert tool.get("name", tool["type"]) in str(caught.value)
    assert f"tools[{len(MESSAGE_TOOLS)}]" in str(caught.value)


def test_a_stream_of_a_custom_call_that_is_cut_off_shows_what_there_is(
    scripted_server: ServerProcess,
) -> None:
    body = {
        "messages": say(call_of("run", {"input": "a" * 50})), "tools": [CODE],
        "max_tokens": 70, "stream": True,
    }  # fmt: skip
    *chunks, _ = events(scripted_server.post("/v1/chat/completions", body).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    said = "".join(call["custom"]["input"] for d in deltas for call in d.get("tool_calls", ()))
    assert said
    assert set(said) == {"a"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
