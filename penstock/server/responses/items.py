"""Converts the items of a conversation: from client input, and to chat messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.conversation.media import MediaReference
from penstock.protocol.errors import InputError
from penstock.server.openai.custom_tools import arguments_of
from penstock.server.schema.base import Body

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def new_item_id(kind: str) -> str:
    return new_id("msg" if kind == "message" else "item")


def input_items(
    given_input: str | Sequence[Body] | None, known_ids: Iterable[str] = ()
) -> list[Item]:
    """Convert a request's input to items. Each item gets a type and a unique id."""
    if isinstance(given_input, str):
        part = {"type": "input_text", "text": given_input}
        return [{"type": "message", "id": new_id("msg"), "role": "user", "content": [part]}]
    items, ids = [], set(known_ids)
    for given in given_input or ():
        item: Item = given.model_dump(exclude_unset=True)
        item["type"] = item.get("type") or "message"
        if not item.get("id") or item["id"] in ids:
            item["id"] = new_item_id(item["type"])
        ids.add(item["id"])
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        items.append(item)
    return items


def as_messages(
    instructions: str | None, items: Iterable[Item], knows_developers: bool
) -> list[dict[str, Any]]:
    """Convert a conversation to OpenAI's chat format.

    Consecutive reasoning, text and calls become one assistant message. All system messages at the
    beginning become one, because many templates allow only one.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    results: list[dict[str, Any]] = []  # of tool-server calls, to follow the message

    def add(message: dict[str, Any]) -> None:
        messages.extend(results)
        results.clear()
        last = messages[-1] if messages else {}
        is_text = isinstance(message["content"], str)
        if message["role"] == "system" == last.get("role") and len(messages) == 1 and is_text:
            last["content"] += "\n\n" + message["content"]
        else:
            messages.append(message)

    def assistant(*full: str) -> dict[str, Any]:
        """Return the current assistant message, or a new one if it already has any of `full`."""
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in full):
            add({"role": "assistant", "content": ""})
        return messages[-1]

    for index, item in enumerate(items):
        match item["type"]:
            case "message" if item["role"] == "assistant":
                assistant("content", "tool_calls")["content"] = _text(item["content"])
            case "message":
                role = item["role"]
                if role == "developer" and not knows_developers:
                    role = "system"
                where = f"input[{index}].content"
                add({"role": role, "content": _content(item["content"], where)})
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                if parts:
                    message = assistant("content", "tool_calls", "reasoning")
                    message["reasoning"] = _text(parts)
            case "function_call":
                call = as_call(item["call_id"], item["name"], item["arguments"])
                assistant().setdefault("tool_calls", []).append(call)
            case "custom_tool_call":
                call = as_call(item["call_id"], item["name"], arguments_of(item["input"]))
                assistant().setdefault("tool_calls", []).append(call)
            case "mcp_call":
                call = as_call(item["id"], item["name"], item["arguments"])
                assistant().setdefault("tool_calls", []).append(call)
                results.append(as_result(item["id"], _mcp_output(item)))
            case "function_call_output" | "custom_tool_call_output":
                output = _content(item["output"], f"input[{index}].output")
                add(as_result(item["call_id"], output))
    return messages + results


def as_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def as_result(call_id: str, output: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def _mcp_output(item: Item) -> str:
    if item.get("output") is not None:
        return str(item["output"])
    error = item.get("error")
    return error if isinstance(error, str) else json.dumps(error or "no output")


def _content(content: str | Sequence[dict[str, Any]], where: str) -> str | list[dict[str, Any]]:
    """A text, or parts of OpenAI's chat format if there are images."""
    if isinstance(content, str) or all(part["type"] != "input_image" for part in content):
        return _text(content)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if part["type"] != "input_image":
            parts.append({"type": "text", "text": _text([part])})
            continue
        at = f"{where}[{index}]"
        if not part.get("image_url"):
            raise InputError(f"{at} must have image_url: files are not kept here", at)
        reference = MediaReference(part["image_url"], f"{at}.image_url")
        parts.append({"type": "image_url", "image_url": reference})
    return parts


def _text(content: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)
