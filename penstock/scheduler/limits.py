"""The numbers that bound a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.protocol.errors import ConfigError, InputError
from penstock.protocol.request import EngineRequest
from penstock.scheduler.request import RequestState


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int  # requests that run at once
    max_num_batched_tokens: int  # tokens in one step
    max_model_len: int  # tokens in one request, prompt and output together
    long_prefill_token_threshold: int = 0  # prompt tokens of one request in a step; 0: no limit
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    queue_timeout_s: float | None = None  # for which a request may wait to run; None: no limit
    num_speculative_tokens: int = 0  # drafts that a decoding request brings to a step
    vocab_size: int = 2**31  # tokens that there are to choose from

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without enable_chunked_prefill, max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}): a request of any length must fit into one step"
            )

    def share(self, state: RequestState, budget: int) -> tuple[int, int]:
        """How many tokens a request computes next, and how many of them are drafts."""
        num_left = state.num_total_tokens - state.num_computed_tokens
        if not state.has_sampled:
            return self.chunk(num_left, budget), 0
        num_samples_left = state.max_total_tokens - state.num_total_tokens
        if num_samples_left <= 0:
            return 0, 0  # steps in flight may bring all that it may have
        num_drafts = min(self.num_speculative_tokens, num_samples_left - 1, budget - 1)
        return 1 + num_drafts, num_drafts

    def chunk(self, num_left: int, budget: int) -> int:
        """How much of `num_left` known tokens goes into a step."""
        if not self.enable_chunked_prefill:
            return num_left if num_left <= budget else 0
        return min(num_left, budget, self.long_prefill_token_threshold or num_left)


def check_length(request: EngineRequest, longest: int) -> None:
    """Raise InputError for a request that leaves nothing to compute or has no room to do so."""
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    if num_prompt == 0:
        raise InputError("the prompt must hold at least 1 token, got 0", "prompt_token_ids")
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
