"""Routing and experts in plain torch, against what they mean token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from penstock.ops.experts import ACTIVATIONS, Routing, dense_experts, experts, route


def test_weights_are_scores_and_ids_are_the_best_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    weights, ids = route(logits, Routing(2))
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])


def test_renormalized_weights_sum_to_the_scale() -> None:
    weights, _ = route(torch.randn(9, 12), Routing(3, "sigmoid", renormalize=True, scale=2.5))
    torch.testing.assert_close(weights.sum(-1), torch.full((9,), 2.5))


def test_a_correction_changes_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    weights, ids = route(logits, Routing(1, "sigmoid"), torch.tensor([0.0, 0.0, 5.0]))
    assert ids.tolist() == [[2]]
    torch.testing.assert_close(weights, torch.tensor([[0.5]]))


@pytest.mark.parametrize(("score", "expected"), [("max", [0, 1]), ("top2", [2, 3])])
def test_only_the_best_groups_experts_are_eligible(score: str, expected: list[int]) -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0, 1.0, 1.0]])
    routing = Routing(2, "sigmoid", num_groups=3, top_groups=1, group_score=score)  # type: ignore[arg-type]
    _, ids = route(logits, routing)
    assert sorted(ids[0].tolist()) == expected


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("op", [experts, dense_experts])
def test_experts_are_the_weighted_sum_of_their_mlps(
    op: Callable[..., torch.Tensor], activation: str, bias: bool
) -> None:
    n, top_k, count, hidden, size = 7, 2, 5, 12, 6
    x = torch.randn(n, hidden)
    weights, ids = route(torch.randn(n, count), Routing(top_k))
    gate_up, down = torch.randn(count, 2 * size, hidden), torch.randn(count, hidden, size)
    biases = (torch.randn(count, 2 * size), torch.randn(count, hidden)) if bias else (None, None)
    output = op(x, weights, ids, gate_up, down, activation, *biases)
    for token in range(n):
        expected = torch.zeros(hidden)
        for weight, index in zip(weights[token], ids[token].tolist(), strict=True):
            first, second = (None if b is None else b[index] for b in biases)
            gate, up = F.linear(x[token], gate_up[index], first).chunk(2)
            activated = ACTIVATIONS[activation](gate, up)
            expected += weight * F.linear(activated, down[index], second)
        torch.testing.assert_close(output[token], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", [experts, dense_experts])
def test_an_expert_that_overflows_harms_only_the_tokens_that_chose_it(
    op: Callable[..., torch.Tensor],
) -> None:
    gate_up, down = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    gate_up[1] = torch.inf
    weights, ids = torch.ones(2, 1), torch.tensor([[0], [1]], dtype=torch.int32)
    output = op(torch.ones(2, 4), weights, ids, gate_up, down, "silu")
    assert output[0].isfinite().all()
    assert not output[1].isfinite().all()
