"""LoRA adapters: their weights by layer, and what they add to a layer's output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


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
    # By module: the whole matrix [vocab_size, hidden_size] instead of the model's.
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    # By module of the experts, then by expert's part such as "experts.3.gate_proj".
    experts: dict[str, dict[str, PartDelta]] = field(default_factory=dict)


class LayerSlots(Protocol):
    """One layer's share of the adapter slots, which `runner/adapters.py` fills."""

    def prepare(self, weights: AdapterWeights) -> Any:
        """This rank's share of an adapter, for `place`; None if it does not change the layer.

        Runs beside the steps, in another thread.
        """

    def place(self, slot: int, own: Any) -> None:
        """Put what `prepare` returned into a slot, before the next step. All ranks do it."""
