"""EngineDelta: what is new about a request, on its way from the engine to its client."""

from __future__ import annotations

import enum

import msgspec

from penstock.protocol.pooling import Payload
from penstock.protocol.step import PromptLogprobs, RoutedExperts, TokenLogprobs


class FinishReason(enum.Enum):
    STOP = "stop"  # end of text, a stop token or a stop text
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # the request failed; `EngineDelta.error` says how


class EngineDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The collector need not look at it: it holds nothing that could hold it in turn."""

    request_id: str
    token_ids: list[int] = []
    num_drafts: int = 0  # verified in the step of these tokens: all but the last were drafts
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: RoutedExperts | None = None
    payload: Payload | None = None  # what a pooling request ends with
    named: dict[str, Payload] = {}  # and what else it asked for, by name: see `NAMED`
    num_cached_tokens: int = 0  # prompt tokens served by the prefix cache; 0 where said before
    prefill_s: float = 0.0  # from the plan of its first step; comes with its first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop text that ended it
    ends_in_text: bool = False  # STOP, but not at a stop token: a grammar's document is complete
    error: str | None = None
    can_retry: bool = False  # with an error: it was never begun, and may be sent again later
    error_field: str | None = None  # the client's error: the field of its request that is wrong
