"""Converts a request's body to a turn. Refuses unsupported fields by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.conversation.prepare import tokenize_turn
from penstock.conversation.request import NamedTool, ToolChoice, TurnRequest
from penstock.protocol.errors import ContextOverflow, InputError
from penstock.protocol.sampling import OutputKind, SamplingParams
from penstock.protocol.structured import StructuredOutputsParams
from penstock.server.openai.custom_tools import InputGrammar, custom_tool
from penstock.server.openai.structured import schema_params
from penstock.server.openai.tools import check_tools
from penstock.server.responses.items import Item, as_messages
from penstock.server.responses.protocol import (
    AllowedChoice,
    BuiltInTool,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    McpChoice,
    McpTool,
    ResponseRequest,
    TextFormat,
)
from penstock.server.responses.tool_servers import ToolServer, ToolServers
from penstock.server.service import Service
from penstock.server.turn import Turn, prepare_turn
from penstock.text.parsing.formats import Tool
from penstock.text.tokenizer import TooManyTokens

LOGPROBS = "message.output_text.logprobs"
# This API's names for fields that have other names elsewhere.
FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
}
# Current names of built-in tools, by their older names. Tool servers use the current ones.
CURRENT_NAMES = {"web_search_preview": "web_search", "computer_use_preview": "computer"}


@dataclass(frozen=True)
class OfferedTools:
    """The tools that the model may call.

    `servers` maps the names of tools that run on tool servers. `custom` holds the names of tools
    that take plain text.
    """

    tools: tuple[Tool, ...]
    servers: dict[str, ToolServer]
    custom: frozenset[str] = frozenset()


def check_body(body: ResponseRequest) -> None:
    """Raise InputError for unsupported or conflicting fields instead of ignoring them."""
    if body.prompt is not None:
        raise InputError("prompt is not supported here: use instructions", "prompt")
    if body.conversation is not None and body.previous_response_id is not None:
        raise InputError(
            "conversation and previous_response_id cannot be combined: a conversation includes "
            "its earlier responses",
            "conversation",
        )
    if body.input is None and body.conversation is None and body.previous_response_id is None:
        raise InputError(
            "input is required unless a response or conversation is continued", "input"
        )
    if body.background and body.store is False:
        raise InputError("background needs store: leave store out or make it true", "background")
    if body.background and body.stream:
        raise InputError("background and stream cannot be combined here: leave one out", "stream")
    for name in ("tools", "text"):  # these are stored and echoed
        with plain_json(name):
            json.dumps(body.model_dump(include={name}), allow_nan=False)


@contextlib.contextmanager
def plain_json(name: str) -> Iterator[None]:
    """Raise InputError for the field `name` if its value cannot be written as JSON."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} must be plain JSON: {error}", name) from error


def offer_tools(body: ResponseRequest, known: ToolServers) -> OfferedTools:
    tools: list[Tool] = []
    servers: dict[str, ToolServer] = {}
    for index, given in enumerate(body.tools or ()):
        where = f"tools[{index}]"
        if isinstance(given, FunctionTool):
            parameters = given.parameters or {"type": "object", "properties": {}}
            tools.append(Tool(given.name, parameters, given.description or ""))
            continue
        if isinstance(given, CustomTool):
            tools.append(_custom(given, where))
            continue
        if isinstance(given, McpTool):
            server, offered = _tools_of_server(given, known, where)
        else:
            server, offered = _built_in(given, known, where)
        tools += offered
        servers |= {tool.name: server for tool in offered}
    check_tools(tools)
    custom = frozenset(given.name for given in body.tools or () if isinstance(given, CustomTool))
    return _allowed(body, OfferedTools(tuple(tools), servers, custom))


def _custom(given: CustomTool, where: str) -> Tool:
    form = given.format
    if form is None or form.type == "text":
        return custom_tool(given.name, given.description, None)
    if form.definition is None or form.syntax is None:
        raise InputError(
            f"{where}.format of type grammar needs definition and syntax", f"{where}.format"
        )
    grammar = InputGrammar(definition=form.definition, syntax=form.syntax)
    return custom_tool(given.name, given.description, grammar)


def _tools_of_server(
    given: McpTool, known: ToolServers, where: str
) -> tuple[ToolServer, Sequence[Tool]]:
    server = known.find(given.server_label, given.server_url)
    if server is None:
        asked = given.server_url or given.server_label
        there = ", ".join(f"{item.label} ({item.url})" for item in known.servers) or "none"
        raise InputError(
            f"{where}: there is no tool server {asked!r} here; there is {there}. Tool servers are "
            "named by --tool-server when this server is started",
            where,
        )
    allowed = given.allowed_tools
    names = allowed if isinstance(allowed, list) or allowed is None else allowed.tool_names
    if names is None:
        return server, server.tools
    by_name = {tool.name: tool for tool in server.tools}
    for name in names:
        if name not in by_name:
            raise InputError(
                f"{where}.allowed_tools: {server.label} has no tool {name!r}; it has "
                f"{', '.join(by_name)}",
                f"{where}.allowed_tools",
            )
    return server, [by_name[name] for name in dict.fromkeys(names)]


def _built_in(
    given: BuiltInTool, known: ToolServers, where: str
) -> tuple[ToolServer, Sequence[Tool]]:
    name = CURRENT_NAMES.get(given.type, given.type)
    found = known.find_tool(name)
    if found is None:
        raise InputError(
            f"{where}: {given.type} is not built in here: send a function, or start the server "
            f"with a --tool-server that has a tool {name}",
            where,
        )
    server, tool = found
    return server, [tool]


def _allowed(body: ResponseRequest, offered: OfferedTools) -> OfferedTools:
    """Return the tools that a `tool_choice` of type allowed_tools allows."""
    choice = body.tool_choice
    if not isinstance(choice, AllowedChoice):
        return offered
    names: set[object] = set()
    for entry in choice.tools:
        if entry.get("type") == "mcp" and entry.get("name") is None:
            label = entry.get("server_label")
            names |= {name for name, server in offered.servers.items() if server.label == label}
        else:
            names.add(entry.get("name", entry.get("type")))
    kept = tuple(tool for tool in offered.tools if tool.name in names)
    if not kept:
        raise InputError("tool_choice allows none of the tools", "tool_choice")
    servers = {name: server for name, server in offered.servers.items() if name in names}
    return OfferedTools(kept, servers, offered.custom)


def _tool_choice(body: ResponseRequest, offered: OfferedTools) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return "auto" if offered.tools else "none"
    if isinstance(choice, AllowedChoice):
        return choice.mode
    if isinstance(choice, FunctionChoice):
        return NamedTool(choice.name)
    if isinstance(choice, McpChoice):
        if choice.name is None:
            raise InputError("tool_choice of type mcp needs a name", "tool_choice.name")
        return NamedTool(choice.name)
    return choice


def turn_request(
    service: Service, body: ResponseRequest, items: Sequence[Item], offered: OfferedTools
) -> TurnRequest:
    """Make the first turn of a response to a conversation of `items`."""
    renderer = service.frontend.renderer
    knows_developers = renderer is not None and "developer" in renderer.source
    return TurnRequest(
        messages=as_messages(body.instructions, items, knows_developers),
        params=_params(body, service.frontend.default_params),
        tools=offered.tools,
        tool_choice=_tool_choice(body, offered),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        template_kwargs=body.chat_template_kwargs or {},
        options=body.run_options(),
    )


def _params(body: ResponseRequest, defaults: SamplingParams) -> SamplingParams:
    own: dict[str, Any] = {"max_tokens": body.max_output_tokens}
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        own["logprobs"] = body.top_logprobs or 0
    # An answer that arrives at once does not tell which tokens belong to its text, nor when it
    # began.
    if body.background or "logprobs" in own:
        own["output_kind"] = OutputKind.DELTA
    if body.text is not None and body.text.format is not None:
        own["structured_outputs"] = _structured(body.text.format)
    with renamed_fields():
        return body.sampling_params(defaults, **own)


def _structured(given: TextFormat) -> StructuredOutputsParams | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True, field="text.format")
    return schema_params(given, "text.format.schema")


def prepare(
    service: Service, request: TurnRequest, request_id: str, leave_out_oldest: bool
) -> tuple[Turn, TurnRequest]:
    """Prepare a turn. Returns it and the request it was made from. Slow: call it in a thread."""
    with renamed_fields():
        if leave_out_oldest:
            request = _fit(service, request)
        return prepare_turn(service, request, request_id, "responses"), request


def _fit(service: Service, request: TurnRequest) -> TurnRequest:
    """Drop as many of the oldest messages as needed to leave room for the answer."""
    frontend = service.frontend
    if frontend.tokenizer is None:
        return request
    room = max(frontend.max_model_len - (request.params.max_tokens or 1), 1)

    first = 1 if request.messages and request.messages[0]["role"] == "system" else 0

    def shortened(num_dropped: int) -> TurnRequest:
        kept = list(request.messages)
        del kept[first : first + num_dropped]
        while len(kept) > first + 1 and kept[first]["role"] == "tool":
            del kept[first]  # the result of a call that was dropped
        return replace(request, messages=kept)

    def fits(candidate: TurnRequest) -> bool:
        try:
            return len(tokenize_turn(frontend, candidate, room)) <= room
        except TooManyTokens:
            return False

    fewest, most = 0, max(len(request.messages) - first - 1, 0)  # the last one is answered
    while fewest < most:
        middle = (fewest + most) // 2
        if fits(shortened(middle)):
            most = middle
        else:
            fewest = middle + 1
    return shortened(fewest)


@contextlib.contextmanager
def renamed_fields() -> Iterator[None]:
    """Replace field names in errors by this API's names."""
    try:
        yield
    except ContextOverflow as error:
        raise error.of_field("input") from error
    except InputError as error:
        name = (error.field or "").partition("[")[0]  # an index counts messages, not items
        if name not in FIELD_NAMES:
            raise
        text = str(error)
        if text.startswith(name):
            text = FIELD_NAMES[name] + text.removeprefix(name)
        raise InputError(text, FIELD_NAMES[name]) from error
