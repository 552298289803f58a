"""Shapes that fill no vector, tile or block: the same bits, and nothing from outside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import paged

from penstock.ops.attention import AttentionMetadata, to_int8_entries
from penstock.ops.cpu import ops
from penstock.ops.cpu.packed import PackedLinear, PackedMatrix, quantize_int8

# The fixture's instruction set is the same for all examples of a test.
SETTINGS = settings(max_examples=100)


@SETTINGS
@given(
    head_dim=st.sampled_from([1, 3, 8, 15, 17, 33, 48, 65]),
    block_size=st.sampled_from([1, 3, 16, 48]),
    heads=st.sampled_from([(1, 1), (3, 3), (6, 2), (7, 1), (70, 1)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int8]),
    window=st.sampled_from([None, 1, 7, 32, 33]),
    context=st.integers(1, 100),
    data=st.data(),
)
def test_some_rows_of_a_request_attend_as_all_of_them_and_not_to_what_is_around(
    isa: str,
    head_dim: int,
    block_size: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    window: int | None,
    context: int,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(0)
    floats = torch.float32 if dtype == torch.int8 else dtype
    query, cache, metadata = paged(
        generator, floats, head_dim, [context], [context], *heads, block_size
    )
    if dtype == torch.int8:
        cache = to_int8_entries(cache)
    whole = ops.paged_attention(query, cache, metadata, 0.3, window)
    assert whole.isfinite().all()
    start = data.draw(st.integers(0, context - 1))
    end = data.draw(st.integers(start + 1, context))
    seen = max(start + 1 - window, 0) if window is not None else 0
    # What these rows must not see, in their blocks and in all others, is NaN.
    positions = torch.arange(seen, end)
    blocks = metadata.block_table[0, positions // block_size].long()
    poisoned = torch.full_like(cache.view(torch.uint8), 0xFF).view(dtype)
    for side in (0, 1):
        poisoned[blocks, side, positions % block_size] = cache[blocks, side, positions % block_size]
    part = AttentionMetadata(
        torch.tensor([0, end - start], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32),
        metadata.block_table,
        metadata.slot_mapping[start:end],
        int(end - start == 1),
        end - start,
        end,
    )
    own = ops.paged_attention(query[start:end], poisoned, part, 0.3, window)
    assert torch.equal(own, whole[start:end])


@pytest.mark.parametrize("is_int8", [True, False])
@SETTINGS
@given(
    columns=st.sampled_from([1, 15, 17, 31, 33, 49, 100]),
    blocks=st.integers(1, 5),
    rows=st.integers(1, 110),
    data=st.data(),
)
def test_rows_multiply_alone_as_together_and_keep_their_nans_to_themselves(
    isa: str, is_int8: bool, columns: int, blocks: int, rows: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(columns, 32 * blocks, generator=generator)
    linear = PackedLinear([PackedMatrix(quantize_int8(weight) if is_int8 else weight)])
    x = torch.randn(rows, 32 * blocks, generator=generator)
    whole = linear(x, None)
    start = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(start + 1, rows))
    assert torch.equal(linear(x[start:end], None), whole[start:end])
    x[start, -1] = float("nan")
    broken = linear(x, None)
    assert broken[start].isnan().all()
    others = torch.arange(rows) != start
    assert torch.equal(broken[others], whole[others])
