"""What a parser makes of a model's output: typed pieces, in the order they were written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text; only its beginning if not `complete`
    complete: bool = False


@dataclass(frozen=True)
class Message:
    """A whole output. `content` and `reasoning` are empty where there was none."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def collect(deltas: Iterable[Delta]) -> Message:
    """The message that all `deltas` of an output make. Broken calls are in its content."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart(index, id, name):
                calls[index] = ToolCall(id, name, "")
            case ToolCallArguments(index, text):
                calls[index].arguments += text
            case ToolCallEnd(index):
                calls[index].complete = True
            case ToolCallBroken(index, text):
                del calls[index]
                content.append(text)
    return Message("".join(content), "".join(reasoning), list(calls.values()))
