"""Structured output through the API, with the official client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from server_process import ServerProcess

MESSAGES: Any = [{"role": "user", "content": "Describe a person as JSON, briefly."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = "response_format.json_schema.schema"
ENDLESS = {"type": "integer", "multipleOf": 123456789, "minimum": 0, "maximum": 10**15}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["happy", "sad"]
    age: int = Field(ge=0, le=99)


def format_of(schema: Any, **options: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **options}}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert person.keys() == {"name", "age"}
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 99


def test_the_parse_helper_gives_objects(client: openai.OpenAI, default_model: str) -> None:
    answer = client.chat.completions.parse(
        model=default_model, messages=MESSAGES, response_format=Person, max_tokens=40, seed=1
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_holds_whole_and_in_pieces(
    client: openai.OpenAI, default_model: str, strict: bool | None
) -> None:
    common: Any = {
        "model": default_model,
        "messages": MESSAGES,
        "response_format": format_of(SCHEMA, strict=strict),
        "max_tokens": 64,
        "seed": 3,
    }
    whole = client.chat.completions.create(n=2, **common)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        check_person(choice.message.content or "")
    pieces, reasons = [], []
    for chunk in client.chat.completions.create(stream=True, **common):
        pieces.append(chunk.choices[0].delta.content or "")
        reasons.append(chunk.choices[0].finish_reason)
    check_person("".join(pieces))
    assert reasons[-1] == "stop"


def test_any_object(client: openai.OpenAI, default_model: str) -> None:
    answer = client.chat.completions.create(
        model=default_model,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_tokens=48,
        temperature=0.0,
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ({"choice": ["red", "green"]}, "red|green"),
        ({"regex": r"\d{3}-\d{2}"}, r"\d{3}-\d{2}"),
        ({"grammar": 'root ::= "<" [a-c] [a-c] ">"'}, "<[a-c]{2}>"),
        ({"grammar": 'start: "<" /[a-c]{2}/ ">"'}, "<[a-c]{2}>"),
        ({"json": {"enum": [True, None]}}, "true|null"),
        ({"json": '{"const": "é"}'}, '"é"'),
        ({"json": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2},
          "disable_any_whitespace": True}, r"\[1,1\]"),
        ({"structural_tag": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"},
            "end": "</n>"}}}, r"<n>\d\d</n>"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_every_kind_in_both_endpoints(
    client: openai.OpenAI, default_model: str, spec: dict[str, Any], pattern: str
) -> None:
    common: Any = {
        "model": default_model,
        "max_tokens": 24,
        "seed": 5,
        "extra_body": {"structured_outputs": spec},
    }
    completion = client.completions.create(prompt="It is ", **common).choices[0]
    chat = client.chat.completions.create(messages=MESSAGES, **common).choices[0]
    assert re.fullmatch(pattern, completion.text)
    assert re.fullmatch(pattern, chat.message.content or "")
    assert (completion.finish_reason, chat.finish_reason) == ("stop", "stop")


def test_completions_take_response_format(client: openai.OpenAI, default_model: str) -> None:
    answer = client.completions.create(
        model=default_model,
        prompt="A person: ",
        max_tokens=64,
        seed=2,
        extra_body={"response_format": format_of(SCHEMA)},
    )
    check_person(answer.choices[0].text)


DEEP = {"structured_outputs": {"regex": "[" * 3000}}
NOT_ENFORCEABLE = {"response_format": format_of({"not": {}}, strict=True)}


@pytest.mark.parametrize(
    ("given", "param", "text", "stream"),
    [
        pytest.param(
            {"response_format": format_of(ENDLESS)},
            FORMAT,
            "too complex",
            True,
            marks=pytest.mark.slow,
        ),
        (DEEP, "structured_outputs", "cannot be used", False),
        (DEEP, "structured_outputs", "cannot be used", True),
        (NOT_ENFORCEABLE, FORMAT, "not", False),
        (NOT_ENFORCEABLE, FORMAT, "not", True),
    ],
    ids=["endless", "deep", "deep stream", "not enforceable", "not enforceable stream"],
)
def test_what_cannot_be_compiled_is_a_400_before_the_stream(
    server: ServerProcess, given: dict[str, Any], param: str, text: str, stream: bool
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "stream": stream, **given}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert text in error["message"]


def test_objects_have_no_keys_that_their_schema_does_not_name(
    scripted_server: ServerProcess,
) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}

    def ask(script: str, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": f"[[{script}]]"}], "max_tokens": 120}
        reply = scripted_server.post("/v1/chat/completions", {**body, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]

    tries = '{"a": {"b": 1, "invented": 2}, "more": 3}'
    for held in ({"response_format": format_of(schema)}, {"structured_outputs": {"json": schema}}):
        assert json.loads(ask(tries, **held)["content"]).keys() == {"a"}
        assert json.loads(ask(tries, **held)["content"])["a"].keys() == {"b"}
    free = {"json": schema, "disable_additional_properties": False}
    assert json.loads(ask(tries, structured_outputs=free)["content"]) == json.loads(tries)
    asked = {"structured_outputs": {"json": {**schema, "additionalProperties": {"const": 3}}}}
    said = json.loads(ask('{"a": {"b": 1}, "more": 3}', **asked)["content"])
    assert said == {"a": {"b": 1}, "more": 3}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = '<tool_call>\n{"name": "f", "arguments": ' + tries + "}\n</tool_call>"
    message = ask(call, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert (arguments.keys(), arguments["a"].keys()) == ({"a"}, {"b"})
