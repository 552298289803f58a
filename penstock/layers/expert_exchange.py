"""Experts that are spread over ranks with different tokens: tokens go to the experts and back.

`ExpertExchange` sends each token to the ranks of its experts alone, `GatheringExchange` to all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.expert_placement import PlacedExperts

# (x [n, hidden], weights [n, k], ids [n, k]) -> weighted sums [n, hidden]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# The same for rows of all replicas, which begins with their adapter slots [n] int32; None: without
# adapters. Each slot stands for `n // len(slots)` rows, one after the other.
RunReceived = Callable[
    [torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


def run_scaled(run: Run, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Run each selection as a token of its own: scaled before its one expert, with weight 1."""
    scaled = (x[:, None] * weights[:, :, None].to(x.dtype)).flatten(0, 1)  # [n * top_k, hidden]
    routed = run(scaled, torch.ones_like(weights).view(-1, 1), ids.reshape(-1, 1))
    return routed.view(*weights.shape, x.shape[1]).sum(1)


class ExpertExchange(nn.Module):
    """Dispatches tokens to the ranks of their experts, and combines the outputs (all-to-all).

    Every rank sends each of its tokens to the ranks that hold the token's experts, and gets the
    outputs of the experts back one by one. It adds them in the order of the experts' numbers, as
    one rank does. So a token's result does not depend on where its experts are.
    """

    def __init__(self, build: Build, hidden_size: int, scale_inputs: bool) -> None:
        super().__init__()
        self.ep, self.tp = build.mesh.ep, build.tp
        self.device = build.device
        self.hidden_size = hidden_size
        self.scale_inputs = scale_inputs  # routing weights scale inputs, not outputs

    def forward(
        self,
        x: torch.Tensor,  # [n, hidden_size]
        weights: torch.Tensor,  # [n, top_k] float32
        ids: torch.Tensor,  # [n, top_k]
        slots: torch.Tensor | None,  # [n] int32: of adapters; None: no rank has any
        placed: PlacedExperts,
        run: RunReceived,  # this rank's experts, by their places
    ) -> torch.Tensor:
        """Each token's weighted sum over its experts: [n, hidden_size].

        The ranks that share a replica's layers have the same tokens. Each sends its part of them.
        """
        count = len(x)
        size = -(-count // self.tp.size)  # tokens of a rank
        own = slice(min(self.tp.rank * size, count), min((self.tp.rank + 1) * size, count))
        slots = None if slots is None else slots[own]
        output = self._exchange(x[own], weights[own], ids[own], slots, placed, run)
        if self.tp.size == 1 or not count:
            return output
        return self.tp.stack(_padded(output, size)).flatten(0, 1)[:count]

    def join(
        self,
        placed: PlacedExperts,
        run: RunReceived,
        dtype: torch.dtype,
        top_k: int,
        has_slots: bool,
    ) -> None:
        """Compute other replicas' tokens in a step in which this one has none."""
        x = torch.empty(0, self.hidden_size, dtype=dtype, device=self.device)
        weights = torch.empty(0, top_k, device=self.device)
        ids = weights.int()
        self._exchange(x, weights, ids, ids[:, 0] if has_slots else None, placed, run)

    def _exchange(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        slots: torch.Tensor | None,
        placed: PlacedExperts,
        run: RunReceived,
    ) -> torch.Tensor:
        num_tokens, top_k = ids.shape
        ids, order = ids.long().sort(dim=-1)  # a token's experts in the order of their numbers
        weights = weights.gather(1, order)
        owners, places = (found.flatten() for found in placed.find(weights, ids))
        by_owner = owners.argsort(stable=True)
        rows = x.repeat_interleave(top_k, dim=0)
        if self.scale_inputs:
            rows = rows * weights.flatten()[:, None].to(x.dtype)
        sent = owners.bincount(minlength=self.ep.size)
        one_each = [1] * self.ep.size
        received = self.ep.exchange(sent, one_each, one_each)
        going, coming = sent.tolist(), received.tolist()
        others = self.ep.exchange(rows[by_owner], going, coming)
        numbers = places.int()[:, None]
        if slots is not None:
            numbers = torch.cat([numbers, slots.repeat_interleave(top_k)[:, None]], dim=1)
        numbers = self.ep.exchange(numbers[by_owner], going, coming)
        slots = None if slots is None else numbers[:, 1].contiguous()
        ones = torch.ones(len(others), 1, device=x.device)
        outputs = run(slots, others, ones, numbers[:, :1].contiguous()) if len(others) else others
        back = torch.empty_like(rows)
        back[by_owner] = self.ep.exchange(outputs, coming, going)
        by_token = back.view(num_tokens, top_k, x.shape[1])
        total = torch.zeros_like(x)
        for place in range(top_k):
            each = by_token[:, place]
            total += each if self.scale_inputs else (each * weights[:, place, None]).to(x.dtype)
        return total


class GatheringExchange(ExpertExchange):
    """All ranks get all tokens (all-gather), and add up what their experts make of them
    (reduce-scatter).

    That moves less if a token has more experts than there are ranks. Sums have another order than
    one rank's.
    """

    def _exchange(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        slots: torch.Tensor | None,
        placed: PlacedExperts,
        run: RunReceived,
    ) -> torch.Tensor:
        top_k = ids.shape[1]
        counts = self.ep.stack(torch.tensor([len(x)], device=self.device)).flatten().tolist()
        columns = [weights.view(torch.int32), ids.int()]
        choices = torch.cat(columns if slots is None else [*columns, slots[:, None]], dim=1)
        rows, choices = self._gather(x, counts), self._gather(choices, counts)
        weights, ids, *rest = torch.split(choices, top_k, dim=1)
        weights, places = placed.held_here(weights.contiguous().view(torch.float32), ids)
        run_rows = partial(run, None if slots is None else rest[0][:, 0].contiguous())
        if self.scale_inputs:
            outputs = run_scaled(run_rows, rows, weights, places)
        else:
            outputs = run_rows(rows, weights, places)
        parts = [_padded(part, max(counts)) for part in torch.split(outputs, counts)]
        return self.ep.reduce_scatter(parts)[: len(x)]

    def _gather(self, own: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The rows of all ranks, in rank order."""
        parts = self.ep.stack(_padded(own, max(counts)))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [n, *shape] with rows of zeros behind it: [size, *shape]."""
    padded = x.new_zeros(size, *x.shape[1:])
    padded[: len(x)] = x
    return padded
