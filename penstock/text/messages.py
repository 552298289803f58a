"""Messages as clients send them, checked where templates would stumble over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.errors import InputError

OPTIONAL = ("tool_calls", "reasoning", "reasoning_content", "tool_call_id", "name")


def check_calls(messages: Sequence[dict[str, Any]]) -> None:
    """InputError for calls that are none. What is null is taken out of the messages, which are
    plain copies."""
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
