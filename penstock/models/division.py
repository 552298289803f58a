"""Refuses numbers of ranks that a model cannot be divided among, before any rank starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.config import EngineConfig
from penstock.config.engine import ParallelConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.build import Build
from penstock.layers.expert_share import has_experts
from penstock.loading.source import ModelSource
from penstock.loading.tasks import choose_task
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import ConfigError, PenstockError

MOST_RANKS = 64  # that are tried, to name those that would do


def check_division(config: EngineConfig, source: ModelSource) -> None:
    """Build the ranks' models on the meta device, which takes no memory.

    One rank's model is built only for options that need experts. Raises what the ranks would raise.
    If it is about the tensor-parallel size, the error names the sizes that do.
    """
    parallel = config.parallel
    if parallel.num_ranks == 1 and not _expert_options(config):
        return
    try:
        _build_stages(config, source, parallel)
    except ConfigError as error:
        sizes = [
            str(size)
            for size in range(1, MOST_RANKS + 1)
            if _fits(config, source, replace(parallel, tensor_parallel_size=size))
        ]
        if not sizes:
            raise  # it is about something else
        raise ConfigError(f"{error}; {', '.join(sizes)} would do") from error


def _fits(config: EngineConfig, source: ModelSource, parallel: ParallelConfig) -> bool:
    try:
        _build_stages(config, source, parallel)
    except PenstockError:
        return False
    return True


@torch.inference_mode()
def _build_stages(config: EngineConfig, source: ModelSource, parallel: ParallelConfig) -> None:
    """The last rank of each stage, whose share may be the smallest."""
    tp, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    generates = choose_task(config, source) == "generate"
    ep = tp * parallel.num_lanes if parallel.enable_expert_parallel else 1
    models = []
    for stage in range(num_stages):
        build = Build(
            dtype=torch.float32,
            device=torch.device("meta"),
            max_model_len=config.model.max_model_len or 2,
            ops=Ops("cpu"),
            mesh=Mesh(RankGroup(tp - 1, tp), RankGroup(stage, num_stages), RankGroup(ep - 1, ep)),
            generates=generates,
            takes_media=config.media.modalities,
            num_redundant_experts=parallel.num_redundant_experts,
        )
        models.append(build_model(source.config, build, config.model.model_impl))
    options = _expert_options(config)
    if options and not any(map(has_experts, models)):
        raise ConfigError(
            f"{options[0]} is for models with experts, and this one has none: drop it"
        )


def _expert_options(config: EngineConfig) -> list[str]:
    """The options that need a model with experts."""
    given = {
        "enable_expert_parallel": config.parallel.enable_expert_parallel,
        "enable_return_routed_experts": config.model.enable_return_routed_experts,
    }
    return [name for name, is_given in given.items() if is_given]
