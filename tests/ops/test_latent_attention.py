"""Latent attention in plain torch against attention to expanded keys, token by token."""

from __future__ import annotations

import pytest
import torch
from latent_batch import Sizes, make_batch

from penstock.ops.latent_attention import is_worth_expanding, latent_attention, write_latent

SMALL = Sizes(heads=4, nope=16, rope=8, value=12, rank=24)


@pytest.mark.parametrize(
    "sizes", [SMALL, Sizes(3, 5, 2, 7, 9), Sizes(1, 8, 4, 8, 64)], ids=["small", "odd", "one_head"]
)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_any_mix_of_prompts_chunks_and_decodes(sizes: Sizes, block_size: int) -> None:
    torch.manual_seed(0)
    query_lens, seq_lens = [1, 1, 1, 7, 60, 3, 50], [1, 18, 40, 7, 60, 40, 63]
    batch = make_batch(query_lens, seq_lens, sizes, block_size)
    output = latent_attention(*batch.arguments())  # type: ignore[arg-type]
    torch.testing.assert_close(output.double(), batch.expected, rtol=1e-5, atol=1e-5)


def test_long_queries_are_expanded_and_short_ones_absorbed() -> None:
    up = torch.empty(1, 256, 512)  # DeepSeek V3's sizes
    assert [is_worth_expanding(length, up) for length in (1, 64, 256)] == [False, False, True]
    small = torch.empty(4, 28, 24)  # SMALL's: the batches above have both kinds
    assert [is_worth_expanding(length, small) for length in (7, 50)] == [False, True]
    assert not is_worth_expanding(10**6, torch.empty(1, 256, 64)), "never, if rank is small"


def test_entries_are_written_where_their_slots_are() -> None:
    cache = torch.zeros(3, 4, 5)
    entries = torch.randn(3, 5)
    write_latent(entries, cache, torch.tensor([4, 11, 7]))
    assert torch.equal(cache[1, 0], entries[0])
    assert torch.equal(cache[2, 3], entries[1])
    assert torch.equal(cache[1, 3], entries[2])
    assert int((cache != 0).any(-1).sum()) == 3


def test_a_cache_of_8_bits_is_near() -> None:
    torch.manual_seed(1)
    batch = make_batch([1, 1, 30], [9, 40, 55], SMALL, 16, cache_dtype=torch.int8)
    output = latent_attention(*batch.arguments())  # type: ignore[arg-type]
    torch.testing.assert_close(output.double(), batch.expected, rtol=0.0, atol=0.05)
    entries = batch.entries[:2]
    cache = torch.zeros(1, 2, entries.shape[1] + 4, dtype=torch.int8)
    write_latent(entries, cache, torch.tensor([1, 0]))
    assert cache[0, 1, :-4].float().abs().max() == 127
