"""The interface of a layer with weights to the loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from penstock.distributed.mesh import RankGroup
from penstock.ops.blocks import BlockTensor, Weight

ANY = -1  # a size in `Expected.shape` that only the checkpoint knows


@dataclass(frozen=True)
class Expected:
    """One checkpoint tensor that a layer needs."""

    shape: tuple[int, ...]  # before sharding; () also means one number in any shape
    rows: int | None = 0  # output dimension, stacked in fused tensors; None: shared by parts
    columns: int | None = 1  # input dimension; None: no such dimension, or not sharded
    cut: bool = True  # False: the layer gets it whole and takes its own share


Shape = tuple[int, ...]


@runtime_checkable
class Loadable(Protocol):
    """A layer that knows its checkpoint tensors by (parameter, part).

    A part is a piece of a fused layer under its checkpoint name, which is a sibling of the fused
    layer. An unfused layer has the single part ``""``.
    """

    def expected(self) -> Mapping[tuple[str, str], Shape | Expected]:
        """Every tensor the layer needs, with its shape in the checkpoint, before sharding."""

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        """Load this rank's shard of a tensor with the expected shape."""


def copy_shard(
    parameter: torch.Tensor, tensor: Weight, tp: RankGroup, num_shards: int | None = None
) -> None:
    """Fill a parameter with this rank's rows of a tensor that is not a matrix.

    `num_shards` is the number of distinct shards; None: as many as ranks.
    """
    assert not isinstance(tensor, BlockTensor), "only matrices are stored in blocks"
    shards = tp.size if num_shards is None else num_shards
    first = tp.rank * shards // tp.size * len(parameter)
    parameter.copy_(tensor[first : first + len(parameter)])
