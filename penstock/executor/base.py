"""The interface between the engine core and whatever runs its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from penstock.protocol.kv import AnyKVCacheSpec, KVCacheLayout
from penstock.protocol.step import StepMasks, StepPlan, StepResult


@dataclass(frozen=True)
class Capabilities:
    """What the workers can do, once their model is loaded."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_dtype: str
    kv_specs: dict[str, AnyKVCacheSpec]
    kv_budget: int  # bytes for the cache, on each rank
    max_in_flight: int  # steps that may be launched before the first is collected
    num_drafts: int = 0


class Executor(Protocol):
    """Launch, sample, collect: each step goes through the three in this order.

    Up to `capabilities.max_in_flight` steps may be launched before the first is collected;
    steps are collected in the order of their launch. `launch` and `sample` raise `OutOfMemory` for
    want of memory, `EngineDeadError` if nothing can be run any more, and anything else if this
    step failed: then its requests are released before they are sent again.
    """

    capabilities: Capabilities

    def start(self, layout: KVCacheLayout, max_model_len: int) -> None:
        """Allocate the cache; steps may be launched from now on."""

    def launch(self, plan: StepPlan) -> Any:
        """Begin a step, up to its logits; returns a handle."""

    def sample(self, handle: Any, masks: StepMasks | None = None) -> None:
        """Choose the step's tokens, with `masks` if and only if its plan is `masked`."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step's results."""

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if a worker has died; for when no step would find out."""

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
