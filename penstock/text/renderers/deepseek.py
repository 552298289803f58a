"""Renders DeepSeek V3.1's format, for checkpoints without a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.text.renderers.base import (
    FamilyRenderer,
    Message,
    Tools,
    calls_of,
    refuse_role,
    text_of,
)

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ROLES = "system, user, assistant, tool"
TOOLS_HEAD = "\n\n## Tools\nYou have access to the following tools:\n"
TOOLS_FORM = (
    "\n\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    f"{CALLS_BEGIN}{CALL_BEGIN}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}"
    f"{{additional_tool_calls}}{CALLS_END}\n\nWhere:\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema"
    "\n- For multiple tool calls, chain them directly without separators or spaces\n"
)


class DeepSeekRenderer(FamilyRenderer):
    source = f"{CALL_BEGIN}{SEPARATOR}{ASSISTANT}<think> thinking"

    def write(self, chat: list[Message], tools: Tools, options: Mapping[str, Any]) -> str:
        system = "\n\n".join(text_of(m) for m in chat if m["role"] in ("system", "developer"))
        parts = [BEGIN, system, _describe(tools) if tools else ""]
        before = ""
        for index, message in enumerate(chat):
            match message["role"]:
                case "system" | "developer":
                    continue
                case "user":
                    parts.append(USER + text_of(message))
                case "assistant":
                    parts.append(_open(before, "</think>"))
                    parts.append(text_of(message) + _calls(message) + END)
                case "tool":
                    parts.append(f"<｜tool▁output▁begin｜>{text_of(message)}<｜tool▁output▁end｜>")
                case _:
                    raise refuse_role(message, index, ROLES)
            before = message["role"]
        return "".join(parts)

    def begin_answer(self, goes_on: Message | None, before: str, options: Mapping[str, Any]) -> str:
        if goes_on is not None:
            return _open(before, "</think>") + text_of(goes_on)
        thinks = options.get("thinking", options.get("enable_thinking"))
        return _open(before, "<think>" if thinks else "</think>")


def _open(before: str, thinking: str) -> str:
    """An answer continues after the results of its tools."""
    return "" if before == "tool" else ASSISTANT + thinking


def _describe(tools: Tools) -> str:
    parts = [TOOLS_HEAD]
    for tool in tools:
        function = tool.get("function", {})
        schema = json.dumps(function.get("parameters", {}), ensure_ascii=False)
        about = function.get("description", "")
        parts.append(
            f"\n### {function.get('name')}\nDescription: {about}\n\nParameters: {schema}\n"
        )
    return "".join(parts).rstrip("\n") + TOOLS_FORM


def _calls(message: Message) -> str:
    calls = [
        f"{CALL_BEGIN}{name}{SEPARATOR}{args}{CALL_END}" for _, name, args in calls_of(message)
    ]
    return CALLS_BEGIN + "".join(calls) + CALLS_END if calls else ""
