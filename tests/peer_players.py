"""One process that plays all ranks of a `PeerMemory` on one GPU, a stream and graphs for each.

A rank that waits keeps the GPU from loading code and from allocating memory. So the others could
not begin, unless all has been captured before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.ops.triton.peers import PeerMemory

Compute = Callable[[PeerMemory], torch.Tensor]


class Players:
    def __init__(self, size: int, max_bytes: int) -> None:
        device = torch.device("cuda")
        num_bytes = PeerMemory.buffer_bytes(size, max_bytes)
        self._buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(size)
        ]
        addresses = [buffer.data_ptr() for buffer in self._buffers]
        self.ranks = [PeerMemory(rank, addresses, device, max_bytes) for rank in range(size)]
        self._streams = [torch.cuda.Stream() for _ in range(size)]

    def capture(self, compute: Compute) -> tuple[list[torch.cuda.CUDAGraph], list[torch.Tensor]]:
        """A graph and its result for each rank. Capture everything before the first replay."""
        for buffer in self._buffers:
            buffer.fill_(1)  # everybody has been told by everybody: no rank waits
        for rank in self.ranks:
            rank._counts.zero_()
        graphs, results = [], []
        for rank in self.ranks:
            compute(rank)  # compiles
            rank._counts.zero_()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results.append(compute(rank))
            graph.replay()  # the first one may allocate
            rank._counts.zero_()
            torch.cuda.synchronize()
            graphs.append(graph)
        for buffer in self._buffers:
            buffer.zero_()
        torch.cuda.synchronize()
        return graphs, results

    def replay(self, graphs: list[torch.cuda.CUDAGraph], times: int = 1) -> float:
        """Run all ranks side by side. Returns the milliseconds of the first."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record(self._streams[0])
        for _ in range(times):
            for stream, graph in zip(self._streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        end.record(self._streams[0])
        torch.cuda.synchronize()
        return start.elapsed_time(end)
