"""Philox against its published vectors, and its keys and counters against plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.ops.random import (
    MAX_GUMBEL,
    gumbel,
    gumbel_of_groups,
    gumbel_of_tokens,
    philox4x32,
    random_words,
    signed_seed,
    uniform,
)

# Random123's kat_vectors, philox4x32 10: counter, key, result
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter: str, key: str, expected: str) -> None:
    result = philox4x32(torch.tensor(words_of(counter)), torch.tensor(words_of(key)))
    assert result.tolist() == words_of(expected)
    assert python_philox(words_of(counter), words_of(key)) == words_of(expected)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**31, 2**33 + 1])
def test_key_is_the_seed_and_counter_is_position_group_and_purpose(
    seed: int, position: int
) -> None:
    groups = torch.tensor([0, 1, 12287, 65535])
    words = random_words(torch.tensor([signed_seed(seed)]), torch.tensor([position]), groups)
    for column, group in enumerate(groups.tolist()):
        counter = [position & 0xFFFFFFFF, position >> 32, group, 0]
        expected = python_philox(counter, [seed & 0xFFFFFFFF, seed >> 32])
        assert words[:, column].tolist() == expected


def test_uniform_is_never_zero_or_one_and_is_exact() -> None:
    extremes = uniform(torch.tensor([0, 511, 512, 2**32 - 1]))
    assert extremes.dtype == torch.float32
    assert extremes.tolist() == [2.0**-24, 2.0**-24, 1.5 * 2.0**-23, 1.0 - 2.0**-24]


def test_gumbel_is_finite_and_bounded_by_max_gumbel() -> None:
    low, high = gumbel(torch.tensor([0, 2**32 - 1])).tolist()
    assert low == pytest.approx(-math.log(24 * math.log(2)), rel=1e-5)
    assert high == pytest.approx(24 * math.log(2), rel=1e-5)
    assert high < MAX_GUMBEL


def test_noise_of_a_token_is_its_lane_of_its_group() -> None:
    seeds, positions = torch.tensor([5, -1]), torch.tensor([0, 9])
    ids = torch.tensor([[0, 1, 2, 3, 41, 1000], [7, 6, 5, 4, 3, 2]])
    groups = torch.arange(251).expand(2, -1)
    dense = gumbel_of_groups(seeds[:, None], positions[:, None], groups).flatten(1)
    assert torch.equal(gumbel_of_tokens(seeds, positions, ids), dense.gather(1, ids))


def test_noise_of_an_element_does_not_depend_on_the_shape_it_is_computed_in() -> None:
    groups = torch.arange(1003).expand(5, -1)
    seeds, positions = torch.arange(5)[:, None] * 2**40, torch.arange(5)[:, None] + 3
    whole = gumbel_of_groups(seeds, positions, groups)
    for row in range(5):
        alone = gumbel_of_groups(
            seeds[row : row + 1], positions[row : row + 1], groups[row : row + 1, 17:40]
        )
        assert torch.equal(alone[0], whole[row, 17:40])
