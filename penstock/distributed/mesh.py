"""Mesh: owns a rank's position among the ranks of one engine, and the collectives between them.

Each kind of parallelism is a field that holds this rank's group. Tensor parallelism is the only one
so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankGroup:
    """Ranks that compute together. A single rank needs no process group."""

    rank: int = 0
    size: int = 1
    process_group: ProcessGroup | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate all ranks' tensors along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class Mesh:
    """This process's position. The default is a single rank."""

    tp: RankGroup = field(default_factory=RankGroup)  # each rank holds a shard of every layer


def join_mesh(rank: int, size: int, store_path: str, backend: str) -> Mesh:
    """Join the other ranks. They rendezvous through the file at `store_path`."""
    if size == 1:
        return Mesh()
    dist.init_process_group(backend, init_method=f"file://{store_path}", rank=rank, world_size=size)
    return Mesh(tp=RankGroup(rank, size, dist.group.WORLD))


def leave_mesh(mesh: Mesh) -> None:
    if mesh.tp.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
