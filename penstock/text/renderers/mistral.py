"""Renders the format of Mistral models with a tekken vocabulary, which have no chat template.

tekken.json names the version of the format. Version 3 (Nemo) puts the system prompt before the last
user message, and calls in one JSON list. Version 7 has a separate system prompt. Version 11 writes
each call as name and arguments. Version 13 omits ids, shows tools first, and supports reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.text.renderers.base import (
    FamilyRenderer,
    Message,
    Tools,
    calls_of,
    reasoning_of,
    refuse_role,
    text_of,
)

ROLES = "system, user, assistant, tool"


class MistralRenderer(FamilyRenderer):
    def __init__(self, version: int, has_thinking: bool = False) -> None:
        self._version = version
        self._has_thinking = has_thinking
        self.source = "[TOOL_CALLS]" + "[ARGS]" * (version >= 11) + "[THINK]" * has_thinking

    def write(self, chat: list[Message], tools: Tools, options: Mapping[str, Any]) -> str:
        users = [index for index, message in enumerate(chat) if message["role"] == "user"]
        shows_tools = (users[0] if self._version >= 13 else users[-1]) if users else -1
        system = ""
        parts = ["<s>"]
        for index, message in enumerate(chat):
            match message["role"]:
                case "system" | "developer" if self._version >= 7:
                    parts.append(f"[SYSTEM_PROMPT]{text_of(message)}[/SYSTEM_PROMPT]")
                case "system" | "developer":
                    system += text_of(message) + "\n\n"
                case "user":
                    if index == shows_tools and tools:
                        parts.append(f"[AVAILABLE_TOOLS]{_tools_json(tools)}[/AVAILABLE_TOOLS]")
                    said = text_of(message)
                    if index == users[-1]:
                        said = system + said
                    parts.append(f"[INST]{said}[/INST]")
                case "assistant":
                    parts.append(self._said(message) + "</s>")
                case "tool":
                    parts.append(f"[TOOL_RESULTS]{self._result(message)}[/TOOL_RESULTS]")
                case _:
                    raise refuse_role(message, index, ROLES)
        return "".join(parts)

    def begin_answer(self, goes_on: Message | None, before: str, options: Mapping[str, Any]) -> str:
        return "" if goes_on is None else self._said(goes_on)

    def _said(self, message: Message) -> str:
        thoughts = reasoning_of(message) if self._has_thinking else ""
        said = f"[THINK]{thoughts}[/THINK]" if thoughts else ""
        return said + text_of(message) + self._calls(message)

    def _calls(self, message: Message) -> str:
        calls = calls_of(message)
        if self._version >= 11:
            written = []
            for call_id, name, arguments in calls:
                shown_id = f"[CALL_ID]{call_id}" if call_id and self._version < 13 else ""
                written.append(f"[TOOL_CALLS]{name}{shown_id}[ARGS]{_json(arguments)}")
            return "".join(written)
        items: list[dict[str, Any]] = []
        for call_id, name, arguments in calls:
            item = {"name": name, "arguments": _value(arguments)}
            items.append({**item, "id": call_id} if call_id else item)
        return f"[TOOL_CALLS]{json.dumps(items, ensure_ascii=False)}" if items else ""

    def _result(self, message: Message) -> str:
        content, call_id = text_of(message), str(message.get("tool_call_id") or "")
        if self._version >= 13:
            return content
        if self._version >= 7:
            return f"{call_id}[TOOL_CONTENT]{content}"
        return json.dumps({"content": _value(content), "call_id": call_id}, ensure_ascii=False)


def _tools_json(tools: Tools) -> str:
    shown = []
    for tool in tools:
        function = tool.get("function", {})
        shown.append(
            {
                "type": "function",
                "function": {
                    "name": function.get("name"),
                    "description": function.get("description", ""),
                    "parameters": function.get("parameters", {}),
                },
            }
        )
    return json.dumps(shown, ensure_ascii=False)


def _value(text: str) -> Any:
    """The value of JSON; other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _json(text: str) -> str:
    """JSON in the form that this family was trained on."""
    return json.dumps(_value(text), ensure_ascii=False)
