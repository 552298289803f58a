"""Triton's routing, sorting by expert and experts, against the reference."""

from __future__ import annotations

import pytest
import torch

from penstock.ops import reference
from penstock.ops.experts import Routing

pytest.importorskip("triton", reason="needs Triton")

from penstock.ops.triton import experts as fused
from penstock.ops.triton.routing import FEW_PAIRS, align, route
from penstock.ops.triton.tuning import ExpertsPlan, ExpertsTile, Launch

ROUTINGS = {
    "softmax": Routing(3),
    "renormalized": Routing(2, renormalize=True, scale=1.5),
    "sigmoid": Routing(4, "sigmoid", renormalize=True),
    "one": Routing(1),
    "grouped": Routing(4, "softmax", num_groups=5, top_groups=2),
    "grouped_top2": Routing(
        4, "sigmoid", True, 2.5, num_groups=5, top_groups=3, group_score="top2"
    ),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("n", [1, 6])
def test_routing_is_the_references(device: torch.device, name: str, n: int) -> None:
    routing = ROUTINGS[name]
    logits = torch.randn(n, 20, device=device)
    correction = torch.randn(20, device=device) if routing.scoring == "sigmoid" else None
    weights, ids = route(logits, routing, correction)
    expected_weights, expected_ids = reference.route(logits, routing, correction)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


def test_logits_that_are_no_numbers_still_give_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((2, 6), torch.nan, device=device)
    _, ids = route(logits, Routing(3))
    assert ((ids >= 0) & (ids < 6)).all()


def random_ids(n: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    return torch.rand(n, num_experts, device=device).topk(top_k).indices.int()


@pytest.mark.parametrize(
    ("n", "top_k", "num_experts"), [(1, 2, 4), (40, 3, 6), (9, 2, 50), (FEW_PAIRS // 2 + 3, 2, 6)]
)
@pytest.mark.parametrize(("one_expert", "num_elsewhere"), [(False, 0), (True, 0), (False, 2)])
def test_every_pair_stands_once_in_a_block_of_its_expert(
    device: torch.device, n: int, top_k: int, num_experts: int, one_expert: bool, num_elsewhere: int
) -> None:
    """Except for pairs whose experts are on another rank."""
    rows = 16
    ids = random_ids(n, top_k, num_experts, device)
    if one_expert:
        ids = torch.full_like(ids, num_experts - 1)
    own = num_experts - num_elsewhere
    blocks = align(ids, own, rows)
    flat, seen = ids.flatten().tolist(), []
    for index, (expert, count) in enumerate(
        zip(blocks.experts.tolist(), blocks.rows.tolist(), strict=True)
    ):
        assert 0 <= count <= rows
        pairs = blocks.pairs[index * rows : index * rows + count].tolist()
        assert all(flat[pair] == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == [pair for pair, expert in enumerate(flat) if expert < own]


def check(
    device: torch.device,
    ids: torch.Tensor,
    num_experts: int,
    activation: str = "silu",
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    hidden: int = 48,
    size: int = 40,
) -> None:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    n, top_k = ids.shape
    x, weights = randn(n, hidden), torch.rand(n, top_k, device=device)
    gate_up = randn(num_experts, 2 * size, hidden) / hidden**0.5
    down = randn(num_experts, hidden, size) / size**0.5
    biases = (randn(num_experts, 2 * size), randn(num_experts, hidden)) if bias else (None, None)
    assert fused.refusal(hidden, size, activation, dtype) is None
    ours = fused.experts(x, weights, ids, gate_up, down, activation, *biases)
    theirs = reference.experts(x, weights, ids, gate_up, down, activation, *biases)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [1, 2, 3, 30])  # token by token, and sorted
@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_the_references(device: torch.device, n: int, bias: bool) -> None:
    check(device, random_ids(n, 3, 6, device), 6, bias=bias)


@pytest.mark.parametrize("n", [1, 30])
def test_experts_of_other_ranks_add_nothing(device: torch.device, n: int) -> None:
    check(device, random_ids(n, 3, 6, device), 4, bias=True)


@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 4])
def test_activations_are_the_references(device: torch.device, activation: str, n: int) -> None:
    check(device, random_ids(n, 2, 3, device), 3, activation)


@pytest.mark.parametrize("n", [6, 40, 150])  # by how many tokens an expert has, in half precision
def test_half_precision_at_every_plan(device: torch.device, n: int) -> None:
    check(device, random_ids(n, 1, 2, device), 2, dtype=torch.float16, hidden=72, size=64)


def test_all_tokens_on_one_expert_and_none_on_the_others(device: torch.device) -> None:
    check(device, torch.full((20, 1), 2, dtype=torch.int32, device=device), 4)


def test_no_tokens_at_all(device: torch.device) -> None:
    ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    x = torch.empty(0, 48, device=device)
    weights = torch.empty(4, 80, 48, device=device), torch.empty(4, 48, 40, device=device)
    assert fused.experts(x, ids.float(), ids, *weights, "silu").shape == (0, 48)


@pytest.mark.parametrize("swap", [False, True])
def test_either_side_may_be_the_left_operand(
    device: torch.device, swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = ExpertsTile(64, 32, swap, 2, Launch(4, 2))
    monkeypatch.setattr(fused, "experts_plan", lambda *_: ExpertsPlan(16, tile, tile))
    check(device, random_ids(12, 2, 4, device), 4, hidden=80, size=72)


def test_what_has_no_kernel_is_refused_with_a_reason() -> None:
    assert "activation relu2" in str(fused.refusal(64, 64, "relu2", torch.float32))
    assert "16 bytes" in str(fused.refusal(64, 36, "silu", torch.bfloat16))
