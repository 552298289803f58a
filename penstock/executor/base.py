"""The interface between the engine core and whatever runs its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.protocol.kv import AnyKVCacheSpec
from penstock.protocol.limits import StepLimits
from penstock.protocol.pooling import PoolingInfo
from penstock.protocol.step import StepMasks, StepPlan, StepResult


@dataclass(frozen=True)
class Capabilities:
    """What a worker can do, once its model is loaded."""

    limits: StepLimits
    kv_dtype: str
    kv_specs: dict[str, AnyKVCacheSpec]
    kv_budget: int  # bytes for the cache, on each rank
    pooling: PoolingInfo | None = None  # of a model that pools


def merge_capabilities(ranks: Sequence[Capabilities]) -> Capabilities:
    """What all ranks can do: they differ in the memory that is left on their devices."""
    merged = replace(ranks[0], kv_budget=min(rank.kv_budget for rank in ranks))
    for rank in ranks:
        alike = replace(rank, kv_budget=merged.kv_budget)
        assert alike == merged, f"ranks differ: {alike} and {merged}"
    return merged


class Executor(Protocol):
    """Launch, sample if it is masked, collect: each step goes through them in this order.

    Up to `StepLimits.max_in_flight` steps may be launched before the first is collected; steps
    are collected in the order of their launch. Nothing is raised for a step that fails: its result
    says so, and later steps are skipped until `call("reset")`, which must follow an interrupt, too.
    `EngineDeadError` is raised if nothing can be run any more.
    """

    capabilities: Capabilities

    def launch(self, plan: StepPlan) -> None:
        """Begin a step: up to its logits if it is `masked`, to its tokens if not."""

    def sample(self, masks: StepMasks | None) -> None:
        """Choose the tokens of the last step, which is `masked`; without masks it fails."""

    def collect(self) -> StepResult:
        """Wait for the oldest step's result."""

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of `Worker` on all workers, ordered with the steps; the first's result."""

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if a worker has died; for when no step would find out."""

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
