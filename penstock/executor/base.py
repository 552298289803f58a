"""Executor: the interface between the engine core and the workers that run its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import AnyKVCacheSpec
from penstock.protocol.limits import StepLimits
from penstock.protocol.pooling import PoolingInfo
from penstock.protocol.step import StepMasks, StepPlan, StepResult

Stages = list[tuple[list[str], int]]
"""The cached layers of each pipeline stage, and the bytes for them on each of its ranks."""


@dataclass(frozen=True)
class Capabilities:
    """What a worker supports. Known once its model is loaded."""

    limits: StepLimits
    kv_dtype: str
    kv_specs: dict[str, AnyKVCacheSpec]
    kv_budget: int  # bytes for the KV cache on each rank
    pooling: PoolingInfo | None = None  # for pooling models
    draft_specs: dict[str, AnyKVCacheSpec] = field(default_factory=dict)  # of a drafter's layers
    device: str = "cpu"  # or "cuda"
    fingerprint: str = ""  # of the checkpoint
    stages: Stages = field(default_factory=list)  # of all ranks together, if there are several


def merge_capabilities(ranks: Sequence[Capabilities], num_stages: int = 1) -> Capabilities:
    """Return what all ranks, in stages one behind the other, support.

    Ranks of a stage may differ only in free memory: the least one counts. Stages have different
    layers, and only the last one drafts or pools.
    """
    size = len(ranks) // num_stages
    stages = [_merge_ranks(ranks[first : first + size]) for first in range(0, len(ranks), size)]
    last = stages[-1]
    if num_stages == 1:
        return last
    specs = {name: spec for stage in stages for name, spec in stage.kv_specs.items()}
    least = min(stage.kv_budget for stage in stages)
    merged = replace(last, kv_specs=specs, kv_budget=least)
    for number, stage in enumerate(stages):
        alike = replace(
            stage, kv_specs=specs, kv_budget=least, pooling=last.pooling,
            draft_specs=last.draft_specs,
        )  # fmt: skip
        _check_alike(alike, merged, f"pipeline stage {number}", f"stage {num_stages - 1}")
    names = [[*stage.kv_specs, *stage.draft_specs] for stage in stages]
    shares = [(own, stage.kv_budget) for own, stage in zip(names, stages, strict=True)]
    return replace(merged, stages=shares)


def _merge_ranks(ranks: Sequence[Capabilities]) -> Capabilities:
    merged = replace(ranks[0], kv_budget=min(rank.kv_budget for rank in ranks))
    for number, rank in enumerate(ranks):
        alike = replace(rank, kv_budget=merged.kv_budget)
        _check_alike(alike, merged, f"tensor-parallel rank {number}", "rank 0")
    return merged


def _check_alike(own: Capabilities, other: Capabilities, own_name: str, name: str) -> None:
    """Raise ConfigError, naming what differs. On one machine nothing can."""
    for each in fields(own):
        ours, theirs = getattr(own, each.name), getattr(other, each.name)
        if ours == theirs:
            continue
        what, remedy = f"{each.name} {ours!r:.200} and {theirs!r:.200}", "start all nodes alike"
        if each.name == "fingerprint":
            what, remedy = "different checkpoints", "give all nodes the same files of the model"
        elif each.name == "limits":
            names = [
                key for key in ours.__struct_fields__ if getattr(ours, key) != getattr(theirs, key)
            ]
            what = f"different limits ({', '.join(names)})"
        raise ConfigError(f"{own_name} and {name} have {what}: {remedy}")


class Executor(Protocol):
    """Runs steps: launch, then sample if the step is masked, then collect.

    Up to `StepLimits.max_in_flight` steps may be launched before the first is collected. Steps are
    collected in launch order. A failed step raises nothing: its result carries the failure, and
    later steps are skipped until `call("reset")`. A reset must follow an interrupt, too.
    `EngineDeadError` is raised if no step can run any more.
    """

    capabilities: Capabilities

    def launch(self, plan: StepPlan) -> None:
        """Start a step. A `masked` step stops at its logits, any other runs to its tokens."""

    def sample(self, masks: StepMasks | None) -> None:
        """Sample the last launched step, which is `masked`. Without masks the step fails."""

    def collect(self) -> StepResult:
        """Wait for the oldest step's result."""

    def call(self, method: str, *args: Any) -> Any:
        """Run a `Worker` method on all workers, in order with the steps. Return rank 0's result."""

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if a worker has died. Needed while no step is running."""

    def close(self) -> None:
        """Release all resources. Safe to call twice."""
