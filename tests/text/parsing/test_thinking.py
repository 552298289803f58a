"""Where reasoning begins and ends, by family, prompt and template arguments."""

from __future__ import annotations

from typing import Any

import pytest
from real_tokenizers import real_tokenizer
from replay import feed_tokens, make_parser, parse
from transcripts import BY_NAME

from penstock.conversation.grammar import after_reasoning
from penstock.protocol.outputs import Message
from penstock.protocol.structured import StructuredOutputsParams
from penstock.text.parsing.deltas import ReasoningDelta
from penstock.text.parsing.parser import (
    REASONING_PARSERS,
    ParserContext,
    reasoning_format,
    thinking_is_open,
)


@pytest.mark.parametrize(
    ("reasoning", "context", "is_open"),
    [
        ("deepseek_r1", {}, True),
        ("deepseek_r1", {"prompt": "<｜Assistant｜><think>\n"}, True),
        ("deepseek_r1", {"prompt": "<｜Assistant｜><think>\n\n</think>\n\n"}, False),
        ("deepseek_r1", {"prompt": "Hi", "continued": "The answer"}, False),
        ("deepseek_r1", {"prompt": "Hi", "continued": "<think>So"}, True),
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"template_kwargs": {"thinking": True}}, True),
        ("deepseek_v3", {"template_kwargs": {"thinking": False}}, False),
        ("deepseek_v3", {"prompt": "<｜Assistant｜><think>"}, True),
        ("deepseek_v3", {"prompt": "<｜Assistant｜></think>"}, False),
        # After a tool's result V3.1's template opens nothing, whatever the argument says.
        (
            "deepseek_v3",
            {"prompt": "<｜tool▁output▁end｜>", "template_kwargs": {"thinking": True}},
            False,
        ),
        ("qwen3", {"prompt": "assistant\n"}, False),
        ("qwen3", {"prompt": "assistant\n<think>\n"}, True),
        ("qwen3", {"prompt": "assistant\n<think>\n\n</think>\n\n"}, False),
        ("qwen3", {"prompt": "A user writes <think> here<|im_start|>assistant\n"}, False),
        ("glm45", {"prompt": "<|assistant|>\n<think></think>"}, False),
        ("minimax_m2", {}, True),
        ("mistral", {}, False),
        ("granite", {}, False),
        ("openai_gptoss", {}, False),
    ],
)
def test_the_prompt_says_whether_thinking_is_open(
    reasoning: str, context: dict[str, Any], is_open: bool
) -> None:
    assert thinking_is_open(reasoning, ParserContext(**context)) is is_open


@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
def test_the_closing_text_ends_the_reasoning(reasoning: str) -> None:
    """What a spent budget appends is read as the end."""
    form = reasoning_format(reasoning)
    message = parse(f"{form.start}Let me{form.closing}Four.", reasoning=reasoning)
    assert message == Message(content="Four.", reasoning="Let me")


@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
def test_the_end_and_the_prefix_lead_to_the_answer(reasoning: str) -> None:
    form = reasoning_format(reasoning)
    text = f"{form.start}Let me{form.end}{form.answer_prefix}" + '{"a": 1}'
    assert parse(text, reasoning=reasoning) == Message(content='{"a": 1}', reasoning="Let me")


def test_reasoning_is_shown_as_it_comes_but_not_what_may_be_its_end() -> None:
    parser = make_parser("qwen3")
    assert parser.feed("<think>") == []
    assert parser.feed("\nOne.") == [ReasoningDelta("One.")]
    assert parser.feed(" Two.\n</th") == [ReasoningDelta(" Two.")]
    assert parser.feed("ird>") == [ReasoningDelta("\n</third>")]
    assert parser.feed("</think") == []
    assert parser.feed(">\n\n") == []
    assert parser.finish() == []


GRANITE_32 = "Write the thoughts after 'Here is my thought process:' and the response after ..."
GRANITE_33 = "Write the thoughts between <think></think> and the response between ..."


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        (GRANITE_32, "Here is my thought process:", "Here is my response:"),
        (GRANITE_33, "<think>", "</think>"),
    ],
)
def test_an_answers_form_holds_after_granites_thinking(template: str, start: str, end: str) -> None:
    """No token of its vocabulary begins the reasoning, so it is there if it was asked for."""
    tokenizer = real_tokenizer("llama3_2")
    assert not tokenizer.is_token(start)
    wanted = StructuredOutputsParams(choice=["Four."])

    def held(**kwargs: bool) -> StructuredOutputsParams:
        context = ParserContext(prompt="Hi", template_kwargs=kwargs)
        return after_reasoning(wanted, "granite", context, tokenizer, template, is_calls=False)

    assert held() == held(thinking=False) == wanted
    asked = held(thinking=True)
    assert asked.reasoning_start == start
    assert asked.reasoning_ends[0] == end
    assert {"</think>", "Here is my response:"} < set(asked.reasoning_ends)
    closing = reasoning_format("granite", template).closing
    message = parse(f"{start} Two and two.{closing}Four.", reasoning="granite")
    assert message == Message(content="Four.", reasoning="Two and two.")


def test_white_space_of_reasoning_that_is_cut_off_is_no_content() -> None:
    assert parse("<think>So \n\n", reasoning="qwen3") == Message(reasoning="So")
    text = "<|channel|>analysis<|message|>So \n"
    assert parse(text, reasoning="openai_gptoss") == Message(reasoning="So")


def test_without_tokens_bytes_the_share_of_text_counts() -> None:
    parser = make_parser("deepseek_r1")
    parser.feed("abcd", [1, 2])
    parser.feed("ab</think>cd", [3, 4, 5, 6])
    assert parser.num_reasoning_tokens == 3


@pytest.mark.parametrize(
    "name",
    [
        "harmony with a call",
        "deepseek_v3 as V3.1 writes it, after thinking",
        "granite thinks in words",
        "deepseek_r1 is cut off while it thinks",
        "mistral's names and arguments, after thinking",
    ],
)
def test_reasoning_tokens_are_those_of_the_reasoning(name: str) -> None:
    transcript = BY_NAME[name]
    tokenizer = real_tokenizer(transcript.model)
    token_ids = tokenizer.encode(transcript.text, add_special_tokens=False)
    parser = make_parser(**transcript.options, token_bytes=tokenizer.token_bytes)
    feed_tokens(parser, tokenizer, [token_ids])
    alone = tokenizer.encode(transcript.reasoning, add_special_tokens=False)
    # White space between marker and reasoning may be a token of its own.
    assert abs(parser.num_reasoning_tokens - len(alone)) <= 1


def test_nothing_is_reasoning_without_a_parser() -> None:
    parser = make_parser(tools="hermes")
    parser.feed("<think>x</think>", [1, 2, 3])
    assert parser.num_reasoning_tokens == 0


def test_parsers_name_the_markers_that_they_must_see() -> None:
    assert not make_parser().markers
    assert make_parser("mistral").markers == {"[THINK]", "[/THINK]"}
