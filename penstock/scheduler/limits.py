"""The numbers that bound a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.protocol.errors import ConfigError


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
