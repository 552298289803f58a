"""Decides which grammar a turn's output must match, and where in the output it begins to apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.protocol.structured import StructuredOutputsParams
from penstock.structured.schemas import read_schema
from penstock.structured.tags import call_structure, params_for_calls
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
    """Allow only calls of `tools`, in the format of the tool-call parser `parser`."""
    grammar = call_grammar(parser, tools, parallel, template)
    return params_for_calls(grammar, tokenizer.is_special)


def hold_to_format(
    wanted: StructuredOutputsParams,
    parser: str,
    tools: Sequence[Tool],
    parallel: bool,
    template: str,
    tokenizer: Tokenizer,
) -> StructuredOutputsParams:
    """Allow either the `wanted` format or calls, for a model that may choose to call tools."""
    if wanted.kind not in ("json", "json_object"):
        return wanted
    schema = {"type": "object"} if wanted.json_object else read_schema(wanted.json, wanted.field)
    calls = call_structure(call_grammar(parser, tools, parallel, template), tokenizer.is_special)
    answer: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    either = {"type": "or", "elements": [answer, calls["format"]]}
    tag = {"type": "structural_tag", "format": either}
    return msgspec.structs.replace(wanted, json=None, json_object=None, structural_tag=tag)


def after_reasoning(
    wanted: StructuredOutputsParams,
    reasoning: str | None,
    context: ParserContext,
    tokenizer: Tokenizer,
    template: str,
    is_calls: bool,
) -> StructuredOutputsParams:
    """Apply the grammar only after the reasoning, if the output begins with reasoning."""
    if reasoning is None:
        return wanted
    form = reasoning_format(reasoning, template)
    is_over = bool(context.continued) or context.prompt.rstrip().endswith(form.ends)
    is_open = thinking_is_open(reasoning, context)
    if is_over and not is_open:
        return wanted
    start, ends = None, list(form.ends)
    if form.answer_prefix:
        if not is_calls:
            ends = [form.answer_prefix.removeprefix("<|start|>assistant")]
    elif not is_open:
        # The model decides whether to think. If no single token marks the start, the template's
        # arguments decide.
        start = form.start
        if not tokenizer.is_token(start) and not any(
            map(context.template_kwargs.get, ASKED_TO_THINK)
        ):
            return wanted
    return msgspec.structs.replace(wanted, reasoning_end=ends, reasoning_start=start)
