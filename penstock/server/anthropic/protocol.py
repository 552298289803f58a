"""Bodies and replies of Anthropic's endpoints. Undeclared fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from penstock.server.openai.tools import ToolName, Tools
from penstock.server.schema.base import Body, Items, Reply, Text, type_of
from penstock.server.schema.request import RequestBody

# -- requests


class TextBlock(Body):
    type: Literal["text"]
    text: Text


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Text
    data: Text


class URLSource(Body):
    type: Literal["url"]
    url: Text


class ImageBlock(Body):
    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Field(discriminator="type")]


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Items[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = (
        None
    )
    is_error: bool | None = None


ContentBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | Items[ContentBlock]


class ClientTool(Body):
    name: ToolName
    description: Text | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class ServerTool(Body):
    """A tool of Anthropic's own: none is run here."""

    type: Text
    name: Text | None = None


def _kind_of_tool(value: Any) -> str:
    return "custom tool" if type_of(value) in (None, "custom") else "server tool"


ToolParam = Annotated[
    Annotated[ClientTool, Tag("custom tool")] | Annotated[ServerTool, Tag("server tool")],
    Discriminator(_kind_of_tool),
]


class ToolChoiceParam(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(None, description="Required for type tool.")
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Maximum tokens of thinking, for models with a reasoning parser."
    )


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema.")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For the chat template, like reasoning_effort."
    )
    format: OutputFormat | None = Field(None, description="Format that the answer must match.")


class CountTokensRequest(Body):
    """A conversation."""

    model: Text
    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: Text | Items[TextBlock] | None = None
    tools: Tools[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extra variables for the chat template."
    )


class MessagesRequest(CountTokensRequest, RequestBody):
    max_tokens: int = Field(description="Maximum tokens to generate.")
    stop_sequences: Items[Text] | None = Field(None, description="Strings that end the answer.")


# -- replies


class AnthropicErrorDetail(Reply):
    type: str
    message: str


class AnthropicError(Reply):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = None


class CountTokensReply(Reply):
    input_tokens: int


class MessageUsage(Reply):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int


class OutputBlock(Reply):
    """Text, thinking or the use of a tool, by `type`."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    citations: None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageReply(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
