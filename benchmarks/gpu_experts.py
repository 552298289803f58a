"""Mixture-of-experts kernels on a GPU, in the shapes of Qwen3-30B-A3B, over many configurations.

python benchmarks/gpu_experts.py compile PART PARTS   fill Triton's cache, several at once
python benchmarks/gpu_experts.py check                compare with the reference, in float32
python benchmarks/gpu_experts.py tune                 find the best configurations for each batch
python benchmarks/gpu_experts.py layer                time the layer as configured, and _grouped_mm

Times are medians of calls captured in a graph. Each call uses different experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import triton

from penstock.ops import experts as plain
from penstock.ops.triton import experts as fused
from penstock.ops.triton import routing, tuning
from penstock.ops.triton.tuning import ExpertsPlan, ExpertsTile, Launch, RowTile

HIDDEN, SIZE, EXPERTS, TOP_K = 2048, 768, 128, 8
ROUTING = plain.Routing(TOP_K, renormalize=True)
BATCHES = 8, 64, 256, 512, 1024, 2048, 4096, 16384
SHARED_MEMORY = 227 * 1024


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


class Layer:
    def __init__(self, num_experts: int = EXPERTS) -> None:
        self.num_experts = num_experts
        self.gate_up = randn(num_experts, 2 * SIZE, HIDDEN, scale=0.02)
        self.down = randn(num_experts, HIDDEN, SIZE, scale=0.02)


class Batch:
    def __init__(self, n: int, num_experts: int = EXPERTS) -> None:
        self.x = randn(n, HIDDEN)
        self.logits = randn(n, num_experts)
        self.weights, self.ids = routing.route(self.logits, ROUTING)


def time_us(calls: list[Callable[[], object]]) -> float:
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    bench = triton.testing.do_bench(graph.replay, warmup=5, rep=20, return_mode="median")
    return float(bench) * 1e3 / len(calls)


def _fits(rows: int, width: int, depth: int, stages: int) -> bool:
    return (rows + width) * depth * 2 * stages + 2048 <= SHARED_MEMORY


def tiles(n: int, *, is_gate_up: bool) -> Iterator[tuple[int, ExpertsTile]]:
    """The rows of a block, and a tile."""
    doubled = 2 if is_gate_up else 1
    columns: tuple[int, ...]
    if n <= 64:
        rows, depths, stages, groups = (16,), (64, 128, 256), (3, 4, 6), (1,)
        columns = (32, 64, 128) if is_gate_up else (64, 128, 256)
    else:
        rows, depths, stages = (32, 64) if n <= 512 else (64, 128), (64, 128), (3, 4)
        columns = (64, 128) if is_gate_up else (128, 256)
        groups = (4,) if n <= 512 else (1, 4, 8)
    for row in rows:
        for column in columns:
            for depth in depths:
                for stage in stages:
                    if not _fits(row, column * doubled, depth, stage):
                        continue
                    if column * doubled * depth < 8192 or column * doubled * depth > 32768:
                        continue
                    wide = row * column * doubled >= 128 * 256
                    swaps = (True, False) if row <= 32 else (False,)
                    for swap in swaps:
                        if swap and column < 64:
                            continue
                        for group in groups:
                            launch = Launch(8 if wide else 4, stage)
                            yield row, ExpertsTile(column, depth, swap, group, launch)


FEW_TILES = [
    RowTile(rows, columns, Launch(warps, 3))
    for rows in (1, 2, 4)
    for columns in (512, 1024, 2048)
    for warps in (1, 2, 4)
    if 512 <= rows * columns // warps <= 4096
]


def jobs() -> Iterator[tuple[int, bool, int, ExpertsTile]]:
    for n in BATCHES:
        for is_gate_up in (True, False):
            for rows, tile in tiles(n, is_gate_up=is_gate_up):
                yield n, is_gate_up, rows, tile


def runner(
    layer: Layer, batch: Batch, is_gate_up: bool, rows: int, tile: ExpertsTile
) -> Callable[[], object]:
    plan = ExpertsPlan(rows, tile, tile)
    blocks = routing.align(batch.ids, layer.num_experts, rows)
    if is_gate_up:
        return lambda: fused.run_gate_up(batch.x, blocks, TOP_K, layer.gate_up, None, "silu", plan)
    sorted_rows = randn(len(blocks.pairs), SIZE)
    return lambda: fused.run_down(sorted_rows, blocks, batch.weights, layer.down, None, plan)


def compile_part(part: int, parts: int) -> None:
    layer = Layer(TOP_K)
    batch = Batch(3, TOP_K)
    seen = sorted({job[1:] for job in jobs()})
    for is_gate_up, rows, tile in seen[part::parts]:
        try:
            runner(layer, batch, is_gate_up, rows, tile)()
        except Exception as error:  # a configuration that does not compile is not a candidate
            print("does not run:", is_gate_up, rows, tile, str(error)[:100])
    for tile in FEW_TILES[part::parts]:
        few(layer, batch, tile, tile)()
    torch.cuda.synchronize()


def few(layer: Layer, batch: Batch, first: RowTile, second: RowTile) -> Callable[[], object]:
    def call() -> object:
        fused.few_experts_tiles = lambda: (first, second)
        return fused._few(
            batch.x, batch.weights, batch.ids, layer.gate_up, layer.down, "silu", None, None
        )

    return call


def check() -> None:
    layer = Layer()
    exact = [layer.gate_up.float(), layer.down.float()]
    for n in (1, 2, 3, 8, 64, 300, 512, 4096):
        batch = Batch(n)
        weights, ids = plain.route(batch.logits, ROUTING)
        same = (ids.sort().values == batch.ids.sort().values).all(-1).float().mean()
        out = fused.experts(batch.x, batch.weights, batch.ids, layer.gate_up, layer.down, "silu")
        ref = plain.experts(batch.x.float(), batch.weights, batch.ids, *exact, "silu")
        error = (out.float() - ref).norm() / ref.norm()
        apart = (weights.sort().values - batch.weights.sort().values).abs().max()
        print(f"n={n}: error {error:.2e}; routed alike {same:.3f}, weights within {apart:.1e}")


def tune() -> None:
    layer = Layer()
    singles = [Batch(1) for _ in range(16)]
    found = [(time_us([few(layer, b, tile, tile) for b in singles]), tile) for tile in FEW_TILES]
    print(
        "n=1, both with one tile:", *[f"\n  {us:7.1f} us {tile}" for us, tile in sorted(found)[:6]]
    )
    for n in map(int, sys.argv[2:] or BATCHES):
        batches = [Batch(n) for _ in range(4 if n <= 512 else 1)]
        print(f"n={n}: reading all experts once {1.208e9 / 4.3e6 / 3:.0f} us a third")
        for is_gate_up in (True, False):
            found_tiles = []
            for rows, tile in tiles(n, is_gate_up=is_gate_up):
                try:
                    calls = [runner(layer, b, is_gate_up, rows, tile) for b in batches]
                    found_tiles.append((time_us(calls), rows, tile))
                except Exception as error:
                    print("does not run:", n, is_gate_up, rows, tile, str(error)[:60])
            best: dict[tuple[int, bool], list[tuple[float, int, ExpertsTile]]] = {}
            for entry in sorted(found_tiles):
                best.setdefault((entry[1], entry[2].swap), []).append(entry)
            flops = n * TOP_K * HIDDEN * SIZE * 2 * (2 if is_gate_up else 1)
            for entries in best.values():
                for us, rows, tile in entries[:3]:
                    print(
                        f"  {'gate_up' if is_gate_up else 'down   '} {us:8.1f} us "
                        f"{flops / us / 1e6:5.0f} TFLOP/s rows={rows} {tuple(tile)}",
                        flush=True,
                    )


def layer_times() -> None:
    layer = Layer()
    for n in (1, 2, 4, *BATCHES):
        batches = [Batch(n) for _ in range(8 if n <= 64 else 1)]

        def whole(b: Batch) -> object:
            weights, ids = routing.route(b.logits, ROUTING)
            return fused.experts(b.x, weights, ids, layer.gate_up, layer.down, "silu")

        rows = tuning.experts_plan(n * TOP_K, EXPERTS, 2).rows
        parts = {
            "all": [lambda b=b: whole(b) for b in batches],
            "route": [lambda b=b: routing.route(b.logits, ROUTING) for b in batches],
            "align": [lambda b=b, rows=rows: routing.align(b.ids, EXPERTS, rows) for b in batches],
        }
        if n > tuning.FEW_TOKENS:
            scaled = randn(n * TOP_K, HIDDEN)
            parts["sum"] = [lambda scaled=scaled, n=n: fused._sum(scaled, n)]
        parts["_grouped_mm"] = [lambda b=b: grouped(layer, b) for b in batches]
        print(
            f"n={n}", *[f"{name} {time_us(calls):.1f}" for name, calls in parts.items()], flush=True
        )


def grouped(layer: Layer, batch: Batch) -> torch.Tensor:
    """The same with torch's grouped matmul and as few other ops as possible."""
    flat = batch.ids.flatten().long()
    order = flat.argsort()
    counts = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0).int()
    x = batch.x[order // TOP_K]
    gate, up = torch._grouped_mm(x, layer.gate_up.transpose(1, 2), ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, layer.down.transpose(1, 2), ends)
    y = y * batch.weights.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(batch.x).index_add_(0, order // TOP_K, y)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "compile":
        compile_part(int(sys.argv[2]), int(sys.argv[3]))
    else:
        {"check": check, "tune": tune, "layer": layer_times}[sys.argv[1]]()
