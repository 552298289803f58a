"""What a model's own template writes for an assistant's turn, its parser reads back."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from real_tokenizers import real_template, real_templates, real_tokenizer
from replay import TOOLS, calls_in, cut, feed_tokens, make_parser

from penstock.protocol.outputs import Message
from penstock.text.parsing.deltas import collect
from penstock.text.parsing.parser import detect


@dataclass(frozen=True)
class Family:
    model: str
    reasoning: str | None
    tools: str
    max_calls: int = 3
    takes_content: bool = False  # beside calls
    takes_text: bool = False  # arguments as JSON text


FAMILIES = [
    Family("qwen2_5", None, "hermes", takes_content=True),
    Family("qwen3", "qwen3", "hermes", takes_content=True),
    Family("llama3_2", None, "llama3_json", max_calls=1),
    # Its template ends the turn after every call but the first.
    Family("deepseek_v3", None, "deepseek_v3", max_calls=2, takes_text=True),
    Family("mistral_nemo", None, "mistral"),
]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=[f.model for f in FAMILIES])

text = st.text(max_size=20) | st.sampled_from(
    ["<tool_call>", "</tool_call>", "</think>", "[TOOL_CALLS]", "<｜tool▁call▁end｜>", "```", '"}]']
)
value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(
    st.tuples(st.sampled_from(["get_weather", "now"]), st.dictionaries(text, value, max_size=4)),
    min_size=1,
    max_size=3,
)


def turn_of(family: Family, message: dict[str, Any]) -> tuple[str, list[int]]:
    """The prompt, and the tokens of the turn that the model would have written."""
    template, tokenizer = real_template(family.model), real_tokenizer(family.model)
    functions = [
        {"type": "function", "function": {"name": t.name, "parameters": t.parameters}}
        for t in TOOLS
    ]
    user = {"role": "user", "content": "How is the weather?"}
    prompt = template.render([user], tools=functions)
    whole = template.render(
        [user, {"role": "assistant", **message}], tools=functions, add_generation_prompt=False
    )
    assert whole.startswith(prompt)
    token_ids = tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
    ends = [at for at, token_id in enumerate(token_ids) if token_id in tokenizer.end_ids]
    return prompt, token_ids[: ends[-1]] if ends else token_ids


def parse_turn(family: Family, prompt: str, token_ids: list[int], cuts: list[int]) -> Message:
    tokenizer = real_tokenizer(family.model)
    parser = make_parser(
        family.reasoning, family.tools, prompt=prompt, token_bytes=tokenizer.token_bytes
    )
    return collect(feed_tokens(parser, tokenizer, cut(token_ids, cuts)))


@every_family
@given(calls=calls, cuts=st.lists(st.integers(0, 500), max_size=20))
@settings(max_examples=40)
def test_calls_are_read_back(
    family: Family, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    calls = calls[: family.max_calls]
    written = json.dumps(calls, ensure_ascii=False)
    assume(unicodedata.normalize("NFC", written) == written)  # as Qwen's tokenizer does
    tokenizer = real_tokenizer(family.model)
    # What is written like a special token becomes that token here, and is not shown.
    assume(tokenizer.special_ids.isdisjoint(tokenizer.encode(written, add_special_tokens=False)))
    message = {
        "content": "" if family.takes_content else None,
        "tool_calls": [
            {
                "id": f"abcdefgh{index}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments) if family.takes_text else arguments,
                },
            }
            for index, (name, arguments) in enumerate(calls)
        ],
    }
    found = parse_turn(family, *turn_of(family, message), cuts)
    assert calls_in(found) == calls
    assert found.content == ""
    assert found.reasoning == ""


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.takes_content], ids=lambda f: f.model)
def test_text_before_a_call_is_read_back(family: Family) -> None:
    function = {"name": "now", "arguments": {}}
    message = {"content": "One moment, please: <tool", "tool_calls": [{"function": function}]}
    prompt, token_ids = turn_of(family, message)
    found = parse_turn(family, prompt, token_ids, list(range(len(token_ids))))
    assert found.content == "One moment, please: <tool"
    assert calls_in(found) == [("now", {})]


@every_family
def test_a_plain_answer_is_all_content(family: Family) -> None:
    answer = "It rains.\n\n- 12 °C, ☔\n- <b>no</b> wind [sic] {curly}"
    prompt, token_ids = turn_of(family, {"content": answer})
    found = parse_turn(family, prompt, token_ids, list(range(len(token_ids))))
    assert found == Message(content=answer)


def test_qwen3_reasoning_is_read_back_and_counted() -> None:
    family = FAMILIES[1]
    function = {"name": "now", "arguments": {}}
    message = {
        "content": "A moment.",
        "reasoning_content": "They want the time.\nI look.",
        "tool_calls": [{"function": function}],
    }
    prompt, token_ids = turn_of(family, message)
    found = parse_turn(family, prompt, token_ids, list(range(len(token_ids))))
    assert found.reasoning == "They want the time.\nI look."
    assert found.content == "A moment."
    assert calls_in(found) == [("now", {})]
    tokenizer = real_tokenizer("qwen3")
    parser = make_parser("qwen3", "hermes", token_bytes=tokenizer.token_bytes)
    feed_tokens(parser, tokenizer, [token_ids])
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    assert parser.num_reasoning_tokens == texts.index("</think>") - texts.index("<think>") - 1


@pytest.mark.parametrize(("enable_thinking", "is_open"), [(True, True), (False, False)])
def test_qwen3_thinking_is_switched_by_the_template(enable_thinking: bool, is_open: bool) -> None:
    user = {"role": "user", "content": "Hi"}
    prompt = real_template("qwen3").render([user], enable_thinking=enable_thinking)
    parser = make_parser("qwen3", prompt=prompt)
    deltas = parser.feed("<think>\nHm" if is_open else "Hello", [])
    message = collect(deltas + parser.finish())
    assert message == (Message(reasoning="Hm") if is_open else Message(content="Hello"))


@every_family
def test_the_template_names_its_parsers(family: Family) -> None:
    assert detect(real_templates(family.model)["default"]) == (family.reasoning, family.tools)
