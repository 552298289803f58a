"""TurnRequest: one turn of a conversation as the chat APIs ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.protocol.beam_search import BeamSearchParams
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams
from penstock.text.parsing.formats import Tool


@dataclass(frozen=True)
class PromptTruncation:
    """Keep `keep` tokens of a prompt (-1: as many as fit) and cut off the others at `side`."""

    keep: int
    side: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class RunOptions:
    """Options of a request other than its prompt and sampling parameters."""

    add_special_tokens: bool = False
    priority: int = 0
    cache_salt: str | None = None
    truncation: PromptTruncation | None = None
    timeout_s: float | None = None
    beams: BeamSearchParams | None = None


@dataclass(frozen=True)
class NamedTool:
    """The tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class MediaOptions:
    """How a request's media are decoded and processed, besides what the engine is told."""

    processor_kwargs: Mapping[str, Any] | None = None
    io_kwargs: Mapping[str, Any] | None = None  # by modality


@dataclass(frozen=True)
class TurnRequest:
    """A turn to generate.

    `messages` have the form of OpenAI's chat API: `role` and `content` (a text, or parts: texts,
    images and videos). An assistant's message may have `tool_calls` (`id`, `type`, `function` with
    `name` and `arguments` as JSON text) and `reasoning`. The result of a call is a message of role
    "tool" with `tool_call_id`. `params.structured_outputs` is the format of the answer, if there is
    one. It applies after the reasoning and does not forbid tool calls.

    `tool_choice` "auto" lets the model decide. "required" and `NamedTool` are enforced, the latter
    as exactly one call. Without tools it has no effect. `thinking` tells the template to turn
    thinking on or off. None leaves the template's default. `template_kwargs` override all derived
    arguments.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None  # replaces the model's own, if the operator allows it
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: RunOptions = field(default_factory=RunOptions)
    media: MediaOptions | None = None


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Read tools in OpenAI's chat format: {"type": "function", "function": {...}}."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InputError(f"tools must be a list, got {tools!r:.80}", "tools")
    return [_read_tool(tool, index) for index, tool in enumerate(tools)]


def _read_tool(tool: Mapping[str, Any], index: int) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InputError(
            f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}, '
            f"got {tool!r:.80}",
            "tools",
        )
    assert isinstance(function, Mapping)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    description = function.get("description") or ""
    if not isinstance(parameters, Mapping):
        raise InputError(
            f"tools[{index}].function.parameters must be a JSON schema, got {parameters!r:.80}",
            "tools",
        )
    if not isinstance(description, str):
        raise InputError(
            f"tools[{index}].function.description must be a text, got {description!r:.80}", "tools"
        )
    return Tool(name, parameters, description)


def read_tool_choice(choice: str | Mapping[str, Any]) -> ToolChoice:
    """Read a tool choice in OpenAI's chat format."""
    if choice in ("none", "auto", "required"):
        return choice  # type: ignore[return-value]
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InputError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
            f'{{"name": ...}}}}, got {choice!r:.80}',
            "tool_choice",
        )
    return NamedTool(name)
