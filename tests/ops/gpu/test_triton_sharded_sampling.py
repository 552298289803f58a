"""Triton's sampling over vocabulary shards against its own with whole rows."""

from __future__ import annotations

import math

import pytest
import torch
from shard_ranks import choose_over_shards

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton.bitmask import apply_bitmask
from penstock.ops.triton.sampling import GREEDY, choose_tokens

VOCAB = 4203  # more than a chunk; the second shard begins at no multiple of 4
TRUNCATIONS = [(0.0, VOCAB, 1.0), (0.0, 20, 1.0), (0.05, VOCAB, 1.0), (0.01, 50, 0.8)]


@pytest.mark.parametrize("truncates", [False, True])
def test_ranks_choose_the_token_of_whole_rows(device: torch.device, truncates: bool) -> None:
    """In bfloat16 many tokens tie, at the top and at the cutoff."""
    rows = 6
    floats, ints = torch.empty(rows, 3), torch.empty(rows, 2, dtype=torch.int64)
    ints[:, 1] = torch.randint(-(2**63), 2**63 - 1, (rows,))
    for row in range(rows):
        min_p, top_k, top_p = TRUNCATIONS[row % 4 if truncates else 0]
        floats[row] = torch.tensor([0.8, math.log(min_p) if min_p else -math.inf, top_p])
        ints[row, 0] = top_k
    floats[0, 0] = float(GREEDY.value)
    logits = torch.randn(rows, VOCAB).bfloat16()
    logits[1] = 1.0  # every token ties
    logits[2, 4000] = math.nan
    slots, positions = torch.arange(rows), torch.randint(0, 2**34, (rows,))
    args = [each.to(device) for each in (logits, slots, positions, floats, ints)]
    tokens, faulted = choose_tokens(*args, truncates=truncates)
    found = choose_over_shards(2, "cuda", *args, truncates=truncates)
    assert found.tolist() == [tokens.tolist(), faulted.long().tolist()]


def test_a_shards_logits_are_masked_by_its_own_bits(device: torch.device) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (2, -(-VOCAB // 32)), dtype=torch.int32)
    whole = torch.zeros(3, VOCAB)
    rows = torch.tensor([2, 0])
    own = whole[:, 2102:].clone().to(device)
    whole = whole.to(device)
    apply_bitmask(whole, bits.to(device), rows.to(device))
    apply_bitmask(own, bits.to(device), rows.to(device), first=2102)
    assert torch.equal(own, whole[:, 2102:])
