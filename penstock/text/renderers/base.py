"""What a renderer is, and what those that need no template have in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.protocol.errors import InputError

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


class Renderer(Protocol):
    """Turns a conversation into a prompt, special tokens included: encode it without adding more.

    Messages and tools have the form of OpenAI's chat. InputError says what is wrong with them.
    """

    @property
    def source(self) -> str:
        """A chat template, or texts that are in such a family's: what parsers are chosen by."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """With `continue_final_message` the prompt ends where the last message does."""


class FamilyRenderer(ABC):
    """Writes a family's published format itself. Arguments that it does not know are ignored, as
    templates do."""

    source = ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        from penstock.text.chat import check_conversation

        chat = check_conversation(messages, add_generation_prompt, continue_final_message)
        if documents:
            raise InputError("documents is not supported by this model: leave it out", "documents")
        goes_on = chat.pop() if continue_final_message else None
        prompt = self.write(chat, tools or (), template_kwargs)
        if goes_on is None and not add_generation_prompt:
            return prompt
        before = chat[-1]["role"] if chat else ""
        return prompt + self.begin_answer(goes_on, before, template_kwargs)

    @abstractmethod
    def write(self, chat: list[Message], tools: Tools, options: Mapping[str, Any]) -> str:
        """All of the conversation, every message with its end."""

    @abstractmethod
    def begin_answer(self, goes_on: Message | None, before: str, options: Mapping[str, Any]) -> str:
        """The answer's beginning: of a new one, or of the message that is to be continued.

        `before` is the role of the message before it.
        """


def text_of(message: Message) -> str:
    return str(message.get("content") or "")


def reasoning_of(message: Message) -> str:
    return str(message.get("reasoning") or message.get("reasoning_content") or "")


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Id, name, and arguments as JSON text of each call."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        calls.append((str(call.get("id") or ""), call["function"]["name"], arguments or "{}"))
    return calls


def refuse_role(message: Message, index: int, known: str) -> InputError:
    return InputError(
        f"messages[{index}].role must be one of {known}, got {message['role']!r:.80}", "messages"
    )
