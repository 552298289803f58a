"""StopRules: decides when a request ends: by its parameters, its grammar, or a failed step."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from penstock.protocol.choice import why_no_token, why_no_token_of_grammar
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import InputError, RequestFault
from penstock.protocol.step import RequestResult, ScheduledRequest
from penstock.scheduler.grammars import Grammars
from penstock.scheduler.request import RequestState

logger = logging.getLogger(__name__)


class Stop(NamedTuple):
    num_tokens: int  # how many of the new tokens belong to the output
    reason: FinishReason
    stop_reason: int | None = None
    ends_in_text: bool = False  # the last token is text, not a stop token
    error: str | None = None  # with reason ERROR
    error_field: str | None = None


def failed(error: str, field: str | None = None) -> Stop:
    """A stop with an error and no new tokens."""
    return Stop(0, FinishReason.ERROR, error=error, error_field=field)


def find_stop(state: RequestState, new_token_ids: list[int]) -> Stop | None:
    """Return where the request ends within `new_token_ids`, or None if it continues."""
    request, params = state.request, state.request.sampling
    num_known = len(state.token_ids)
    for count, token_id in enumerate(new_token_ids, start=1):
        if token_id in state.stop_ids and (
            num_known + count - state.num_prompt_tokens >= params.min_tokens
        ):
            if token_id in request.eos_token_ids and not params.ignore_eos:
                return Stop(count, FinishReason.STOP)
            return Stop(count, FinishReason.STOP, token_id)
        if num_known + count >= state.max_total_tokens:
            return Stop(count, FinishReason.LENGTH)
    return None


class StopRules:
    """Finds where requests end."""

    def __init__(self, grammars: Grammars | None, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size

    def find(
        self, state: RequestState, planned: ScheduledRequest, result: RequestResult
    ) -> Stop | None:
        """Return where the request ends within a step's result, or None if it continues."""
        if state.pools:
            return _find_end(planned, result)
        fault = result.fault or _why_malformed(planned, result)
        if fault is not None:
            return self._explain(state, fault, result.token_ids)
        stop = find_stop(state, result.token_ids)
        if self._grammars is None or not state.is_masked:
            return stop
        try:
            return self._follow(self._grammars, state, result, stop)
        except (InputError, RequestFault) as error:
            return failed(str(error), error.field if isinstance(error, InputError) else None)
        except Exception:  # a grammar's library may raise anything: only its request fails
            logger.exception(
                "Matching the output of request %s against its grammar failed", state.request_id
            )
            return failed("the request's grammar failed")

    def is_complete(self, state: RequestState) -> bool:
        """Whether a replayed request's structured output is already complete."""
        if self._grammars is None or not state.is_masked:
            return False
        return self._grammars.is_complete(state.request_id)

    def _follow(
        self, grammars: Grammars, state: RequestState, result: RequestResult, stop: Stop | None
    ) -> Stop | None:
        """Return where the structured output is complete, or `stop` if it is not."""
        token_ids = result.token_ids
        if stop is not None:
            token_ids = token_ids[: stop.num_tokens]
        complete = grammars.accept(state.request_id, token_ids, result.drafts)
        if complete is None:
            return stop
        if stop is not None and stop.reason is FinishReason.STOP and stop.num_tokens == complete:
            return stop  # both end at the same stop token
        is_text = token_ids[complete - 1] not in state.request.eos_token_ids
        return Stop(complete, FinishReason.STOP, ends_in_text=is_text)

    def _explain(self, state: RequestState, fault: str, token_ids: list[int]) -> Stop:
        """Return why the request failed. If its parameters forbid all tokens, the error says so."""
        for count in range(len(token_ids) + 1):  # the step may have sampled before it failed
            known = state.token_ids + token_ids[:count]
            wrong = why_no_token(state.request, known, self._vocab_size)
            if wrong is not None:
                break
        else:
            num_output = len(state.token_ids) - state.num_prompt_tokens
            wrong = why_no_token_of_grammar(state.request, num_output)
        return failed(fault) if wrong is None else failed(str(wrong), wrong.field)


def _find_end(planned: ScheduledRequest, result: RequestResult) -> Stop | None:
    """A pooling request ends when its vector arrives."""
    if result.fault is not None:
        return failed(result.fault)
    if not planned.samples:
        return None
    if result.payload is None:
        return failed("the step brought no vector where one was due")
    return Stop(0, FinishReason.STOP)


def _why_malformed(planned: ScheduledRequest, result: RequestResult) -> str | None:
    """Return an error if the number of sampled tokens is wrong, else None."""
    num_tokens = len(result.token_ids)
    most = 1 + planned.num_drafts if planned.samples else 0
    if min(most, 1) <= num_tokens <= most:
        return None
    return f"the step brought {num_tokens} tokens where {min(most, 1)} to {most} were due"


def delta_of(
    state: RequestState,
    planned: ScheduledRequest,
    result: RequestResult,
    token_ids: list[int],
    first: int,
    stop: Stop | None,
) -> EngineDelta:
    """What a client is told of a step's result. The step's first token is at position `first`."""
    routed_experts = result.routed_experts
    if routed_experts is not None:  # positions of rejected drafts are sent again later
        routed_experts = msgspec.structs.replace(routed_experts, start=first)
    return EngineDelta(
        request_id=state.request_id,
        token_ids=token_ids,
        num_drafts=planned.num_drafts,
        logprobs=result.logprobs[: len(token_ids)],
        prompt_logprobs=result.prompt_logprobs,
        routed_experts=routed_experts,
        payload=result.payload,
        named=result.named,
        num_cached_tokens=state.num_cached_tokens,
        prefill_s=state.take_prefill_s() if token_ids or result.payload else 0.0,
        finish_reason=state.finish_reason,
        stop_reason=state.stop_reason,
        ends_in_text=stop is not None and stop.ends_in_text,
    )
