"""From a body to requests for the engine. Called in a thread, since tokenizing takes time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.protocol.choice import why_no_token
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams
from penstock.server.openai.params import chat_params, completion_params
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ChatTemplateBody,
    CompletionRequest,
    GenerationBody,
    Prompt,
)
from penstock.server.service import Service
from penstock.text.frontend import Frontend, PreparedRequest

FIELDS_OF_THEIR_OWN = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


def prepare_chat(service: Service, body: ChatCompletionRequest, request_id: str) -> PreparedRequest:
    try:
        params = chat_params(body, service.frontend.default_params, service.server_config)
        prompt = render(service.frontend, body.messages, body)
        special = bool(body.add_special_tokens)
        return _prepare(service, body, prompt, params, special, request_id)
    except InputError as error:
        if error.field == "logprobs":  # which is how many of them, in every other place
            raise InputError(f"top_{error}", "top_logprobs") from error
        raise


def prepare_completions(
    service: Service, body: CompletionRequest, request_id: str
) -> list[PreparedRequest]:
    params = completion_params(body, service.frontend.default_params, service.server_config)
    prompts = as_prompts(body.prompt)
    most = service.server_config.max_prompts
    if len(prompts) > most:
        raise InputError(
            f"prompt may hold at most {most} prompts here, got {len(prompts)}", "prompt"
        )
    special = body.add_special_tokens is not False
    try:
        return [_prepare(service, body, prompt, params, special, request_id) for prompt in prompts]
    except InputError as error:
        if error.field == "prompt_token_ids":  # which are a prompt, too, in this API
            raise InputError(
                str(error).replace("prompt_token_ids", "prompt", 1), "prompt"
            ) from error
        raise


def as_prompts(prompt: Prompt | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """A list of prompts, whichever of the four forms they came in."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InputError("prompt must not be empty", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]  # one prompt as token ids
    return prompt


def render(frontend: Frontend, messages: Sequence[ChatMessage], body: ChatTemplateBody) -> str:
    """The prompt of a conversation, through the model's chat template."""
    kwargs: dict[str, Any] = body.chat_template_kwargs or {}
    for name in FIELDS_OF_THEIR_OWN:
        if name in kwargs:
            raise InputError(
                f"chat_template_kwargs must not hold {name}, which is a field by itself",
                "chat_template_kwargs",
            )
    try:
        return frontend.render_chat(
            [message.model_dump(exclude_unset=True) for message in messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            **({"documents": body.documents} if body.documents else {}),
            **kwargs,
        )
    except RecursionError as error:
        raise InputError(
            "messages, documents and chat_template_kwargs must be nested less deeply", "messages"
        ) from error


def _prepare(
    service: Service,
    body: GenerationBody,
    prompt: str | list[int],
    params: SamplingParams,
    add_special_tokens: bool,
    request_id: str,
) -> PreparedRequest:
    frontend = service.frontend
    if body.truncate_prompt_tokens is not None:
        prompt = _truncate(frontend, body, prompt, params, add_special_tokens)
    prepared = frontend.prepare(
        service.engine_id(request_id),
        prompt,
        params,
        add_special_tokens=add_special_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    child = prepared.children[0]
    if wrong := why_no_token(child, child.prompt_token_ids, frontend.vocab_size):
        raise wrong  # now, rather than when the engine finds out
    return prepared


def _truncate(
    frontend: Frontend,
    body: GenerationBody,
    prompt: str | list[int],
    params: SamplingParams,
    add_special_tokens: bool,
) -> list[int]:
    keep = body.truncate_prompt_tokens
    assert keep is not None
    if keep == -1:
        keep = max(frontend.max_model_len - (params.max_tokens or 1), 1)
    if keep < 1:
        raise InputError(
            f"truncate_prompt_tokens must be at least 1, or -1, got {keep}",
            "truncate_prompt_tokens",
        )
    if isinstance(prompt, str):
        if frontend.tokenizer is None:
            raise InputError("prompt must be token ids: this server has no tokenizer", "prompt")
        prompt = frontend.tokenizer.encode(prompt, add_special_tokens)
    return prompt[:keep] if body.truncation_side == "right" else prompt[-keep:]
