"""Decides which ways to use some GPUs are worth a look."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.config.engine import ParallelConfig
from penstock.planning.shapes import Partition
from penstock.protocol.errors import ConfigError

MOST_RANKS = 64
Way = tuple[Partition, int]  # and how many replicas there are


def list_ways(
    parallel: ParallelConfig, num_gpus: int, has_experts: bool, with_stages: bool
) -> list[Way]:
    """The ways to use all GPUs, the fewest tensor-parallel ranks first.

    Sizes that were asked for are kept. Pipeline stages are listed only `with_stages`, or if they
    were asked for. Experts are sliced, and also spread over the ranks of all replicas; only spread
    if that was asked for. Raises ConfigError if the sizes do not fit the number of GPUs.
    """
    if parallel.enable_expert_parallel and not has_experts:
        raise ConfigError(
            "enable_expert_parallel is for models with experts, and this one has none: drop it"
        )
    num_stages = parallel.pipeline_parallel_size
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    asked = {name: getattr(parallel, name) for name in names if getattr(parallel, name) > 1}
    needed = parallel.tensor_parallel_size * num_stages * parallel.data_parallel_size
    if num_gpus < needed:
        given = " x ".join(f"{name}={size}" for name, size in asked.items())
        raise ConfigError(f"{given} needs {needed} GPUs, but --gpus is {num_gpus}")
    ways: list[Way] = []
    for tp in _sizes(parallel.tensor_parallel_size, num_gpus):
        for pp in _sizes(num_stages, num_gpus // tp):
            if pp > 1 and not with_stages and num_stages == 1:
                continue
            dp = num_gpus // (tp * pp)
            if parallel.data_parallel_size in (1, dp):
                eps = _expert_ranks(parallel, Partition(tp, pp), dp) if has_experts else [1]
                ways += [(Partition(tp, pp, ep), dp) for ep in eps]
    if not ways:
        given = ", ".join(f"{name}={size}" for name, size in asked.items())
        raise ConfigError(f"there is no way to use {num_gpus} GPUs with {given}: change --gpus")
    return ways


def _sizes(asked: int, most: int) -> Iterable[int]:
    if asked > 1:
        return [asked] if most % asked == 0 else []
    return [size for size in range(1, min(most, MOST_RANKS) + 1) if most % size == 0]


def _expert_ranks(parallel: ParallelConfig, sliced: Partition, dp: int) -> list[int]:
    """Among how many ranks experts may be spread. 1: they are sliced."""
    spread = []
    if dp > 1 and sliced.pp == 1:
        spread = [sliced.tp * dp]
    elif dp == 1 and sliced.tp > 1:
        spread = [sliced.tp]
    if parallel.enable_expert_parallel:
        return spread
    # Spread over the ranks of one engine, experts take as much memory and time as slices.
    return [1, *(ep for ep in spread if ep > sliced.tp)]
