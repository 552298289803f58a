"""How many calls a choice of tools gives, how the answer ends, and what a cut-off call shows:
through the official clients of three APIs, with and without a parser of the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from scripted import make_scripted_model
from server_process import ServerProcess, start_scripted
from tool_schemas import TIME, WEATHER

FUNCTIONS: Any = [
    {"name": "get_weather", "description": "Weather.", "parameters": WEATHER},
    {"name": "get_time", "parameters": TIME},
]
CHAT_TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSE_TOOLS: Any = [{"type": "function", **function} for function in FUNCTIONS]
MESSAGE_TOOLS: Any = [
    {"name": function["name"], "input_schema": function["parameters"]} for function in FUNCTIONS
]
PARIS = {"city": "Paris", "unit": "celsius"}
HERMES = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': PARIS})}\n</tool_call>"
BARE = json.dumps({"name": "get_weather", "parameters": PARIS})
# What a model writes that goes on calling, by whether its calls are known. A grammar makes a
# bracket of the dot, which would be one of those around the script.
MANY = {True: "\n".join([HERMES] * 4), False: f".{', '.join([BARE] * 4)}] "}
ONE = {True: HERMES, False: f".{BARE}] "}

Ask = Callable[[ServerProcess, str, Any, bool, bool], tuple[list[str], str | None]]


@pytest.fixture(scope="module")
def unknown_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The model that says what it is told, of which the server does not know how it calls."""
    folder = make_scripted_model(tmp_path_factory.mktemp("scripted"))
    with start_scripted(
        folder, "--tool-call-parser", "none", "--reasoning-parser", "none"
    ) as process:
        yield process


def test_a_model_whose_calls_are_not_known_may_not_choose(unknown_server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "[[Hi.]]"}], "tools": CHAT_TOOLS}
    refused = unknown_server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "--tool-call-parser" in refused.json()["error"]["message"]
    answer = unknown_server.post("/v1/chat/completions", {**body, "tool_choice": "none"})
    assert answer.json()["choices"][0]["message"]["content"] == "Hi."


@pytest.fixture(params=[True, False], ids=["with a parser", "without a parser"])
def known(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def answering(
    known: bool, scripted_server: ServerProcess, unknown_server: ServerProcess
) -> ServerProcess:
    return scripted_server if known else unknown_server


def chat(
    server: ServerProcess, script: str, choice: Any, parallel: bool, streamed: bool
) -> tuple[list[str], str | None]:
    """Names of the calls, and the reason that the answer ended for."""
    named: Any = choice
    if choice == "get_weather":
        named = {"type": "function", "function": {"name": choice}}
    options: Any = {
        "model": "scripted", "messages": [{"role": "user", "content": f"[[{script}]]"}],
        "tools": CHAT_TOOLS, "tool_choice": named, "parallel_tool_calls": parallel,
        "max_tokens": 900,
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client:
        if not streamed:
            (whole,) = client.chat.completions.create(**options).choices
            assert whole.message.content is None
            calls: Any = whole.message.tool_calls or []
            for call in calls:
                assert json.loads(call.function.arguments) == PARIS
            return [call.function.name for call in calls], whole.finish_reason
        names, reason, arguments = [], None, {}
        for chunk in client.chat.completions.create(stream=True, **options):
            (piece,) = chunk.choices
            assert not piece.delta.content
            reason = piece.finish_reason or reason
            for delta in piece.delta.tool_calls or []:
                assert delta.function is not None
                if delta.function.name:
                    names.append(delta.function.name)
                text = arguments.get(delta.index, "") + (delta.function.arguments or "")
                arguments[delta.index] = text
        assert all(json.loads(text) == PARIS for text in arguments.values())
        return names, reason


def responses(
    server: ServerProcess, script: str, choice: Any, parallel: bool, streamed: bool
) -> tuple[list[str], str | None]:
    named = {"type": "function", "name": choice} if choice == "get_weather" else choice
    options: Any = {
        "model": "scripted", "input": f"[[{script}]]", "tools": RESPONSE_TOOLS,
        "tool_choice": named, "parallel_tool_calls": parallel, "max_output_tokens": 900,
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client:
        if streamed:
            *_, last = client.responses.create(stream=True, **options)
            assert isinstance(last, openai.types.responses.ResponseCompletedEvent)
            response = last.response
        else:
            response = client.responses.create(**options)
    assert all(json.loads(item.arguments) == PARIS for item in response.output)  # type: ignore[union-attr]
    return [item.name for item in response.output], response.status  # type: ignore[union-attr]


def messages(
    server: ServerProcess, script: str, choice: Any, parallel: bool, streamed: bool
) -> tuple[list[str], str | None]:
    kinds = {"required": {"type": "any"}, "auto": {"type": "auto"}}
    named = kinds.get(choice) or {"type": "tool", "name": choice}
    options: Any = {
        "model": "scripted", "messages": [{"role": "user", "content": f"[[{script}]]"}],
        "tools": MESSAGE_TOOLS, "max_tokens": 900,
        "tool_choice": {**named, "disable_parallel_tool_use": not parallel},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=server.base_url, api_key="none") as client:
        if streamed:
            with client.messages.stream(**options) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**options)
    assert all(block.type == "tool_use" and block.input == PARIS for block in message.content)
    return [block.name for block in message.content], message.stop_reason  # type: ignore[union-attr]


every_api = pytest.mark.parametrize("ask", [chat, responses, messages])
streamed_or_not = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
ENDS = {  # by whether the tool was named
    chat: {True: "stop", False: "tool_calls"},
    responses: {True: "completed", False: "completed"},
    messages: {True: "tool_use", False: "tool_use"},
}


@every_api
@streamed_or_not
@pytest.mark.parametrize("parallel", [True, False])
def test_a_named_tool_is_called_exactly_once(
    answering: ServerProcess, known: bool, ask: Ask, streamed: bool, parallel: bool
) -> None:
    found = ask(answering, MANY[known], "get_weather", parallel, streamed)
    assert found == (["get_weather"], ENDS[ask][True])  # type: ignore[index]


@every_api
@streamed_or_not
def test_required_calls_may_be_one_or_several_unless_they_may_not(
    answering: ServerProcess, known: bool, ask: Ask, streamed: bool
) -> None:
    alone = ask(answering, ONE[known], "required", True, streamed)
    assert alone == (["get_weather"], ENDS[ask][False])  # type: ignore[index]
    several = ask(answering, MANY[known], "required", True, streamed)
    assert several == (["get_weather"] * 4, ENDS[ask][False])  # type: ignore[index]
    one = ask(answering, MANY[known], "required", False, streamed)
    assert one == (["get_weather"], ENDS[ask][False])  # type: ignore[index]


@every_api
@streamed_or_not
def test_a_model_that_chooses_makes_one_call_where_only_one_may_be(
    scripted_server: ServerProcess, ask: Ask, streamed: bool
) -> None:
    several = ask(scripted_server, MANY[True], "auto", True, streamed)
    assert several == (["get_weather"] * 4, ENDS[ask][False])  # type: ignore[index]
    one = ask(scripted_server, MANY[True], "auto", False, streamed)
    assert one == (["get_weather"], ENDS[ask][False])  # type: ignore[index]


@pytest.mark.parametrize(
    ("known", "choice"),
    [
        (True, "auto"), (True, "required"), (True, "get_weather"),
        (False, "required"), (False, "get_weather"),
    ],
)  # fmt: skip
def test_a_call_that_max_tokens_cuts_off_leaves_no_markup_in_the_content(
    answering: ServerProcess, known: bool, choice: Any
) -> None:
    named = {"type": "function", "function": {"name": choice}}
    body: Any = {
        "messages": [{"role": "user", "content": f"[[{ONE[known]}]]"}],
        "tools": CHAT_TOOLS,
        "tool_choice": named if choice == "get_weather" else choice,
    }
    # A grammar gives calls one form: few cuts show what a parser makes of it.
    for max_tokens in range(1, 90, 4 if choice in ("auto", "required") else 11):
        body["max_tokens"] = max_tokens
        reply = answering.post("/v1/chat/completions", body).json()["choices"][0]
        assert not reply["message"]["content"], max_tokens
        text = answering.post("/v1/chat/completions", {**body, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert not any(delta.get("content") for delta in deltas), max_tokens
        reason = chunks[-1]["choices"][0]["finish_reason"]
        assert reason == reply["finish_reason"]
        if max_tokens < 60:
            assert reason == "length"


def test_a_model_that_would_end_while_it_thinks_still_makes_the_call(
    scripted_server: ServerProcess,
) -> None:
    body = {
        "messages": [{"role": "user", "content": "[[<think>hm]]"}], "tools": CHAT_TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_time"}},
        "thinking_token_budget": 6, "max_tokens": 300, "seed": 1,
    }  # fmt: skip
    choice = scripted_server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["reasoning"].startswith("hm")
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("get_time", "stop")
