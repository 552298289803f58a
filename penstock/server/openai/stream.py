"""Shared by completions and chat completions: answering, streaming and counting usage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Request, Response

from penstock.config import ServerConfig
from penstock.conversation.output import TurnAnswer, TurnStep, TurnUsage
from penstock.protocol.outputs import CompletionOutput, RequestOutput
from penstock.server.http.errors import describe_errors
from penstock.server.http.replies import Answer, send_answer, unless_gone
from penstock.server.openai.logprobs import LogprobFormat, usage
from penstock.server.openai.protocol import (
    Choice,
    ChoiceMetrics,
    CompletionBody,
    SpeculationMetrics,
    StreamOptions,
    Usage,
)
from penstock.server.openai.routed_experts import encode_routed_experts
from penstock.server.schema.base import Reply
from penstock.server.service import Service

EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer. With stream, chunks as server-sent events.",
        "content": {"text/event-stream": {}},
    }
}
ERRORS = describe_errors(400, 401, 404, 408, 413, 429, 500, 503)
ANSWERS = {**EVENT_STREAM, **ERRORS}


T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=CompletionBody)


@dataclass(frozen=True)
class Exchange(Generic[BodyT]):
    """A request, and what its answer names."""

    service: Service
    body: BodyT
    model: str
    request_id: str


async def complete(
    request: Request,
    body: BodyT,
    id_prefix: str,
    prepare: Callable[[Service, BodyT, str], T],
    make_answer: Callable[[Exchange[BodyT], T], Answer],
) -> Response:
    """Answer a request. `prepare` runs in a thread. `make_answer` formats the result."""
    service: Service = request.app.state.service
    model = await service.admit(body.model)
    request_id = id_prefix + (body.request_id or request.state.request_id)
    preparing = service.in_thread(prepare, service, body, request_id)
    prepared = await unless_gone(request, preparing)
    answer = make_answer(Exchange(service, body, model, request_id), prepared)
    return await send_answer(request, answer, body.stream)


class AnswerFormat(Generic[BodyT]):
    """What the answers of both APIs share: identity, usage, logprobs, chunks of text."""

    def __init__(self, exchange: Exchange[BodyT], num_logprobs: int | None) -> None:
        service, body = exchange.service, exchange.body
        self._service = service
        self._body = body
        self._identity: dict[str, Any] = {
            "id": exchange.request_id,
            "created": int(time.time()),
            "model": exchange.model,
            "system_fingerprint": service.fingerprint,
        }
        self._shows_usage = UsageOptions.of(body.stream_options, service.server_config)
        self._logprobs = LogprobFormat(
            service.frontend.tokenizer,
            -1 if body.logprob_token_ids else num_logprobs or 0,
            service.shows_token_ids(body.return_tokens_as_token_ids),
        )
        self._texts = TextChunks()

    def _add_extras(self, choice: Choice, item: CompletionOutput | TurnAnswer | TurnStep) -> None:
        """Add what only some servers are asked for: routed experts and counts of drafts."""
        if item.routed_experts is not None:
            choice.routed_experts = encode_routed_experts(item.routed_experts)
        detail = self._service.server_config.per_request_spec_decode_metrics
        if detail == "off" or item.drafts is None or item.finish_reason is None:
            return
        drafts = item.drafts
        shown = SpeculationMetrics(
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            mean_acceptance_length=drafts.mean_acceptance_length,
            draft_acceptance_rate=drafts.num_accepted_tokens / drafts.num_draft_tokens,
        )
        if detail == "detailed":
            shown.acceptance_histogram = drafts.accepted
        choice.metrics = ChoiceMetrics(speculative_decoding=shown)


class TextChunks:
    """Writes the chunks of a choice that differ only in their text.

    Most chunks do. Building and serializing an object for each would take longer than everything
    else that this process does for a token.
    """

    _TEXT = "\0text\0"  # placeholder for the text in the template chunk

    def __init__(self) -> None:
        self._around: dict[int, tuple[str, str]] = {}  # JSON before and after the text, by choice

    def write(self, index: int, text: str, make: Callable[[str], Reply]) -> str:
        """Return the JSON of `make(text)` for choice `index`. Calls `make` once per choice."""
        around = self._around.get(index)
        if around is None:
            written = make(self._TEXT).model_dump_json(exclude_unset=True)
            before, after = written.split(_as_json(self._TEXT))
            around = self._around[index] = before, after
        return f"{around[0]}{_as_json(text)}{around[1]}"


def _as_json(text: str) -> str:
    return msgspec.json.encode(text).decode()


@dataclass(frozen=True)
class UsageOptions:
    """When a stream includes usage. `with_details` adds details of the prompt's tokens."""

    at_end: bool
    in_every_chunk: bool
    with_details: bool

    @classmethod
    def of(cls, options: StreamOptions | None, config: ServerConfig) -> UsageOptions:
        at_end = config.enable_force_include_usage or bool(options and options.include_usage)
        is_continuous = at_end and bool(options and options.continuous_usage_stats)
        return cls(at_end, is_continuous, config.enable_prompt_tokens_details)


class UsageCounter:
    """Counts the tokens of outputs."""

    def __init__(self, options: UsageOptions) -> None:
        self._options = options
        self._num_cached: dict[int, int] = {}  # by prompt
        self._total = TurnUsage()

    def count(self, index: int, output: RequestOutput) -> None:
        if index not in self._num_cached:
            self._total.num_prompt += len(output.prompt_token_ids)
        self._total.num_cached += output.num_cached_tokens - self._num_cached.get(index, 0)
        self._num_cached[index] = output.num_cached_tokens
        self._total.num_completion += sum(len(item.token_ids) for item in output.outputs)

    def so_far(self) -> Usage:
        return usage(self._total, self._options.with_details)
