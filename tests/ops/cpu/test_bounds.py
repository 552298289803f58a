"""Numbers and shapes that would lead the library out of its arrays are refused before they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_batch import paged

from penstock.ops.cpu import ops
from penstock.ops.cpu.ops import step_of
from penstock.ops.cpu.packed import PackedLinear, PackedMatrix

BLOCKS, BLOCK_SIZE = 6, 16


@pytest.mark.parametrize("row", [-1, 100, 2**40, -(2**40)])
def test_a_row_that_an_embedding_does_not_have(isa: str, row: int) -> None:
    matrix = PackedMatrix(torch.randn(100, 32))
    for count in (1, 20):
        with pytest.raises(IndexError, match="penstock_embed"):
            matrix.embed(torch.tensor([*range(count), row]))
    assert matrix.embed(torch.tensor([0, 99])).shape == (2, 32)


@pytest.mark.parametrize("slot", [-1, BLOCKS * BLOCK_SIZE, 2**40])
def test_a_slot_that_the_cache_does_not_have(isa: str, slot: int) -> None:
    cache = torch.zeros(BLOCKS, 2, BLOCK_SIZE, 2, 8)
    keys = torch.ones(3, 2, 8)
    with pytest.raises(IndexError, match="penstock_write_kv"):
        ops.write_kv(keys, keys, cache, torch.tensor([0, 1, slot]))
    assert not cache.any()
    ops.write_kv(keys, keys, cache, torch.tensor([0, 1, BLOCKS * BLOCK_SIZE - 1]))
    assert cache.sum() == 2 * keys.numel()


@pytest.mark.parametrize(
    ("field", "index", "number"),
    [
        ("block_table", (1, 2), 1000),  # not in the cache
        ("block_table", (1, 0), -1),
        ("seq_lens", (1,), 49),  # more blocks than the table is wide
        ("seq_lens", (0,), 2),  # fewer tokens than are computed
        ("query_starts", (2,), 6),  # more rows than there are
        ("query_starts", (0,), -1),
        ("query_starts", (1,), 6),  # not ascending
    ],
)
def test_requests_that_lead_out_of_the_cache_or_the_rows(
    isa: str, generator: torch.Generator, field: str, index: Any, number: int
) -> None:
    query, cache, metadata = paged(generator, torch.float32, 64, [3, 2], [20, 40])
    ops.paged_attention(query, cache, metadata, 0.125)
    changed = getattr(metadata, field).clone()
    changed[index] = number
    wrong = dataclasses.replace(metadata, **{field: changed})
    with pytest.raises(IndexError, match="penstock_attend"):
        ops.paged_attention(query, cache, wrong, 0.125)


def test_blocks_past_a_request_are_not_looked_at(isa: str, generator: torch.Generator) -> None:
    query, cache, metadata = paged(generator, torch.float32, 64, [1, 1], [20, 40])
    expected = ops.paged_attention(query, cache, metadata, 0.125)
    metadata.block_table[0, 2] = 2**30
    assert torch.equal(ops.paged_attention(query, cache, metadata, 0.125), expected)


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_the_sampling_tables_do_not_have(isa: str, slot: int) -> None:
    floats, ints = torch.ones(2, 3), torch.ones(2, 2, dtype=torch.int64)
    with pytest.raises(IndexError, match="penstock_choose_tokens"):
        ops.choose_tokens(
            torch.zeros(2, 40), torch.tensor([0, slot]), torch.tensor([1, 1]), floats, ints
        )


def test_a_top_k_of_nothing_leaves_the_best(isa: str, generator: torch.Generator) -> None:
    logits = torch.randn(3, 500, generator=generator)
    slots = torch.zeros(3, dtype=torch.int64)
    floats, ints = torch.tensor([[1.0, -99.0, 1.0]]), torch.tensor([[0, 7]])
    tokens, _ = ops.choose_tokens(logits, slots, slots, floats, ints)
    assert torch.equal(tokens, logits.argmax(1))


WIDE, NARROW = torch.ones(4, 64), torch.ones(4, 32)
HEADS, CACHE = torch.ones(4, 2, 64), torch.zeros(2, 2, 16, 2, 64)
SLOTS = torch.arange(4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.rms_norm(WIDE, torch.ones(32), 1e-5),
        lambda: ops.add_rms_norm(WIDE, NARROW, torch.ones(64), 1e-5),
        lambda: ops.add_rms_norm(WIDE, WIDE, torch.ones(32), 1e-5),
        lambda: ops.silu_mul(torch.ones(4, 63)),
        lambda: ops.rotate_pair(HEADS, HEADS, *torch.ones(2, 3, 1, 32)),  # angles of fewer rows
        lambda: ops.rotate_pair(HEADS, HEADS, *torch.ones(2, 4, 1, 64)),  # a head has 32 pairs
        lambda: ops.rotate_pair(HEADS, HEADS[:3], *torch.ones(2, 4, 1, 32)),
        lambda: ops.write_kv(HEADS, HEADS, CACHE, SLOTS[:3]),
        lambda: ops.write_kv(HEADS, HEADS[:3], CACHE, SLOTS),
        lambda: ops.write_kv(HEADS[:, :1], HEADS[:, :1], CACHE[..., :32].contiguous(), SLOTS),
        lambda: PackedLinear([PackedMatrix(WIDE)])(WIDE[0], None),
        lambda: PackedLinear([PackedMatrix(WIDE)])(NARROW, None),
        lambda: PackedLinear([PackedMatrix(WIDE)])(WIDE, torch.ones(3)),
        lambda: PackedLinear([PackedMatrix(WIDE)])(WIDE, torch.ones(4, dtype=torch.bfloat16)),
    ],
)
def test_shapes_that_do_not_fit_together(call: Any) -> None:
    with pytest.raises((ValueError, RuntimeError, IndexError, AssertionError)):
        call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_are_float32_whatever_is_torchs_default(
    isa: str, generator: torch.Generator, dtype: torch.dtype
) -> None:
    query, cache, metadata = paged(generator, torch.float32, 64, [3, 2], [20, 40])
    matrix = PackedMatrix(torch.randn(50, 64, generator=generator))
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: ops.rms_norm(WIDE, WIDE[0], 1e-5),
        lambda: ops.silu_mul(WIDE),
        lambda: ops.paged_attention(query, cache, metadata, 0.125),
        lambda: PackedLinear([matrix])(WIDE, None),
        lambda: matrix.embed(SLOTS),
    ]
    expected = [call() for call in calls]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = [call() for call in calls]
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("part", ["rows", "head_dim", "heads"])
def test_queries_that_do_not_fit_the_step_or_the_cache(
    generator: torch.Generator, part: str
) -> None:
    query, cache, metadata = paged(generator, torch.float32, 64, [3, 2], [20, 40])
    match part:
        case "rows":
            query = query[:4]
        case "head_dim":
            query = query[..., :32].contiguous()
        case _:
            query = query[:, :5].contiguous()
    with pytest.raises(ValueError, match="5 rows in the step"):
        ops.paged_attention(query, cache, metadata, 0.125)


@pytest.mark.parametrize("field", ["query_starts", "seq_lens", "block_table", "slot_mapping"])
def test_a_step_of_whole_layers_is_made_of_the_right_integers(
    generator: torch.Generator, field: str
) -> None:
    _, _, metadata = paged(generator, torch.float32, 64, [3, 2], [20, 40])
    angles = torch.ones(5, 1, 32)
    step_of(metadata, angles, angles)
    tensor = getattr(metadata, field)
    other = tensor.long() if tensor.dtype == torch.int32 else tensor.int()
    with pytest.raises(AssertionError):
        step_of(dataclasses.replace(metadata, **{field: other}), angles, angles)


@pytest.mark.parametrize("starts", [[0, 5], [0, 4, 3, 10], [1, 10], [0, 11], [-1, 10]])
def test_requests_that_do_not_divide_the_rows(isa: str, starts: list[int]) -> None:
    rows = torch.zeros(10, 2, 16)
    with pytest.raises(IndexError, match="penstock_attend_rows"):
        ops.varlen_attention(rows, rows, rows, torch.tensor(starts, dtype=torch.int32), 1.0)


def test_keys_that_do_not_fit_the_queries() -> None:
    starts = torch.tensor([0, 10], dtype=torch.int32)
    query, key = torch.zeros(10, 3, 16), torch.zeros(10, 2, 16)
    with pytest.raises(ValueError, match="queries"):
        ops.varlen_attention(query, key, key, starts, 1.0)
    with pytest.raises(ValueError, match="queries"):
        ops.varlen_attention(query, query[:9], query[:9], starts, 1.0)
