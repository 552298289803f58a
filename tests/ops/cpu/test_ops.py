"""Every op of the C++ library against its torch reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged_batch import paged

from penstock.ops import reference
from penstock.ops.attention import AttentionMetadata
from penstock.ops.cpu import ops

SIZES = [1, 7, 8, 64, 129, 576]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rms_norm(isa: str, generator: torch.Generator, rows: int, size: int) -> None:
    x = torch.randn(rows, size, generator=generator) * 5
    weight = torch.randn(size, generator=generator)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=2e-6, rtol=2e-6
    )


def test_rms_norm_of_heads_inside_wider_rows(isa: str, generator: torch.Generator) -> None:
    heads = torch.randn(5, 12, 64, generator=generator)[:, 3:7]
    weight = torch.randn(64, generator=generator)
    torch.testing.assert_close(
        ops.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6)
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_add_rms_norm(isa: str, generator: torch.Generator, rows: int, size: int) -> None:
    x, residual = torch.randn(2, rows, size, generator=generator)
    weight = torch.randn(size, generator=generator)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_silu_mul(isa: str, generator: torch.Generator, rows: int, size: int) -> None:
    x = torch.randn(rows, 2 * size, generator=generator) * 10
    x[0, 0] = -200.0  # exp would overflow
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_layer_norm(
    isa: str, generator: torch.Generator, rows: int, size: int, has_bias: bool
) -> None:
    x = torch.randn(rows, size, generator=generator) * 5 + 3
    weight = torch.randn(size, generator=generator)
    bias = torch.randn(size, generator=generator) if has_bias else None
    torch.testing.assert_close(
        ops.layer_norm(x, weight, bias, 1e-5),
        reference.layer_norm(x, weight, bias, 1e-5),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("reach", [None, 0, 3, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 32), (6, 2, 20), (2, 1, 128)])
def test_varlen_attention(
    isa: str,
    generator: torch.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    reach: int | None,
) -> None:
    lengths = [1, 5, 32, 0, 33, 100, 64]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    width = heads + 2 * kv_heads
    rows = torch.randn(int(starts[-1]), width, head_dim, generator=generator)
    query, key, value = rows.split([heads, kv_heads, kv_heads], dim=1)
    found = ops.varlen_attention(query, key, value, starts, 0.3, reach)
    expected = reference.varlen_attention(query, key, value, starts, 0.3, reach)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_varlen_attention_of_a_request_is_the_same_alone_and_beside_others(
    isa: str, generator: torch.Generator
) -> None:
    starts = torch.tensor([0, 7, 77, 180], dtype=torch.int32)
    query, key, value = torch.randn(3, 180, 4, 32, generator=generator)
    together = ops.varlen_attention(query, key, value, starts, 0.3)
    for first, end in itertools.pairwise(starts.tolist()):
        own = (x[first:end] for x in (query, key, value))
        alone = ops.varlen_attention(*own, torch.tensor([0, end - first], dtype=torch.int32), 0.3)
        assert torch.equal(alone, together[first:end])


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (10, 5), (80, 16)])
def test_rotate_pair(isa: str, generator: torch.Generator, head_dim: int, half: int) -> None:
    rows = 11
    angles = torch.rand(rows, 1, half, generator=generator) * 6
    heads = torch.randn(rows, 6, head_dim, generator=generator)
    query, key = heads[:, :4], heads[:, 4:]
    expected = reference.rotate_pair(query, key, angles.cos(), angles.sin())
    rotated = ops.rotate_pair(query, key, angles.cos(), angles.sin())
    for one, other in zip(rotated, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 20])
@pytest.mark.parametrize("window", [None, 5, 40])
def test_paged_attention(
    isa: str, generator: torch.Generator, dtype: torch.dtype, head_dim: int, window: int | None
) -> None:
    queries, contexts = [1, 1, 1, 37, 70], [1, 33, 200, 37, 131]
    query, cache, metadata = paged(generator, dtype, head_dim, queries, contexts)
    scale = head_dim**-0.5
    torch.testing.assert_close(
        ops.paged_attention(query, cache, metadata, scale, window),
        reference.paged_attention(query, cache.float(), metadata, scale, window),
        atol=2e-5,
        rtol=1e-5,
    )


def test_attention_in_chunks_is_the_references(generator: torch.Generator) -> None:
    queries, contexts = [1, 1, 37, 70], [1, 200, 37, 131]
    query, cache, metadata = paged(generator, torch.bfloat16, 64, queries, contexts)
    plain = reference.paged_attention(query, cache, metadata, 0.125)
    chunked = reference.paged_attention(query, cache, metadata, 0.125, chunk=24)
    assert torch.equal(ops.paged_attention(query, cache, metadata, 0.125, chunk=24), chunked)
    assert not torch.allclose(plain, chunked)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(3.0, False), (None, True), (50.0, True)])
def test_capped_scores_and_sinks(
    isa: str,
    generator: torch.Generator,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    queries, contexts = [1, 1, 37, 70], [1, 200, 37, 131]
    query, cache, metadata = paged(generator, torch.float32, 64, queries, contexts)
    sinks = torch.randn(6, generator=generator) * 3 if has_sinks else None
    torch.testing.assert_close(
        ops.paged_attention(query, cache, metadata, 0.3, window, softcap, sinks),
        reference.paged_attention(query, cache, metadata, 0.3, window, softcap, sinks),
        atol=5e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_behind_the_window_are_not_read(
    isa: str, generator: torch.Generator, dtype: torch.dtype
) -> None:
    window, queries, contexts = 20, [1, 1, 9, 70], [1, 200, 100, 131]
    query, cache, metadata = paged(generator, dtype, 64, queries, contexts)
    expected = ops.paged_attention(query, cache, metadata, 0.125, window)
    for index, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        behind = max(context - count + 1 - window, 0) // cache.shape[2]
        cache[metadata.block_table[index, :behind]] = float("nan")
        metadata.block_table[index, : behind // 2] = 0
    cache[0] = float("nan")
    assert cache[1:].isnan().any()
    for implementation in (ops, reference):
        output = implementation.paged_attention(query, cache, metadata, 0.125, window)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("window", "num_heads"), [(None, 6), (40, 6), (None, 2), (None, 14)])
def test_a_token_attends_the_same_however_its_request_was_cut(
    isa: str,
    generator: torch.Generator,
    dtype: torch.dtype,
    window: int | None,
    num_heads: int,
) -> None:
    query, cache, metadata = paged(generator, dtype, 64, [150], [150], num_heads)
    whole = ops.paged_attention(query, cache, metadata, 0.125, window)
    for chunk in (1, 7, 64):
        for start in range(0, 150, chunk):
            end = min(start + chunk, 150)
            part = AttentionMetadata(
                torch.tensor([0, end - start], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
                metadata.block_table,
                metadata.slot_mapping[start:end],
                int(chunk == 1),
                end - start,
                end,
            )
            own = ops.paged_attention(query[start:end], cache, part, 0.125, window)
            assert torch.equal(own, whole[start:end])


def test_what_others_left_behind_in_a_block_is_not_read(
    isa: str, generator: torch.Generator
) -> None:
    query, cache, metadata = paged(generator, torch.float32, 64, [1, 20], [19, 35])
    expected = ops.paged_attention(query, cache, metadata, 0.125)
    cache[metadata.block_table[0, 1].item(), :, 3:] = float("nan")
    cache[metadata.block_table[1, 2].item(), :, 3:] = float("inf")
    cache[0] = float("nan")
    assert torch.equal(ops.paged_attention(query, cache, metadata, 0.125), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 30])
def test_write_kv(isa: str, generator: torch.Generator, dtype: torch.dtype, rows: int) -> None:
    heads = torch.randn(rows, 10, 20, generator=generator) * 100
    heads[0, 4, 0] = 1e-7  # below the normal numbers of float16
    key, value = heads[:, 4:7], heads[:, 7:]
    slots = torch.randperm(64, generator=generator)[:rows]
    cache, expected = torch.zeros(2, 8, 2, 8, 3, 20, dtype=dtype)
    ops.write_kv(key, value, cache, slots)
    reference.write_kv(key, value, expected, slots)
    assert torch.equal(cache, expected)


def test_other_dtypes_go_to_the_reference(isa: str, generator: torch.Generator) -> None:
    x = torch.randn(3, 16, generator=generator).bfloat16()
    weight = torch.ones(16, dtype=torch.bfloat16)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.silu_mul(x), reference.silu_mul(x))
    residual = torch.randn(3, 16, generator=generator)
    for arguments in [(residual, residual, weight), (residual, x, weight.float())]:
        expected = reference.add_rms_norm(*arguments, 1e-5)
        for own, other in zip(ops.add_rms_norm(*arguments, 1e-5), expected, strict=True):
            assert torch.equal(own, other)
