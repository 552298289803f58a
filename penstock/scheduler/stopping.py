"""When a request is done."""

from __future__ import annotations

from typing import NamedTuple

from penstock.protocol.delta import FinishReason
from penstock.scheduler.request import RequestState


class Stop(NamedTuple):
    num_tokens: int  # how many of the new tokens belong to the output
    reason: FinishReason
    stop_reason: int | None = None
    ends_in_text: bool = False  # the last token is no stop token


def find_stop(state: RequestState, new_token_ids: list[int]) -> Stop | None:
    """Where the request ends if `new_token_ids` follow its known tokens; None: it goes on."""
    request, params = state.request, state.request.params
    num_known = len(state.token_ids)
    for count, token_id in enumerate(new_token_ids, start=1):
        if num_known + count - state.num_prompt_tokens >= params.min_tokens:
            if token_id in request.eos_token_ids and not params.ignore_eos:
                return Stop(count, FinishReason.STOP)
            if params.stop_token_ids and token_id in params.stop_token_ids:
                return Stop(count, FinishReason.STOP, token_id)
        if num_known + count >= state.max_total_tokens:
            return Stop(count, FinishReason.LENGTH)
    return None
