"""Converts a request's body to sampling parameters. Refuses unsupported fields by name."""

from __future__ import annotations

from typing import Any

from penstock.config import ServerConfig
from penstock.protocol.beam_search import BeamSearchParams
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionBody,
    CompletionRequest,
)
from penstock.server.openai.structured import structured_outputs


def completion_params(
    body: CompletionRequest, defaults: SamplingParams, limits: ServerConfig
) -> SamplingParams:
    own = _own_fields(body, limits)
    own["logprobs"] = body.logprobs
    if body.max_tokens is not None:
        own["max_tokens"] = body.max_tokens
    if body.echo:
        if body.logprobs is not None and body.prompt_logprobs is None:
            own["prompt_logprobs"] = body.logprobs
        if body.max_tokens == 0:
            own["max_tokens"] = 1  # a request must sample; the token is not shown
    return body.sampling_params(defaults, **own)


def chat_params(
    body: ChatCompletionRequest, defaults: SamplingParams, limits: ServerConfig
) -> SamplingParams:
    own = _own_fields(body, limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.logprobs:
        own["logprobs"] = body.top_logprobs or 0
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return body.sampling_params(defaults, max_tokens=most, **own)


def _own_fields(body: CompletionBody, limits: ServerConfig) -> dict[str, Any]:
    """Return the parameters that depend on the API's reply format."""
    _refuse_unsupported(body)
    if body.n is not None and body.n > limits.max_n:
        raise InputError(f"n must be at most {limits.max_n} here, got {body.n}", "n")
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options needs stream to be true", "stream_options")
    own = {
        "n": body.n,
        "prompt_logprobs": body.prompt_logprobs,
        "logprob_token_ids": body.logprob_token_ids,
    }
    given = {name: value for name, value in own.items() if value is not None}
    return {**given, "structured_outputs": structured_outputs(body)}


def _refuse_unsupported(body: CompletionBody) -> None:
    """Raise InputError for unsupported fields instead of ignoring them."""
    unsupported: dict[str, Any] = {}
    if isinstance(body, CompletionRequest):
        unsupported["suffix"] = body.suffix
    if isinstance(body, ChatCompletionRequest):
        unsupported["audio"] = body.audio
        if set(body.modalities or []) - {"text"}:
            unsupported["modalities"] = True
    for name, value in unsupported.items():
        if value:
            raise InputError(f"{name} is not supported by this model: leave it out", name)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InputError(
            f"best_of is not supported: leave it out or make it n ({body.n or 1}), "
            f"got {body.best_of}",
            "best_of",
        )


# Beam search would have to ignore these.
_NOT_WITH_BEAMS = (
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "stop", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "allowed_token_ids", "min_tokens", "structured_outputs", "response_format",
    "thinking_token_budget", "echo",
)  # fmt: skip


def beam_params(body: CompletionBody) -> BeamSearchParams | None:
    """The parameters of beam search, if the request asks for it."""
    if not body.use_beam_search:
        return None
    for name in _NOT_WITH_BEAMS:
        if getattr(body, name, None):
            raise InputError(f"{name} cannot be combined with use_beam_search: leave one out", name)
    return BeamSearchParams(
        beam_width=body.n or 1,
        max_tokens=2**31 - 1,  # the request's own limit holds
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=True,  # in the tokens; the text is the request's matter
    )
