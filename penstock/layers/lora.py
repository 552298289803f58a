"""LoRA adapters: their weights by layer, and what they add to a layer's output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from penstock.layers.context import current_adapters
from penstock.layers.linear import Linear, Product
from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantization import DenseMethod
from penstock.ops.lora import PartUpdate


@dataclass(frozen=True)
class PartDelta:
    """What an adapter changes in one part of a linear layer. Before sharding, on the host.

    The output becomes `magnitude / norm(W + b a) * (W + b a) x + bias`, without a magnitude
    `(W + b a) x + bias`. The scaling is multiplied into `b`.
    """

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]
    magnitude: torch.Tensor | None = None  # [out_features]: DoRA
    bias: torch.Tensor | None = None  # [out_features]: added to the layer's own


@dataclass(frozen=True)
class AdapterWeights:
    """All of an adapter's weights. Modules and parts have the names of the model's layers."""

    rank: int  # the largest
    linear: dict[tuple[str, str], PartDelta] = field(default_factory=dict)  # by module and part
    # By module: the token embedding and the LM head. `a` is [rank, vocab_size] for an embedding.
    embedding: dict[str, PartDelta] = field(default_factory=dict)
    # By module: the whole matrix instead of the model's, of an embedding, a head or a label head.
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    # By module of the experts, then by expert's part such as "experts.3.gate_proj".
    experts: dict[str, dict[str, PartDelta]] = field(default_factory=dict)


def add_delta(weight: torch.Tensor, delta: PartDelta) -> torch.Tensor:
    """W + b a, in float32, with the norms of DoRA's magnitudes: [out_features, in_features]."""
    merged = torch.addmm(weight.float(), delta.b.float(), delta.a.float())
    if delta.magnitude is None:
        return merged
    norms: torch.Tensor = torch.linalg.vector_norm(merged, dim=1)
    return merged * (delta.magnitude.float() / norms)[:, None]


class LayerSlots(Protocol):
    """One layer's share of the adapter slots, which `runner/adapters.py` fills."""

    def prepare(self, weights: AdapterWeights) -> Any:
        """This rank's share of an adapter, for `place`; None if it does not change the layer.

        Runs beside the steps, in another thread.
        """

    def place(self, slot: int, own: Any) -> None:
        """Put what `prepare` returned into a slot, before the next step. All ranks do it."""

    @property
    def needs_rows(self) -> bool:
        """Whether an adapter in a slot needs the step's rows on the host: no graph can."""


def make_slots(
    model: nn.Module,
    num_slots: int,
    max_rank: int,
    dtype: torch.dtype,
    experts_move: bool = False,  # between ranks, while adapters are in slots
) -> dict[str, LayerSlots]:
    """Give every layer that adapters can change its slots. Returns them by the module's name."""
    from penstock.layers.experts import Experts  # these modules import this one
    from penstock.layers.lora_experts import ExpertSlots
    from penstock.layers.lora_labels import LabelSlots
    from penstock.layers.lora_vocab import add_vocab_slots

    slots: dict[str, LayerSlots] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.is_label_head:
            module.adapter = slots[name] = LabelSlots(name, module)
        elif isinstance(module, Linear) and module.takes_adapters:
            kind = TowerSlots if module.encodes_media else LinearSlots
            module.adapter = slots[name] = kind(name, module, num_slots, max_rank, dtype)
        elif isinstance(module, Experts):
            own, args = f"{name}.experts", (num_slots, max_rank, dtype, experts_move)
            module.adapter = slots[own] = ExpertSlots(own, module, *args)
    slots.update(add_vocab_slots(model, num_slots, max_rank, dtype))
    return slots


def guest_slots(slots: Mapping[str, LayerSlots], lane: int) -> dict[str, LayerSlots]:
    """Another replica's slots on this rank, of `make_slots`: those of experts, which it shares."""
    from penstock.layers.lora_experts import ExpertSlots, GuestSlots  # it imports this module

    shared = [(name, own) for name, own in slots.items() if isinstance(own, ExpertSlots)]
    return {name: GuestSlots(own, lane) for name, own in shared}


@dataclass(frozen=True)
class OwnPart:
    """This rank's share of a `PartDelta`, on the host."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [rank, out_features]
    magnitude: torch.Tensor | None
    squared_norms: torch.Tensor | None  # [out_features]: of the rows of W + b a in these columns
    bias: torch.Tensor | None


class LinearSlots:
    """The adapters of a linear layer (`Linear.adapter`)."""

    def __init__(
        self,
        name: str,
        layer: MatrixLayer,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        build = layer.build
        self.name = name
        self.layer = layer
        self.dtype = dtype
        self.slots = build.ops.lora_slots(
            num_slots, layer.in_features, [*layer.part_rows.values()], max_rank, dtype, build.device
        )
        is_summed = layer.split_input and build.tp.size > 1  # over ranks: without gaps in memory
        if isinstance(layer, Linear) and isinstance(layer.method, DenseMethod) and not is_summed:
            self.slots.join(layer.weight, layer.bias)

    @property
    def needs_rows(self) -> bool:
        return False

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        step = current_adapters()
        if step is None:
            return product(x)
        return self.slots.run(x, product, step)

    def prepare(self, weights: AdapterWeights) -> list[OwnPart | None] | None:
        deltas = [weights.linear.get((self.name, part)) for part in self.layer.part_rows]
        if not any(deltas):
            return None
        parts = zip(self.layer.part_rows, deltas, strict=True)
        return [None if delta is None else self.own_part(part, delta) for part, delta in parts]

    def place(self, slot: int, own: list[OwnPart | None] | None) -> None:
        if own is None:
            self.slots.place(slot, ())
            return
        parts = zip(self.layer.part_rows, own, strict=True)
        updates = [None if share is None else self._update(part, share) for part, share in parts]
        self.slots.place(slot, updates)

    def own_part(self, part: str, delta: PartDelta, with_norms: bool = True) -> OwnPart:
        """This rank's share of a part's delta. Without norms, `place` computes them."""
        layer = self.layer
        rows, columns = layer.shard_of(part)
        magnitude = squared_norms = None
        if delta.magnitude is not None:
            magnitude = delta.magnitude[rows].float().clone()
            if with_norms:
                squared_norms = self._squared_norms(part, delta.a[:, columns], delta.b[rows])
        # With split input, a bias must enter the sum over ranks only once.
        has_bias = delta.bias is not None and (not layer.split_input or layer.build.tp.rank == 0)
        return OwnPart(
            host_copy(delta.a[:, columns], self.dtype, layer.build.device),
            host_copy(delta.b[rows].T, self.dtype, layer.build.device),
            magnitude,
            squared_norms,
            delta.bias[rows].float().clone() if has_bias and delta.bias is not None else None,
        )

    def _squared_norms(self, part: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Of the rows of W + b a in this rank's columns: [out_features], on the host."""
        base = self.layer.method.floats(self.layer, part)
        update = b.float().to(base.device) @ a.float().to(base.device)
        return update.add_(base).square_().sum(1).cpu()

    def _update(self, part: str, own: OwnPart) -> PartUpdate:
        layer = self.layer
        multiplier, shift = None, own.bias
        if own.magnitude is not None:
            norms, device = own.squared_norms, layer.build.device
            if norms is None:
                norms = self._squared_norms(part, own.a, own.b.T)
            norms = norms.to(device, copy=True)
            if layer.split_input:
                norms = layer.build.tp.all_reduce(norms)
            multiplier = own.magnitude.to(device) / norms.sqrt()
            bias = layer.own_bias
            if bias is not None:  # it is in the output already, and must not be multiplied
                kept = layer.rows_of(bias, part).float() * (1 - multiplier)
                shift = kept if shift is None else kept + shift.to(device)
        return PartUpdate(own.a, own.b, multiplier, shift)


class TowerSlots(LinearSlots):
    """The adapters of a layer that encodes media.

    The context's one row tells the adapter of all rows, of which each layer of a tower has another
    number.
    """

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        step = current_adapters()
        if step is None:
            return product(x)
        rows = x.reshape(-1, x.shape[-1])
        all_rows = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
        output = self.slots.run(rows, product, step.take(all_rows))
        return output.view(*x.shape[:-1], output.shape[-1])


def host_copy(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Contiguous, independent of the file that it may be mapped from, pinned for a GPU."""
    own = torch.empty(tensor.shape, dtype=dtype, pin_memory=device.type == "cuda")
    return own.copy_(tensor)


def is_hooked(layer: Linear) -> bool:
    """Whether something changes or observes the layer's output in this step."""
    adapter = layer.adapter
    if isinstance(adapter, LinearSlots):
        return current_adapters() is not None
    return adapter is not None
