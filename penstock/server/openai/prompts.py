"""Converts request bodies to engine requests. Called in a thread: tokenizing is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.conversation.prepare import prepare_request
from penstock.conversation.request import (
    MediaOptions,
    PromptTruncation,
    RunOptions,
    ToolChoice,
    TurnRequest,
)
from penstock.protocol.errors import ContextOverflow, InputError
from penstock.protocol.sampling import SamplingParams
from penstock.server.openai.params import beam_params, chat_params, completion_params
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ChatTemplateBody,
    CompletionBody,
    CompletionRequest,
    Prompt,
)
from penstock.server.openai.tools import (
    plain_messages,
    read_function_call,
    read_functions,
    read_tool_choice,
    read_tools,
)
from penstock.server.service import Service
from penstock.server.turn import Turn, prepare_turn
from penstock.text.frontend import PreparedRequest
from penstock.text.parsing.formats import Tool

MAX_PROMPT_LOGPROBS = 1024 * 1024  # per answer with several completions of a prompt


def prepare_chat(service: Service, body: ChatCompletionRequest, request_id: str) -> Turn:
    try:
        params = chat_params(body, service.frontend.default_params, service.server_config)
        return prepare_turn(
            service, turn_request(body, body.messages, params), request_id, "chat_completions"
        )
    except ContextOverflow as error:
        raise error.of_field("messages") from error
    except InputError as error:
        if error.field == "logprobs":  # in this API the number is in top_logprobs
            raise InputError(f"top_{error}", "top_logprobs") from error
        if error.field == "max_tokens" and body.max_completion_tokens is not None:
            name = "max_completion_tokens"
            raise InputError(str(error).replace("max_tokens", name, 1), name) from error
        raise


def turn_request(
    body: ChatTemplateBody, messages: Sequence[ChatMessage], params: SamplingParams
) -> TurnRequest:
    """Convert a body to a turn. A body that generates nothing sets only what affects the prompt."""
    asks = body if isinstance(body, ChatCompletionRequest) else None
    choice, tools = _tools(body)
    parallel = asks is None or (asks.parallel_tool_calls is not False and not asks.functions)
    special = bool(body.add_special_tokens)
    return TurnRequest(
        messages=plain_messages([message.model_dump(exclude_unset=True) for message in messages]),
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs or {},
        chat_template=body.chat_template,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        options=_run_options(asks, special) if asks else RunOptions(special),
        media=MediaOptions(body.mm_processor_kwargs, body.media_io_kwargs),
    )


def _tools(body: ChatTemplateBody) -> tuple[ToolChoice, list[Tool]]:
    """Return the tool choice and the tools. Also reads the older `functions`."""
    if not isinstance(body, ChatCompletionRequest):
        return read_tool_choice(None, read_tools(body.tools))
    if body.functions is None and body.function_call is None:
        return read_tool_choice(body.tool_choice, read_tools(body.tools))
    if body.tools is not None or body.tool_choice is not None:
        raise InputError(
            "functions and function_call are the older form of tools and tool_choice, and exclude "
            "them: leave one or the other out",
            "functions",
        )
    functions = read_functions(body.functions or ())
    return read_function_call(body.function_call, functions), functions


def prepare_completions(
    service: Service, body: CompletionRequest, request_id: str
) -> list[PreparedRequest]:
    params = completion_params(body, service.frontend.default_params, service.server_config)
    prompts = as_prompts(body.prompt)
    most = service.server_config.max_prompts
    if len(prompts) > most:
        raise InputError(
            f"prompt may contain at most {most} prompts here, got {len(prompts)}", "prompt"
        )
    field = "prompt" if len(prompts) > 1 else "n"
    service.check_size(len(prompts) * params.n, field)  # before each is tokenized
    options = _run_options(body, add_special_tokens=body.add_special_tokens is not False)
    try:
        prepared = [
            prepare_request(
                service.frontend, prompt, params, service.engine_id(request_id), options
            )
            for prompt in prompts
        ]
    except InputError as error:
        if error.field == "prompt_token_ids":  # this API calls them prompt
            raise InputError(
                str(error).replace("prompt_token_ids", "prompt", 1), "prompt"
            ) from error
        raise
    if params.prompt_logprobs is not None:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        num_top = params.prompt_logprobs
        num_top = service.frontend.vocab_size if num_top < 0 else num_top
        _check_prompt_logprobs(name, num_top + 1, prepared)
    return prepared


def _check_prompt_logprobs(
    name: str, num_at_position: int, prepared: Sequence[PreparedRequest]
) -> None:
    """Limit prompt logprobs: every completion repeats them, which can add up to gigabytes."""
    if all(len(request.children) == 1 for request in prepared):
        return
    prompts = [child.prompt_token_ids for request in prepared for child in request.children]
    num_positions = sum(map(len, prompts))
    if num_positions * num_at_position > MAX_PROMPT_LOGPROBS:
        raise InputError(
            f"{name} must be lower, or n: {num_at_position} for each of "
            f"{num_positions} tokens are more than {MAX_PROMPT_LOGPROBS}",
            name,
        )


def as_prompts(prompt: Prompt | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """Convert any of the four forms of a prompt to a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InputError("prompt must not be empty", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]  # one prompt as token ids
    return prompt


def _run_options(body: CompletionBody, add_special_tokens: bool) -> RunOptions:
    keep, truncation = body.truncate_prompt_tokens, None
    if keep is not None:
        truncation = PromptTruncation(keep, body.truncation_side or "left")
    options = body.run_options(add_special_tokens, truncation)
    return replace(options, beams=beam_params(body))
