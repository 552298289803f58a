"""What a layer with weights offers to the loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from penstock.distributed.mesh import RankGroup
from penstock.ops.blocks import BlockTensor, Weight

ANY = -1  # a size in `Expected.shape` that the checkpoint alone knows


@dataclass(frozen=True)
class Expected:
    """One checkpoint tensor that a layer needs."""

    shape: tuple[int, ...]  # before sharding; () also stands for one number in any shape
    rows: int | None = 0  # the dimension of outputs, stacked in fused tensors; None: parts share it
    columns: int | None = 1  # the dimension of inputs; None: it has none, or every rank has all
    cut: bool = True  # False: the layer gets it whole, and takes its own share


Shape = tuple[int, ...]


@runtime_checkable
class Loadable(Protocol):
    """A layer knows its checkpoint tensors by (parameter, part).

    A part is a fused layer's piece under the name it has in checkpoints, where it is a sibling
    of the fused layer; an unfused layer has the one part ``""``.
    """

    def expected(self) -> Mapping[tuple[str, str], Shape | Expected]:
        """Every tensor it needs, with the checkpoint's shape, before sharding."""

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        """Take this rank's shard of a tensor that has the expected shape."""


def copy_shard(
    parameter: torch.Tensor, tensor: Weight, tp: RankGroup, num_shards: int | None = None
) -> None:
    """Fill a parameter with this rank's rows of a tensor that is not a matrix.

    `num_shards` is how many ranks' worth of different rows there are; None: as many as ranks.
    """
    assert not isinstance(tensor, BlockTensor), "only matrices are stored in blocks"
    shards = tp.size if num_shards is None else num_shards
    first = tp.rank * shards // tp.size * len(parameter)
    parameter.copy_(tensor[first : first + len(parameter)])
