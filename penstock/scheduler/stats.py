"""Snapshots of the scheduler's state, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerStats:
    num_running: int
    num_waiting: int  # at a gate, in the queue, for an adapter, or held for a retry
    num_steps_in_flight: int
    num_preemptions: int  # since the start
    kv_cache_usage: float  # 0 to 1
    num_prefix_queries: int  # tokens, since the start
    num_prefix_hits: int


@dataclass(frozen=True)
class SpeculationStats:
    """Since the start."""

    num_drafts: int  # proposals that were verified, each of one or more tokens
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]  # by the draft's place in its proposal


@dataclass(frozen=True)
class AdapterStats:
    """Of LoRA adapters. Counters run since the start."""

    max_loras: int
    running: list[str]  # names of adapters in running requests
    waiting: list[str]  # names of adapters in waiting requests
    num_copies: int  # adapters in host memory
    num_loads: int  # into host memory
    num_evictions: int  # from host memory, for another adapter
    num_placements: int  # into a device slot
    num_waits: int  # requests that had to wait for their adapter
    longest_wait_s: float  # of a request for its adapter, until it was admitted
    most_overtakes: int  # of a request while it was the first to wait: at most `max_overtakes`
