"""The routing simulation in short form: the router's promises on its traces."""

from __future__ import annotations

from types import ModuleType

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return load_script("benchmarks/route_simulation.py")


@pytest.mark.parametrize("trace", ["shared-prefix", "multi-turn"])
@pytest.mark.parametrize("num_replicas", [2, 5])
def test_prefix_routing_keeps_the_hits_of_one_engine_and_the_balance(
    simulation: ModuleType, trace: str, num_replicas: int
) -> None:
    outcome = simulation.simulate("prefix", trace, num_replicas, 60)
    assert outcome.share_of_ideal >= 0.9
    assert outcome.busiest_by_requests <= 1.3
    assert outcome.busiest_by_tokens <= 1.3


def test_other_policies_balance_requests_and_lose_hits(simulation: ModuleType) -> None:
    prefix = simulation.simulate("prefix", "shared-prefix", 5, 40)
    for policy in ("round-robin", "least-loaded"):
        outcome = simulation.simulate(policy, "shared-prefix", 5, 40)
        assert outcome.busiest_by_requests <= 1.3
        assert outcome.hit_rate < 0.9 * prefix.hit_rate


def test_one_replica_has_all_the_hits(simulation: ModuleType) -> None:
    assert simulation.simulate("prefix", "multi-turn", 1, 40).share_of_ideal == pytest.approx(
        1, 0.02
    )
