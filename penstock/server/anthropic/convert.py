"""Converts a body of Anthropic's Messages API to a turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.conversation.media import MediaReference
from penstock.conversation.request import NamedTool, RunOptions, ToolChoice, TurnRequest
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.structured import StructuredOutputsParams
from penstock.server.anthropic.protocol import (
    ClientTool,
    CountTokensRequest,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    ServerTool,
    TextBlock,
    ThinkingBlock,
    ToolChoiceParam,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
)
from penstock.server.openai.tools import check_tools
from penstock.server.service import Service
from penstock.text.parsing.formats import Tool

Content = str | list[dict[str, Any]]


def turn_request(service: Service, body: CountTokensRequest) -> TurnRequest:
    """Convert a body to a turn. Raises InputError."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    check_tools(tools)
    messages = list(_messages(body))
    goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    choice = body.tool_choice
    return TurnRequest(
        messages=messages,
        params=_params(service, body),
        tools=tools,
        tool_choice=_tool_choice(choice) if tools or choice is not None else "none",
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        reasoning_effort=body.output_config.effort if body.output_config else None,
        thinking=body.thinking.type != "disabled" if body.thinking else None,
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        options=body.run_options() if isinstance(body, MessagesRequest) else RunOptions(),
    )


def _params(service: Service, body: CountTokensRequest) -> SamplingParams:
    defaults = service.frontend.default_params
    if not isinstance(body, MessagesRequest):
        return defaults
    own: dict[str, Any] = {"max_tokens": body.max_tokens}
    if body.stop_sequences:
        own["stop"] = body.stop_sequences
    if body.output_config is not None and body.output_config.format is not None:
        own["structured_outputs"] = StructuredOutputsParams(
            json=body.output_config.format.schema_,
            lenient=True,
            field="output_config.format.schema",
        )
    thinking = body.thinking
    budget = thinking.budget_tokens if thinking and thinking.type != "disabled" else None
    # Without a reasoning parser there is nothing to limit.
    if budget is not None and service.frontend.parsers.reasoning is not None:
        own["thinking_token_budget"] = budget
    try:
        return body.sampling_params(defaults, **own)
    except InputError as error:
        if error.field == "stop" and body.stop_sequences:
            message = str(error).replace("stop", "stop_sequences", 1)
            raise InputError(message, "stop_sequences") from error
        raise


def _tool(given: ClientTool | ServerTool, where: str) -> Tool:
    if isinstance(given, ServerTool):
        named = f"{given.name} ({given.type})" if given.name else given.type
        raise InputError(
            f"{where}: {named:.200} is a tool of Anthropic's own, which is not run here: leave it "
            "out, or describe a tool of yours with name and input_schema",
            where,
        )
    return Tool(given.name, given.input_schema, given.description or "")


def _tool_choice(choice: ToolChoiceParam | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "tool":
        if choice.name is None:
            raise InputError("tool_choice of type tool needs a name", "tool_choice")
        return NamedTool(choice.name)
    return "required" if choice.type == "any" else "none"


def _messages(body: CountTokensRequest) -> Iterator[dict[str, Any]]:
    """Yield the conversation's messages in OpenAI's chat format."""
    if body.system:
        yield {"role": "system", "content": _text(body.system)}
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role != "assistant":
            yield from _user_messages(message, f"messages[{index}].content")
        else:
            yield _assistant_message(message)


def _user_messages(message: InputMessage, where: str) -> Iterator[dict[str, Any]]:
    parts: list[tuple[str, TextBlock | ImageBlock]] = []  # each with its field
    for index, block in enumerate(message.content):
        at = f"{where}[{index}]"
        if isinstance(block, ToolResultBlock):
            content: Content = block.content if isinstance(block.content, str) else ""
            if isinstance(block.content, list):
                content = _content([(f"{at}.content[{i}]", e) for i, e in enumerate(block.content)])
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif isinstance(block, (TextBlock, ImageBlock)):
            parts.append((at, block))
        else:
            _refuse(block, message.role)
    if parts or not message.content:
        yield {"role": message.role, "content": _content(parts)}


def _content(parts: Sequence[tuple[str, TextBlock | ImageBlock]]) -> Content:
    """A text, or parts of OpenAI's chat format if there are images."""
    texts = [block for _, block in parts if isinstance(block, TextBlock)]
    if len(texts) == len(parts):
        return _text(texts)
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {"type": "image_url", "image_url": MediaReference(_url(block), f"{where}.source")}
        for where, block in parts
    ]


def _url(block: ImageBlock) -> str:
    source = block.source
    if isinstance(source, URLSource):
        return source.url
    return f"data:{source.media_type};base64,{source.data}"


def _assistant_message(message: InputMessage) -> dict[str, Any]:
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            _refuse(block, message.role)
    made: dict[str, Any] = {"role": "assistant", "content": _text(texts)}
    if thoughts:
        made["reasoning"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _refuse(block: Any, role: str) -> None:
    raise InputError(
        f"a message of role {role} must not contain a block of type {block.type}", "messages"
    )


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
