"""Multi-token prediction (MTP): the layer after a model's last one, which drafts its next tokens.

A row has the embedding of a token, and the hidden state before it: of the model where the model
computed it, otherwise of the layer itself. Embedding and output head are the model's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part
from penstock.layers.norm import Norm
from penstock.models.base import Hidden, Model, WeightTable
from penstock.models.decoder import DecoderLM


class MtpParts(nn.Module):
    """The layer under its name in checkpoints: ``layers.N`` of ``model``."""

    def __init__(self, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer})


class SharedHead(nn.Module):
    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm


class MtpHead(Model):
    """Not a model of its own: `draft` takes the place of `forward`."""

    def __init__(self, build: Build, target: DecoderLM) -> None:
        super().__init__()
        index, size = target.config.num_layers, target.hidden_size
        self.vocab_size, self.hidden_size, self.dtype = target.vocab_size, size, build.dtype
        layer: Any = target.layer(index)
        layer.enorm, layer.hnorm = target.norm(), target.norm()
        layer.eh_proj = Linear(build, 2 * size, [Part("", size, 1)])
        layer.shared_head = SharedHead(target.norm())
        self.model = MtpParts(index, layer)
        own = rf"^model\.layers\.{index}\."
        self.weights = WeightTable(
            ignored=(rf"^(?!{own[1:]})", rf"{own}(embed_tokens|shared_head\.head|rotary_emb)\."),
            renamed=target.weights.renamed,
        )
        # Not parts of this model: their weights are loaded.
        self._project, self._angles = target.logits, target.angles

    def combine(self, hidden: Hidden) -> torch.Tensor:
        """The target's hidden states that rows take."""
        return hidden.states.to(self.dtype)

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute rows. Returns what `project` takes, and the hidden states for the next rows."""
        layer: Any
        (layer,) = self.model.layers.values()
        pair = [layer.enorm(embedded.to(self.dtype)), layer.hnorm(hidden)]
        angles = [*self._angles(positions)][-1]
        x, residual = layer(layer.eh_proj(torch.cat(pair, dim=-1)), None, angles)
        states, residual = layer.shared_head.norm.add(x, residual)
        return states, residual

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return self._project(Hidden(states), slice(None))
