"""Outputs fed to parsers as the engine would: token by token, or several at once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from penstock.protocol.outputs import Message, ToolCall
from penstock.text.parsing.deltas import Delta, collect
from penstock.text.parsing.formats import Tool
from penstock.text.parsing.parser import OutputParser, ParserContext, make_output_parser
from penstock.text.tokenizer import Tokenizer

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "metric": {"type": "boolean"},
            "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
            "hours": {"type": "array", "items": {"type": "integer"}},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["city"],
        "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
    },
)
NOW = Tool("now", {"type": "object", "properties": {}})
TOOLS = (WEATHER, NOW)


def make_parser(
    reasoning: str | None = None,
    tools: str | None = None,
    tools_offered: Sequence[Tool] = TOOLS,
    enforced: bool = False,
    is_free: bool = True,
    **context: Any,
) -> OutputParser:
    """A parser whose call ids are `call0`, `call1`, ..., so that outputs can be compared."""
    ids = itertools.count()
    context.setdefault("new_call_id", lambda: f"call{next(ids)}")
    return make_output_parser(
        reasoning,
        tools,
        tools_offered=tools_offered,
        context=ParserContext(**context),
        enforced=enforced,
        is_free=is_free,
    )


def feed_text(parser: OutputParser, pieces: Sequence[str], is_whole: bool = False) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece, ())]
    return deltas + parser.finish(is_whole)


def feed_tokens(
    parser: OutputParser, tokenizer: Tokenizer, steps: Sequence[Sequence[int]]
) -> list[Delta]:
    """Tokens in steps of one or more, through the detokenizer, as a server feeds them."""
    detokenizer = tokenizer.detokenizer(shown_tokens=parser.markers)
    deltas: list[Delta] = []
    for token_ids in steps:
        deltas += parser.feed(detokenizer.add(token_ids), token_ids)
    return deltas + parser.feed(detokenizer.flush(), ()) + parser.finish()


def parse(text: str, **options: Any) -> Message:
    return collect(feed_text(make_parser(**options), [text]))


def cut(items: Any, cuts: Sequence[int]) -> list[Any]:
    """`items` split at `cuts`, which may lie anywhere."""
    bounds = [0, *sorted({at % (len(items) + 1) for at in cuts}), len(items)]
    return [items[begin:end] for begin, end in itertools.pairwise(bounds)]


def call(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return name, arguments


def calls_in(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Names and parsed arguments; every call must be whole."""
    assert all(found.complete for found in message.tool_calls), message
    return [(found.name, json.loads(found.arguments)) for found in message.tool_calls]


def names_in(calls: Sequence[ToolCall]) -> list[str]:
    return [found.name for found in calls]
