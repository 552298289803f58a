"""What a turn's output is held to: calls of tools, the answer's form, and where that begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.protocol.structured import StructuredOutputsParams
from penstock.structured.schemas import read_schema
from penstock.structured.tags import call_structure
from penstock.text.parsing.formats import Tool
from penstock.text.parsing.parser import (
    ParserContext,
    call_grammar,
    reasoning_format,
    thinking_is_open,
)
from penstock.text.tokenizer import Tokenizer

ASKED_TO_THINK = ("thinking", "enable_thinking")  # arguments of chat templates


def hold_to_calls(
    parser: str, tools: Sequence[Tool], parallel: bool, template: str, tokenizer: Tokenizer
) -> StructuredOutputsParams:
    """Nothing but calls of `tools`, as the tool-call parser `parser` reads them."""
    grammar = call_grammar(parser, tools, parallel, template)
    return StructuredOutputsParams(
        structural_tag=call_structure(grammar, tokenizer.is_special),
        lenient=True,  # tools come with whatever schemas their authors wrote
        field="tools",
    )


def hold_to_format(
    wanted: StructuredOutputsParams,
    parser: str,
    tools: Sequence[Tool],
    template: str,
    tokenizer: Tokenizer,
) -> StructuredOutputsParams:
    """Either what was `wanted`, or calls: for a model that may choose to call tools."""
    if wanted.kind not in ("json", "json_object"):
        return wanted
    schema = {"type": "object"} if wanted.json_object else read_schema(wanted.json, wanted.field)
    calls = call_structure(call_grammar(parser, tools, True, template), tokenizer.is_special)
    answer: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    either = {"type": "or", "elements": [answer, calls["format"]]}
    tag = {"type": "structural_tag", "format": either}
    lenient = wanted.lenient or wanted.kind == "json_object"  # which leaves the tools' schemas
    return msgspec.structs.replace(
        wanted, json=None, json_object=None, structural_tag=tag, lenient=lenient
    )


def after_reasoning(
    wanted: StructuredOutputsParams,
    reasoning: str | None,
    context: ParserContext,
    tokenizer: Tokenizer,
    is_calls: bool,
) -> StructuredOutputsParams:
    """The same, from where the reasoning ends, if the output begins with some."""
    if reasoning is None:
        return wanted
    marker = reasoning_format(reasoning)
    is_over = bool(context.continued) or context.prompt.rstrip().endswith(marker.end)
    is_open = thinking_is_open(reasoning, context)
    if is_over and not is_open:
        return wanted
    start, end = None, marker.end
    if marker.answer_prefix:
        if not is_calls:
            end = marker.answer_prefix.removeprefix("<|start|>assistant")
    elif not is_open:
        # The model decides by itself whether to think: it may also begin with the answer. Where
        # no token tells which it does, the answer's form counts for more, unless it was asked to.
        start = marker.start if tokenizer.is_token(marker.start) else None
        if start is None and not any(map(context.template_kwargs.get, ASKED_TO_THINK)):
            return wanted
    return msgspec.structs.replace(wanted, reasoning_end=end, reasoning_start=start)
