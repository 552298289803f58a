"""Where experts are: which of them each rank holds, with copies of some, and how that changes.

A placement is a list with the experts of each rank. Their order is that of the rank's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from penstock.protocol.errors import ConfigError

Placement = list[tuple[int, ...]]

WORTHWHILE = 0.95  # of the busiest rank's work: a placement that leaves more is not worth moves


def spread_experts(num_experts: int, num_ranks: int, num_redundant: int = 0) -> Placement:
    """The first placement. Where ranks do not divide the experts, the first have one more.

    >>> spread_experts(5, 2)
    [(0, 1, 2), (3, 4)]
    """
    if num_experts < num_ranks:
        raise ConfigError(
            f"enable_expert_parallel spreads whole experts, and the model's {num_experts} are "
            f"fewer than {num_ranks} ranks: use fewer, or drop it"
        )
    if num_redundant > (most := num_experts * (num_ranks - 1)):
        raise ConfigError(
            f"num_redundant_experts must be at most {most}, so that {num_ranks} ranks have no "
            f"expert twice, got {num_redundant}"
        )
    size, rest = divmod(num_experts + num_redundant, num_ranks)
    starts = [rank * size + min(rank, rest) for rank in range(num_ranks + 1)]
    sizes = [end - start for start, end in pairwise(starts)]
    if num_redundant:
        return _pack([1.0] * num_experts, sizes)
    return [tuple(range(*pair)) for pair in pairwise(starts)]


def work_of(loads: Sequence[float], placement: Placement) -> list[float]:
    """Each rank's share of the experts' loads. Copies of an expert share its load."""
    copies = [0] * len(loads)
    for experts in placement:
        for expert in experts:
            copies[expert] += 1
    return [sum(loads[each] / copies[each] for each in experts) for experts in placement]


def rebalanced(loads: Sequence[float], placement: Placement) -> Placement:
    """A placement with less work for the busiest rank, or the same one if there is none.

    What stays on a rank stays in its place.
    """
    packed = _pack(loads, [len(experts) for experts in placement])
    if max(work_of(loads, packed)) >= WORTHWHILE * max(work_of(loads, placement)):
        return placement
    settled = []
    for old, new in zip(placement, packed, strict=True):
        arriving = iter(sorted(set(new) - set(old)))
        settled.append(tuple(each if each in new else next(arriving) for each in old))
    return settled


def _pack(loads: Sequence[float], sizes: Sequence[int]) -> Placement:
    """Give the busiest experts copies, and each rank in turn the busiest that is left."""
    copies = [1] * len(loads)
    for _ in range(sum(sizes) - len(loads)):
        may_grow = [each for each, count in enumerate(copies) if count < len(sizes)]
        copies[max(may_grow, key=lambda each: loads[each] / copies[each])] += 1
    shares = [load / count for load, count in zip(loads, copies, strict=True)]
    order = sorted(range(len(loads)), key=lambda each: -shares[each])
    ranks: list[list[int]] = [[] for _ in sizes]
    work = [0.0] * len(sizes)
    for expert in (each for each in order for _ in range(copies[each])):
        with_room = [rank for rank, size in enumerate(sizes) if len(ranks[rank]) < size]
        free = [rank for rank in with_room if expert not in ranks[rank]]
        if free:
            rank = min(free, key=work.__getitem__)
        else:
            rank = _make_room(expert, with_room[0], ranks, work, shares)
        ranks[rank].append(expert)
        work[rank] += shares[expert]
    return [tuple(sorted(experts)) for experts in ranks]


def _make_room(
    expert: int, target: int, ranks: list[list[int]], work: list[float], shares: Sequence[float]
) -> int:
    """Move some expert to `target`, which has `expert` itself. Returns a rank with room for it.

    There is one: `target` has no more experts than any other rank, apart from the last places.
    """
    for rank, experts in enumerate(ranks):
        for other in experts if expert not in experts else ():
            if other not in ranks[target]:
                experts.remove(other)
                ranks[target].append(other)
                work[rank] -= shares[other]
                work[target] += shares[other]
                return rank
    raise AssertionError("some rank without it has an expert that the target lacks")


class PlacedExperts(nn.Module):
    """A layer's placement as tensors that never move, so that captured graphs read them.

    Which copy of an expert computes a token depends on the token's own routing weights alone, not
    on the batch.
    """

    def __init__(
        self, placement: Placement, num_experts: int, rank: int, device: torch.device
    ) -> None:
        super().__init__()
        self.placement = placement
        self.rank = rank
        self.num_held = len(placement[rank])
        num_slots = sum(map(len, placement))
        most = min(len(placement), 1 + num_slots - num_experts)  # copies of an expert
        self.num_copies: torch.Tensor  # [num_experts]
        self.owners: torch.Tensor  # [num_experts, most]: the rank of each copy
        self.places: torch.Tensor  # [num_experts, most]: its place among those of its rank
        self.own: torch.Tensor  # [num_experts, most] int32: here; `num_held`: on another rank
        shape = (num_experts, most)
        counts = torch.ones(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("num_copies", counts, persistent=False)
        for name in ("owners", "places", "own"):
            dtype = torch.int32 if name == "own" else torch.int64
            table = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, table, persistent=False)
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Note where experts are from now on."""
        self.placement = placement
        copies: list[list[tuple[int, int]]] = [[] for _ in range(len(self.num_copies))]
        for rank, experts in enumerate(placement):
            for place, expert in enumerate(experts):
                copies[expert].append((rank, place))
        most = self.owners.shape[1]
        padded = torch.tensor([each + each[:1] * (most - len(each)) for each in copies])
        self.num_copies.copy_(torch.tensor([len(each) for each in copies]))
        self.owners.copy_(padded[..., 0])
        self.places.copy_(padded[..., 1])
        self.own.copy_(padded[..., 1].masked_fill(padded[..., 0] != self.rank, self.num_held))

    def held_here(
        self, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids [n, top_k] as this rank's experts take them.

        Experts of other ranks get a number past the last one.
        """
        (own,) = self._look_up(weights, ids, self.own)
        return weights.masked_fill(own == self.num_held, 0.0), own

    def find(self, weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the experts `ids` [n, top_k]: their ranks, and their places on these."""
        owners, places = self._look_up(weights, ids, self.owners, self.places)
        return owners, places

    def _look_up(
        self, weights: torch.Tensor, ids: torch.Tensor, *tables: torch.Tensor
    ) -> list[torch.Tensor]:
        ids = ids.long()
        if self.owners.shape[1] == 1:
            return [table[:, 0][ids] for table in tables]
        # The last bits of a weight are as good as random.
        bits = weights.float().view(torch.int32).sum(-1, keepdim=True)
        copies = (bits + ids) % self.num_copies[ids]
        return [table[ids, copies] for table in tables]
