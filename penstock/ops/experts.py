"""Mixture of experts (MoE) in plain torch: routing, and what the experts compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Routing:
    """How a token's experts are selected and weighted."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False  # a token's weights sum to 1, before `scale`
    scale: float = 1.0
    num_groups: int = 1  # expert groups of equal size; only the best ones are eligible
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # best expert, or sum of the best two


def _silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate) * up


def _gelu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _swiglu_clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's activation: both inputs clamped at 7, a steeper sigmoid, 1 added to `up`."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "swiglu_clamped": _swiglu_clamped,
}


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of each number, in float64 on a CPU.

    In float32, torch rounds the elements after the last whole vector differently. A row must not
    depend on its neighbours.
    """
    return torch.sigmoid(x.double()).to(x.dtype) if x.device.type == "cpu" else torch.sigmoid(x)


def route(
    logits: torch.Tensor,  # [n, num_experts]
    routing: Routing,
    correction: torch.Tensor | None = None,  # [num_experts] for the selection only
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [n, top_k] float32 and ids [n, top_k] int32 of each token's experts, best first."""
    logits = logits.float()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else sigmoid(logits)
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        grouped = choice.view(len(choice), routing.num_groups, -1)  # [n, expert groups, members]
        members = 1 if routing.group_score == "max" else 2
        best = grouped.topk(members, dim=-1).values.sum(-1)
        groups = best.topk(routing.top_groups, dim=-1).indices
        eligible = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        choice = grouped.masked_fill(~eligible[..., None], -torch.inf).flatten(1)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return weights * routing.scale, ids.int()


RunExpert = Callable[[int, torch.Tensor], torch.Tensor]  # (expert, rows of x) -> [m, hidden]
# (x, weights, ids, number of experts, what one expert computes) -> [n, hidden]
RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, RunExpert], torch.Tensor]


def run_gated(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    activation: str,
    linear: Callable[..., torch.Tensor],  # (rows, an expert's part of each tensor)
    gate_up: Sequence[torch.Tensor | None],  # [num_experts, ...] each: gate rows, then up rows
    down: Sequence[torch.Tensor | None],
    run_experts: RunExperts | None = None,  # default: run_by_expert
) -> torch.Tensor:
    """Experts of two matmuls with the activation in between: [n, hidden]."""
    activate = ACTIVATIONS[activation]
    assert gate_up[0] is not None

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        first, second = (
            [None if tensor is None else tensor[expert] for tensor in stacked]
            for stacked in (gate_up, down)
        )
        gate, up = linear(rows, *first).chunk(2, dim=-1)
        return linear(activate(gate, up), *second)

    return (run_experts or run_by_expert)(x, weights, ids, len(gate_up[0]), run)


def experts(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k] float32
    ids: torch.Tensor,  # [n, top_k]
    gate_up: torch.Tensor,  # [num_experts, 2 * intermediate, hidden]: gate rows, then up rows
    down: torch.Tensor,  # [num_experts, hidden, intermediate]
    activation: str,
    gate_up_bias: torch.Tensor | None = None,  # [num_experts, 2 * intermediate]
    down_bias: torch.Tensor | None = None,  # [num_experts, hidden]
    run_experts: RunExperts | None = None,  # default: run_by_expert
) -> torch.Tensor:
    """Each token's weighted sum over its experts: [n, hidden]."""
    both = (gate_up, gate_up_bias), (down, down_bias)
    return run_gated(x, weights, ids, activation, F.linear, *both, run_experts)


def run_all_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, num_experts: int, run: RunExpert
) -> torch.Tensor:
    """Run every expert on every token. Slow, but the host needs no routing result."""
    output = torch.zeros_like(x)
    for expert in range(num_experts):
        is_chosen = ids == expert  # [n, top_k]
        scaled = run(expert, x) * (weights * is_chosen).sum(-1, keepdim=True)
        # An expert's output for a token that did not select it may not even be finite.
        output += torch.where(is_chosen.any(-1, keepdim=True), scaled, 0.0).to(output.dtype)
    return output


def run_by_expert(
    x: torch.Tensor,  # [n, hidden]
    weights: torch.Tensor,  # [n, top_k]
    ids: torch.Tensor,  # [n, top_k]
    num_experts: int,
    run: RunExpert,
) -> torch.Tensor:
    """Call `run` once per expert with tokens, on all of its tokens.

    A token's experts are added in the order of their ids, independent of other tokens. Ids from
    `num_experts` on are experts of other ranks.
    """
    output = torch.zeros_like(x)
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    tokens = order // ids.shape[1]  # [n * top_k] sorted by expert
    scales = weights.flatten()[order, None]
    start = 0
    for expert, count in enumerate(flat.bincount(minlength=num_experts)[:num_experts].tolist()):
        if not count:
            continue
        own = slice(start, start + count)
        rows = tokens[own]
        result = run(expert, x[rows]) * scales[own]
        output.index_add_(0, rows, result.to(output.dtype))
        start += count
    return output


# Like `experts`, but every expert computes every token.
dense_experts = partial(experts, run_experts=run_all_experts)
