"""Every parser on its model's true format, through its model's tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import real_tokenizer
from replay import calls_in, cut, feed_text, feed_tokens, make_parser
from transcripts import TRANSCRIPTS, Transcript

from penstock.text.parsing.deltas import collect
from penstock.text.parsing.parser import REASONING_PARSERS, TOOL_PARSERS

every_transcript = pytest.mark.parametrize(
    "transcript", TRANSCRIPTS, ids=[transcript.name for transcript in TRANSCRIPTS]
)
cuts = st.lists(st.integers(0, 2000), max_size=12)


def test_every_parser_has_a_transcript() -> None:
    tools = {transcript.tool_parser for transcript in TRANSCRIPTS} - {None}
    assert tools == set(TOOL_PARSERS) - {"json"}
    reasoning = {transcript.reasoning_parser for transcript in TRANSCRIPTS} - {None}
    assert reasoning == set(REASONING_PARSERS)


@every_transcript
def test_one_token_at_a_time_gives_the_message(transcript: Transcript) -> None:
    tokenizer = real_tokenizer(transcript.model)
    token_ids = tokenizer.encode(transcript.text, add_special_tokens=False)
    parser = make_parser(**transcript.options, token_bytes=tokenizer.token_bytes)
    steps = [[token_id] for token_id in token_ids]
    message = collect(feed_tokens(parser, tokenizer, steps))
    assert message.content == transcript.content
    assert message.reasoning == transcript.reasoning
    assert calls_in(message) == transcript.calls


@every_transcript
@given(cuts=cuts)
@settings(max_examples=15)
def test_steps_of_any_number_of_tokens_give_the_same(
    transcript: Transcript, cuts: list[int]
) -> None:
    tokenizer = real_tokenizer(transcript.model)
    token_ids = tokenizer.encode(transcript.text, add_special_tokens=False)
    results = []
    for steps in ([token_ids], cut(token_ids, cuts)):
        parser = make_parser(**transcript.options, token_bytes=tokenizer.token_bytes)
        results.append(
            (collect(feed_tokens(parser, tokenizer, steps)), parser.num_reasoning_tokens)
        )
    assert results[0] == results[1]


@every_transcript
@given(cuts=cuts)
@settings(max_examples=15)
def test_any_split_of_the_text_gives_the_same(transcript: Transcript, cuts: list[int]) -> None:
    whole = collect(feed_text(make_parser(**transcript.options), [transcript.text]))
    pieces = cut(transcript.text, cuts)
    assert collect(feed_text(make_parser(**transcript.options), pieces)) == whole


@every_transcript
def test_an_output_may_end_anywhere(transcript: Transcript) -> None:
    """max_tokens strikes in the middle of markers and calls: nothing of them is content."""
    whole = collect(feed_text(make_parser(**transcript.options), [transcript.text]))
    for length in range(len(transcript.text)):
        beginning = transcript.text[:length]
        message = collect(feed_text(make_parser(**transcript.options), [beginning]))
        if transcript.reasoning_parser != "granite":  # which frames its answers with words
            assert whole.content.startswith(message.content.rstrip())
        if not whole.reasoning and not whole.tool_calls:
            parser = make_parser(**transcript.options)
            ended = collect(feed_text(parser, [beginning], is_whole=True))
            assert ended.content == beginning
        if whole.reasoning:
            assert whole.reasoning[:6] not in message.content
            assert message.reasoning[:6] in whole.reasoning
        for cut_off, found in zip(message.tool_calls, whole.tool_calls, strict=False):
            assert cut_off.name == found.name
            assert found.arguments.startswith(cut_off.arguments)
            assert cut_off.complete <= (cut_off.arguments == found.arguments)
