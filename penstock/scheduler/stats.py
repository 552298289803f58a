"""Snapshots of the scheduler's state, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SchedulerStats:
    """Of requests. The defaults are those of an engine that has just started."""

    num_running: int = 0
    num_waiting: int = 0  # at a gate, in the queue, for an adapter, or held for a retry
    num_deferred: int = 0  # of those, the ones that are not in the queue
    num_steps_in_flight: int = 0
    num_preemptions: int = 0  # since the start
    kv_cache_usage: float = 0.0  # 0 to 1
    num_prefix_queries: int = 0  # tokens, since the start
    num_prefix_hits: int = 0


@dataclass(frozen=True)
class SpeculationStats:
    """Since the start."""

    num_drafts: int = 0  # proposals that were verified, each of one or more tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # By the draft's place in its proposal.
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class AdapterStats:
    """Of LoRA adapters. Counters run since the start."""

    max_loras: int = 0
    running: list[str] = field(default_factory=list)  # names of adapters in running requests
    waiting: list[str] = field(default_factory=list)  # names of adapters in waiting requests
    num_copies: int = 0  # adapters in host memory
    num_loads: int = 0  # into host memory
    num_evictions: int = 0  # from host memory, for another adapter
    num_placements: int = 0  # into a device slot
    num_waits: int = 0  # requests that had to wait for their adapter
    longest_wait_s: float = 0.0  # of a request for its adapter, until it was admitted
    most_overtakes: int = 0  # of a request while it was the first to wait: at most `max_overtakes`
