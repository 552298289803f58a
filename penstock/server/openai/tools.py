"""Tools in the form of OpenAI's chat: what requests say about them, and what calls look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from penstock.protocol.errors import InputError
from penstock.server.openai.base import Body, Reply, Text
from penstock.server.turn import NamedTool, ToolChoice
from penstock.text.parsing.formats import Tool

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_./:-]{1,128}$")]

# No request of good faith comes near these; a prompt with more in it fits no context.
MAX_TOOLS = 1024
MAX_TOOLS_LENGTH = 1024 * 1024  # characters of all names, descriptions and schemas
T = TypeVar("T")
Tools = Annotated[list[T], Field(max_length=MAX_TOOLS)]


class FunctionDefinition(Body):
    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of the arguments; none without one."
    )
    strict: bool | None = Field(None, description="Accepted: calls that are enforced always are.")


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: Text


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    model_config = ConfigDict(extra="allow")
    name: Text
    arguments: Text | dict[str, Any] | None = Field(None, description="JSON text.")


class MessageToolCall(Body):
    """A call that the assistant made earlier in the conversation."""

    model_config = ConfigDict(extra="allow")
    id: Text | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class FunctionCall(Reply):
    name: str | None = None
    arguments: str


class ToolCallReply(Reply):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolCallDelta(Reply):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


def read_tools(given: Sequence[ToolDefinition] | None) -> list[Tool]:
    """The tools of a request; InputError for what `check_tools` refuses."""
    tools = []
    for definition in given or ():
        function = definition.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        tools.append(Tool(function.name, parameters, function.description or ""))
    check_tools(tools)
    return tools


def check_tools(tools: Sequence[Tool]) -> None:
    """InputError if they are too many, too large or named alike, or one does not take an object
    or is not Unicode."""
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools may be at most {MAX_TOOLS}, got {len(tools)}", "tools")
    length = sum(len(tool.name) + len(tool.description) + _length(tool) for tool in tools)
    if length > MAX_TOOLS_LENGTH:
        raise InputError(
            f"tools may be at most {MAX_TOOLS_LENGTH} characters long together, got {length}",
            "tools",
        )
    names: set[str] = set()
    for tool in tools:
        kind = tool.parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            what = f"the parameters of the tool {tool.name!r}"
            raise InputError(f"{what} must be of type object, got {kind!r:.40}", "tools")
        if tool.name in names:
            raise InputError(
                f"tools must have names of their own, got {tool.name!r} twice", "tools"
            )
        names.add(tool.name)


def _length(tool: Tool) -> int:
    try:
        text = json.dumps(tool.parameters, ensure_ascii=False)
        text.encode()
        return len(text)
    except UnicodeEncodeError:
        raise InputError(
            f"the parameters of the tool {tool.name!r} must be valid Unicode, without lone "
            "surrogates",
            "tools",
        ) from None
    except RecursionError:
        raise InputError(
            f"the parameters of the tool {tool.name!r} are nested too deeply", "tools"
        ) from None


def read_tool_choice(given: str | NamedToolChoice | None, has_tools: bool) -> ToolChoice:
    """By default the model decides, if there is anything to decide."""
    if isinstance(given, NamedToolChoice):
        return NamedTool(given.function.name)
    if given in ("none", "auto", "required"):
        return given  # type: ignore[return-value]
    return "auto" if has_tools else "none"
