"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.conversation.prepare import tokenize_turn
from penstock.protocol.errors import ContextOverflow, InputError
from penstock.server.anthropic.convert import turn_request
from penstock.server.anthropic.errors import AnthropicFrame, describe_errors
from penstock.server.anthropic.protocol import (
    CountTokensReply,
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    MessageUsage,
    OutputBlock,
)
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.replies import json_response, send_answer, unless_gone
from penstock.server.openai.stream import EVENT_STREAM
from penstock.server.service import Service
from penstock.server.turn import Turn, prepare_turn
from penstock.text.parsing.deltas import (
    ContentDelta,
    Delta,
    Part,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallStart,
    joined,
)

router = APIRouter(tags=["Anthropic"], route_class=JsonRoute)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post(
    "/v1/messages",
    response_model=MessageReply,
    responses={**EVENT_STREAM, **describe_errors(400, 401, 404, 408, 413, 429, 500, 503)},
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Create a message (Anthropic's API)."""
    service: Service = request.app.state.service
    model = await service.admit(body.model)
    message_id = f"msg_{request.state.request_id}"

    def prepare() -> Turn:
        try:
            return prepare_turn(service, turn_request(service, body), message_id, "other")
        except ContextOverflow as error:  # Anthropic's clients recognize this text
            longest = error.max_model_len - 1
            message = f"prompt is too long: {error.num_tokens} tokens > {longest} maximum"
            raise InputError(message, "messages") from error

    turn = await unless_gone(request, service.in_thread(prepare))
    answer = MessageAnswer(body, turn, model, message_id)
    return await send_answer(request, answer, body.stream, AnthropicFrame(request.state.request_id))


@router.post(
    "/v1/messages/count_tokens",
    response_model=CountTokensReply,
    responses=describe_errors(400, 401, 404, 413, 500, 503),
)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Count the tokens of a conversation as rendered by the chat template."""
    service: Service = request.app.state.service
    await service.check_model(body.model)

    def count() -> int:
        request = turn_request(service, body)
        return len(tokenize_turn(service.frontend, request, service.max_counted_tokens))

    num_tokens = await unless_gone(request, service.in_thread(count))
    return json_response(CountTokensReply(input_tokens=num_tokens))


class MessageAnswer:
    """Formats the answer to one conversation."""

    def __init__(self, body: MessagesRequest, turn: Turn, model: str, message_id: str) -> None:
        self._turn = turn
        self._model = model
        self._id = message_id
        self._shows_thinking = body.thinking is None or body.thinking.type != "disabled"

    async def whole(self) -> MessageReply:
        """The complete answer."""
        (answer,) = await self._turn.whole()
        reason, sequence = _stop(answer.finish_reason, answer.stop_reason)
        return self._message(self._blocks(answer.parts), reason, sequence)

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Stream events as JSON. An event's type is also its name."""
        blocks = _BlockEvents(self._shows_thinking)
        has_begun = False
        async with contextlib.aclosing(self._turn.steps()) as steps:
            async for step in steps:
                if not has_begun:
                    has_begun = True
                    message = self._message([], None, None).model_dump(exclude_unset=True)
                    message["usage"]["output_tokens"] = 0
                    yield json.dumps({"type": "message_start", "message": message})
                    yield json.dumps({"type": "ping"})
                for event in blocks.take(step.deltas):
                    yield json.dumps(event)
                if step.finish_reason is not None:
                    for event in blocks.end():
                        yield json.dumps(event)
                    reason, sequence = _stop(step.finish_reason, step.stop_reason)
                    delta = {"stop_reason": reason, "stop_sequence": sequence}
                    usage = self._usage().model_dump(exclude_unset=True)
                    yield json.dumps({"type": "message_delta", "delta": delta, "usage": usage})
        yield json.dumps({"type": "message_stop"})

    def _message(
        self, content: list[OutputBlock], reason: str | None, sequence: str | None
    ) -> MessageReply:
        return MessageReply(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        usage = self._turn.usage
        return MessageUsage(
            input_tokens=usage.num_prompt - usage.num_cached,
            output_tokens=usage.num_completion,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=usage.num_cached,
        )

    def _blocks(self, parts: Sequence[Part]) -> list[OutputBlock]:
        if not self._shows_thinking:
            shown = (part for part in parts if not isinstance(part, ReasoningDelta))
            parts = list(joined(shown))
        return [_block(part) for part in parts]


def _block(part: Part) -> OutputBlock:
    match part:
        case ReasoningDelta(text):
            return OutputBlock(type="thinking", thinking=text, signature="")
        case ContentDelta(text):
            return OutputBlock(type="text", text=text)
    given = json.loads(part.arguments) if part.complete else {}
    return OutputBlock(type="tool_use", id=part.id, name=part.name, input=given)


class _BlockEvents:
    """Makes events of content blocks. One is open at a time. A delta of another kind ends it."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: str | None = None  # the kind of the open block

    def take(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for delta in deltas:
            match delta:
                case ReasoningDelta(text) if self._shows_thinking:
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    events += self._piece(block, {"type": "thinking_delta", "thinking": text})
                case ContentDelta(text) | ToolCallBroken(text=text):
                    block = {"type": "text", "text": ""}
                    events += self._piece(block, {"type": "text_delta", "text": text})
                case ToolCallStart(_, call_id, name):
                    events += self._begin(
                        {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                    )
                case ToolCallArguments(_, text):
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events

    def end(self) -> list[dict[str, Any]]:
        """End the open block, if there is one."""
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _piece(self, block: dict[str, Any], delta: dict[str, Any]) -> list[dict[str, Any]]:
        begins = self._begin(block) if self._open != block["type"] else []
        return [*begins, self._delta(delta)]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        ends = self.end()
        self._index += 1
        self._open = str(block["type"])
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*ends, start]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _stop(finish_reason: str, stop_reason: int | str | None) -> tuple[str, str | None]:
    """Return Anthropic's stop reason, and the stop sequence if one was hit."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return STOP_REASONS.get(finish_reason, "end_turn"), None
