"""Paged attention in C++: compare instruction sets and KV cache dtypes, alternating.

    python benchmarks/cpu_attention.py [--head-dim 64] [--rounds 30]

Prints the lowest CPU time of a call over the rounds, on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from penstock.ops.attention import AttentionMetadata, to_int8_entries
from penstock.ops.cpu import ops
from penstock.ops.cpu.library import load

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 9, 3, 16
SHAPES = {  # rows of a request, its tokens, requests
    "prefill of 512": (512, 512, 1),
    "decode at 512, 16 requests": (1, 512, 16),
    "decode at 4096": (1, 4096, 1),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


def make_call(
    dtype: torch.dtype, head_dim: int, shape: tuple[int, int, int]
) -> Callable[[], object]:
    rows, length, requests = shape
    table = torch.randperm(length // BLOCK_SIZE * requests).int() + 1
    floats = torch.randn(len(table) + 1, 2, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
    cache = to_int8_entries(floats) if dtype == torch.int8 else floats.to(dtype)
    query = torch.randn(rows * requests, NUM_HEADS, head_dim)
    metadata = AttentionMetadata(
        query_starts=torch.arange(requests + 1, dtype=torch.int32) * rows,
        seq_lens=torch.full((requests,), length, dtype=torch.int32),
        block_table=table.view(requests, -1),
        slot_mapping=torch.zeros(len(query), dtype=torch.int64),
        num_decodes=requests if rows == 1 else 0,
        max_query_len=rows,
        max_seq_len=length,
    )
    return lambda: ops.paged_attention(query, cache, metadata, head_dim**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    library = load()
    assert library is not None, "the C++ library is not built"
    library.penstock_set_threads(1)
    names = ("portable", "neon", "avx2", "avxvnni", "avx512vnni")
    sets = [name for name in names if library.penstock_select_isa(name.encode())]
    print(f"head_dim {args.head_dim}, microseconds a call")
    print("| | cache | " + " | ".join(sets) + " |")
    print("|---|---|" + "---|" * len(sets))
    for title, shape in SHAPES.items():
        calls = {name: make_call(dtype, args.head_dim, shape) for name, dtype in DTYPES.items()}
        best: dict[tuple[str, str], float] = {}
        for _ in range(args.rounds):
            for cache, call in calls.items():
                for isa in sets:
                    library.penstock_select_isa(isa.encode())
                    start = time.thread_time()
                    call()
                    taken = time.thread_time() - start
                    best[cache, isa] = min(best.get((cache, isa), taken), taken)
        for cache in calls:
            times = " | ".join(f"{best[cache, isa] * 1e6:.0f}" for isa in sets)
            print(f"| {title} | {cache} | {times} |")


if __name__ == "__main__":
    main()
