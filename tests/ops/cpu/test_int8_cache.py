"""The int8 KV cache: what is written, and attention to it, in C++ and in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import paged

from penstock.ops import reference
from penstock.ops.attention import AttentionMetadata, from_int8_entries, to_int8_entries
from penstock.ops.cpu import ops
from penstock.protocol.kv import INT8_SCALE_BYTES, FullAttentionSpec, KVCacheGroup, KVCacheLayout
from penstock.runner.kv_memory import KVMemory

HEAD_DIMS = [64, 80, 96, 128, 256, 20, 1]
QUERIES, CONTEXTS = [1, 1, 1, 37, 70], [1, 33, 200, 37, 131]


def int8_paged(
    generator: torch.Generator, head_dim: int, heads: tuple[int, int] = (6, 2)
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """As `paged`, with keys and values of very different sizes in 8 bits."""
    query, floats, metadata = paged(
        generator, torch.float32, head_dim, QUERIES, CONTEXTS, heads[0], heads[1]
    )
    sizes = torch.rand(*floats.shape[:4], 1, generator=generator) * 2 + 0.01
    return query, to_int8_entries(floats * sizes), metadata


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 30])
def test_the_library_writes_the_bits_that_torch_writes(
    isa: str, generator: torch.Generator, head_dim: int, rows: int
) -> None:
    heads = torch.randn(rows, 10, head_dim, generator=generator) * 100
    heads[0, 4] = 0.0
    heads[0, 5] *= 1e-33  # too small to divide by
    key, value = heads[:, 4:7], heads[:, 7:]
    slots = torch.randperm(64, generator=generator)[:rows]
    shape = (8, 2, 8, 3, head_dim + INT8_SCALE_BYTES)
    cache, expected = torch.zeros(2, *shape, dtype=torch.int8)
    ops.write_kv(key, value, cache, slots)
    reference.write_kv(key, value, expected, slots)
    assert torch.equal(cache, expected)


@given(
    numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70),
    spoiled=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
)
@settings(max_examples=60)
def test_a_head_comes_back_within_half_a_step_or_not_at_all(
    numbers: list[float], spoiled: float | None
) -> None:
    x = torch.tensor(numbers)
    step = x.abs().max() / 127
    if spoiled is not None:
        x[len(numbers) // 2] = spoiled
    cache = torch.zeros(1, 2, 1, 1, len(numbers) + INT8_SCALE_BYTES, dtype=torch.int8)
    heads = x.view(1, 1, -1)
    ops.write_kv(heads, heads, cache, torch.tensor([0]))
    for entry in (to_int8_entries(x), cache[0, 0, 0, 0], cache[0, 1, 0, 0]):
        back = from_int8_entries(entry)
        if spoiled is None:
            assert ((back - x).abs() <= step * 0.5001 + 1e-30).all()
        else:
            assert back.isnan().all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [None, 5, 40])
def test_attention_is_the_references_to_the_same_entries(
    isa: str, generator: torch.Generator, head_dim: int, window: int | None
) -> None:
    query, cache, metadata = int8_paged(generator, head_dim)
    scale = head_dim**-0.5
    expected = reference.paged_attention(query, from_int8_entries(cache), metadata, scale, window)
    for backend in (ops, reference):
        output = backend.paged_attention(query, cache, metadata, scale, window)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (12, 3)])
def test_heads_may_share_keys_in_any_number(
    isa: str, generator: torch.Generator, heads: tuple[int, int]
) -> None:
    query, cache, metadata = int8_paged(generator, 64, heads)
    torch.testing.assert_close(
        ops.paged_attention(query, cache, metadata, 0.125),
        reference.paged_attention(query, from_int8_entries(cache), metadata, 0.125),
        atol=2e-5,
        rtol=1e-5,
    )


def test_soft_caps_and_sinks_are_those_of_the_floats(generator: torch.Generator) -> None:
    query, cache, metadata = int8_paged(generator, 64)
    sinks = torch.randn(6, generator=generator)
    for window in (None, 40):
        output = reference.paged_attention(query, cache, metadata, 0.125, window, 20.0, sinks)
        floats = from_int8_entries(cache)
        expected = reference.paged_attention(query, floats, metadata, 0.125, window, 20.0, sinks)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("window", [None, 40])
def test_a_token_is_the_same_however_its_request_was_cut(
    isa: str, generator: torch.Generator, head_dim: int, window: int | None
) -> None:
    query, empty, metadata = paged(generator, torch.float32, head_dim, [150], [150])
    key, value = torch.randn(2, 150, 2, head_dim, generator=generator)
    positions = torch.arange(150)
    slots = metadata.block_table[0].long()[positions // 16] * 16 + positions % 16
    shape = (*empty.shape[:4], head_dim + INT8_SCALE_BYTES)

    def compute(chunk: int) -> torch.Tensor:
        """The request in chunks, from an empty cache on: its keys are written as it goes."""
        cache = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        outputs = []
        for start in range(0, 150, chunk):
            end = min(start + chunk, 150)
            ops.write_kv(key[start:end], value[start:end], cache, slots[start:end])
            part = replace(
                metadata,
                query_starts=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                slot_mapping=slots[start:end],
            )
            outputs.append(ops.paged_attention(query[start:end], cache, part, 0.125, window))
        return torch.cat(outputs)

    whole = compute(150)
    for chunk in (1, 7, 64):
        assert torch.equal(compute(chunk), whole)


@pytest.mark.parametrize("head_dim", [64, 80, 3])
def test_a_page_holds_its_entries_and_nothing_else(head_dim: int) -> None:
    spec = FullAttentionSpec(num_kv_heads=3, head_dim=head_dim, dtype="int8")
    assert spec.bytes_per_token() == 2 * 3 * (head_dim + INT8_SCALE_BYTES)
    group = KVCacheGroup(spec=spec, block_size=16, layer_names=["a", "b"])
    page_bytes = 16 * spec.bytes_per_token()
    layout = KVCacheLayout(groups=[group], num_blocks=5, page_bytes=page_bytes)
    caches = KVMemory(layout, torch.device("cpu")).caches
    assert layout.total_bytes == sum(cache.nbytes for cache in caches.values())
    caches["a"].fill_(1)
    assert not caches["b"].any()
    assert all(cache.data_ptr() % 64 == 0 for cache in caches.values())
    assert caches["a"][0].is_contiguous()
