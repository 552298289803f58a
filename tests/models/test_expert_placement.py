"""Where experts go: all are somewhere, none is twice on a rank, and the busiest rank has less."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.layers.expert_placement import (
    PlacedExperts,
    Placement,
    rebalanced,
    spread_experts,
    work_of,
)
from penstock.protocol.errors import ConfigError

CPU = torch.device("cpu")


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, Placement]:
    """A number of experts, and where they and some copies are."""
    ranks = draw(st.integers(2, 5))
    count = draw(st.integers(ranks, 12))
    redundant = draw(st.integers(0, count * (ranks - 1)))
    return count, spread_experts(count, ranks, redundant)


@given(placements(), st.data())
def test_a_placement_has_every_expert_and_no_rank_has_one_twice(
    placed: tuple[int, Placement], data: st.DataObject
) -> None:
    """However the loads change."""
    count, first = placed
    current = first
    for _ in range(3):
        loads = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
        new = rebalanced(loads, current)
        assert {expert for experts in new for expert in experts} == {*range(count)}
        assert all(len({*experts}) == len(experts) for experts in new)
        assert [len(experts) for experts in new] == [len(experts) for experts in first]
        assert new is current or max(work_of(loads, new)) < max(work_of(loads, current))
        for old, experts in zip(current, new, strict=True):
            assert all(experts[old.index(each)] == each for each in experts if each in old)
        current = new


def test_the_busiest_experts_get_the_copies() -> None:
    loads = [100.0, 1.0, 1.0, 50.0, 1.0, 1.0]
    placement = rebalanced(loads, spread_experts(6, 3, 3))
    assert [sum(expert in experts for experts in placement) for expert in range(6)] == [
        3, 1, 1, 2, 1, 1
    ]  # fmt: skip
    work = work_of(loads, placement)
    assert max(work) / (sum(work) / 3) < 1.2


def test_a_balance_that_is_good_enough_stays() -> None:
    placement = spread_experts(4, 2)
    assert rebalanced([10.0, 10.0, 10.0, 10.5], placement) is placement


def test_too_many_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_redundant_experts must be at most 8, so that 3"):
        spread_experts(4, 3, 9)


def test_the_copy_of_a_token_does_not_depend_on_the_batch() -> None:
    placed = PlacedExperts(spread_experts(6, 3, 6), 6, 0, CPU)
    weights, ids = torch.rand(50, 2), torch.randint(0, 6, (50, 2))
    owners, places = placed.find(weights, ids)
    order = torch.randperm(50)
    again, others = placed.find(weights[order[:7]], ids[order[:7]])
    assert torch.equal(again, owners[order[:7]])
    assert torch.equal(others, places[order[:7]])
    _, own = placed.held_here(weights, ids)
    assert torch.equal(own < placed.num_held, owners == 0)
