"""What a call is made to look like is what the family's parser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from real_tokenizers import real_templates, real_tokenizer
from replay import NOW, TOOLS, WEATHER, calls_in, make_parser, parse

from penstock.protocol.errors import ConfigError
from penstock.text.parsing.formats import CallGrammar, Tool
from penstock.text.parsing.parser import TOOL_PARSERS, call_grammar

TEMPLATES = {"": list(TOOL_PARSERS), "[TOOL_CALLS]": ["mistral"], "<｜tool▁sep｜>": ["deepseek_v3"]}
EVERY_DIALECT = [(name, template) for template, names in TEMPLATES.items() for name in names]
PARIS = {"city": 'Pa"ris', "days": 3}


def written(grammar: CallGrammar, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """An output that the grammar admits."""
    shapes = {"get_weather": grammar.calls[0], "now": grammar.calls[1]}
    texts = [
        shapes[name].prefix + json.dumps(arguments) + shapes[name].suffix
        for name, arguments in calls
    ]
    return grammar.begin + grammar.separator.join(texts) + grammar.end


@pytest.mark.parametrize(("tools", "template"), EVERY_DIALECT)
@pytest.mark.parametrize("parallel", [True, False])
def test_an_enforced_call_is_read_back(tools: str, template: str, parallel: bool) -> None:
    grammar = call_grammar(tools, TOOLS, parallel, template)
    assert grammar.parallel is (parallel and tools != "openai")
    calls = (
        [("get_weather", PARIS), ("now", {}), ("now", {})] if grammar.parallel else [("now", {})]
    )
    message = parse(written(grammar, calls), tools=tools, enforced=True)
    assert calls_in(message) == calls
    assert message.content == ""
    assert len({call.id for call in message.tool_calls}) == len(calls)


@pytest.mark.parametrize(("tools", "template"), EVERY_DIALECT)
def test_the_schema_is_the_tools_own(tools: str, template: str) -> None:
    weather, nothing = call_grammar(tools, [WEATHER, Tool("bare")], True, template).calls
    assert weather.schema == WEATHER.parameters
    assert nothing.schema == {"type": "object", "properties": {}}


def test_a_schema_that_says_by_other_means_what_arguments_there_are_is_left_alone() -> None:
    for more in ({"additionalProperties": True}, {"patternProperties": {}}, {"anyOf": [{}]}):
        (shape,) = call_grammar("hermes", [Tool("f", {"type": "object", **more})], True).calls
        assert shape.schema == {"type": "object", **more}


def test_a_named_tool_is_the_only_one() -> None:
    (shape,) = call_grammar("hermes", [NOW], parallel=False).calls
    assert shape.prefix == '<tool_call>\n{"name": "now", "arguments": '
    assert shape.suffix == "}\n</tool_call>"


@pytest.mark.parametrize(
    ("tools", "model"),
    [("hermes", "qwen3"), ("mistral", "mistral_nemo"), ("deepseek_v3", "deepseek_v3")],
)
def test_the_grammar_is_the_templates_dialect(tools: str, model: str) -> None:
    """It begins a call as the model's own template does."""
    template = real_templates(model)["default"]
    grammar = call_grammar(tools, TOOLS, True, template)
    begins = {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ',
        "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": ',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "get_weather\n```json\n",
    }
    assert grammar.begin + grammar.calls[0].prefix == begins[tools]


@pytest.mark.parametrize(
    ("tools", "model"),
    [
        ("deepseek_v3", "deepseek_v3"),
        ("mistral", "magistral"),
        ("openai", "gpt_oss"),
        ("kimi_k2", "deepseek_v3_1"),
    ],
)
def test_markers_are_single_tokens_of_the_model(tools: str, model: str) -> None:
    tokenizer = real_tokenizer(model)
    for marker in call_grammar(tools, TOOLS, True).special:
        assert len(tokenizer.encode(marker, add_special_tokens=False)) == 1, marker


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no tool-call parser 'hermit': .*hermes"):
        make_parser(tools="hermit")
    with pytest.raises(ConfigError, match=r"no reasoning parser 'qwen': .*qwen3"):
        make_parser("qwen")
    with pytest.raises(ConfigError, match="do not go together"):
        make_parser("qwen3", "openai")
    with pytest.raises(ConfigError, match="do not go together"):
        make_parser("openai_gptoss", "hermes")
