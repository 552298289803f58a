"""Sampling over vocabulary shards against the reference with whole rows."""

from __future__ import annotations

import math

import pytest
import torch
from shard_ranks import choose_over_shards

from penstock.ops import sampling as reference
from penstock.ops.sampling import GREEDY

VOCAB = 1003  # shards begin at tokens that are no multiples of 4
TRUNCATIONS = [
    (0.0, VOCAB, 1.0),
    (0.0, 1, 1.0),
    (0.0, 20, 1.0),
    (0.0, 64, 0.7),
    (0.05, VOCAB, 1.0),
    (0.01, 50, 0.9),
    (0.5, 50, 0.9),
]
BACKENDS = ["cpu", "cpu-native"]


def tables(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A slot for each row. The first is greedy; the others have each truncation in turn."""
    floats, ints = torch.empty(rows, 3), torch.empty(rows, 2, dtype=torch.int64)
    ints[:, 1] = torch.randint(-(2**63), 2**63 - 1, (rows,))
    for row in range(rows):
        min_p, top_k, top_p = TRUNCATIONS[row % len(TRUNCATIONS)]
        floats[row] = torch.tensor([0.8, math.log(min_p) if min_p else -math.inf, top_p])
        ints[row, 0] = top_k
    floats[0, 0] = GREEDY
    return floats, ints


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu-native":
        from penstock.ops.cpu import library

        if library.load() is None:
            pytest.skip("needs the C++ library")
    return str(request.param)


def check(size: int, backend: str, logits: torch.Tensor, allowed: torch.Tensor | None) -> None:
    rows = len(logits)
    floats, ints = tables(rows)
    slots, positions = torch.randperm(rows), torch.randint(0, 2**34, (rows,))
    args = (logits, slots, positions, floats, ints)
    expected = torch.stack(
        [each.long() for each in reference.choose_tokens(*args, allowed=allowed)]
    )
    found = choose_over_shards(size, backend, *args, allowed=allowed)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("spread", [0.0, 0.3, 8.0])
def test_ranks_choose_the_token_of_whole_rows(size: int, backend: str, spread: float) -> None:
    """Also where all logits are equal: ties at the cutoff count, and go to the lower token."""
    torch.manual_seed(size)
    check(size, backend, torch.randn(21, VOCAB) * spread, None)


def test_ties_across_shards_go_to_the_lower_token(backend: str) -> None:
    """Few distinct values, as in bfloat16: more tokens equal the k-th than a rank sends."""
    torch.manual_seed(1)
    check(3, backend, (torch.randn(21, VOCAB) * 2).round(), None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_usable_logits_are_faulted_on_all_ranks(backend: str, bad: float) -> None:
    logits = torch.randn(8, VOCAB)
    if bad < 0:
        logits[1:3] = bad
        logits[3, :900] = bad
    else:
        logits[1, 7], logits[2, 999] = bad, bad
    check(2, backend, logits, None)


def test_masks_reach_the_tokens_of_each_shard(backend: str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(14, VOCAB) * 3
    allowed = torch.randint(-(2**31), 2**31 - 1, (14, -(-VOCAB // 32)), dtype=torch.int32)
    allowed[3] = 0  # leaves no token
    allowed[4, 16:] = 0  # leaves none on the second rank
    logits[5, 600] = math.nan  # faulted whether the mask allows it or not
    check(2, backend, logits, allowed)
