"""CUDA graphs: the sizes that steps are padded to, and the memory pool that graphs share."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

T = TypeVar("T")

LEAST_ROWS = 8  # cuBLAS is no faster for two to seven rows
DECODE_SIZES = (
    1, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240,
    256, 288, 320, 352, 384, 416, 448, 480, 512,
)  # fmt: skip
MIXED_SIZES = (16, 32, 64, 128, 256, 512)
# Steps of models without a KV cache, up to a size at which a matmul takes the device as long as the
# host takes to launch it: rows times the weights of a matmul, on an H200.
LARGER_SIZES = (*range(640, 1024, 128), *range(1024, 2048, 256), *range(2048, 8193, 512))
MAX_PADDED_WORK = 1.5e10
NUM_REQUESTS = (8, 64)  # that such a step is padded to


class GraphPool:
    """Captures graphs into one shared memory pool. The graphs never run at the same time."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._seen: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    def is_due(self, key: Hashable) -> bool:
        """Whether graphs are enabled and `key` was seen before. Records `key`."""
        if not self.enabled:
            return False
        is_known = key in self._seen
        self._seen.add(key)
        return is_known

    def capture(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture what `compute` launches. Replaying the graph overwrites the returned value."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        return graph, result


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The padded sizes of decode steps, ascending."""
    sizes = [size for size in DECODE_SIZES if size < max_num_seqs]
    return [*sizes, min(max_num_seqs, DECODE_SIZES[-1])]


def mixed_sizes(max_rows: int, mean_weights: float | None) -> list[int]:
    """The padded sizes of other steps, ascending.

    `mean_weights` are those of a matmul of a model without a KV cache, None of another. Kernels
    that read a cache are faster if the host tells them about large steps, which a graph cannot.
    """
    sizes = [*MIXED_SIZES]
    if mean_weights is not None:
        sizes += [size for size in LARGER_SIZES if size * mean_weights <= MAX_PADDED_WORK]
    return [size for size in sizes if size <= max_rows]


def at_least(sizes: list[int], wanted: int) -> int | None:
    """The smallest of `sizes` that is at least `wanted`, or None."""
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
