"""Mesh: owns a rank's position among the ranks of one engine, and the collectives between them.

Each kind of parallelism is a field that holds this rank's group. World ranks are counted along
tensor parallelism first: rank = stage * tp_size + tp_rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Peers(Protocol):
    """Faster collectives for the tensors that fit. All ranks must agree on which do."""

    def fits(self, x: torch.Tensor) -> bool: ...
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...
    def stack(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class RankGroup:
    """Ranks that compute together. A single rank needs no process group."""

    rank: int = 0
    size: int = 1
    process_group: ProcessGroup | None = None
    peers: Peers | None = None  # on GPUs that can read each other's memory

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.size == 1:
            return x
        is_plain = x.is_floating_point() and x.is_contiguous()
        if self.peers is not None and is_plain and self.peers.fits(x):
            return self.peers.all_reduce(x)
        dist.all_reduce(x, group=self.process_group)
        return x

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, in rank order: [*shape] -> [size, *shape]."""
        if self.size == 1:
            return x[None]
        if self.peers is not None and self.peers.fits(x):
            return self.peers.stack(x)
        stacked = x.new_empty((self.size, *x.shape))
        dist.all_gather([*stacked.unbind(0)], x.contiguous(), group=self.process_group)
        return stacked

    def reduce_scatter(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """A tensor for each rank, of one shape -> the sum of what all ranks have for this one."""
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts, group=self.process_group)
        return out

    def broadcast(self, x: torch.Tensor, rank: int) -> None:
        """Give all ranks the tensor of one, in place."""
        if self.size > 1:
            dist.broadcast(x, group=self.process_group, group_src=rank)

    def exchange(self, x: torch.Tensor, going: list[int], coming: list[int]) -> torch.Tensor:
        """Rows for each rank, in rank order -> the rows that the ranks have for this one."""
        out = x.new_empty((sum(coming), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), coming, going, group=self.process_group)
        return out


@dataclass(frozen=True)
class Mesh:
    """This process's position. The default is a single rank."""

    tp: RankGroup = field(default_factory=RankGroup)  # each rank holds a shard of every layer
    pp: RankGroup = field(default_factory=RankGroup)  # rank = stage: each holds some of the layers
    ep: RankGroup = field(default_factory=RankGroup)  # each holds some of the experts, whole
    world: RankGroup = field(default_factory=RankGroup)  # all ranks of the engine

    @property
    def spans_replicas(self) -> bool:
        """Whether the ranks that experts are spread over have different tokens."""
        return self.ep.size > self.tp.size

    @property
    def num_lanes(self) -> int:
        """Replicas with different tokens among the ranks that experts are spread over."""
        return self.ep.size // self.tp.size if self.spans_replicas else 1

    @property
    def lane(self) -> int:
        """The number of this rank's replica among them."""
        return self.ep.rank // self.tp.size if self.spans_replicas else 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @property
    def reports(self) -> bool:
        """Whether this rank's step results carry those of the requests: one rank's of a stage."""
        return self.tp.rank == 0

    def layers_of_stage(self, num_layers: int) -> range:
        """This stage's share of a model's layers. Raises ConfigError if some stage has none."""
        stage, num_stages = self.pp.rank, self.pp.size
        if num_stages > num_layers:
            raise ConfigError(
                f"pipeline_parallel_size must be at most {num_layers}, the model's number of "
                f"layers, got {num_stages}"
            )
        return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)


def join_mesh(
    rank: int, tp_size: int, pp_size: int, rendezvous: str, backend: str,
    spread_experts: bool = False, num_lanes: int = 1,
) -> Mesh:  # fmt: skip
    """Join the other ranks, at a URL for torch's rendezvous (file:// or tcp://).

    `backend` names one for each kind of device. So every group takes tensors on the host, too.
    With several lanes, which are replicas without pipeline stages, experts are spread over all.
    """
    size = tp_size * pp_size * num_lanes
    if size == 1:
        return Mesh()
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
    stages = [list(range(first, first + tp_size)) for first in range(0, size, tp_size)]
    pipelines = [list(range(first, size, tp_size)) for first in range(tp_size)]
    tp, world = _join_group(rank, stages), RankGroup(rank, size, dist.group.WORLD)
    return Mesh(
        tp=tp,
        pp=_join_group(rank, pipelines) if pp_size > 1 else RankGroup(),
        ep=world if num_lanes > 1 else tp if spread_experts else RankGroup(),
        world=world,
    )


def _join_group(rank: int, groups: Sequence[Sequence[int]]) -> RankGroup:
    """The group of world rank `rank`. All ranks must make all groups, in the same order."""
    joined = RankGroup()
    for ranks in groups:
        if len(ranks) == 1:
            continue
        is_world = len(ranks) == dist.get_world_size()
        process_group = dist.group.WORLD if is_world else dist.new_group(list(ranks))
        if rank in ranks:
            joined = RankGroup(ranks.index(rank), len(ranks), process_group)
    return joined


def leave_mesh(mesh: Mesh) -> None:
    if mesh.world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
