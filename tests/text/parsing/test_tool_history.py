"""Earlier calls and reasoning, as clients send them, through real chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from real_tokenizers import real_template
from replay import calls_in, parse
from test_real_chat_templates import FAMILIES, Family

from penstock.text.renderers.template import ChatTemplate

ARGUMENTS = {"city": 'Pa"ris', "days": None}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


def conversation(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "12"},
    ]


every_family = pytest.mark.parametrize("family", FAMILIES, ids=[f.model for f in FAMILIES])


@every_family
@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}], ids=str)
@pytest.mark.parametrize("as_text", [True, False])
def test_a_call_is_shown_to_the_model_as_the_model_writes_it(
    family: Family, fields: dict[str, Any], as_text: bool
) -> None:
    template = real_template(family.model)
    messages = conversation(json.dumps(ARGUMENTS) if as_text else ARGUMENTS, **fields)
    before = template.render(messages[:1], tools=TOOLS)
    after = template.render(messages[:2], tools=TOOLS, add_generation_prompt=False)
    assert after.startswith(before)
    message = parse(after[len(before) :], reasoning=family.reasoning, tools=family.tools)
    assert calls_in(message) == [("get_weather", ARGUMENTS)]
    assert "12" in template.render(messages, tools=TOOLS)


def test_reasoning_of_a_turn_with_calls_is_shown_again() -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = conversation("{}", content=None, **{name: "I need the weather."})
        prompt = real_template("qwen3").render(messages, tools=TOOLS)
        assert "<think>\nI need the weather.\n</think>" in prompt


def test_the_clients_messages_are_not_changed() -> None:
    messages = conversation("{}", reasoning="Hm.")
    before = json.dumps(messages)
    real_template("qwen3").render(messages, tools=TOOLS)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ call.arguments | tojson }}", '{"a": 1}'),
        ("{{ call.arguments }}", '{"a": 1}'),  # an object would be shown as Python's
        ("{{ 'x' + call.arguments }}", 'x{"a": 1}'),
        ("{% for k, v in call.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}", "<a>1"),
        ("{% if 'x' in message.content %}{% endif %}{{ call.arguments | tojson }}", '{"a": 1}'),
        ("{% if message.content is none %}{{ call.arguments | tojson }}{% endif %}", '{"a": 1}'),
    ],
)
def test_arguments_and_content_have_the_form_that_the_template_takes(
    template: str, shown: str
) -> None:
    whole = (
        "{% for message in messages %}{% for c in message.tool_calls or [] %}"
        f"{{% set call = c.function %}}{template}{{% endfor %}}{{% endfor %}}"
    )
    assert ChatTemplate({"default": whole}).render(conversation('{"a": 1}')) == shown


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    prompt = real_template("qwen3").render(conversation('{"a": '), tools=TOOLS)
    assert '"arguments": {"a": }' in prompt


def test_a_call_without_arguments_has_an_empty_object() -> None:
    for arguments in ("", None):
        assert '"arguments": {}}' in real_template("qwen3").render(conversation(arguments))
