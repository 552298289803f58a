"""Adds tools for models whose chat template has none: in the system prompt, as in Hermes.

Calls of earlier turns and their results are also written into messages, so any template that shows
messages works. A template that writes calls in its own format, and only omits the tools, keeps that
format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.protocol.errors import InputError
from penstock.text.parsing.detect import detect
from penstock.text.parsing.formats import Tool
from penstock.text.parsing.parser import call_grammar, writes_json
from penstock.text.renderers.base import (
    Conversation,
    Message,
    Renderer,
    Tools,
    calls_of,
    text_of,
)
from penstock.text.renderers.template import ChatTemplate

_PROBE = "penstock_probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_SYSTEM, _USER = {"role": "system", "content": "x"}, {"role": "user", "content": "x"}
_INSTRUCTIONS = """\
# Tools

You can call functions to help with what the user asks. These are the functions, as JSON:
<tools>
{}
</tools>

To call a function, write its name and its arguments as JSON, like this:
{}
If no function helps, answer without a call."""


def shows_tools(template: ChatTemplate) -> bool:
    """Whether the template puts tools into prompts."""
    if not re.search(r"\btools\b", template.source):
        return False
    if detect(template.source).tools is not None:
        return True  # a family that is known to
    for messages in ([_USER], [_SYSTEM, _USER]):
        if _PROBE in (_try(template, messages, [_PROBE_TOOL]) or ""):
            return True
    # A template that accepts neither conversation is too unusual to change.
    return _try(template, [_USER], None) is None


def _try(template: ChatTemplate, messages: list[Message], tools: Tools | None) -> str | None:
    try:
        return template.render(messages, tools=tools)
    except InputError:
        return None


class GenericToolRenderer(Renderer):
    """A model's chat template, with tools, calls and results in the texts of messages.

    `parser` is the matching tool-call parser.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.source = template.source
        own = detect(template.source).tools
        self._writes_calls = own is not None and writes_json(own)
        self.parser = own if own is not None and self._writes_calls else "hermes"
        self._takes_system: bool | None = None  # determined when there are tools to show

    def prompt(self, chat: Conversation) -> str:
        messages, tools = chat.messages, chat.tools
        is_list = isinstance(messages, Sequence)  # otherwise the template's own check reports it
        if is_list and (tools or any(map(_is_about_calls, messages))):
            checked = chat.checked()
            messages = checked = checked if self._writes_calls else _spell_out_calls(checked)
            if tools:
                self._describe(tools, checked)
        return self._template.prompt(replace(chat, messages=messages, tools=None))

    def _describe(self, tools: Tools, chat: list[Message]) -> None:
        """Put the tools after the system prompt.

        If the template takes no system prompt, they go before the first message.
        """
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        grammar = call_grammar(self.parser, [Tool("FUNCTION")], False, self.source)
        (call,) = grammar.calls
        example = f"{grammar.begin}{call.prefix}{{ARGUMENTS}}{call.suffix}{grammar.end}"
        text = _INSTRUCTIONS.format(listed, example)
        if chat[0]["role"] in ("system", "developer"):
            chat[0]["content"] = _joined(text_of(chat[0]), text)
        elif self._has_system_prompts():
            chat.insert(0, {"role": "system", "content": text})
        elif chat[0]["role"] == "user":
            chat[0]["content"] = _joined(text, text_of(chat[0]))
        else:
            chat.insert(0, {"role": "user", "content": text})

    def _has_system_prompts(self) -> bool:
        if self._takes_system is None:
            probe = [{"role": "system", "content": _PROBE}, _USER]
            self._takes_system = _PROBE in (_try(self._template, probe, None) or "")
        return self._takes_system


def _is_about_calls(message: Any) -> bool:
    return isinstance(message, Mapping) and bool(
        message.get("tool_calls") or message.get("role") == "tool"
    )


def _spell_out_calls(chat: Sequence[Message]) -> list[Message]:
    """The conversation with calls and results as text.

    Results become part of the next user message: many templates require user and assistant to
    alternate.
    """
    told: list[Message] = []
    after_results = False
    for message in chat:
        if message["role"] == "tool":
            text = f"<tool_response>\n{text_of(message)}\n</tool_response>"
            if after_results:
                told[-1]["content"] += f"\n{text}"
            else:
                told.append({"role": "user", "content": text})
            after_results = True
            continue
        if message["role"] == "user" and after_results:
            told[-1]["content"] = _joined(told[-1]["content"], text_of(message))
        elif calls := calls_of(message):
            written = "".join(_call_text(name, arguments) for _, name, arguments in calls)
            said = f"{text_of(message)}\n{written}" if text_of(message) else written
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            told.append({**kept, "content": said})
        else:
            told.append(message)
        after_results = False
    return told


def _call_text(name: str, arguments: str) -> str:
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        value = arguments
    call = json.dumps({"name": name, "arguments": value}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
