"""Decides how many tokens of a request go into a step, and which requests are too long."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.errors import InputError
from penstock.protocol.limits import StepLimits
from penstock.protocol.request import EngineRequest
from penstock.scheduler.request import RequestState


def share(limits: StepLimits, state: RequestState, budget: int, num_drafts: int) -> tuple[int, int]:
    """Return how many tokens the request computes next, and how many of them are drafts.

    `num_drafts`: the most that it may verify.
    """
    num_left = state.num_total_tokens - state.num_computed_tokens
    if not state.has_sampled:
        return chunk(limits, num_left, budget), 0
    num_samples_left = state.max_total_tokens - state.num_total_tokens
    if num_samples_left <= 0:
        return 0, 0  # steps in flight may already produce its last token
    num_drafts = min(num_drafts, num_samples_left - 1, budget - 1)
    return 1 + num_drafts, num_drafts


def chunk(limits: StepLimits, num_left: int, budget: int) -> int:
    """Return how many of `num_left` known tokens go into the step (chunked prefill)."""
    if not limits.enable_chunked_prefill:
        return num_left if num_left <= budget else 0
    return min(num_left, budget, limits.long_prefill_token_threshold or num_left)


def find_spans(request: EngineRequest, limits: StepLimits) -> list[tuple[int, int]]:
    """The tokens of a prompt that see each other. A step computes the rest of a span or nothing.

    Raises InputError if a span does not fit into a step.
    """
    if limits.spans == "none":
        return []
    if limits.spans == "prompt":
        return [(0, len(request.prompt_token_ids))] if request.media else []
    spans = [
        (item.offset + start, item.offset + start + count)
        for item in request.media
        for start, count in item.runs
    ]
    longest = max((end - start for start, end in spans), default=0)
    if longest > limits.max_span:
        raise InputError(
            f"an item of multi_modal_data has {longest} tokens in a row, but at most "
            f"{limits.max_span} are computed together: send a smaller one",
            "multi_modal_data",
        )
    return spans


def before_span(spans: Sequence[tuple[int, int]], end: int) -> int:
    """The last place not after `end` where a step may end: it does not cut a span."""
    return next((start for start, stop in spans if start < end < stop), end)


def check_length(request: EngineRequest, longest: int) -> None:
    """Raise InputError if the prompt is empty or too long, or no token is left to generate."""
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    if num_prompt == 0:
        raise InputError("the prompt must contain at least 1 token, got 0", "prompt_token_ids")
    if request.pools and num_prompt > longest:
        raise InputError(
            f"the prompt must be at most max_model_len ({longest}) tokens long, got {num_prompt}",
            "prompt_token_ids",
        )
    if request.pools:
        return
    if num_prompt >= longest:
        raise InputError(
            f"the prompt must be shorter than max_model_len ({longest} tokens), got {num_prompt}",
            "prompt_token_ids",
        )
    if num_output >= min(request.max_tokens, longest - num_prompt):
        raise InputError(
            f"output_token_ids must leave at least 1 token to generate (max_tokens is "
            f"{request.max_tokens}, max_model_len {longest}), got {num_output}",
            "output_token_ids",
        )
