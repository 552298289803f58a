"""LoRA adapters of routed experts.

The activation needs what an adapter adds before it. So rows with an adapter leave the fused kernels
and go through their experts one matmul after the other. All other rows stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.layers.context import adapter_context, current_adapters
from penstock.layers.experts import Experts, ExpertWeights, PackedExperts
from penstock.layers.lora import AdapterWeights, LinearSlots, OwnPart
from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantization import LinearMethod
from penstock.ops.experts import ACTIVATIONS, run_by_expert
from penstock.ops.lora import AdapterStep
from penstock.protocol.step import NO_SLOT

PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}

Key = tuple[int, str]  # expert, and one of PARTS
Shares = dict[Key, list[OwnPart | None]]  # by the experts' numbers
RunRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertSlots:
    """The adapters of a layer's routed experts (`Experts.adapter`).

    Replicas that share experts have slots of their own, which they fill at different times. A row
    that goes to another replica's expert names its replica's slot, counted over all of them.

    Where experts move between ranks, every rank keeps an adapter's share of all experts on the
    host, and fills the slots of those that it holds.
    """

    def __init__(
        self,
        name: str,
        layer: Experts,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        experts_move: bool = False,
    ) -> None:
        experts = layer.experts
        assert isinstance(experts, ExpertWeights | PackedExperts), "the weights are loaded"
        self.name = name
        self.config = layer.config
        self.build = layer.build
        self.num_slots = num_slots  # of a replica
        self.max_rank = max_rank
        self.dtype = dtype
        self._experts = experts
        # Of all replicas, by slot: what is placed, by the experts' places.
        self._by_slot: dict[int, dict[Key, LinearSlots]] = {}
        self._shares: dict[int, Shares] = {}  # what it is of, where experts move
        self._placed = layer.placed
        self._held = tuple(self.config.own_experts)
        self._experts_move = experts_move

    @property
    def needs_rows(self) -> bool:
        return bool(self._by_slot)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, run: RunRows
    ) -> torch.Tensor:
        """[n, hidden_size] -> the same shape. `run` computes rows without an adapter.

        A row of the step may be several rows here, one after the other.
        """
        step = current_adapters()
        used = [] if step is None else [s for s in self._by_slot if len(step.rows_of(s))]
        if step is None or not used:
            return run(x, weights, ids)
        output = torch.empty_like(x)
        each = torch.arange(len(x) // len(step.slots), device=x.device)
        is_plain = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for slot in used:
            rows = (step.rows_of(slot)[:, None] * len(each) + each).flatten()
            is_plain[rows] = False
            output[rows] = self._run(
                self._by_slot[slot], step, x[rows], weights[rows], ids[rows]
            ).to(output.dtype)
        rest = is_plain.nonzero()[:, 0]
        if len(rest):
            output[rest] = run(x[rest], weights[rest], ids[rest]).to(output.dtype)
        return output

    def slots_of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The slots of this step's rows, counted over all replicas: [n] int32."""
        step = current_adapters()
        if step is None:
            return torch.full((len(x),), NO_SLOT, dtype=torch.int32, device=x.device)
        return torch.where(step.slots < 0, step.slots, step.slots + self._first(self._lane))

    def run_received(
        self,
        slots: torch.Tensor,  # of the rows
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        run: RunRows,
    ) -> torch.Tensor:
        """As `__call__`, for rows of any replicas."""
        if not self._by_slot:
            return run(x, weights, ids)
        step = self.build.ops.group_rows(slots, self._first(self.build.mesh.num_lanes))
        with adapter_context(step):
            return self(x, weights, ids, run)

    def _run(
        self,
        slots: dict[Key, LinearSlots],
        step: AdapterStep,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        def linear(expert: int, matrix: str, rows: torch.Tensor) -> torch.Tensor:
            output = self._experts.linear(expert, matrix, rows)
            bias = self._experts.bias(expert, matrix)
            if bias is not None:
                output = output + bias
            own = slots.get((expert, matrix))
            if own is not None:
                output = own.slots.add(rows, output, step.only(len(rows)))
            return output

        def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
            both = linear(expert, "gate_up", rows)
            if self.config.activation == "silu":
                activated = self.build.ops.silu_mul(both)
            else:
                activated = ACTIVATIONS[self.config.activation](*both.chunk(2, dim=-1))
            return linear(expert, "down", activated)

        return run_by_expert(x, weights, ids, len(self.config.own_experts), run)

    def prepare(self, weights: AdapterWeights) -> Shares | None:
        own = weights.experts.get(self.name)
        if own is None:
            return None
        shares: Shares = {}
        numbers = range(self.config.num_experts) if self._experts_move else self._held
        for place, number in enumerate(numbers):
            for matrix, parts in PARTS.items():
                deltas = {part: own.get(f"experts.{number}.{part}") for part in parts}
                if not any(deltas.values()):
                    continue
                # Norms of experts that move are known where they are, between steps.
                linear = self._slots_of(0 if self._experts_move else place, matrix)
                shares[number, matrix] = [
                    None
                    if delta is None
                    else linear.own_part(part, delta, with_norms=not self._experts_move)
                    for part, delta in deltas.items()
                ]
        return shares

    def place(self, slot: int, own: Shares | None) -> None:
        self.place_for(self._lane, slot, own)

    def place_for(self, lane: int, slot: int, own: Shares | None) -> None:
        """Put an adapter into a slot of some replica."""
        slot += self._first(lane)
        self._by_slot.pop(slot, None)
        self._shares.pop(slot, None)
        if own is None:
            return
        self._by_slot[slot] = {}
        for place in range(len(self._held)):
            self._fill(slot, place, own)
        if self._experts_move:
            self._shares[slot] = own

    def follow_experts(self) -> None:
        """Fill the slots of experts that have moved here. All ranks do it, between steps."""
        assert self._placed is not None, "experts are spread over ranks"
        before, self._held = self._held, self._placed.placement[self._placed.rank]
        for place, number in enumerate(self._held):
            if before[place] != number:
                for slot, own in self._shares.items():
                    self._fill(slot, place, own)

    def _fill(self, slot: int, place: int, own: Shares) -> None:
        """Put what a slot's adapter changes in the expert at a place where steps read it."""
        for matrix in PARTS:
            self._by_slot[slot].pop((place, matrix), None)
            parts = own.get((self._held[place], matrix))
            if parts is not None:
                self._by_slot[slot][place, matrix] = slots = self._slots_of(place, matrix)
                slots.place(0, parts)

    @property
    def _lane(self) -> int:
        return self.build.mesh.lane

    def _first(self, lane: int) -> int:
        """The number of a replica's first slot."""
        return lane * self.num_slots

    def _slots_of(self, expert: int, matrix: str) -> LinearSlots:
        """One slot for one matrix. Memory is taken only for the adapters that are there."""
        layer = _Matrix(self._experts, expert, matrix)
        return LinearSlots(self.name, layer, 1, self.max_rank, self.dtype)


@dataclass(frozen=True)
class GuestSlots:
    """Another replica's adapter slots, of the experts on this rank."""

    slots: ExpertSlots
    lane: int

    def prepare(self, weights: AdapterWeights) -> Shares | None:
        return self.slots.prepare(weights)

    def place(self, slot: int, own: Shares | None) -> None:
        self.slots.place_for(self.lane, slot, own)

    @property
    def needs_rows(self) -> bool:
        return self.slots.needs_rows


class _Matrix(MatrixLayer):
    """One matrix of an expert, as a linear layer."""

    def __init__(self, experts: ExpertWeights | PackedExperts, expert: int, matrix: str) -> None:
        config, tp = experts.config, experts.build.tp
        size = config.intermediate_size // tp.size
        self.split_input = matrix == "down"
        self._first = tp.rank * size
        rows = config.hidden_size if self.split_input else size
        super().__init__(
            experts.build,
            size if self.split_input else config.hidden_size,
            dict.fromkeys(PARTS[matrix], rows),
        )
        self.experts = [experts]  # in a list: no submodule
        self.expert, self.matrix = expert, matrix

    def use(self, method: LinearMethod) -> None:
        self.method = _MatrixMethod()  # the experts have the weights

    @property
    def own_bias(self) -> torch.Tensor | None:
        return self.experts[0].bias(self.expert, self.matrix)

    def shard_of(self, part: str) -> tuple[slice, slice]:
        if self.split_input:
            return slice(None), slice(self._first, self._first + self.in_features)
        return slice(self._first, self._first + self.part_rows[part]), slice(None)


class _MatrixMethod(LinearMethod):
    def apply(self, layer: MatrixLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(layer, _Matrix)
        return layer.experts[0].linear(layer.expert, layer.matrix, x)
