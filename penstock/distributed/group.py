"""Groups of processes that hold shards of one model, and the collectives between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Group:
    """This process's place among `size` ranks. One rank alone needs no process group."""

    rank: int = 0
    size: int = 1
    process_group: ProcessGroup | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors side by side along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=-1)


def join_group(rank: int, size: int, store_path: str, backend: str) -> Group:
    """Meet the other ranks through a file that all of them can see."""
    if size == 1:
        return Group()
    dist.init_process_group(backend, init_method=f"file://{store_path}", rank=rank, world_size=size)
    return Group(rank, size, dist.group.WORLD)


def leave_group(group: Group) -> None:
    if group.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
