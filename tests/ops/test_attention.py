"""Paged attention against plain attention over each request's own tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.ops.attention import AttentionMetadata, paged_attention, varlen_attention, write_kv


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    chunk: int | None,
) -> torch.Tensor:
    """One request, in float64, position by position. The queries are the last tokens."""
    groups = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(groups, 1)
    value = value.double().repeat_interleave(groups, 1)
    rows = []
    for index in range(len(query)):
        end = len(key) - len(query) + index + 1
        start = max(0, end - window) if window else 0
        start = max(start, (end - 1) // chunk * chunk) if chunk else start
        scores = torch.einsum("hd,khd->hk", query[index].double(), key[start:end]) * scale
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[start:end]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("window", "chunk"), [(None, None), (5, None), (64, None), (None, 6), (None, 64), (7, 10)]
)
@pytest.mark.parametrize("softcap", [None, 1e6])  # the same, on the way that softcaps take
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_any_mix_of_prompts_chunks_and_decodes(
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    heads: int,
    kv_heads: int,
    block_size: int,
) -> None:
    torch.manual_seed(0)
    dim, scale = 8, 0.3
    query_lens, seq_lens = [1, 1, 1, 7, 20, 3], [1, 18, 40, 7, 33, 40]
    num_blocks = [-(-length // block_size) for length in seq_lens]
    # Every page is poisoned: what a request did not write must not matter.
    cache = torch.full((sum(num_blocks) + 1, 2, block_size, kv_heads, dim), float("nan"))
    order = torch.randperm(sum(num_blocks)) + 1
    table = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    keys, values, queries, slots = [], [], [], []
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = order[sum(num_blocks[:index]) :][: num_blocks[index]]
        table[index, : len(blocks)] = blocks
        key, value = torch.randn(2, seq_len, kv_heads, dim)
        positions = torch.arange(seq_len)
        where = blocks[positions // block_size] * block_size + positions % block_size
        past = seq_len - query_len
        write_kv(key[:past], value[:past], cache, where[:past])
        keys.append(key)
        values.append(value)
        queries.append(torch.randn(query_len, heads, dim))
        slots.append(where[past:])
    metadata = AttentionMetadata(
        query_starts=torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
        num_decodes=3,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    new = [slice(-length, None) for length in query_lens]
    write_kv(
        torch.cat([key[part] for key, part in zip(keys, new, strict=True)]),
        torch.cat([value[part] for value, part in zip(values, new, strict=True)]),
        cache,
        metadata.slot_mapping,
    )
    # Blocks behind a window or before a chunk are given back while a request runs.
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        past = seq_len - query_len
        first = 0 if window is None else max(past + 1 - window, 0)
        first = first if chunk is None else max(first, past // chunk * chunk)
        table[index, : first // block_size] = 0
    output = paged_attention(
        torch.cat(queries), cache, metadata, scale, window, softcap, chunk=chunk
    )
    expected = torch.cat(
        [
            naive(query, key, value, scale, window, chunk)
            for query, key, value in zip(queries, keys, values, strict=True)
        ]
    )
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reach", [None, 1, 4])
def test_bidirectional_attention_stays_inside_each_request(reach: int | None) -> None:
    torch.manual_seed(0)
    lengths = [3, 1, 6]
    query = torch.randn(10, 4, 8)
    key, value = torch.randn(2, 10, 2, 8)
    starts = torch.tensor(np.cumsum([0, *lengths]))
    output = varlen_attention(query, key, value, starts, 0.5, reach)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        part = slice(start, end)
        wide_key = key[part].repeat_interleave(2, 1)
        wide_value = value[part].repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", query[part], wide_key) * 0.5
        if reach is not None:
            tokens = torch.arange(end - start)
            scores[:, (tokens - tokens[:, None]).abs() > reach] = float("-inf")
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_value)
        torch.testing.assert_close(output[part], expected, rtol=1e-5, atol=1e-5)
