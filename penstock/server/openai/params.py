"""From a request's body to sampling parameters; what cannot be done is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config import ServerConfig
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import OutputKind, SamplingParams
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
)
from penstock.server.openai.structured import structured_outputs

SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "allowed_token_ids", "bad_words", "prompt_logprobs", "logprob_token_ids",
)  # fmt: skip

STRUCTURED = "use structured_outputs: {}"
# What to do in place of a field that other servers know and that would change the answer.
REMEDIES = {
    "guided_json": STRUCTURED.format('{"json": SCHEMA}'),
    "guided_regex": STRUCTURED.format('{"regex": PATTERN}'),
    "guided_choice": STRUCTURED.format('{"choice": [TEXT, ...]}'),
    "guided_grammar": STRUCTURED.format('{"grammar": GRAMMAR}'),
    "guided_json_object": STRUCTURED.format('{"json_object": true}'),
    "guided_whitespace_pattern": STRUCTURED.format('{"whitespace_pattern": PATTERN, ...}'),
    "guided_decoding_backend": "start the server with --structured-outputs-backend",
    "prompt_embeds": "send the prompt as text or token ids",
    "logits_processors": "start the server with --logits-processors",
    "repetition_detection": "leave it out, or limit max_tokens",
    "kv_transfer_params": "leave it out",
}


def completion_params(
    body: CompletionRequest, defaults: SamplingParams, limits: ServerConfig
) -> SamplingParams:
    options = _common(body, limits)
    options["logprobs"] = body.logprobs
    if body.max_tokens is not None:
        options["max_tokens"] = body.max_tokens
    if body.echo:
        if body.logprobs is not None and body.prompt_logprobs is None:
            options["prompt_logprobs"] = body.logprobs
        if body.max_tokens == 0:
            options["max_tokens"] = 1  # computed, since a request must sample, but not shown
    return _override(defaults, options)


def chat_params(
    body: ChatCompletionRequest, defaults: SamplingParams, limits: ServerConfig
) -> SamplingParams:
    options = _common(body, limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    options["max_tokens"] = most
    if body.thinking_token_budget is not None:
        options["thinking_token_budget"] = body.thinking_token_budget
    return _override(defaults, options)


def _common(body: GenerationBody, limits: ServerConfig) -> dict[str, Any]:
    _refuse_unsupported(body)
    if body.n is not None and body.n > limits.max_n:
        raise InputError(f"n must be at most {limits.max_n} here, got {body.n}", "n")
    if body.timeout is not None and not body.timeout > 0:
        raise InputError(f"timeout must be above 0 seconds, got {body.timeout}", "timeout")
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options needs stream to be true", "stream_options")
    options = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        options["logit_bias"] = _logit_bias(body.logit_bias)
    options["structured_outputs"] = structured_outputs(body)
    options["output_kind"] = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
    return options


def _override(defaults: SamplingParams, options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**msgspec.structs.asdict(defaults), **options})


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    converted = {}
    for key, bias in biases.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InputError(f"logit_bias must have token ids as keys, got {key!r}", "logit_bias")
        converted[int(key)] = bias
    return converted


def _refuse_unsupported(body: GenerationBody) -> None:
    """Say plainly what this server does not do, rather than ignore that it was asked for."""
    for name, value in (body.model_extra or {}).items():
        if name in REMEDIES and value is not None:
            raise InputError(f"{name} is not supported here: {REMEDIES[name]}", name)
    unsupported: dict[str, Any] = {"use_beam_search": body.use_beam_search}
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
