"""The interface of renderers, and the base of those that need no template."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.protocol.errors import InputError
from penstock.text.messages import check_conversation

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """The input of a prompt. Messages and tools have the form of OpenAI's chat API."""

    messages: Sequence[Mapping[str, Any]]  # as the client sent them
    add_generation_prompt: bool
    continue_final_message: bool  # the prompt ends where the last message does
    tools: Tools | None
    documents: Sequence[Mapping[str, Any]] | None
    options: Mapping[str, Any]  # further template arguments

    def checked(self, keep_parts: bool = False) -> list[Message]:
        """A plain copy of the messages; see `check_conversation`."""
        return check_conversation(
            self.messages, self.add_generation_prompt, self.continue_final_message, keep_parts
        )


class Renderer(ABC):
    """Turns a conversation into a prompt with special tokens: add none when encoding it."""

    source = ""  # a chat template, or markers of the family: decides the parsers

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # so that template arguments may have any name
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The prompt for `messages`. InputError says what is wrong with them.

        With `continue_final_message`, the prompt ends where the last message does.
        """
        return self.prompt(
            Conversation(
                messages, add_generation_prompt, continue_final_message, tools, documents, options
            )
        )

    @abstractmethod
    def prompt(self, chat: Conversation) -> str:
        """Like `render`, with all arguments in one object."""


class FamilyRenderer(Renderer):
    """Writes a family's published format itself.

    Unknown arguments are ignored, as in templates.
    """

    def prompt(self, chat: Conversation) -> str:
        messages = chat.checked()
        if chat.documents:
            raise InputError("documents is not supported by this model: leave it out", "documents")
        goes_on = messages.pop() if chat.continue_final_message else None
        prompt = self.write(messages, chat.tools or (), chat.options)
        if goes_on is None and not chat.add_generation_prompt:
            return prompt
        before = messages[-1]["role"] if messages else ""
        return prompt + self.begin_answer(goes_on, before, chat.options)

    @abstractmethod
    def write(self, chat: list[Message], tools: Tools, options: Mapping[str, Any]) -> str:
        """The whole conversation, every message with its end."""

    @abstractmethod
    def begin_answer(self, goes_on: Message | None, before: str, options: Mapping[str, Any]) -> str:
        """The beginning of the answer: a new one, or the message to be continued.

        `before` is the role of the message before it.
        """


def text_of(message: Message) -> str:
    return str(message.get("content") or "")


def reasoning_of(message: Message) -> str:
    return str(message.get("reasoning") or message.get("reasoning_content") or "")


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """The id, the name and the arguments as JSON text of each call."""
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
