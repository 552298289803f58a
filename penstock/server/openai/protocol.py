"""Bodies of the OpenAI endpoints, checked for types here and for sense where they are used.

Fields that are not declared are ignored, as OpenAI's clients send new ones all the time. Those of
other servers that would change the answer are refused by name, see `params.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from penstock.server.openai.calls import FunctionCall, ToolCallDelta, ToolCallReply
from penstock.server.openai.tools import (
    CalledFunction,
    FunctionDefinition,
    MessageToolCall,
    ToolChoiceParam,
    ToolDefinition,
    ToolReference,
    Tools,
)
from penstock.server.schema.base import (
    Body,
    Effort,
    Items,
    NullsReply,
    Reply,
    Text,
    TokenId,
)
from penstock.server.schema.request import RequestBody

# -- requests

Prompt = Text | Items[TokenId]
# What X-Request-Id may be, too: it is written to the log.
RequestId = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="End with a chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="Put the usage so far into every chunk."
    )


class JsonSchemaFormat(Body):
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="A JSON schema; any JSON without one."
    )
    strict: bool | None = Field(
        None, description="Refuse a schema that uses what cannot be enforced; else that is ignored."
    )


class ResponseFormat(Body):
    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="For type json_schema.")


class StructuredOutputs(Body):
    """What the output must match: exactly one of the first six."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | Text | bool | None = Field(
        None, alias="json", description="A JSON schema."
    )
    regex: Text | None = Field(None, description="A regular expression of all of the output.")
    choice: Items[Text] | None = Field(None, description="The output is one of these.")
    grammar: Text | None = Field(None, description="A grammar in Lark's or an EBNF notation.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: dict[str, Any] | Text | None = Field(None, description="Tags within text.")
    disable_any_whitespace: bool | None = Field(None, description="JSON without white space.")
    disable_additional_properties: bool | None = Field(
        None,
        description="On by default: JSON objects have only properties that their schema names.",
    )
    whitespace_pattern: Text | None = Field(
        None, description="A regular expression of white space between parts of JSON."
    )


class CompletionBody(RequestBody):
    """What completions and chat completions have in common."""

    model: Text | None = Field(None, description="A name from /v1/models; the first by default.")
    n: int | None = Field(None, description="How many completions.")
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, description="As logprobs, for the prompt's tokens.")
    logprob_token_ids: Items[int] | None = Field(
        None, description="Report these tokens, at most 128, in place of the most likely ones."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep so many tokens of the prompt; -1: as many as the model takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where tokens are cut off; left by default."
    )
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    return_token_ids: bool | None = Field(None, description="Token ids of prompt and answer, too.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens in logprobs as token_id:ID."
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = Field(None, description="Not supported.")
    best_of: int | None = Field(None, description="Not supported above n.")


class CompletionRequest(CompletionBody):
    model_config = ConfigDict(extra="allow")
    prompt: Prompt | Items[Text] | Items[Items[TokenId]] = Field(
        description="A text, several, or the same as token ids."
    )
    max_tokens: int | None = Field(
        None, description="16 by default. 0 with echo: the prompt alone."
    )
    echo: bool | None = Field(None, description="Begin with the prompt.")
    logprobs: int | None = Field(None, description="How many most likely tokens to report.")
    add_special_tokens: bool | None = Field(None, description="On by default.")
    suffix: Text | None = Field(None, description="Not supported.")


class ContentPart(Body):
    model_config = ConfigDict(extra="allow")
    type: Text = Field(description="Only text is supported.")
    text: Text | None = None


class ChatMessage(Body):
    model_config = ConfigDict(extra="allow")
    role: Annotated[Text, Field(min_length=1)]
    content: Text | Items[ContentPart] | None = None
    reasoning: Text | None = Field(None, description="What the assistant thought; for templates.")
    reasoning_content: Text | None = Field(None, description="Another name of reasoning.")
    tool_calls: Items[MessageToolCall] | None = Field(
        None, description="Of an assistant's message."
    )
    tool_call_id: Text | None = Field(None, description="Of a tool's: the call that it answers.")
    function_call: CalledFunction | None = Field(
        None, description="An assistant's call as it was before tool_calls."
    )


class ChatTemplateBody(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = Field(None, description="On by default.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message; needs add_generation_prompt off."
    )
    add_special_tokens: bool | None = Field(None, description="Off by default.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="For the model's chat template."
    )
    documents: Items[dict[str, Any]] | None = None
    chat_template: Text | None = Field(
        None, description="A Jinja template, where the server trusts requests with that."
    )
    tools: Tools[ToolDefinition] | None = Field(
        None, description="Functions and custom tools that the model may call."
    )
    reasoning_effort: Effort | None = Field(
        None, description="For the chat template; none: do not think, where it can be told."
    )


Messages = Annotated[Items[ChatMessage], Field(min_length=1)]


class ChatFields(CompletionBody, ChatTemplateBody):
    """How a conversation is answered, whichever it is."""

    model_config = ConfigDict(extra="allow")
    max_tokens: int | None = Field(None, description="By default, as many as fit.")
    max_completion_tokens: int | None = Field(None, description="The same; this one counts.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="How many most likely tokens to report.")
    echo: bool | None = Field(None, description="Begin with the last message if it is continued.")
    tool_choice: ToolChoiceParam | None = Field(
        None, description="auto by default: the model decides. required and a function: enforced."
    )
    parallel_tool_calls: bool | None = Field(None, description="Off: at most one call.")
    include_reasoning: bool | None = Field(None, description="Off: leave the reasoning out.")
    functions: Tools[FunctionDefinition] | None = Field(
        None, description="The older form of tools; calls then come as function_call."
    )
    function_call: Literal["none", "auto"] | ToolReference | None = Field(
        None, description="The older form of tool_choice."
    )
    modalities: Items[Text] | None = Field(None, description="Only text.")
    audio: dict[str, Any] | None = Field(None, description="Not supported.")


class ChatCompletionRequest(ChatFields):
    messages: Messages


class ChatBatchRequest(ChatFields):
    messages: Annotated[Items[Messages], Field(min_length=1)] = Field(
        description="Conversations, each of which gets a choice of its own."
    )


class TokenizeRequest(ChatTemplateBody):
    model: Text | None = None
    prompt: Text | None = Field(None, description="A text; or give messages.")
    messages: Items[ChatMessage] | None = None
    return_token_strs: bool | None = Field(
        None, description="The tokens as the vocabulary spells them, too."
    )


class DetokenizeRequest(Body):
    model: Text | None = None
    tokens: Items[TokenId]
    skip_special_tokens: bool | None = Field(None, description="Off by default.")


# -- replies


class PromptTokensDetails(Reply):
    cached_tokens: int


class CompletionTokensDetails(Reply):
    reasoning_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | None = None


class TokenLogprob(Reply):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, TokenLogprob] | None]


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Reply):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None  # base64 of a .npy file [tokens, layers, top_k]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class AnswerReply(NullsReply):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: None = None
    kv_transfer_params: None = None


class Completion(AnswerReply):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[ChatTokenLogprob]


class AssistantMessage(Reply):
    role: str
    content: str | None
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: FunctionCall | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(AnswerReply):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(Reply):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    function_call: FunctionCall | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(Reply):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(Reply):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Reply):
    prompt: str
