"""What a layer with weights offers to the loader."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from penstock.ops.blocks import Weight


@runtime_checkable
class Loadable(Protocol):
    """A layer knows its checkpoint tensors by (parameter, part).

    A part is a fused layer's piece under the name it has in checkpoints, where it is a sibling
    of the fused layer; an unfused layer has the one part ``""``.
    """

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Every tensor it needs, with the checkpoint's shape, before sharding."""

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        """Take this rank's shard of a tensor that has the expected shape."""
