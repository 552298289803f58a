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
        "How this model writes tool calls, such as hermes; default: by its chat template, where "
        "that is unmistakable, and hermes where the template shows no tools; none: there are no "
        "tool calls. docs/parsers.md lists them.",
    )
    reasoning_parser: str | None = option(
        None,
        "How this model writes its reasoning, such as deepseek_r1; default: by its chat template, "
        "where that is unmistakable; none: reasoning is part of the answer.",
    )
    enable_auto_tool_choice: bool = option(
        True, "Let the model decide whether to call tools; off: it calls those that a request asks."
    )
    chat_renderer: Literal["auto", "template", "mistral", "deepseek", "harmony"] = option(
        "auto",
        "What makes prompts of conversations; auto: harmony for gpt-oss, else the chat template, "
        "to which tools are added if it shows none, and for a model without one its family's own; "
        "template: the chat template as it is.",
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "Arguments of the chat template that requests may override, as JSON: "
        '{"enable_thinking": false}.',
    )
    trust_request_chat_template: bool = option(
        False, "Take chat templates from requests: they are code, which runs confined."
    )

    def __post_init__(self) -> None:
        for name in self.default_chat_template_kwargs or {}:
            if name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
                raise ConfigError(
                    f"default_chat_template_kwargs must not hold {name}: it is a request's own"
                )
