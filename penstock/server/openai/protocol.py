"""Bodies and replies of the OpenAI endpoints. Types are checked here, values where they are used.

Undeclared fields are ignored, because OpenAI's clients often send new ones. Fields of other servers
that would change the answer are refused by name, see `OpenBody`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from penstock.server.openai.calls import FunctionCall, ToolCallDelta, ToolCallReply
from penstock.server.openai.formats import ResponseFormat, StructuredOutputs
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
    OpenBody,
    Reply,
    Text,
    TokenId,
)
from penstock.server.schema.request import RequestBody

# -- requests

Prompt = Text | Items[TokenId]
# The same characters as in X-Request-Id: it is written to the log.
RequestId = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send the usage in a last chunk.")
    continuous_usage_stats: bool | None = Field(
        None, description="Send the usage so far in every chunk."
    )


class CompletionBody(RequestBody):
    """What completions and chat completions have in common."""

    model: Text | None = Field(None, description="Model name from /v1/models. Default: the first.")
    n: int | None = Field(None, description="Number of completions per prompt.")
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, description="Like logprobs, for the prompt tokens.")
    logprob_token_ids: Items[int] | None = Field(
        None,
        description="Return these tokens (at most 128) instead of the most likely ones.",
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Truncate the prompt to this many tokens. -1: to what fits."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Side to truncate. Default: left."
    )
    request_id: RequestId | None = Field(None, description="Becomes part of the response ID.")
    return_token_ids: bool | None = Field(
        None, description="Also return the token IDs of prompt and output."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Show tokens in logprobs as token_id:ID."
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = Field(
        None, description="Return the n likeliest completions, by beam search of width n."
    )
    length_penalty: float | None = Field(
        None,
        description="Beam search: the score of a completion is its log-probability divided by its "
        "length to this power. Default: 1.",
    )
    best_of: int | None = Field(None, description="Only the value of n is supported.")


class CompletionRequest(CompletionBody):
    prompt: Prompt | Items[Text] | Items[Items[TokenId]] = Field(
        description="A string, token IDs, or a list of either."
    )
    max_tokens: int | None = Field(
        None,
        description="Maximum tokens to generate. Default: 16. 0 with echo: return the prompt only.",
    )
    echo: bool | None = Field(None, description="Prepend the prompt to the text.")
    logprobs: int | None = Field(
        None, description="Number of most likely tokens to return per position."
    )
    add_special_tokens: bool | None = Field(None, description="On by default.")
    suffix: Text | None = Field(None, description="Not supported.")


class MediaURL(Body):
    model_config = ConfigDict(extra="allow")
    url: Text = Field(
        description="A data URL, such as data:image/png;base64,..., an http or https URL, or a "
        "file URL if the server allows them."
    )


class ContentPart(Body):
    model_config = ConfigDict(extra="allow")
    type: Text = Field(description="text, image_url, video_url, image_embeds or video_embeds.")
    text: Text | None = None
    image_url: MediaURL | Text | None = Field(None, description="An image.")
    video_url: MediaURL | Text | None = Field(None, description="A video.")
    image_embeds: Text | dict[str, Any] | None = Field(
        None, description="A .npy file in base64. Requires --enable-mm-embeds."
    )
    video_embeds: Text | dict[str, Any] | None = Field(
        None, description="As image_embeds, for a video."
    )
    uuid: Text | None = Field(
        None,
        description="Name of the item. With it, a later request may leave the content out, as long "
        "as the server keeps the item.",
    )


class ChatMessage(Body):
    model_config = ConfigDict(extra="allow")
    role: Annotated[Text, Field(min_length=1)]
    content: Text | Items[ContentPart] | None = None
    reasoning: Text | None = Field(
        None, description="Reasoning of an assistant message, for templates."
    )
    reasoning_content: Text | None = Field(None, description="Alias of reasoning.")
    tool_calls: Items[MessageToolCall] | None = Field(
        None, description="Calls of an assistant message."
    )
    tool_call_id: Text | None = Field(None, description="Call that a tool message answers.")
    function_call: CalledFunction | None = Field(None, description="Deprecated form of tool_calls.")


class ChatTemplateBody(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = Field(None, description="On by default.")
    continue_final_message: bool | None = Field(
        None, description="Continue the last message. Requires add_generation_prompt=false."
    )
    add_special_tokens: bool | None = Field(None, description="Off by default.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extra variables for the chat template."
    )
    documents: Items[dict[str, Any]] | None = None
    chat_template: Text | None = Field(
        None, description="Jinja template. Requires --trust-request-chat-template."
    )
    tools: Tools[ToolDefinition] | None = Field(
        None, description="Functions and custom tools that the model may call."
    )
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Arguments of the model's image processor."
    )
    media_io_kwargs: dict[str, dict[str, Any]] | None = Field(
        None,
        description="How media are decoded, by modality, such as {video: {num_frames: 16}}.",
    )
    reasoning_effort: Effort | None = Field(
        None,
        description="For the chat template. none disables thinking if the template supports that.",
    )


Messages = Annotated[Items[ChatMessage], Field(min_length=1)]


class ChatFields(CompletionBody, ChatTemplateBody):
    """How a conversation is answered, whichever it is."""

    model_config = OpenBody.model_config  # not that of the last base
    max_tokens: int | None = Field(
        None, description="Maximum tokens to generate. Default: as many as fit."
    )
    max_completion_tokens: int | None = Field(
        None, description="Same as max_tokens; takes precedence."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None, description="Number of most likely tokens to return per position."
    )
    echo: bool | None = Field(None, description="Prepend the last message if it is continued.")
    tool_choice: ToolChoiceParam | None = Field(
        None,
        description="Default: auto, the model decides. required and a named tool are enforced.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Off: at most one call.")
    include_reasoning: bool | None = Field(None, description="Off: do not return the reasoning.")
    functions: Tools[FunctionDefinition] | None = Field(
        None, description="Deprecated form of tools. Calls are returned as function_call."
    )
    function_call: Literal["none", "auto"] | ToolReference | None = Field(
        None, description="Deprecated form of tool_choice."
    )
    modalities: Items[Text] | None = Field(None, description="Only text is supported.")
    audio: dict[str, Any] | None = Field(None, description="Not supported.")


class ChatCompletionRequest(ChatFields):
    messages: Messages


class ChatBatchRequest(ChatFields):
    messages: Annotated[Items[Messages], Field(min_length=1)] = Field(
        description="Conversations. Each gets one choice."
    )


class TokenizeRequest(ChatTemplateBody):
    model: Text | None = None
    prompt: Text | None = Field(None, description="A string. Give either prompt or messages.")
    messages: Items[ChatMessage] | None = None
    return_token_strs: bool | None = Field(
        None, description="Also return the tokens as spelled in the vocabulary."
    )


class DetokenizeRequest(Body):
    model: Text | None = None
    tokens: Items[TokenId]
    skip_special_tokens: bool | None = Field(None, description="Off by default.")


# -- replies


class PromptTokensDetails(Reply):
    cached_tokens: int


class MediaTokensDetails(PromptTokensDetails):
    """Of a prompt that has images or videos."""

    image_tokens: int
    video_tokens: int


class CompletionTokensDetails(Reply):
    reasoning_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: MediaTokensDetails | PromptTokensDetails | None
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


class SpeculationMetrics(Reply):
    """Draft tokens that were verified for a choice."""

    num_drafts: int  # proposals, each of one or more tokens
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float  # tokens per proposal, with the one that the model adds
    draft_acceptance_rate: float
    acceptance_histogram: list[int] | None = None  # proposals by number of accepted tokens


class ChoiceMetrics(Reply):
    speculative_decoding: SpeculationMetrics


class Choice(Reply):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None  # base64 of a .npy file [tokens, layers, top_k]
    # In the last chunk, where the server shows them.
    metrics: Annotated[ChoiceMetrics | None, Field(exclude_if=lambda value: value is None)] = None


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
    tasks: list[str] = Field(
        description="generate, or what a pooling model is served for: embed, classify, "
        "token_embed, token_classify; and score, if /score and /rerank work."
    )
    takes_images: bool = Field(description="Whether messages may contain images.")
    labels: list[str] | None = Field(
        None, description="A classifier's labels, in the order of the probabilities."
    )


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
