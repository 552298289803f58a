"""Tokens chosen in C++ against the torch reference: the same, whatever the logits and the cuts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ops import sampling as reference
from penstock.ops.cpu.library import load
from penstock.ops.cpu.sampling import choose_tokens
from penstock.ops.random import gumbel_of_tokens
from penstock.ops.sampling import NEG_INF

GREEDY = torch.finfo(torch.float32).tiny  # what the tables hold for temperature 0
KINDS = ("normal", "flat", "peaked", "tied", "equal", "masked", "single")


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((rows, vocab), generator=generator)
    match kind:
        case "normal":
            return noise * 3.5 - 2
        case "flat":
            return noise * 0.01
        case "peaked":
            return noise * 8
        case "tied":
            return (noise * 2).round()
        case "equal":
            return torch.full((rows, vocab), -7.25)
        case "masked":
            hidden = torch.rand((rows, vocab), generator=generator) < 0.7
            hidden[:, 0] = False
            return (noise * 3).masked_fill(hidden, NEG_INF)
        case _:  # all but one
            only = torch.randint(vocab, (rows, 1), generator=generator)
            return torch.full((rows, vocab), NEG_INF).scatter_(1, only, -3.5)


def tables(
    rows: list[tuple[float, float, int, float]], vocab: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(temperature, min_p, top_k, top_p) of each slot, as the sampler's tables hold them."""
    floats = torch.tensor(
        [[t or GREEDY, math.log(m) if m > 0 else NEG_INF, p, 9.0] for t, m, _, p in rows]
    )
    ints = torch.tensor(
        [
            [min(k, vocab) if k > 0 else vocab, seed * 977 - i, 5]
            for i, (_, _, k, _) in enumerate(rows)
        ]
    )
    return floats, ints


def expected(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
) -> list[int]:
    best, greedy = logits.max(-1)
    scaled = reference.scale_logits(logits, best, floats[slots, 0])
    cut = reference.Truncation(floats[slots, 1], ints[slots, 0], floats[slots, 2])
    drawn = reference.draw(scaled, cut, ints[slots, 1], positions)
    return torch.where(floats[slots, 0] > GREEDY, drawn, greedy).tolist()


def check(kind: str, cuts: list[tuple[float, float, int, float]], vocab: int, seed: int) -> None:
    logits = logits_of(kind, len(cuts), vocab, seed)
    slots = torch.arange(len(cuts)).flip(0)
    positions = torch.arange(len(cuts)) * 3 + 2**33 * (seed % 2)
    floats, ints = tables(cuts, vocab, seed)
    tokens, faulted = choose_tokens(logits, slots, positions, floats, ints)
    assert not faulted.any()
    assert tokens.tolist() == expected(logits, slots, positions, floats, ints)
    for row in range(len(cuts)):
        one = slice(row, row + 1)
        alone, _ = choose_tokens(logits[one], slots[one], positions[one], floats, ints)
        assert alone[0] == tokens[row]


GRID: list[tuple[float, float, int, float]] = [
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 1, 1.0),
    (1.0, 0.0, 40, 1.0),
    (1.5, 0.0, 10**6, 1.0),
    (1.0, 0.0, 0, 0.9),
    (1.0, 0.0, 0, 1e-9),
    (2.0, 0.0, 0, 0.9999),
    (0.8, 0.1, 0, 1.0),
    (1.0, 1.0, 0, 1.0),
    (1.0, 1e-9, 0, 1.0),
    (1.0, 0.01, 900, 0.7),
    (0.05, 0.0, 50, 0.95),
    (30.0, 0.0, 0, 0.5),
    (1e-30, 0.0, 0, 0.5),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 65, 997, 3001])
def test_every_cut_gives_the_references_token(isa: str, kind: str, vocab: int) -> None:
    check(kind, GRID, vocab, seed=vocab)


@pytest.mark.parametrize("kind", ["normal", "flat", "tied"])
def test_a_whole_vocabulary_gives_the_references_tokens(isa: str, kind: str) -> None:
    check(kind, GRID, 49_152 + 3, seed=1)


cuts = st.tuples(
    st.sampled_from([0.0, 0.05, 0.7, 1.0, 4.0]),
    st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    st.integers(0, 800),
    st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
)


@settings(max_examples=60)
@given(
    rows=st.lists(cuts, min_size=1, max_size=8),
    kind=st.sampled_from(KINDS),
    vocab=st.integers(1, 700),
    seed=st.integers(0, 2**20),
)
def test_any_cut_gives_the_references_token(
    isa: str, rows: list[tuple[float, float, int, float]], kind: str, vocab: int, seed: int
) -> None:
    check(kind, rows, vocab, seed)


def test_long_runs_of_draws_give_the_references_tokens(isa: str) -> None:
    """Enough draws that a difference in the last place of noise or mass would show somewhere."""
    rows, vocab = 4000, 211
    logits = logits_of("normal", 1, vocab, seed=5).expand(rows, -1)
    floats, ints = tables([(1.0, 0.0, 0, 0.9), (1.3, 0.0, 0, 1.0)], vocab, seed=11)
    slots, positions = torch.arange(rows) % 2, torch.arange(rows)
    tokens, _ = choose_tokens(logits, slots, positions, floats, ints)
    assert tokens.tolist() == expected(logits, slots, positions, floats, ints)
    assert len(tokens.unique()) > 20


def test_noise_is_the_references_to_the_bit(isa: str) -> None:
    library = load()
    assert library is not None
    ids = torch.arange(100_003, dtype=torch.int32)
    ours = torch.empty(len(ids))
    for seed, position in ((0, 0), (-1, 2**40 + 3), (2**62 + 12345, 77)):
        library.penstock_noise(ids.data_ptr(), len(ids), seed, position, ours.data_ptr())
        theirs = gumbel_of_tokens(torch.tensor([seed]), torch.tensor([position]), ids[None].long())
        assert torch.equal(ours, theirs[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 70, 100])
def test_a_row_that_is_not_finite_is_faulted_and_no_other(
    isa: str, temperature: float, wrong: float, place: int
) -> None:
    logits = logits_of("normal", 3, 101, seed=0)
    logits[1, place] = wrong
    floats, ints = tables([(temperature, 0.0, 0, 0.9)] * 3, 101, seed=0)
    slots = positions = torch.arange(3)
    tokens, faulted = choose_tokens(logits, slots, positions, floats, ints)
    assert faulted.tolist() == [False, True, False]
    assert tokens[1] == 0
    assert tokens[[0, 2]].tolist() == [
        expected(logits[[row]], slots[[row]], positions[[row]], floats, ints)[0] for row in (0, 2)
    ]


def test_a_row_with_nothing_to_choose_from_is_faulted(isa: str) -> None:
    floats, ints = tables([(1.0, 0.0, 0, 1.0)], 33, seed=0)
    zero = torch.zeros(1, dtype=torch.int64)
    _, faulted = choose_tokens(torch.full((1, 33), NEG_INF), zero, zero, floats, ints)
    assert faulted.tolist() == [True]
    nothing = torch.zeros((1, 2), dtype=torch.int32)
    _, faulted = choose_tokens(torch.zeros(1, 33), zero, zero, floats, ints, allowed=nothing)
    assert faulted.tolist() == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [7, 64, 203, 997])
def test_a_mask_of_bits_bans_as_minus_infinity_does(isa: str, kind: str, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    words = -(-vocab // 32)
    bits = torch.randint(
        -(2**31), 2**31, (len(GRID), words), dtype=torch.int32, generator=generator
    )
    logits = logits_of(kind, len(GRID), vocab, seed=2)
    bits[:, 0] |= 1
    logits[:, 0] = -4.0
    slots, positions = torch.arange(len(GRID)), torch.arange(len(GRID)) + 9
    floats, ints = tables(GRID, vocab, seed=3)
    tokens, faulted = choose_tokens(logits, slots, positions, floats, ints, allowed=bits)
    banned = logits.masked_fill(~reference.unpack_bitmask(bits, vocab), NEG_INF)
    assert not faulted.any()
    assert tokens.tolist() == expected(banned, slots, positions, floats, ints)


def test_a_fault_under_a_mask_is_a_fault(isa: str) -> None:
    logits = torch.zeros(1, 40)
    logits[0, 35] = math.nan
    bits = torch.tensor([[1, 0]], dtype=torch.int32)
    floats, ints = tables([(0.0, 0.0, 0, 1.0)], 40, seed=0)
    zero = torch.zeros(1, dtype=torch.int64)
    arguments: dict[str, Any] = {"allowed": bits}
    assert choose_tokens(logits, zero, zero, floats, ints, **arguments)[1].tolist() == [True]
