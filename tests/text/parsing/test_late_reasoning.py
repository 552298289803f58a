"""Reasoning that does not come where it should: again after the answer has begun, around calls, or
behind a damaged header. None of it is content."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import call, calls_in, cut, feed_text, make_parser, parse

from penstock.protocol.outputs import Message
from penstock.text.parsing.deltas import collect
from penstock.text.parsing.parser import REASONING_PARSERS, reasoning_format

SECRET = "Between us, four."
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TAGGED = [name for name in REASONING_PARSERS if name != "openai_gptoss"]


def every_size(text: str, **options: Any) -> Message:
    """The message, which must be the same however the text is split."""
    whole = parse(text, **options)
    for size in (1, 3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert collect(feed_text(make_parser(**options), pieces)) == whole
    return whole


@pytest.mark.parametrize("reasoning", TAGGED)
@pytest.mark.parametrize("before", ["", "Four. ", "{start}Hm.{end}Four.\n\n"])
def test_reasoning_may_come_again(reasoning: str, before: str) -> None:
    form = reasoning_format(reasoning)
    before = before.format(start=form.start, end=form.end)
    prompt = form.end  # of a template that has closed the reasoning
    text = f"{before}{form.start}{SECRET}{form.end}\n\nSo four.{form.start}{SECRET}"
    message = every_size(text, reasoning=reasoning, prompt=prompt)
    assert SECRET not in message.content
    assert message.content.endswith("So four.")
    assert message.reasoning.count(SECRET) == 2


@settings(max_examples=150)
@given(
    names=st.sampled_from([("qwen3", "hermes"), ("mistral", "mistral"), ("granite", "granite")]),
    kinds=st.lists(st.sampled_from(["say", "think", "call"]), max_size=8),
    cuts=st.lists(st.integers(0, 500), max_size=20),
)
def test_whatever_the_order_reasoning_is_reasoning_and_content_content(
    names: tuple[str, str], kinds: list[str], cuts: list[int]
) -> None:
    form = reasoning_format(names[0])
    calls = {
        "hermes": CALL,
        "mistral": "[TOOL_CALLS]now[ARGS]{}",
        "granite": '<|tool_call|>[{"name": "now", "arguments": {}}]',
    }
    written = {
        "say": "Said.",
        "think": f"{form.start}{SECRET}{form.end}",
        "call": calls[names[1]],
    }
    text = "".join(written[kind] for kind in kinds)
    parser = make_parser(*names, prompt="Hi")
    message = collect(feed_text(parser, cut(text, cuts)))
    assert message.content == "Said." * kinds.count("say")
    assert message.reasoning == SECRET * kinds.count("think")
    assert len(message.tool_calls) == kinds.count("call")


def test_reasoning_between_calls_is_none_of_the_content() -> None:
    text = f"<think>One.</think>A moment.{CALL}<think>Two.</think>{CALL}Done."
    message = every_size(text, reasoning="qwen3", tools="hermes")
    assert message.content == "A moment.Done."
    assert message.reasoning == "One.Two."
    assert calls_in(message) == [call("now")] * 2


@pytest.mark.parametrize(
    "text",
    [
        "Write `<think>` before it, and `</think>` after.",
        "re.split(\"<think>\", s), or '<think>' for that matter.",
        "Such as:\n```\n<think>\nHm.\n</think>\n```\nThat is all.",
        "An end alone, </think>, ends nothing.",
    ],
)
def test_a_marker_that_is_only_spoken_of_is_content(text: str) -> None:
    assert every_size(text, reasoning="qwen3", tools="hermes") == Message(content=text)


def test_a_marker_after_a_block_of_code_begins_reasoning() -> None:
    text = f"```\n<think>\n```\n<think>{SECRET}</think>"
    assert every_size(text, reasoning="qwen3").reasoning == SECRET


def test_an_answer_that_is_held_to_a_form_is_content_throughout() -> None:
    text = '{"a": "say <think> and go on"}'
    parser = make_parser("qwen3", is_free=False)
    assert collect(feed_text(parser, list(text))) == Message(content=text)
    assert "<think>" not in parse(text, reasoning="qwen3").content


@pytest.mark.parametrize(
    ("reasoning", "tools", "written"),
    [
        ("qwen3", "hermes", CALL),
        ("qwen3", "qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        ("glm45", "glm45", "<tool_call>now\n</tool_call>"),
        (
            "deepseek_v3",
            "deepseek_v3",
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ),
        ("mistral", "mistral", "[TOOL_CALLS]now[ARGS]{}"),
        (
            "minimax_m2",
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        ),
    ],
)
def test_a_call_in_thinking_that_was_never_ended_is_made(
    reasoning: str, tools: str, written: str
) -> None:
    form = reasoning_format(reasoning)
    text = f"{form.start}I need the time.\n{written}"
    message = every_size(text, reasoning=reasoning, tools=tools)
    assert message.reasoning == "I need the time."
    assert message.content == ""
    assert calls_in(message) == [call("now")]
    goes_on = every_size(f"{text} Or not.{form.end}Noon.", reasoning=reasoning, tools=tools)
    assert goes_on.reasoning.endswith("Or not.")
    assert goes_on.content == "Noon."


@pytest.mark.parametrize(
    "thought",
    [
        "I could write <tool_call> and so on.",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {oops}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a":',
        "<tool_call>",
    ],
)
def test_a_call_that_is_only_thought_of_is_reasoning(
    thought: str, caplog: pytest.LogCaptureFixture
) -> None:
    for tools in ("hermes", "qwen3_coder"):
        text = f"<think>{thought}</think>Noon."
        message = every_size(text, reasoning="qwen3", tools=tools)
        assert message == Message(content="Noon.", reasoning=thought)
        cut_off = every_size(f"<think>{thought}", reasoning="qwen3", tools=tools)
        assert cut_off == Message(reasoning=thought)
    assert caplog.records == []


def test_tokens_of_a_call_are_no_reasoning_tokens() -> None:
    text = f"<think>ab{CALL}cd</think>ef"
    parser = make_parser("qwen3", "hermes", token_bytes=lambda token_id: bytes([token_id]))
    for byte in text.encode():
        parser.feed(chr(byte), [byte])
    parser.finish()
    assert parser.num_reasoning_tokens == len("abcd")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>analysis",
        "<|channel|>analysis" + " to=" + "x" * 300,
        "<|channel|>analysis <|constrain|>" + "x" * 300,
        "analysis",
        "<|start|>assistant analysis",
        "<|channel|>thoughts",
    ],
)
def test_a_damaged_harmony_header_does_not_show_reasoning(header: str) -> None:
    answer = "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    for message in ("<|message|>", ""):
        if not message and "channel" not in header:
            continue
        text = f"{header}{message} {SECRET * 30}<|end|>{answer}"
        found = every_size(text, reasoning="openai_gptoss")
        assert found.content == "Four."
        assert SECRET in found.reasoning


def test_a_harmony_message_without_a_channel_is_in_that_of_the_one_before() -> None:
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|message|>{SECRET}<|end|>"
    assert every_size(text, reasoning="openai_gptoss").content == ""
    text = "<|message|>One.<|end|><|start|>assistant<|message|>Two.<|return|>"
    assert every_size(text, reasoning="openai_gptoss") == Message(content="One.Two.")
    text = f"<|channel|>analysis<|message|>Hm.<|end|>{SECRET}"
    assert every_size(text, reasoning="openai_gptoss").content == ""


def test_harmony_may_reason_again_after_its_answer() -> None:
    messages = [("final", "One."), ("analysis", SECRET), ("final", "Two.")]
    text = "<|end|><|start|>assistant".join(
        f"<|channel|>{channel}<|message|>{said}" for channel, said in messages
    )
    message = every_size(text, reasoning="openai_gptoss")
    assert message == Message(content="One.Two.", reasoning=SECRET)


def seconds(text: str, size: int, **options: Any) -> float:
    parser = make_parser(**options)
    started = time.process_time()
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size], [1])
        assert parser.num_reasoning_tokens >= 0
    parser.finish()
    return time.process_time() - started


@pytest.mark.parametrize(
    "piece", [" ", "<think>a</think>b", f"<think>a{CALL}</think>", "<think><tool_call>", "`"]
)
def test_time_grows_with_the_length_and_not_with_its_square(piece: str) -> None:
    options: Any = {"reasoning": "qwen3", "tools": "hermes"}
    size = len(piece)
    short, long = piece * (3_000 // size), piece * (48_000 // size)
    # The shortest of three: the garbage of other tests may be collected during one of them.
    shortest = min(seconds(short, size, **options) for _ in range(3))
    assert min(seconds(long, size, **options) for _ in range(3)) < 16 * 4 * shortest + 0.2
