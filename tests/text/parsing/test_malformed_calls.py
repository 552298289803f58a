"""What is no call becomes text; what is cut off stays a beginning; nothing crashes."""

from __future__ import annotations

import json
import logging

import pytest
from replay import calls_in, feed_text, make_parser, parse

from penstock.text.parsing.deltas import (
    ContentDelta,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from penstock.text.parsing.formats import Tool

BROKEN = {
    "hermes": [
        '<tool_call>\n{"name": "now", "arguments": {"a": oops}}\n</tool_call> after',
        "<tool_call>\nnow()\n</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "\\x"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{not json"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": NaN}"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1e999}"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": ' + "[" * 99 + "]" * 99 + '}"}',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 5000 + "</tool_call>",
    ],
    "llama3_json": ["<|python_tag|>print(1)", '<|python_tag|>{"name": "unknown"}'],
    "pythonic": [
        "[now(3)]",
        "[now(a=open('x'))]",
        "[now(a=1]",
        "[now(a={1: 2, )]",
        "[now(a=lambda: 1)]",
        "[now(a=b'x')]",
        "[now(a={1, 2})]",
        "[now(a=NaN)]",
        "[now(a=[1e999])]",
        "<|python_start|>print('x')<|python_end|>",
    ],
    "mistral": ["[TOOL_CALLS]now[ARGS]nothing", "[TOOL_CALLS] [now]", "[TOOL_CALLS]<b>[ARGS]{}"],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>now<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n[1]\n```<｜tool▁call▁end｜>",
    ],
    "qwen3_coder": [
        "<tool_call>\nnow\n</tool_call>",
        "<tool_call>\n<function=now>\nwhat?\n</function>\n</tool_call>",
        "<function=a b>\n</function>",
    ],
    "glm45": [
        "<tool_call>now\n<arg_key>a</arg_key>\nb\n</tool_call>",
        "<tool_call>a tool\n</tool_call>",
    ],
    "minimax_m2": [
        "<minimax:tool_call>\nnow\n</minimax:tool_call>",
        "<minimax:tool_call>\n<invoke name=now>\n</invoke>\n</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="now">\n<what>\n</invoke>\n</minimax:tool_call>',
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>now<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>5<|tool_call_end|>",
    ],
    "granite": ["<|tool_call|>now", '<|tool_call|>[{"name": "now", "arguments": 5}]'],
    "json": ['[{"name": "now", "parameters": 5}]', "{}", "[]"],
}
EVERY_BROKEN = [(tools, text) for tools, texts in BROKEN.items() for text in texts]


@pytest.mark.parametrize(("tools", "text"), EVERY_BROKEN)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_malformed_call_is_text_in_full(
    tools: str, text: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    with caplog.at_level(logging.WARNING):
        message = collect(feed_text(make_parser(tools=tools), pieces))
    assert message.content == text
    assert message.tool_calls == []
    assert len(caplog.records) <= 1


def test_a_malformed_call_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    text = "<tool_call>x</tool_call>" * 3
    with caplog.at_level(logging.WARNING):
        assert parse(text, tools="hermes").content == text
    assert [record.name for record in caplog.records] == ["penstock.text.parsing.emitter"]


def test_an_answer_that_only_looks_like_a_call_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse('{"a": 1}', tools="llama3_json").content == '{"a": 1}'
        assert parse("[1, 2]", tools="pythonic").content == "[1, 2]"
    assert caplog.records == []


def test_a_malformed_harmony_call_is_text() -> None:
    header = "<|channel|>commentary to=functions.now<|message|>"
    message = parse(f"{header}what?<|call|>", reasoning="openai_gptoss", tools="openai")
    assert message.content == "what?"
    assert message.tool_calls == []


def test_harmony_that_is_cut_off_in_a_header_shows_none_of_it() -> None:
    message = "<|channel|>final<|message|>Hello.<|end|>"
    for header in ("<|start|>", "<|start|>assist", "<|start|>assistant<|channel|>comm"):
        assert parse(message + header, tools="openai").content == "Hello."


def test_harmony_without_any_header_is_content() -> None:
    assert parse("Hello.", tools="openai").content == "Hello."
    long = "Hello. " * 100
    assert parse(long, tools="openai").content == long


def test_a_good_call_after_a_malformed_one_counts() -> None:
    text = 'So:\n<tool_call>oops</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
    message = parse(text, tools="hermes")
    assert message.content == "So:\n<tool_call>oops</tool_call>"
    assert calls_in(message) == [("now", {})]


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_good_call_within_a_name_that_is_too_long_counts(size: int) -> None:
    good = "<tool_call>now\n</tool_call>"
    text = "<tool_call>" + "x" * 300 + good
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    message = collect(feed_text(make_parser(tools="glm45"), pieces))
    assert message.content == text.removesuffix(good)
    assert calls_in(message) == [("now", {})]


def test_a_call_that_breaks_late_is_taken_back() -> None:
    parser = make_parser(tools="hermes")
    text = 'Hi\n<tool_call>{"name": "now", "arguments": {"a": 1,, "b": 2}}</tool_call>'
    deltas = feed_text(parser, list(text))
    broken = [delta for delta in deltas if isinstance(delta, ToolCallBroken)]
    assert broken == [ToolCallBroken(0, '\n<tool_call>{"name": "now", "arguments": {"a": 1,')]
    assert ToolCallStart(0, "call0", "now") in deltas
    assert collect(deltas).content == text


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = make_parser(tools="hermes")
    assert parser.feed('<tool_call>{"name": "now", "arg') == []
    started = [ToolCallStart(0, "call0", "now"), ToolCallArguments(0, '{"a')]
    assert parser.feed('uments": {"a') == started
    assert parser.feed('": "x\\') == [ToolCallArguments(0, '": "x')]
    assert parser.feed('n"}') == [ToolCallArguments(0, '\\n"}')]
    assert parser.feed("}</tool_call>") == [ToolCallEnd(0)]
    assert parser.finish() == []


def test_text_is_passed_on_as_it_comes() -> None:
    parser = make_parser("qwen3", "hermes")
    assert parser.feed("Hello <b>you</b>") == [ContentDelta("Hello <b>you</b>")]
    assert parser.feed(" and <tool_") == [ContentDelta(" and")]
    assert parser.feed("kit> more") == [ContentDelta(" <tool_kit> more")]
    assert parser.feed("<tool_c") == []
    assert parser.finish(is_whole=True) == [ContentDelta("<tool_c")]


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    message = parse('<tool_call>{"name": "now", "arguments": {"a": "b', tools="hermes")
    assert [(c.name, c.arguments, c.complete) for c in message.tool_calls] == [
        ("now", '{"a": "b', False)
    ]
    assert message.content == ""


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", 'So:\n<tool_call>{"name": "now", "arguments": {"a": "b'),
        ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\n3\n</para"),
        ("openai", '<|channel|>commentary to=functions.now<|message|>{"a": "b'),
    ],
)
def test_a_call_that_the_model_leaves_incomplete_is_text(tools: str, text: str) -> None:
    for pieces in ([text], list(text)):
        parser = make_parser(tools=tools)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)]
        message = collect(deltas + parser.finish(is_whole=True))
        assert message.tool_calls == []
        assert text.endswith(message.content)
        assert "b" in message.content or "3" in message.content


def test_the_end_marker_may_be_missing() -> None:
    for tools, text in {
        "hermes": '<tool_call>{"name": "now", "arguments": {}}',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}",
        "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
        "openai": "<|channel|>commentary to=functions.now<|message|>{}",
    }.items():
        message = parse(text, tools=tools)
        assert calls_in(message) == [("now", {})]
        assert message.content == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"a": 1}, "name": "now"}',
        '{"type": "function", "function": {"name": "now", "parameters": {"a": 1}}}',
        '{"function": "now", "parameters": "{\\"a\\": 1}"}',
        '{"id": "x", "name": "now", "arguments": {"a": 1}, "extra": [null]}',
    ],
)
def test_keys_of_a_call_come_in_any_order_and_form(text: str) -> None:
    assert calls_in(parse(f"<tool_call>{text}</tool_call>", tools="hermes")) == [("now", {"a": 1})]


@pytest.mark.parametrize("tools", ["hermes", "llama3_json"])
def test_functions_within_functions_without_end_are_text(tools: str) -> None:
    begin = "<tool_call>" if tools == "hermes" else ""
    text = begin + '{"function": ' * 3000
    assert parse(text, tools=tools).content == text


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""'])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    text = f'<tool_call>{{"name": "now"{arguments}}}</tool_call>'
    assert calls_in(parse(text, tools="hermes")) == [("now", {})]


def test_raw_line_breaks_in_json_strings_are_escaped() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "x\n\ty"}}</tool_call>'
    assert calls_in(parse(text, tools="hermes")) == [("now", {"a": "x\n\ty"})]


def test_escaped_surrogates_stay_encodable() -> None:
    for tools, text in {
        "pythonic": "[now(a='\\ud83d')]",
        "hermes": '<tool_call>{"name": "now", "arguments": '
        '"{\\"a\\": \\"\\\\ud83d\\"}"}</tool_call>',
    }.items():
        message = parse(text, tools=tools)
        assert calls_in(message) == [("now", {"a": "\ud83d"})]
        message.tool_calls[0].arguments.encode()


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>'
    assert parse(text, tools="hermes", tools_offered=()).content == text


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("none", {"type": "integer"}, None),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.0", {"type": "number"}, 5.0),
        ("five", {"type": "integer"}, "five"),
        ("1e999", {"type": "number"}, "1e999"),
        ("True", {"type": "boolean"}, True),
        ("false", {"oneOf": [{"type": "boolean"}]}, False),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': True, 'b': None}", {"type": "object"}, {"a": True, "b": None}),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("5", {"$ref": "#/$defs/five"}, 5),
        ("5", {"enum": [1, 5]}, 5),
        ("5", {"enum": ["1", "5"]}, "5"),
        ("5", {"const": "5"}, "5"),
        ("5", {}, 5),
        ("05", {}, "05"),
        ("text", {}, "text"),
        ("[", {"$ref": "#/$defs/itself"}, "["),
        ("5", {"$ref": "#/$defs/both"}, 5),
        ("[1e999]", {"type": "array"}, "[1e999]"),
        ("[" * 300 + "]" * 300, {"type": "array"}, "[" * 300 + "]" * 300),
    ],
)
def test_values_in_tags_have_their_schemas_type(
    written: str, schema: dict[str, object], value: object
) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {
            "five": {"type": "integer"},
            "itself": {"$ref": "#/$defs/itself"},
            "both": {"anyOf": [{"$ref": "#/$defs/both"}] * 3 + [{"type": "integer"}]},
        },
    }
    tools = [Tool("f", parameters)]
    for parser, text in {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n"
        "</tool_call>",
        "minimax_m2": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{written}'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    }.items():
        found = calls_in(parse(text, tools=parser, tools_offered=tools))
        assert json.dumps(found) == json.dumps([("f", {"a": value})])
