"""Experts that are spread over ranks with different tokens: tokens go to the experts and back.

Every rank sends each of its tokens to the ranks that hold the token's experts, and gets the
outputs of the experts back one by one. It adds them in the order of the experts' numbers, as one
rank does. So a token's result does not depend on where its experts are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from penstock.layers.build import Build
from penstock.layers.expert_placement import PlacedExperts

# (rows [m, hidden], weights [m, 1], ids [m, 1]) -> [m, hidden]
RunRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertExchange(nn.Module):
    """Dispatches tokens to the ranks of their experts, and combines the outputs."""

    def __init__(self, build: Build, hidden_size: int) -> None:
        super().__init__()
        self.ep, self.tp = build.mesh.ep, build.tp
        self.device = build.device
        self.hidden_size = hidden_size

    def forward(
        self,
        x: torch.Tensor,  # [n, hidden_size]
        weights: torch.Tensor,  # [n, top_k] float32
        ids: torch.Tensor,  # [n, top_k]
        placed: PlacedExperts,
        run: RunRows,
        scale_inputs: bool = False,
    ) -> torch.Tensor:
        """Each token's weighted sum over its experts: [n, hidden_size].

        The ranks that share a replica's layers have the same tokens. Each sends its part of them.
        """
        count = len(x)
        size = -(-count // self.tp.size)  # tokens of a rank
        own = slice(min(self.tp.rank * size, count), min((self.tp.rank + 1) * size, count))
        output = self._exchange(x[own], weights[own], ids[own], placed, run, scale_inputs)
        if self.tp.size == 1 or not count:
            return output
        padded = x.new_zeros(size, x.shape[1])
        padded[: len(output)] = output
        return self.tp.stack(padded).flatten(0, 1)[:count]

    def join(self, placed: PlacedExperts, run: RunRows, dtype: torch.dtype, top_k: int) -> None:
        """Compute other replicas' tokens in a step in which this one has none."""
        x = torch.empty(0, self.hidden_size, dtype=dtype, device=self.device)
        weights = torch.empty(0, top_k, device=self.device)
        self._exchange(x, weights, weights.int(), placed, run, False)

    def _exchange(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        placed: PlacedExperts,
        run: RunRows,
        scale_inputs: bool,
    ) -> torch.Tensor:
        num_tokens, top_k = ids.shape
        ids, order = ids.long().sort(dim=-1)  # a token's experts in the order of their numbers
        weights = weights.gather(1, order)
        owners, places = (found.flatten() for found in placed.find(weights, ids))
        by_owner = owners.argsort(stable=True)
        rows = x.repeat_interleave(top_k, dim=0)
        if scale_inputs:
            rows = rows * weights.flatten()[:, None].to(x.dtype)
        sent = owners.bincount(minlength=self.ep.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.ep.process_group)
        going, coming = sent.tolist(), received.tolist()
        others = self.ep.exchange(rows[by_owner], going, coming)
        numbers = self.ep.exchange(places[by_owner], going, coming)
        ones = torch.ones(len(others), 1, device=x.device)
        outputs = run(others, ones, numbers.int()[:, None]) if len(others) else others
        back = torch.empty_like(rows)
        back[by_owner] = self.ep.exchange(outputs, coming, going)
        by_token = back.view(num_tokens, top_k, x.shape[1])
        total = torch.zeros_like(x)
        for place in range(top_k):
            each = by_token[:, place]
            total += each if scale_inputs else (each * weights[:, place, None]).to(x.dtype)
        return total
