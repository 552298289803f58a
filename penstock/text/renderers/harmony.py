"""Renders OpenAI's harmony format (gpt-oss): messages with headers, tools as TypeScript.

The developer message contains the system prompt and the tools. The system message sets the
reasoning effort. Reasoning is repeated only if tools were called since the last user message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from penstock.text.parsing.harmony import CHANNEL, CONSTRAIN, MESSAGE, START
from penstock.text.renderers.base import (
    FamilyRenderer,
    Message,
    Tools,
    calls_of,
    reasoning_of,
    refuse_role,
    text_of,
)

END, CALL = "<|end|>", "<|call|>"
ROLES = "system, developer, user, assistant, tool"
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
CUTOFF = "2024-06"
CHANNELS = (
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
CALLS = "Calls to these tools must go to the commentary channel: 'functions'."


class HarmonyRenderer(FamilyRenderer):
    source = f"{START}{CHANNEL}{MESSAGE}"

    def write(self, chat: list[Message], tools: Tools, options: Mapping[str, Any]) -> str:
        parts = [_message("system", _system(tools, options))]
        instructions = [text_of(m) for m in chat if m["role"] in ("system", "developer")]
        if instructions or tools:
            parts.append(_message("developer", _developer("\n\n".join(instructions), tools)))
        users = [index for index, message in enumerate(chat) if message["role"] == "user"]
        names: dict[str, str] = {}  # function names by call id
        for index, message in enumerate(chat):
            match message["role"]:
                case "system" | "developer":
                    continue
                case "user":
                    parts.append(_message("user", text_of(message)))
                case "assistant":
                    names |= {call_id: name for call_id, name, _ in calls_of(message)}
                    is_recent = not users or index > users[-1]
                    parts.append(_said(message, shows_reasoning=is_recent))
                case "tool":
                    name = names.get(str(message.get("tool_call_id"))) or message.get("name")
                    header = f"functions.{name or 'unknown'} to=assistant{CHANNEL}commentary"
                    parts.append(_message(header, text_of(message)))
                case _:
                    raise refuse_role(message, index, ROLES)
        return "".join(parts)

    def begin_answer(self, goes_on: Message | None, before: str, options: Mapping[str, Any]) -> str:
        if goes_on is None:
            return f"{START}assistant"
        return f"{START}assistant{CHANNEL}final{MESSAGE}{text_of(goes_on)}"


def _message(header: str, content: str, end: str = END) -> str:
    return f"{START}{header}{MESSAGE}{content}{end}"


def _said(message: Message, shows_reasoning: bool) -> str:
    calls, content = calls_of(message), text_of(message)
    parts = []
    if shows_reasoning and (thoughts := reasoning_of(message)):
        parts.append(_message(f"assistant{CHANNEL}analysis", thoughts))
    if content:
        channel = "commentary" if calls else "final"
        parts.append(_message(f"assistant{CHANNEL}{channel}", content))
    for _, name, arguments in calls:
        header = f"assistant{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json"
        parts.append(_message(header, arguments, CALL))
    return "".join(parts)


def _system(tools: Tools, options: Mapping[str, Any]) -> str:
    effort = options.get("reasoning_effort") or "medium"
    identity = options.get("model_identity") or IDENTITY
    today = options.get("current_date") or datetime.now().strftime("%Y-%m-%d")
    lines = [f"{identity}\nKnowledge cutoff: {CUTOFF}\nCurrent date: {today}"]
    lines.append(f"Reasoning: {effort}")
    lines.append(f"{CHANNELS}\n{CALLS}" if tools else CHANNELS)
    return "\n\n".join(lines)


def _developer(instructions: str, tools: Tools) -> str:
    parts = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        functions = "\n\n".join(_function(tool.get("function", {})) for tool in tools)
        parts.append(
            "# Tools\n\n## functions\n\nnamespace functions {\n\n"
            f"{functions}\n\n}} // namespace functions"
        )
    return "\n\n".join(parts)


def _function(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    about = _comment(function.get("description"))
    takes = f"_: {_type(schema)}" if schema.get("properties") else ""
    return f"{about}type {function.get('name')} = ({takes}) => any;"


def _comment(text: Any) -> str:
    return "".join(f"// {line}\n" for line in str(text).splitlines()) if text else ""


def _type(schema: Any) -> str:
    """A JSON schema as a TypeScript type; `any` if there is none."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(schema.get("enum"), list):
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if isinstance(variants := schema.get("anyOf") or schema.get("oneOf"), list):
        return " | ".join(_type(variant) for variant in variants)
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_type({**schema, "type": one}) for one in kind)
    if kind == "array":
        inner = _type(schema.get("items", {}))
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    if isinstance(schema.get("properties"), Mapping):
        return _object(schema)
    simple = {"integer": "number", "object": "object"}
    known = ("string", "number", "boolean", "null")
    return kind if kind in known else simple.get(str(kind), "any")


def _object(schema: Mapping[str, Any]) -> str:
    required = schema.get("required") or ()
    lines = ["{"]
    for name, given in schema["properties"].items():
        part = given if isinstance(given, Mapping) else {}
        mark = "" if name in required else "?"
        default = part.get("default")
        note = "" if default is None else f" // default: {_shown(default)}"
        lines.append(f"{_comment(part.get('description'))}{name}{mark}: {_type(part)},{note}")
    return "\n".join([*lines, "}"])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
