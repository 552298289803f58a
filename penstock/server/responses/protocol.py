"""Bodies and replies of the Responses endpoints. Undeclared fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from penstock.server.openai.formats import JsonSchemaFormat
from penstock.server.openai.tools import FunctionDefinition, ToolName, Tools
from penstock.server.schema.base import (
    Body,
    Effort,
    Entries,
    Items,
    Reply,
    Text,
    chosen_by,
    type_of,
)
from penstock.server.schema.request import RequestBody

Status = Literal["in_progress", "completed", "incomplete", "calling", "failed"]

# -- input items


class InputTextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: Text


class InputImagePart(Body):
    type: Literal["input_image"]
    image_url: Text | None = Field(None, description="A data URL, or an http or https URL.")
    detail: Text | None = Field(None, description="Accepted without effect.")
    file_id: Text | None = Field(None, description="Not supported.")


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text


class SummaryPart(Body):
    type: Literal["summary_text"]
    text: Text


class ReasoningPart(Body):
    type: Literal["reasoning_text", "text"]
    text: Text


def _kind_of_part(value: Any) -> str | None:
    kind = type_of(value)
    if kind in ("refusal", "input_image"):
        return "a refusal" if kind == "refusal" else "an image"
    return "a text" if kind in ("input_text", "output_text", "text") else None


# Tags are not identifiers, so errors leave them out of a field's path, see `errors.explain`.
Part = Annotated[
    Annotated[InputTextPart, Tag("a text")]
    | Annotated[InputImagePart, Tag("an image")]
    | Annotated[RefusalPart, Tag("a refusal")],
    chosen_by(
        _kind_of_part,
        "must be an object of type input_text, input_image, output_text or refusal",
    ),
]


def _text_or_list(value: Any) -> str:
    return "a text" if isinstance(value, str) else "a list"


Content = Annotated[
    Annotated[Text, Tag("a text")] | Annotated[Items[Part], Tag("a list")],
    Discriminator(_text_or_list),
]


class ItemBody(Body):
    id: Text | None = None
    status: Status | None = None


class MessageItem(ItemBody):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallBody(ItemBody):
    """A call of one of the client's tools, or its output."""

    call_id: Text


class FunctionCallItem(CallBody):
    type: Literal["function_call"]
    name: Text
    arguments: Text


class CustomCallItem(CallBody):
    type: Literal["custom_tool_call"]
    name: Text
    input: Text


class FunctionCallOutputItem(CallBody):
    type: Literal["function_call_output"]
    output: Content


class CustomCallOutputItem(CallBody):
    type: Literal["custom_tool_call_output"]
    output: Content


class ReasoningItem(ItemBody):
    type: Literal["reasoning"]
    summary: Items[SummaryPart] | None = None
    content: Items[ReasoningPart] | None = None
    encrypted_content: Text | None = Field(None, description="Accepted without effect.")


class McpCallItem(Body):
    type: Literal["mcp_call"]
    id: Text
    server_label: Text
    name: Text
    arguments: Text
    output: Text | None = None
    error: Text | dict[str, Any] | None = None
    status: Status | None = None


class McpListToolsItem(Body):
    type: Literal["mcp_list_tools"]
    id: Text
    server_label: Text
    tools: Items[dict[str, Any]]


ITEM_TYPES = (
    "message", "function_call", "function_call_output", "reasoning", "mcp_call", "mcp_list_tools",
    "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip


def _kind_of_item(value: Any) -> str | None:
    kind = type_of(value)
    kind = "message" if kind is None and isinstance(value, (dict, Body)) else kind
    return f"{kind} item" if kind in ITEM_TYPES else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[FunctionCallItem, Tag("function_call item")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output item")]
    | Annotated[ReasoningItem, Tag("reasoning item")]
    | Annotated[McpCallItem, Tag("mcp_call item")]
    | Annotated[McpListToolsItem, Tag("mcp_list_tools item")]
    | Annotated[CustomCallItem, Tag("custom_tool_call item")]
    | Annotated[CustomCallOutputItem, Tag("custom_tool_call_output item")],
    chosen_by(_kind_of_item, f"must be an object of type {', '.join(ITEM_TYPES)}"),
]
Input = Annotated[
    Annotated[Text, Tag("a text")] | Annotated[Items[InputItem], Tag("a list")],
    Discriminator(_text_or_list),
]

# -- tools


class FunctionTool(FunctionDefinition):
    type: Literal["function"]


class AllowedMcpTools(Body):
    tool_names: Items[Text] | None = None
    read_only: Literal[False] | None = None


class McpTool(Body):
    """The tools of a tool server that this server was started with."""

    type: Literal["mcp"]
    server_label: Text = Field(description="Name of the tool server, unless server_url is given.")
    server_url: Text | None = Field(None, description="URL of one of the --tool-server.")
    server_description: Text | None = None
    allowed_tools: Items[Text] | AllowedMcpTools | None = Field(None, description="All by default.")
    require_approval: Literal["never"] | None = Field(
        None, description="Calls never wait for approval."
    )


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    definition: Text | None = Field(None, description="Required for type grammar.")
    syntax: Literal["lark", "regex"] | None = Field(None, description="Required for type grammar.")


class CustomTool(Body):
    type: Literal["custom"]
    name: ToolName
    description: Text | None = None
    format: CustomFormat | None = Field(
        None, description="Format of the input. Default: free text."
    )


BuiltInType = Literal[
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation",
    "computer", "computer_use_preview", "local_shell", "shell", "apply_patch",
]  # fmt: skip


class BuiltInTool(Body):
    type: BuiltInType = Field(description="Requires a tool server with a tool of this name.")


def _kind_of_tool(value: Any) -> str | None:
    kind = type_of(value)
    if kind in ("function", "mcp", "custom"):
        return f"{kind} tool"
    return "other tool" if kind in get_args(BuiltInType) else None


ToolParam = Annotated[
    Annotated[FunctionTool, Tag("function tool")]
    | Annotated[McpTool, Tag("mcp tool")]
    | Annotated[CustomTool, Tag("custom tool")]
    | Annotated[BuiltInTool, Tag("other tool")],
    chosen_by(_kind_of_tool, "must be an object of type function, custom or mcp"),
]


class FunctionChoice(Body):
    type: Literal["function", "custom"]
    name: Text


class McpChoice(Body):
    type: Literal["mcp"]
    server_label: Text
    name: Text | None = Field(None, description="Required: calls are enforced by name.")


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[dict[str, Any]] = Field(description="Subset of tools; a name is enough.")


ToolChoiceParam = Literal["none", "auto", "required"] | FunctionChoice | McpChoice | AllowedChoice

# -- the rest of a request


class TextFormat(JsonSchemaFormat):
    type: Literal["text", "json_object", "json_schema"]


class TextParam(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Accepted without effect."
    )


class ReasoningParam(Body):
    effort: Effort | None = Field(
        None, description="For the chat template. none disables thinking."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted without effect: reasoning is returned in full."
    )


MetadataKey = Annotated[Text, Field(max_length=64)]
MetadataValue = Annotated[Text, Field(max_length=512)]


class ConversationParam(Body):
    id: Text


class ResponseRequest(RequestBody):
    model: Text | None = Field(None, description="Model name from /v1/models. Default: the first.")
    input: Input | None = Field(None, description="A string, or conversation items.")
    instructions: Text | None = Field(
        None, description="System message at the start, for this response only."
    )
    previous_response_id: Text | None = Field(None, description="Continue this stored response.")
    max_output_tokens: int | None = Field(
        None,
        description="Maximum tokens, with reasoning and calls. Default: as many as fit.",
    )
    max_tool_calls: int | None = Field(
        None,
        ge=0,
        description="Maximum calls to tool servers. Default: limited by --max-tool-rounds.",
    )
    top_logprobs: int | None = Field(
        None, description="Number of most likely tokens to return per position."
    )
    include: Items[Text] | None = Field(
        None, description="message.output_text.logprobs; other values have no effect."
    )
    metadata: Entries[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    store: bool | None = Field(None, description="On by default.")
    background: bool | None = Field(
        None, description="Return immediately and run in the background. Requires store."
    )
    tools: Tools[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = Field(
        None,
        description="Default: auto, the model decides. required and a named tool are enforced.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Off: at most one call per turn.")
    text: TextParam | None = None
    reasoning: ReasoningParam | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: drop the oldest messages if they do not fit."
    )
    user: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extra variables for the chat template."
    )
    conversation: Text | ConversationParam | None = Field(
        None, description="ID of a conversation to continue and append to."
    )
    prompt: dict[str, Any] | None = Field(None, description="Not supported.")


# -- replies


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int


class MediaInputTokensDetails(InputTokensDetails):
    """Of an input that has images or videos."""

    image_tokens: int
    video_tokens: int


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: MediaInputTokensDetails | InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReply(Reply):
    """What is shown in the API's document; `run.py` writes it."""

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    conversation: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class DeletedReply(Reply):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokensReply(Reply):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(Reply):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
