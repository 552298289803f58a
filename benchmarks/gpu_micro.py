"""Single kernels on a GPU, with other configurations than those of `ops/triton/tuning.py`.

python benchmarks/gpu_micro.py [decode] [prefill] [prompt] [varlen] [matmul] [sampling]

Times are medians of calls captured in a graph, without launch gaps.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.ops.attention import AttentionMetadata
from penstock.ops.triton import attention
from penstock.ops.triton import prompt_attention as prompts
from penstock.ops.triton import varlen_attention as texts
from penstock.ops.triton.linear import linear
from penstock.ops.triton.sampling import choose_tokens
from penstock.ops.triton.tuning import DecodePlan, Launch, PrefillTile

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
VOCAB = 151_936


def time_us(function: Callable[[], object], repeats: int = 20) -> float:
    return time_each_us(lambda _: function(), repeats, warmup=10, rep=40)


def time_each_us(
    call: Callable[[int], object], count: int, warmup: int = 3, rep: int = 12
) -> float:
    """The time of `call(0)` to `call(count - 1)` in one graph, divided by their number."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index)
    bench = triton.testing.do_bench(graph.replay, warmup=warmup, rep=rep, return_mode="median")
    return float(bench) * 1e3 / count


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Paged:
    """A step of n requests with `query` tokens each and caches of the given lengths."""

    def __init__(self, seq_lens: torch.Tensor, query: int, heads: int) -> None:
        n, longest = len(seq_lens), int(seq_lens.max())
        blocks = -(-longest // BLOCK_SIZE)
        self.cache = randn(n * blocks + 1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.query = randn(n * query, heads, HEAD_DIM)
        table = torch.randperm(n * blocks, device="cuda").int().view(n, blocks) + 1
        starts = torch.arange(n + 1, device="cuda", dtype=torch.int32) * query
        self.metadata = AttentionMetadata(
            starts, seq_lens, table, seq_lens.long(), n if query == 1 else 0, query, longest
        )

    def __call__(self) -> torch.Tensor:
        return attention.paged_attention(self.query, self.cache, self.metadata, HEAD_DIM**-0.5)


def decode() -> None:
    """us and TB/s of keys and values, for lengths drawn between low and high."""
    cases = (1, 256, 256, 16), (24, 300, 1900, 16), (64, 130, 380, 32), (128, 200, 1900, 16)
    for n, low, high, heads in cases:
        lens = torch.randint(low, high + 1, (n,), device="cuda", dtype=torch.int32)
        step, size = Paged(lens, 1, heads), int(lens.sum()) * 4 * KV_HEADS * HEAD_DIM
        own = attention.decode_plan
        plans = [own(HEAD_DIM, 2, n, KV_HEADS)]
        for tile, (warps, stages), (splits, tokens) in itertools.product(
            (32, 64), ((2, 3), (4, 2)), ((1, 64), (4, 512), (4, 1024), (8, 256), (32, 64))
        ):
            plans.append(DecodePlan(tile, splits, tokens // tile, Launch(warps, stages)))
        found = []
        for plan in plans:
            attention.decode_plan = lambda *_, plan=plan: plan
            found.append((time_us(step), plan))
        attention.decode_plan = own
        print(f"decode n={n} {low}..{high} heads={heads}; ours, then the best:")
        for us, plan in [found[0], *sorted(found)[:3]]:
            print(f"  {us:8.1f} us {size / us / 1e6:5.2f} TB/s  {plan}")


def print_tiles(
    module: Any, name: str, own: PrefillTile, call: Callable[[], object], flops: int
) -> None:
    """Time `call` with the tile that is configured, then with others in place of it."""
    found = []
    configured = getattr(module, name)
    first = time_us(call, 2), own
    for rows, tokens, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (2, 3)):
        tile = PrefillTile(rows, tokens, Launch(warps, stages))
        setattr(module, name, lambda *_, tile=tile: tile)
        found.append((time_us(call, 2), tile))
    setattr(module, name, configured)
    for us, tile in [first, *sorted(found)[:3]]:
        print(f"  {us:8.1f} us {flops / us / 1e6:5.0f} TFLOP/s  {tile}")


def prefill() -> None:
    """us and TFLOP/s, causal, over the paged cache."""
    for n, length, heads in (4, 4096, 32), (32, 512, 32):
        lens = torch.full((n,), length, device="cuda", dtype=torch.int32)
        step, flops = Paged(lens, length, heads), 2 * n * length**2 * heads * HEAD_DIM
        print(f"prefill {n} x {length} heads={heads}; ours, then the best:")
        own = attention.prefill_tile(HEAD_DIM, 2, length)
        print_tiles(attention, "prefill_tile", own, step, flops)


def prompt() -> None:
    """us and TFLOP/s of prompts without a cached prefix; torch's own attention beside it."""
    for n, length, heads in (2, 4096, 32), (4, 4096, 32), (16, 512, 32), (8, 1024, 16):
        flops = 2 * n * length**2 * heads * HEAD_DIM
        qkv = randn(n * length, heads + 2 * KV_HEADS, HEAD_DIM)
        parts = qkv.split([heads, KV_HEADS, KV_HEADS], dim=1)
        starts = torch.arange(n + 1, device="cuda", dtype=torch.int32) * length
        metadata = AttentionMetadata(
            starts, starts.diff(), starts[:n, None], starts.long(), 0, length, length,
            num_prompts=n, num_prompt_rows=n * length,
        )  # fmt: skip
        output, scale = torch.empty_like(parts[0]), HEAD_DIM**-0.5

        def ours(parts=parts, metadata=metadata, scale=scale, output=output) -> None:  # type: ignore[no-untyped-def]
            prompts.prompt_attention(*parts, metadata, scale, output)

        print(f"prompt {n} x {length} heads={heads}; ours, then the best, then torch's:")
        print_tiles(prompts, "prompt_tile", prompts.prompt_tile(2, length), ours, flops)
        dense = [part.unflatten(0, (n, length)).transpose(1, 2) for part in parts]

        def theirs(dense=dense) -> None:  # type: ignore[no-untyped-def]
            F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

        for backend in SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION:
            with sdpa_kernel(backend):
                us = time_us(theirs, 2)
            print(f"  {us:8.1f} us {flops / us / 1e6:5.0f} TFLOP/s  {backend.name}, dense")


def varlen() -> None:
    """us and TFLOP/s of bidirectional attention over packed texts; torch's own beside it."""
    for n, length, heads, size in (1, 512, 12, 64), (8, 512, 12, 64), (16, 512, 12, 64):
        flops = 4 * n * length**2 * heads * size
        parts = randn(n * length, 3 * heads, size).chunk(3, dim=1)
        starts = torch.arange(n + 1, device="cuda", dtype=torch.int32) * length

        def ours(parts=parts, starts=starts, size=size) -> None:  # type: ignore[no-untyped-def]
            texts.varlen_attention(*parts, starts, size**-0.5)

        print(f"varlen {n} x {length} heads={heads} x {size}; ours, then the best, then torch's:")
        own = texts.varlen_tile(2, size, n * length, heads)
        print_tiles(texts, "varlen_tile", own, ours, flops)
        dense = [part.unflatten(0, (n, length)).transpose(1, 2) for part in parts]

        def theirs(dense=dense) -> None:  # type: ignore[no-untyped-def]
            F.scaled_dot_product_attention(*dense)

        for backend in SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION:
            with sdpa_kernel(backend):
                us = time_us(theirs, 2)
            print(f"  {us:8.1f} us {flops / us / 1e6:5.0f} TFLOP/s  {backend.name}, dense")


def matmul() -> None:
    """us per matrix, over enough matrices that none is in the GPU's cache."""
    shapes = (4096, 1024), (1024, 2048), (6144, 1024), (6144, 4096), (24576, 4096), (4096, 12288)
    for out, size in shapes:
        count = int(400e6 // (out * size * 2)) + 2
        weights = [randn(out, size) for _ in range(count)]
        times = []
        for num_rows in (1, 8, 64):
            x = randn(num_rows, size)
            times.append(time_us(lambda x=x, ws=weights: [F.linear(x, w) for w in ws], 1) / count)
        x = randn(1, size)
        one = time_us(lambda x=x, ws=weights: [linear(x, w, None) for w in ws], 1) / count
        shown = ", ".join(f"{us:.1f}" for us in times)
        print(f"matmul {out} x {size}: one row {one:.1f} us; cuBLAS with 1, 8, 64 rows {shown}")


def sampling() -> None:
    for num_rows in 1, 64, 256:
        logits = torch.randn(num_rows, VOCAB, device="cuda")
        slots = torch.arange(num_rows, device="cuda")
        times = []
        for draws, top_k, top_p in (False, VOCAB, 1.0), (True, VOCAB, 1.0), (True, 50, 0.9):
            floats = torch.tensor([[0.6, -float("inf"), top_p]] * num_rows, device="cuda")
            ints = torch.tensor([[top_k, 7, 0]] * num_rows, device="cuda")
            rows = (logits, slots, slots, floats, ints)
            settings = {"draws": draws, "truncates": top_k < VOCAB}
            times.append(time_us(lambda rows=rows, s=settings: choose_tokens(*rows, **s), 2))
        shown = ", ".join(f"{us:.0f}" for us in times)
        print(f"sampling {num_rows} rows, us: greedy, drawn, with top_k and top_p: {shown}")


if __name__ == "__main__":
    torch.manual_seed(0)
    parts = {part.__name__: part for part in (decode, prefill, prompt, varlen, matmul, sampling)}
    for name in sys.argv[1:] or parts:
        parts[name]()
