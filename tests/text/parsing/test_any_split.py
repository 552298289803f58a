"""No text, however damaged, is read differently for how it was split, and none is a crash."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import cut, feed_text, make_parser
from transcripts import TRANSCRIPTS, Transcript

from penstock.text.parsing.deltas import ContentDelta, collect
from penstock.text.parsing.parser import REASONING_PARSERS, TOOL_PARSERS, make_output_parser

MARKERS = sorted(
    {marker for name in TOOL_PARSERS for marker in make_parser(tools=name).markers}
    | {marker for name in REASONING_PARSERS for marker in make_parser(name).markers}
)
FRAGMENTS = [
    *MARKERS, "<function=now>", "</function>", "<parameter=a>", "</parameter>", "<invoke name=",
    '"now">', "</invoke>", '{"name": "now", "arguments": {', '"a": ', '"x"', '"', "}", "]", "[",
    "{", "now", "functions.now:0", "(a=1)", "(", ")", ", ", ";", "\n", " ", "```json", "```",
    "\\", "text", "assistant", "analysis", "commentary to=functions.now ", "final", "é", "😀",
    "'", "None", "=", "null", "-1",
    "x" * 100, "x" * 300,
]  # fmt: skip

cuts = st.lists(st.integers(0, 1000), max_size=20)
fragment = st.sampled_from(FRAGMENTS) | st.text(max_size=3)
edit = st.tuples(st.integers(0, 400), st.integers(0, 12), fragment)
parser_names = st.tuples(
    st.sampled_from([None, *REASONING_PARSERS]), st.sampled_from([None, *TOOL_PARSERS])
).filter(lambda names: "openai" not in names and "openai_gptoss" not in names) | st.just(
    ("openai_gptoss", "openai")
)


def check(options: dict[str, str | None], text: str, cuts: list[int]) -> None:
    whole = collect(feed_text(make_parser(**options), [text]))
    assert collect(feed_text(make_parser(**options), list(text))) == whole
    assert collect(feed_text(make_parser(**options), cut(text, cuts))) == whole
    for found in whole.tool_calls:
        if found.complete:
            assert isinstance(json.loads(found.arguments), dict)
    plain = options["reasoning"] is None and options["tools"] != "openai"
    if plain and not whole.tool_calls:
        assert text.startswith(whole.content)  # what may be the beginning of a call is left out
    ended = collect(feed_text(make_parser(**options), [text], is_whole=True))
    if plain and not ended.tool_calls:
        assert ended.content == text


def check_fragments(
    names: tuple[str | None, str | None], fragments: list[str], cuts: list[int], prompt: str
) -> None:
    options = {"reasoning": names[0], "tools": names[1], "prompt": prompt}
    check(options, "".join(fragments), cuts)


def check_edits(transcript: Transcript, edits: list[tuple[int, int, str]], cuts: list[int]) -> None:
    text = transcript.text
    for at, length, replacement in edits:
        at %= len(text) + 1
        text = text[:at] + replacement + text[at + length :]
    check(transcript.options, text, cuts)


of_fragments = given(
    names=parser_names,
    fragments=st.lists(fragment, max_size=25),
    cuts=cuts,
    prompt=st.sampled_from(["", "<think>\n", "<think></think>"]),
)
of_edits = given(
    transcript=st.sampled_from(TRANSCRIPTS), edits=st.lists(edit, min_size=1, max_size=4), cuts=cuts
)

test_heaps_of_markers = settings(max_examples=400)(of_fragments(check_fragments))
test_damaged_transcripts = settings(max_examples=400)(of_edits(check_edits))
test_many_heaps_of_markers = pytest.mark.slow(
    settings(max_examples=8_000)(of_fragments(check_fragments))
)
test_many_damaged_transcripts = pytest.mark.slow(
    settings(max_examples=8_000)(of_edits(check_edits))
)


def test_where_neither_calls_nor_reasoning_can_come_text_goes_out_as_it_is():
    parser = make_output_parser(None, "hermes")  # no tools were offered
    assert parser.feed("\n a <tool_call>\n", [1, 2]) == [ContentDelta("\n a <tool_call>\n")]
    assert parser.feed("", [3]) == parser.finish(is_whole=True) == []
    assert parser.num_reasoning_tokens == 0
