"""Renders with a model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.protocol.errors import InputError
from penstock.text.chat_history import fit_reasoning
from penstock.text.jinja import CompiledTemplate
from penstock.text.messages import plain
from penstock.text.renderers.base import Conversation, Renderer

# Appended to the message to be continued; the prompt ends where it is found. The space shows
# whether the template trims its input.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate(Renderer):
    """Renders conversations. `templates` are by name; "tool_use" applies if there are tools."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._templates = dict(templates)
        self.source = self._templates.get("tool_use") or self._templates.get("default", "")
        self._special_tokens = dict(special_tokens or {})
        self.takes_parts: bool | None = None  # None: what the template shows
        self._compiled: dict[str, CompiledTemplate] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is no template."""
        return not self._templates

    def prompt(self, chat: Conversation) -> str:
        template = self._template(has_tools=chat.tools is not None)
        takes_parts = template.takes_parts if self.takes_parts is None else self.takes_parts
        messages = chat.checked(takes_parts)
        for message in messages:
            if message["role"] == "assistant":
                fit_reasoning(message)
                if message.get("tool_calls"):
                    template.history_form(self._special_tokens).fit(message)
            if self.takes_parts and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        last = _mark_end(messages[-1]) if chat.continue_final_message else ""
        arguments = plain({**self._special_tokens, **chat.options}, "template arguments")
        arguments |= {
            "messages": messages,
            "tools": plain(chat.tools, "tools"),
            "documents": plain(chat.documents, "documents"),
            "add_generation_prompt": chat.add_generation_prompt,
        }
        text = template.render(arguments)
        return _cut_at_mark(text, last) if chat.continue_final_message else text

    def _template(self, has_tools: bool) -> CompiledTemplate:
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if not self._templates:
            raise InputError(
                "this model has no chat template: give one as chat_template (a Jinja file or the "
                "template itself), or send a prompt in place of messages",
                "messages",
            )
        if name not in self._templates:
            raise InputError(
                f"this model has chat templates named {', '.join(sorted(self._templates))} but no "
                "default: give one as chat_template (a Jinja file or the template itself)",
                "messages",
            )
        if name not in self._compiled:
            self._compiled[name] = CompiledTemplate(self._templates[name])
        return self._compiled[name]


def _mark_end(message: dict[str, Any]) -> str:
    """Mark the end of the message to be continued. Returns its original text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return content
    if isinstance(content, list) and content:
        text = str(content[-1]["text"])
        content[-1]["text"] = text + _END_MARK
        return text
    raise InputError(
        "continue_final_message needs a last message with text to go on from",
        "continue_final_message",
    )


def _cut_at_mark(text: str, last: str) -> str:
    at = text.rfind(_END_MARK.strip())
    if at < 0 or last.strip() not in text:
        raise InputError(
            "continue_final_message does not work here: the chat template leaves out the end of "
            "the last message",
            "continue_final_message",
        )
    keeps_spaces = text.startswith(_END_MARK, at)
    return text[:at] if keeps_spaces else text[:at].rstrip()
