"""How conversations become prompts, and outputs become messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.config.options import option
from penstock.protocol.errors import ConfigError


@dataclass(frozen=True)
class ChatConfig:
    tool_call_parser: str | None = option(
        None,
        "Parser for tool calls, such as hermes; default: detected from the chat template, or "
        "hermes if the template does not render tools; none: no tool calls. docs/parsers.md lists "
        "the parsers.",
    )
    reasoning_parser: str | None = option(
        None,
        "Parser for reasoning, such as deepseek_r1; default: detected from the chat template; "
        "none: reasoning stays in the content.",
    )
    enable_auto_tool_choice: bool = option(
        True,
        "Let the model decide whether to call tools. If off, it calls only tools that a request "
        "requires.",
    )
    chat_renderer: Literal["auto", "template", "mistral", "deepseek", "harmony"] = option(
        "auto",
        "How conversations become prompts. auto: harmony for gpt-oss, otherwise the chat "
        "template, with tools added if it does not render them, or the model family's format if "
        "there is no template. template: the chat template unchanged.",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "Form of messages' content in the chat template. string: one text; openai: a list of "
        "parts, as in OpenAI's API; auto: parts if the template loops over them.",
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None,
        'Default chat template arguments as JSON, such as {"enable_thinking": false}. Requests '
        "can override them.",
    )
    trust_request_chat_template: bool = option(
        False,
        "Accept chat templates in requests. Templates are code; they run in a confined process.",
    )

    def __post_init__(self) -> None:
        for name in self.default_chat_template_kwargs or {}:
            if name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
                raise ConfigError(
                    f"default_chat_template_kwargs must not contain {name}: it belongs to single "
                    "requests"
                )
