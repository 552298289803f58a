"""Expert parallelism: which experts a rank holds, and which of a token's experts are among them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.distributed.mesh import RankGroup
from penstock.layers.build import Build
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.layers.experts import Experts, ExpertsConfig


def spread_experts(num_experts: int, num_ranks: int) -> list[tuple[int, ...]]:
    """The experts of each rank, in order. Where ranks do not divide them, the first have one more.

    >>> spread_experts(5, 2)
    [(0, 1, 2), (3, 4)]
    """
    if num_experts < num_ranks:
        raise ConfigError(
            f"enable_expert_parallel spreads whole experts, and the model's {num_experts} are "
            f"fewer than {num_ranks} ranks: use fewer, or drop it"
        )
    size, rest = divmod(num_experts, num_ranks)
    starts = [rank * size + min(rank, rest) for rank in range(num_ranks + 1)]
    return [tuple(range(*pair)) for pair in pairwise(starts)]


def take_share(build: Build, config: ExpertsConfig) -> tuple[Build, ExpertsConfig]:
    """What this rank's experts are made from: with expert parallelism, whole experts."""
    ep = build.mesh.ep
    if ep.size == 1:
        return build, config
    held = spread_experts(config.num_experts, ep.size)[ep.rank]
    whole = replace(build, mesh=replace(build.mesh, tp=RankGroup()))
    return whole, replace(config, held=held)


class ExpertShare(nn.Module):
    """Translates experts to this rank's. Those of other ranks get a number past the last one."""

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        super().__init__()
        self.num_held = len(config.own_experts)
        numbers = torch.full((config.num_experts,), self.num_held, dtype=torch.int32)
        numbers[list(config.own_experts)] = torch.arange(self.num_held, dtype=torch.int32)
        self.register_buffer("numbers", numbers.to(build.device), persistent=False)
        self.numbers: torch.Tensor

    def forward(
        self, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids [n, top_k] as this rank's experts take them."""
        own = self.numbers[ids.long()]
        return weights.masked_fill(own == self.num_held, 0.0), own


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
