"""What the ranks that experts are spread over send each other, here from one rank to itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.layers.build import Build
from penstock.layers.expert_exchange import ExpertExchange, GatheringExchange
from penstock.ops.registry import Ops


class Loop:
    """A rank group of one rank, which remembers how wide the integers are that it sends."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.widths: list[int] = []

    def exchange(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.stack(x)[0]

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.int32:
            self.widths.append(x.shape[1])
        return x[None]

    def reduce_scatter(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0]


class Placed:
    def find(self, _: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(ids), ids

    def held_here(
        self, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return weights, ids


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize(("kind", "width"), [(ExpertExchange, 1), (GatheringExchange, 4)])
def test_slots_are_sent_only_where_there_are_adapters(
    kind: type[ExpertExchange], width: int, has_slots: bool
) -> None:
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"))
    exchange, group = kind(build, 8, scale_inputs=False), Loop()
    exchange.ep = group  # type: ignore[assignment]
    ids = torch.tensor([[2, 0], [1, 3], [3, 2]], dtype=torch.int32)
    slots = torch.tensor([1, -1, 0], dtype=torch.int32) if has_slots else None
    received = []

    def run(slots: Any, x: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> Any:
        received.append(slots)
        return x * (weights * places).sum(1, keepdim=True)

    x, weights = torch.randn(3, 8), torch.rand(3, 2)
    output = exchange(x, weights, ids, slots, Placed(), run)
    exchange.join(Placed(), run, torch.float32, 2, has_slots)  # type: ignore[arg-type]
    assert torch.allclose(output, x * (weights * ids).sum(1, keepdim=True))
    assert group.widths == [width + has_slots] * 2
    if slots is None:
        assert received[0] is None
    else:
        rows = slots if kind is GatheringExchange else slots.repeat_interleave(2)
        assert received[0].tolist() == rows.tolist()
