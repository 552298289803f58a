"""Reads tools, tool choices and earlier calls in OpenAI's chat format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, Tag

from penstock.conversation.request import NamedTool, ToolChoice
from penstock.protocol.errors import InputError
from penstock.server.openai.custom_tools import InputFormat, arguments_of, custom_tool
from penstock.server.schema.base import Body, Text, chosen_by, type_of
from penstock.text.parsing.formats import Tool

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_./:-]{1,128}$")]

# No legitimate request comes near these limits: such a prompt would exceed any context.
MAX_TOOLS = 1024
MAX_TOOLS_LENGTH = 1024 * 1024  # characters of all names, descriptions and schemas
T = TypeVar("T")
Tools = Annotated[list[T], Field(max_length=MAX_TOOLS)]


class FunctionDefinition(Body):
    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments. No arguments if left out."
    )
    strict: bool | None = Field(
        None, description="Accepted without effect: enforced calls always match their schema."
    )


class FunctionToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class CustomDefinition(Body):
    name: ToolName
    description: Text | None = None
    format: InputFormat | None = Field(None, description="Format of the input. Default: free text.")


class CustomToolDefinition(Body):
    type: Literal["custom"]
    custom: CustomDefinition


class ToolReference(Body):
    name: Text


class NamedToolChoice(Body):
    type: Literal["function"]
    function: ToolReference


class NamedCustomChoice(Body):
    type: Literal["custom"]
    custom: ToolReference


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Tools[dict[str, Any]] = Field(description="Subset of tools; a name is enough.")


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind(value: Any) -> str | None:
    kind = type_of(value)
    return f"{kind} tool" if isinstance(kind, str) else None


def _kind_of_choice(value: Any) -> str | None:
    return "a text" if isinstance(value, str) else _kind(value)


ToolDefinition = Annotated[
    Annotated[FunctionToolDefinition, Tag("function tool")]
    | Annotated[CustomToolDefinition, Tag("custom tool")],
    chosen_by(_kind, "must be an object of type function or custom"),
]
ToolChoiceParam = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a text")]
    | Annotated[NamedToolChoice, Tag("function tool")]
    | Annotated[NamedCustomChoice, Tag("custom tool")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools tool")],
    chosen_by(
        _kind_of_choice,
        "must be none, auto or required, or an object of type function, custom or allowed_tools",
    ),
]


class CalledFunction(Body):
    model_config = ConfigDict(extra="allow")
    name: Text
    arguments: Text | dict[str, Any] | None = Field(None, description="JSON text.")


class CalledCustomTool(Body):
    name: Text
    input: Text


class MessageToolCall(Body):
    """A call that the assistant made earlier in the conversation."""

    model_config = ConfigDict(extra="allow")
    id: Text | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = Field(None, description="For type custom.")


def read_tools(
    given: Sequence[FunctionToolDefinition | CustomToolDefinition] | None,
) -> list[Tool]:
    """Read the tools of a request. Raises InputError as `check_tools` does."""
    tools = []
    for index, definition in enumerate(given or ()):
        if isinstance(definition, CustomToolDefinition):
            tools.append(_custom(definition.custom, f"tools[{index}].custom.format"))
        else:
            tools.append(_function(definition.function))
    check_tools(tools)
    return tools


def _custom(given: CustomDefinition, where: str) -> Tool:
    form = given.format
    if form is None or form.type == "text":
        return custom_tool(given.name, given.description, None)
    if form.grammar is None:
        raise InputError(f"{where} of type grammar needs grammar", where)
    return custom_tool(given.name, given.description, form.grammar)


def read_functions(given: Sequence[FunctionDefinition]) -> list[Tool]:
    """Read the older `functions` as tools."""
    tools = [_function(function) for function in given]
    check_tools(tools)
    return tools


def _function(function: FunctionDefinition) -> Tool:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(function.name, parameters, function.description or "")


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise InputError for invalid tools.

    There may be too many, they may be too large, or two may have the same name. A tool must take an
    object and be valid Unicode.
    """
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
            raise InputError(f"tool names must be unique, got {tool.name!r} twice", "tools")
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


def read_tool_choice(given: Any, tools: Sequence[Tool]) -> tuple[ToolChoice, list[Tool]]:
    """Return the tool choice and the tools that it allows. The default is "auto" with tools."""
    match given:
        case NamedToolChoice():
            return NamedTool(given.function.name), list(tools)
        case NamedCustomChoice():
            return NamedTool(given.custom.name), list(tools)
        case AllowedToolsChoice(allowed_tools=allowed):
            return allowed.mode, _allowed(allowed, tools)
        case "none" | "auto" | "required":
            return given, list(tools)
    return "auto" if tools else "none", list(tools)


def _allowed(allowed: AllowedTools, tools: Sequence[Tool]) -> list[Tool]:
    names = set()
    for entry in allowed.tools:
        kind = entry.get("type", "function")
        inner = entry.get(kind) if isinstance(kind, str) else None
        name = inner.get("name") if isinstance(inner, dict) else entry.get("name")
        if not isinstance(name, str) or all(tool.name != name for tool in tools):
            offered = ", ".join(tool.name for tool in tools) or "none"
            raise InputError(
                f"tool_choice allows {name!r:.80}, which is not among the tools: {offered}",
                "tool_choice",
            )
        names.add(name)
    if not names:
        raise InputError("tool_choice allows none of the tools", "tool_choice")
    return [tool for tool in tools if tool.name in names]


def read_function_call(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Read the older `function_call` as a tool choice."""
    if isinstance(given, ToolReference):
        names = [tool.name for tool in tools]
        if given.name not in names:
            raise InputError(
                f"function_call names {given.name!r:.80}, which is not among the functions: "
                f"{', '.join(names) or 'none'}",
                "function_call",
            )
        return NamedTool(given.name)
    if given in ("none", "auto"):
        return given  # type: ignore[no-any-return]
    return "auto" if tools else "none"


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert older and custom calls and their results to function calls and tool results."""
    plain: list[dict[str, Any]] = []
    last_id: str | None = None  # of the last `function_call`, which has no id of its own
    for index, given in enumerate(messages):
        message = dict(given)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                _plain_call(call, f"messages[{index}].tool_calls[{number}]")
                for number, call in enumerate(message["tool_calls"])
            ]
        function = message.pop("function_call", None)
        if function is not None and not message.get("tool_calls"):
            last_id = f"call_{index}"
            call = {"id": last_id, "type": "function", "function": function}
            message["tool_calls"] = [call]
        if message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": last_id or f"call_{index}"}
        plain.append(message)
    return plain


def _plain_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    custom = call.get("custom")
    if custom is not None:
        function = {"name": custom["name"], "arguments": arguments_of(custom["input"])}
        kept = {key: value for key, value in call.items() if key != "custom"}
        return {**kept, "type": "function", "function": function}
    if call.get("function") is None:
        raise InputError(f"{where} must be an object with function.name", where)
    return dict(call)
