"""Checks conversations from clients, and copies them into plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.errors import InputError

OPTIONAL = ("tool_calls", "reasoning", "reasoning_content", "tool_call_id", "name")


def check_conversation(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    continue_final_message: bool,
    keep_parts: bool = False,
) -> list[dict[str, Any]]:
    """A plain copy of `messages`. Raises InputError if no renderer could use them."""
    if add_generation_prompt and continue_final_message:
        raise InputError(
            "continue_final_message and add_generation_prompt cannot be combined: one goes on "
            "with the last message, the other begins a new one",
            "continue_final_message",
        )
    chat = check_messages(messages, keep_parts)
    _check_calls(chat)
    return chat


def check_messages(
    messages: Sequence[Mapping[str, Any]], keep_parts: bool = False
) -> list[dict[str, Any]]:
    """A plain copy of `messages`. Raises InputError for the first invalid one.

    Contents in parts become one string, unless `keep_parts`.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(
            f"messages must be a list of objects with role and content, got {messages!r:.100}",
            "messages",
        )
    if not messages:
        raise InputError("messages must contain at least one message, got none", "messages")
    return [_check_message(message, i, keep_parts) for i, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], index: int, keep_parts: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object, got {message!r:.100}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where}.role must be a non-empty string, got {role!r:.100}", where)
    checked: dict[str, Any] = plain(message, where)
    content = checked.get("content")
    if isinstance(content, list):
        texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        if not keep_parts:
            checked["content"] = "\n".join(texts)
    elif content is None:
        if not checked.get("tool_calls"):
            raise InputError(f"{where}.content is missing: it must be a string", where)
    elif not isinstance(content, str):
        raise InputError(f"{where}.content must be a string, got {content!r:.100}", where)
    return checked


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        raise InputError(f"{where} must be an object with a type, got {part!r:.100}", where)
    if kind not in ("text", "image", "video"):  # media were taken out, with a text in their place
        raise InputError(
            f"{where} is of type {kind!r:.100}, which is not supported: send parts of type 'text', "
            "and if the model takes them, 'image_url' and 'video_url'",
            where,
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InputError(f"{where}.text must be a string, got {text!r:.100}", where)
    return text


def plain(value: Any, where: str) -> Any:
    """A deep copy of plain JSON types: other objects have methods that a template might call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where) for item in value]
    for base in (str, int, float):  # subclasses, such as enums
        if isinstance(value, base):
            return base(value.value if hasattr(value, "value") else value)
    raise InputError(f"{where} must be plain JSON values, got a {type(value).__name__}", where)


def _check_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Raise InputError for invalid calls.

    Removes null fields from the messages, which are plain copies.
    """
    for index, message in enumerate(messages):
        for name in OPTIONAL:
            if name in message and message[name] is None:
                del message[name]
        calls = message.get("tool_calls", [])
        where = f"messages[{index}].tool_calls"
        if not isinstance(calls, list):
            raise InputError(f"{where} must be a list, got {calls!r:.100}", where)
        for number, call in enumerate(calls):
            _check_call(call, f"{where}[{number}]")


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where} must be an object with function.name, got {call!r:.100}", where)
