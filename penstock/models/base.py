"""The interface between the runner and a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.protocol.kv import KVCacheSpec


@dataclass(frozen=True)
class Hidden:
    """What a forward pass gives."""

    states: torch.Tensor  # [num_tokens, hidden_size], after the last norm
    aux: tuple[torch.Tensor, ...] = ()  # hidden states of earlier layers, for drafters


@dataclass(frozen=True)
class WeightTable:
    """How checkpoint names differ from the model's own, beyond what its layers' parts say."""

    ignored: tuple[str, ...] = ()  # regular expressions of tensors that need not be loaded
    renamed: dict[str, str] = field(default_factory=dict)  # regular expression -> replacement


class Model(Protocol):
    """A model as the runner sees it."""

    weights: WeightTable

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [n] -> [n, hidden_size]."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Hidden:
        """Embedded tokens at their positions, through all layers."""

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [len(rows), vocab_size] of the given rows, in any type; in `out` if given."""

    def kv_specs(self, dtype: str) -> dict[str, KVCacheSpec]:
        """What each layer keeps in the KV cache, by the layer's name, in order."""
