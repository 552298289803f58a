"""Batches of requests in a paged cache, for tests of attention."""

from __future__ import annotations

import torch

from penstock.ops.attention import AttentionMetadata


def paged(
    generator: torch.Generator,
    dtype: torch.dtype,
    head_dim: int,
    queries: list[int],
    contexts: list[int],
    num_heads: int = 6,
    num_kv_heads: int = 2,
    block_size: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Queries, a cache that holds every context in scattered blocks, and where they stand."""
    blocks = [-(-context // block_size) for context in contexts]
    free = (torch.randperm(sum(blocks), generator=generator) + 1).int()
    table = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
    for index, ids in enumerate(free.split(blocks)):
        table[index, : len(ids)] = ids
    shape = (sum(blocks) + 1, 2, block_size, num_kv_heads, head_dim)
    cache = torch.randn(shape, generator=generator).to(dtype)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator) * 2
    metadata = AttentionMetadata(
        starts,
        torch.tensor(contexts, dtype=torch.int32),
        table,
        torch.zeros(len(query), dtype=torch.int64),
        sum(count == 1 for count in queries),
        max(queries),
        max(contexts),
    )
    return query, cache, metadata
