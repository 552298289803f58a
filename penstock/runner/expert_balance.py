"""Balances the work of ranks that hold whole experts (EPLB): counts tokens, and moves experts.

Every rank does the same at the same steps. In its turn, a layer's experts are placed anew by the
tokens that they had, and their weights go from rank to rank in place. So a step waits for the moves
of few layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from penstock.config.eplb import EplbSettings
from penstock.distributed.mesh import RankGroup
from penstock.layers.expert_placement import PlacedExperts, Placement, rebalanced, work_of
from penstock.layers.expert_share import expert_layers
from penstock.layers.experts import Experts, ExpertWeights, PackedExperts
from penstock.models.base import Model
from penstock.protocol.errors import ConfigError
from penstock.runner.routed_experts import RoutedExpertsRecorder


class ExpertBalancer:
    """Call `begin_step` on all ranks before each step, and `count` after one with tokens."""

    def __init__(
        self, model: Model, recorder: RoutedExpertsRecorder, ep: RankGroup, settings: EplbSettings
    ) -> None:
        self.metrics = Counter[str]()
        self._layers = expert_layers(model)
        self._recorder = recorder
        self._ep = ep
        self._interval = settings.step_interval
        self._window = min(settings.window_size, settings.step_interval)
        self._step = 0
        most = max(layer.config.num_experts for layer in self._layers)
        # Tokens by layer and expert. Where a token has fewer experts than in other layers, the rest
        # are counted in the last column.
        shape = (len(self._layers), most + 1)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=recorder.device)
        for layer in self._layers:
            self._check(layer)

    def _check(self, layer: Experts) -> None:
        """Raise ConfigError if experts are stored so differently that they cannot change places."""
        first, *others = (_tensors(layer, place) for place in range(_placed(layer).num_held))
        kinds = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in first]
        is_alike = all([(tuple(t.shape), str(t.dtype)) for t in own] == kinds for own in others)
        sizes = torch.tensor([int(is_alike), sum(tensor.nbytes for tensor in first)])
        stacked = self._ep.stack(sizes.to(self._counts.device)).tolist()
        if not all(own[0] and own == stacked[0] for own in stacked):
            raise ConfigError(
                "enable_eplb needs experts that are stored alike, and this checkpoint's are "
                "quantized differently: drop it"
            )

    def begin_step(self) -> None:
        """Place the experts anew in the layers whose turn it is."""
        step, self._step = self._step, (self._step + 1) % self._interval
        for index, layer in enumerate(self._layers):
            turn = index * self._interval // len(self._layers)
            if step == turn:
                self._rebalance(layer, self._counts[index])
            if (step + self._window - turn) % self._interval == 0:
                self._counts[index].zero_()

    def count(self, num_rows: int) -> None:
        """Count the experts that the rows of the last step chose."""
        ids = self._recorder.rows(num_rows).permute(1, 0, 2).flatten(1).long()
        ids %= self._counts.shape[1]  # -1 stands for none
        self._counts.scatter_add_(1, ids, torch.ones_like(ids))

    def _rebalance(self, layer: Experts, counts: torch.Tensor) -> None:
        total = self._ep.all_reduce(counts.clone())
        loads = total.tolist()[: layer.config.num_experts]
        if not any(loads):
            return
        placed = _placed(layer)
        placement = rebalanced(loads, placed.placement)
        num_moved = move_experts(layer, placement, self._ep)
        if self._ep.rank == 0:
            work = work_of(loads, placed.placement)
            self.metrics["expert_tokens_mean"] += round(sum(work) / len(work))
            self.metrics["expert_tokens_busiest"] += round(max(work))
            self.metrics["expert_moves"] += num_moved
        placed.place(placement)
        if num_moved and layer.adapter is not None:
            layer.adapter.follow_experts()


@torch.inference_mode()
def move_experts(layer: Experts, placement: Placement, ep: RankGroup) -> int:
    """Send the weights of a layer's experts to where they will be. Returns how many moved."""
    before = _placed(layer).placement
    holders: dict[int, list[tuple[int, int]]] = {}  # by expert: ranks and places
    for rank, experts in enumerate(before):
        for place, expert in enumerate(experts):
            holders.setdefault(expert, []).append((rank, place))
    # Sources and targets, as (rank, place). Both sides of a pair of ranks have them in one order.
    moves = [
        (holders[expert][rank % len(holders[expert])], (rank, place))
        for rank, experts in enumerate(placement)
        for place, expert in enumerate(experts)
        if before[rank][place] != expert
    ]
    if not moves:
        return 0
    sent = sorted((to[0], to[1], source[1]) for source, to in moves if source[0] == ep.rank)
    taken = sorted((source[0], to[1]) for source, to in moves if to[0] == ep.rank)
    going = [sum(rank == to for to, _, _ in sent) for rank in range(ep.size)]
    coming = [sum(rank == source for source, _ in taken) for rank in range(ep.size)]
    sample = _bytes(_tensors(layer, 0))
    rows = [_bytes(_tensors(layer, place)) for _, _, place in sent]
    packed = torch.stack(rows) if rows else sample.new_empty(0, len(sample))
    for (_, place), row in zip(taken, ep.exchange(packed, going, coming), strict=True):
        start = 0
        for tensor in _tensors(layer, place):
            part = row[start : start + tensor.nbytes].clone()  # where its type may begin
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
    return len(moves)


def _tensors(layer: Experts, place: int) -> list[torch.Tensor]:
    assert isinstance(layer.experts, (ExpertWeights, PackedExperts))
    return layer.experts.tensors_of(place)


def _placed(layer: Experts) -> PlacedExperts:
    assert layer.placed is not None, "each rank has all experts"
    return layer.placed


def _bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
