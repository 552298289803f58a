"""Messages in the form that chat templates know, whichever of its spellings a client uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.errors import InputError


def normalize(messages: Sequence[dict[str, Any]], arguments_as_text: bool = False) -> None:
    """Change plain copies of messages in place; InputError for calls that are wrong.

    Calls get their arguments as an object, which is what most templates write out themselves, or
    as JSON text. Reasoning has all of its names. What is null is left out.
    """
    for index, message in enumerate(messages):
        for name in ("tool_calls", "reasoning", "reasoning_content", "tool_call_id", "name"):
            if name in message and message[name] is None:
                del message[name]
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
        calls = message.get("tool_calls")
        if calls is None:
            continue
        where = f"messages[{index}].tool_calls"
        if not isinstance(calls, list):
            raise InputError(f"{where} must be a list, got {calls!r:.100}", where)
        for number, call in enumerate(calls):
            _normalize_call(call, f"{where}[{number}]", arguments_as_text)


def _normalize_call(call: Any, where: str, arguments_as_text: bool) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where} must be an object with function.name, got {call!r:.100}", where)
    given = function.get("arguments")
    arguments = _read_arguments(given, f"{where}.function.arguments")
    function["arguments"] = arguments
    if arguments_as_text:
        is_text = isinstance(given, str) and given.strip()
        function["arguments"] = given if is_text else json.dumps(arguments, ensure_ascii=False)


def _read_arguments(given: Any, where: str) -> dict[str, Any]:
    if given is None or given == "":
        return {}
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} must be JSON: {error}", where) from error
    if not isinstance(arguments, dict):
        raise InputError(f"{where} must be a JSON object, got {given!r:.100}", where)
    return arguments
