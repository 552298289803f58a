"""Formats tool calls in chat completions: functions, custom tools and the older `function_call`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from penstock.protocol.outputs import ToolCall
from penstock.server.openai.custom_tools import InputReader, input_of
from penstock.server.schema.base import Reply
from penstock.text.parsing.deltas import Delta, ToolCallArguments, ToolCallEnd, ToolCallStart


class FunctionCall(Reply):
    name: str | None = None
    arguments: str


class CustomCall(Reply):
    name: str | None = None
    input: str


class FunctionToolCall(Reply):
    id: str
    type: Literal["function"]
    function: FunctionCall


class CustomToolCall(Reply):
    id: str
    type: Literal["custom"]
    custom: CustomCall


ToolCallReply = FunctionToolCall | CustomToolCall


class ToolCallDelta(Reply):
    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class CallFormat:
    """Formats the calls of one answer. `custom` holds the names of the custom tools."""

    def __init__(self, custom: Collection[str], is_named: bool, is_legacy: bool) -> None:
        self._custom = custom
        self._is_named = is_named
        self._is_legacy = is_legacy
        self._inputs: dict[tuple[int, int], InputReader] = {}  # by choice and call

    @property
    def is_legacy(self) -> bool:
        """Whether calls are written as `function_call`."""
        return self._is_legacy

    def finish_reason(self, reason: str | None) -> str | None:
        """Convert the finish reason. OpenAI's is "stop" after a call of a named tool."""
        if reason != "tool_calls":
            return reason
        if self._is_named:
            return "stop"
        return "function_call" if self._is_legacy else reason

    def whole(self, calls: Iterable[ToolCall]) -> list[ToolCallReply]:
        made: list[ToolCallReply] = []
        for call in calls:
            if call.name in self._custom:
                custom = CustomCall(name=call.name, input=input_of(call.arguments, call.complete))
                made.append(CustomToolCall(id=call.id, type="custom", custom=custom))
            else:
                function = FunctionCall(name=call.name, arguments=call.arguments)
                made.append(FunctionToolCall(id=call.id, type="function", function=function))
        return made

    def pieces(self, choice: int, deltas: Sequence[Delta]) -> list[ToolCallDelta]:
        """Convert a choice's deltas to call deltas. Adjacent pieces of one call are merged."""
        made: list[ToolCallDelta] = []
        for delta in deltas:
            piece = self._piece(choice, delta)
            if piece is None:
                continue
            last = made[-1] if made and made[-1].index == piece.index else None
            if last is None or piece.id is not None:
                made.append(piece)
            elif last.function is not None and piece.function is not None:
                last.function.arguments += piece.function.arguments
            elif last.custom is not None and piece.custom is not None:
                last.custom.input += piece.custom.input
        return made

    def _piece(self, choice: int, delta: Delta) -> ToolCallDelta | None:
        match delta:
            case ToolCallStart(index, call_id, name) if name in self._custom:
                self._inputs[choice, index] = InputReader()
                return ToolCallDelta(
                    index=index, id=call_id, type="custom", custom=CustomCall(name=name, input="")
                )
            case ToolCallStart(index, call_id, name):
                function = FunctionCall(name=name, arguments="")
                return ToolCallDelta(index=index, id=call_id, type="function", function=function)
            case ToolCallArguments(index, text):
                reader = self._inputs.get((choice, index))
                if reader is None:
                    return ToolCallDelta(index=index, function=FunctionCall(arguments=text))
                return _input_piece(index, reader.feed(text))
            case ToolCallEnd(index):
                reader = self._inputs.pop((choice, index), None)
                return None if reader is None else _input_piece(index, reader.finish())
        return None


def _input_piece(index: int, text: str) -> ToolCallDelta | None:
    return ToolCallDelta(index=index, custom=CustomCall(input=text)) if text else None
