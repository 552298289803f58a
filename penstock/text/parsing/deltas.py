"""The deltas that a parser makes of a model's output, in the order of the text."""

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
    """A call begins. Indexes count from 0 in the order of the calls; calls never overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of a call's arguments. All pieces of a call that ends are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call is whole. It is missing for a call that the output's end cut off."""

    index: int


@dataclass(frozen=True)
class ToolCallBroken:
    """A call that had begun turned out malformed: it is none, and nothing more of it follows.

    `text` is what the model wrote of it so far. It belongs to the content. Who has shown the
    beginning already cannot take it back, and may show the text after it.
    """

    index: int
    text: str


Delta = (
    ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallBroken
)


Part = ContentDelta | ReasoningDelta | ToolCall


def parts_of(deltas: Iterable[Delta]) -> list[Part]:
    """What all `deltas` of an output say, in its order; neighbouring texts are one.

    Broken calls are text.
    """
    parts: list[Part | None] = []
    calls: dict[int, int] = {}  # where in `parts` each is
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
    """Neighbouring texts of one kind as one."""
    for kind, group in groupby(parts, type):
        if kind is ToolCall:
            yield from group
        else:
            yield kind("".join(part.text for part in group if not isinstance(part, ToolCall)))


def collect(deltas: Iterable[Delta]) -> Message:
    """The message that all `deltas` of an output make. Broken calls are in its content."""
    return message_of(parts_of(deltas))


def message_of(parts: Sequence[Part]) -> Message:
    return Message(
        content="".join(part.text for part in parts if isinstance(part, ContentDelta)),
        reasoning="".join(part.text for part in parts if isinstance(part, ReasoningDelta)),
        tool_calls=[part for part in parts if isinstance(part, ToolCall)],
    )
