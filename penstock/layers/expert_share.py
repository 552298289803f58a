"""Expert parallelism: which experts a rank is built with and reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from penstock.distributed.mesh import RankGroup
from penstock.layers.build import Build
from penstock.layers.expert_placement import spread_experts

if TYPE_CHECKING:
    from penstock.layers.experts import Experts, ExpertsConfig


def take_share(build: Build, config: ExpertsConfig) -> tuple[Build, ExpertsConfig]:
    """What this rank's experts are made from: with expert parallelism, whole experts."""
    ep = build.mesh.ep
    if ep.size == 1:
        return build, config
    placement = spread_experts(config.num_experts, ep.size, build.num_redundant_experts)
    whole = replace(build, mesh=replace(build.mesh, tp=RankGroup()))
    return whole, replace(config, placement=placement, held=placement[ep.rank])


def has_experts(model: nn.Module) -> bool:
    return bool(expert_layers(model))


def names_elsewhere(model: nn.Module) -> tuple[str, ...]:
    """Patterns of the names of tensors whose experts are on other ranks."""
    configs = [layer.config for layer in expert_layers(model)]
    held = {expert for config in configs for expert in config.own_experts}
    count = max((config.num_experts for config in configs), default=0)
    others = [str(expert) for expert in range(count) if expert not in held]
    return (rf"\.experts\.(?:{'|'.join(others)})\.",) if others else ()


def expert_layers(model: nn.Module) -> list[Experts]:
    """The layers with experts, in the order in which they run."""
    from penstock.layers.experts import Experts  # that module imports this one

    return [module for module in model.modules() if isinstance(module, Experts)]
