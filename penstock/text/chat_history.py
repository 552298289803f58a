"""Converts calls and reasoning of earlier turns to the form that a model's template takes.

Clients send a call's arguments as JSON text, without content. Most templates take the arguments as
an object and write the JSON themselves; some take text. Some fail on null content, and others read
it as the sign of a call. A trial rendering shows what a template needs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.protocol.errors import InputError

Render = Callable[[list[dict[str, Any]]], str]

_KEY = "penstock_probe"
PROBE_TOOLS = [{"type": "function", "function": {"name": "probe", "parameters": {}}}]


@dataclass(frozen=True)
class HistoryForm:
    """How calls are passed to a template. `empty_contents` may replace a call's missing content."""

    empty_contents: tuple[str | None, ...]
    arguments_as_text: bool

    def fit(self, message: dict[str, Any]) -> None:
        """Convert an assistant's message to this form."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return
        content = message.setdefault("content", None)
        if content in (None, "") and content not in self.empty_contents:
            message["content"] = self.empty_contents[0]
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                arguments = function.get("arguments")
                function["arguments"] = (
                    _as_text(arguments) if self.arguments_as_text else _as_object(arguments)
                )


def find_form(render: Render) -> HistoryForm:
    """The form in which a template shows a call correctly. `render` passes it PROBE_TOOLS."""
    for arguments_as_text in (False, True):
        texts = _probe(render, arguments_as_text)
        contents = tuple(content for content, text in texts.items() if _shows_call(text))
        if contents:
            return HistoryForm(contents, arguments_as_text)
    # The template knows no calls. It only has to accept messages that contain nothing else.
    contents = tuple(_probe(render, arguments_as_text=False))
    return HistoryForm(contents or (None, ""), arguments_as_text=False)


def _probe(render: Render, arguments_as_text: bool) -> dict[str | None, str]:
    """Render a conversation with a call, with each empty content that the template accepts."""
    texts: dict[str | None, str] = {}
    for content in (None, ""):
        call = {"name": "probe", "arguments": json.dumps({_KEY: 1})}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "probe0000", "type": "function", "function": call}],
        }
        HistoryForm((content,), arguments_as_text).fit(message)
        with contextlib.suppress(InputError):
            texts[content] = render([{"role": "user", "content": "probe"}, message])
    if len(texts) == 2 and texts[None].count("None") > texts[""].count("None"):
        del texts[None]  # the template would write it out
    return texts


def _shows_call(text: str) -> bool:
    is_python = f"'{_KEY}'" in text
    is_quoted_twice = f'\\"{_KEY}' in text
    return _KEY in text and not is_python and not is_quoted_twice


def fit_reasoning(message: dict[str, Any]) -> None:
    """Set an assistant's reasoning under every key that templates read."""
    for name in ("reasoning", "reasoning_content"):
        if isinstance(message.get(name), str):
            for other in ("reasoning", "reasoning_content", "thinking"):
                message.setdefault(other, message[name])
            return


def _as_object(arguments: Any) -> Any:
    """Arguments as an object. Anything else is unchanged, for the template to show or refuse."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
