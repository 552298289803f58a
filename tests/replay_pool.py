"""A pool of CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from penstock.models.base import Hidden
from penstock.runner.graphs import GraphPool

T = TypeVar("T", torch.Tensor, Hidden)


class ReplayPool(GraphPool):
    """A replay computes again into the same tensors. What is captured must be free to run once."""

    def __init__(self) -> None:
        super().__init__(enabled=False)  # which needs no GPU
        self.enabled = True
        self.num_captured = self.num_replayed = 0

    def capture(self, compute: Callable[[], T]) -> tuple[Any, T]:
        self.num_captured += 1
        result = compute()
        kept = _tensors(result)
        for tensor in kept:
            tensor.zero_()  # what is captured does not run

        def replay() -> None:
            self.num_replayed += 1
            for tensor, computed in zip(kept, _tensors(compute()), strict=True):
                tensor.copy_(computed)

        return SimpleNamespace(replay=replay), result


def _tensors(result: torch.Tensor | Hidden) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    residual = [] if result.residual is None else [result.residual]
    return [result.states, *residual, *result.aux]
