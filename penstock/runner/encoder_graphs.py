"""EncoderGraphs: captured passes of a vision tower on a GPU, for shapes that repeat.

Passes of tiles are padded to fewer shapes, with graphs and without, so graphs do not change a bit.
A pass is captured the second time its shape occurs, if it is so small that launching its kernels
takes the host longer than computing them takes the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from penstock.layers.linear import Linear
from penstock.models.vision import MediaInputs, Pass, VisionTower
from penstock.runner.graphs import MAX_PADDED_WORK, GraphPool

MAX_GRAPHS = 32
MAX_SHAPES = 1024  # that are remembered without a graph


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    pixels: torch.Tensor  # its input
    rows: torch.Tensor  # its output
    arrangement: Any  # tensors that it reads


class EncoderGraphs:
    def __init__(self, tower: VisionTower, pool: GraphPool) -> None:
        self._tower = tower
        self._pool = pool
        layers = [module for module in tower.modules() if isinstance(module, Linear)]
        # What launches collectives, or looks for adapters, is not captured.
        self._may_capture = pool.enabled and all(
            layer.build.tp.size == 1 and layer.adapter is None for layer in layers
        )
        weights = [layer.in_features * layer.out_features for layer in layers]
        self._max_patches = MAX_PADDED_WORK * len(weights) / sum(weights)
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._seen: OrderedDict[tuple[Any, ...], None] = OrderedDict()  # shapes, the latest last

    def encode(self, items: Sequence[MediaInputs]) -> list[torch.Tensor]:
        """As `VisionTower.encode`. The results are valid until the next call."""
        passes = [self._tower.padded(each) for each in self._tower.join(items)]
        if len(passes) == 1:
            return self._tower.split(self._run(passes[0]), items)
        rows = [self._run(each).clone() for each in passes]  # the next may replay the same graph
        return self._tower.split(torch.cat(rows), items)

    def _run(self, given: Pass) -> torch.Tensor:
        captured = self._captured.get(given.shape)
        if captured is None:
            arrangement = self._tower.arrange(given.shape)
            if not self._is_due(given):
                rows: torch.Tensor = self._tower(given.pixels, arrangement)
                return rows
            captured = self._captured[given.shape] = self._capture(given, arrangement)
        captured.pixels.copy_(given.pixels)
        captured.graph.replay()
        return captured.rows

    def _is_due(self, given: Pass) -> bool:
        """Whether to capture a pass of this shape now. Records the shape."""
        if not self._may_capture or given.num_patches > self._max_patches:
            return False
        if len(self._captured) == MAX_GRAPHS:
            return False
        if given.shape in self._seen:
            del self._seen[given.shape]
            return True
        self._seen[given.shape] = None
        if len(self._seen) > MAX_SHAPES:
            self._seen.popitem(last=False)
        return False

    def _capture(self, given: Pass, arrangement: Any) -> _Captured:
        pixels = given.pixels.clone()
        graph, rows = self._pool.capture(lambda: self._tower(pixels, arrangement))
        return _Captured(graph, pixels, rows, arrangement)
