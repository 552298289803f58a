"""The deltas that a parser makes of a model's output, in text order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.protocol.outputs import Message, ToolCall


@dataclass(frozen=True)
class ContentDelta:
    """A piece of the answer. Never empty."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of the reasoning that comes before the answer. Never empty."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. Indexes count from 0 in call order; calls never overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of a call's arguments. All pieces of a completed call form one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call is complete. Missing for a call that the end of the output cut off."""

    index: int


@dataclass(frozen=True)
class ToolCallBroken:
    """A call that had begun is malformed: it does not count, and nothing more of it follows.

    `text` is what the model wrote of it so far. It belongs to the content. A client that already
    received the beginning cannot take it back, and may show the text after it.
    """

    index: int
    text: str


Delta = (
    ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallBroken
)


Part = ContentDelta | ReasoningDelta | ToolCall


def parts_of(deltas: Iterable[Delta]) -> list[Part]:
    """The content of all `deltas` of an output, in order, with adjacent texts joined.

    Broken calls are text.
    """
    parts: list[Part | None] = []
    calls: dict[int, int] = {}  # index of each in `parts`
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        match delta:
            case ContentDelta() | ReasoningDelta():
                parts.append(delta)
            case ToolCallStart(index, id, name):
                calls[index], arguments[index] = len(parts), []
                parts.append(ToolCall(id, name, ""))
            case ToolCallArguments(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index):
                call = parts[calls[index]]
                assert isinstance(call, ToolCall)
                call.complete = True
            case ToolCallBroken(index, text):
                parts[calls[index]] = None
                parts.append(ContentDelta(text))
    for index, at in calls.items():
        if isinstance(call := parts[at], ToolCall):
            call.arguments = "".join(arguments[index])
    return list(joined(part for part in parts if part is not None))


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Join adjacent texts of one kind."""
    for kind, group in groupby(parts, type):
        if kind is ToolCall:
            yield from group
        else:
            yield kind("".join(part.text for part in group if not isinstance(part, ToolCall)))


def collect(deltas: Iterable[Delta]) -> Message:
    """The message of all `deltas` of an output. Broken calls are in its content."""
    return message_of(parts_of(deltas))


def message_of(parts: Sequence[Part]) -> Message:
    return Message(
        content="".join(part.text for part in parts if isinstance(part, ContentDelta)),
        reasoning="".join(part.text for part in parts if isinstance(part, ReasoningDelta)),
        tool_calls=[part for part in parts if isinstance(part, ToolCall)],
    )
