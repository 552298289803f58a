"""Tools in the prompts of models whose chat template knows none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config import ChatConfig
from penstock.protocol.errors import InputError
from penstock.text.frontend import choose_parsers
from penstock.text.renderers.generic_tools import GenericToolRenderer, shows_tools
from penstock.text.renderers.template import ChatTemplate

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object"}},
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LOOP: Any = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
STRICT = """\
{%- if messages[0].role == "system" %}{{ raise_exception("no system prompts") }}{% endif %}
{%- for m in messages %}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("take turns") }}{% endif %}
<{{ m.role }}>{{ m.content | trim }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, False),
        ("{# tools are not known #}" + PLAIN, False),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN, False),
        ("{{ messages[0].tools }}" + PLAIN, False),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + PLAIN, True),
        (
            "{% if messages[0].role == 'system' and tools %}{{ tools | tojson }}{% endif %}"
            + PLAIN,
            True,
        ),
        ("{{ tools }}{{ raise_exception('never') }}", True),
    ],
)
def test_whether_a_template_shows_tools_is_found_out(source: str, expected: bool) -> None:
    assert shows_tools(ChatTemplate({"default": source})) is expected


def test_tools_calls_and_results_are_written_into_the_messages() -> None:
    renderer = GenericToolRenderer(ChatTemplate({"default": PLAIN}))
    system = {"role": "system", "content": "Be brief."}
    prompt = renderer.render([system, *LOOP], tools=TOOLS)
    head, rest = prompt.split("<user>", 1)
    assert head.startswith("<system>Be brief.\n\n# Tools")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in head
    assert rest == (f"Weather?\n<assistant>{CALL}\n<user><tool_response>\nrain\n</tool_response>\n")
    alone = renderer.render(LOOP[:1], tools=TOOLS)
    assert alone.startswith("<system># Tools")
    assert "Be brief" not in renderer.render([system, *LOOP], tools=TOOLS[:0])[20:]
    assert renderer.render(LOOP[:1]) == "<user>Weather?\n"


def test_what_was_called_is_shown_although_nothing_can_be_called_now() -> None:
    prompt = GenericToolRenderer(ChatTemplate({"default": PLAIN})).render(LOOP)
    assert prompt == f"<user>Weather?\n<assistant>{CALL}\n<user><tool_response>\nrain\n" + (
        "</tool_response>\n"
    )


def test_a_template_without_system_prompts_that_wants_turns_to_be_taken_gets_them() -> None:
    renderer = GenericToolRenderer(ChatTemplate({"default": STRICT}))
    said = {**LOOP[1], "content": "I look."}
    more = [LOOP[0], said, LOOP[2], LOOP[2], {"role": "user", "content": "And now?"}]
    prompt = renderer.render(more, tools=TOOLS)
    before, rest = prompt.split("<assistant>")
    answer, last = rest.split("<user>")
    assert before.startswith("<user># Tools")
    assert before.endswith("Weather?")
    assert answer == f"I look.\n{CALL}"
    result = "<tool_response>\nrain\n</tool_response>"
    assert last == f"{result}\n{result}\n\nAnd now?"


def test_the_parser_follows_from_the_renderer_unless_the_operator_names_one() -> None:
    renderer = GenericToolRenderer(ChatTemplate({"default": PLAIN}))
    assert choose_parsers(ChatConfig(), renderer).tools == "hermes"
    assert choose_parsers(ChatConfig(tool_call_parser="none"), renderer).tools is None
    plain = ChatTemplate({"default": PLAIN})
    assert choose_parsers(ChatConfig(), plain).tools is None


def test_a_template_that_writes_calls_keeps_its_way_and_is_shown_tools() -> None:
    source = """{% for m in messages %}<{{ m.role }}>{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}
```json
{{ c.function.arguments | tojson }}
```{% endfor %}
{% endfor %}"""
    renderer = GenericToolRenderer(ChatTemplate({"default": source}))
    assert choose_parsers(ChatConfig(), renderer).tools == "deepseek_v3"
    prompt = renderer.render(LOOP, tools=TOOLS)
    assert '"name": "get_weather"' in prompt.split("<user>")[0]
    assert "<｜tool▁sep｜>FUNCTION\n```json\n{ARGUMENTS}\n```" in prompt.split("<user>")[0]
    assert '<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```' in prompt
    assert "<tool>rain" in prompt
    assert "<tool_call>" not in prompt


@pytest.mark.parametrize("messages", [None, 7, "hello", {}, [], [None], [{"role": "tool"}]])
def test_what_is_no_conversation_is_the_clients_error(messages: Any) -> None:
    renderer = GenericToolRenderer(ChatTemplate({"default": PLAIN}))
    with pytest.raises(InputError, match="messages"):
        renderer.render(messages, tools=TOOLS)
