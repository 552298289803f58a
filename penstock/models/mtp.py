"""Multi-token prediction (MTP): the layer after a model's last one, which drafts its next tokens.

A row has the embedding of a token, and the hidden state before it: of the model where the model
computed it, otherwise of the layer itself. Embedding and output head are the model's own.
"""

from __future__ import annotations

import re
from copy import copy

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part
from penstock.layers.norm import Norm
from penstock.layers.sublayers import Angles
from penstock.models.base import Hidden, Model, MtpLayout, WeightTable
from penstock.models.decoder import DecoderLayer, DecoderLM


class MtpHead(Model):
    """Not a model of its own: `draft` takes the place of `forward`.

    Its parts have the names of the checkpoint, so that quantized ones are found there.
    """

    vocabulary = None  # it drafts all of the target's tokens

    def __init__(self, build: Build, target: DecoderLM, layout: MtpLayout) -> None:
        super().__init__()
        index, size = target.config.num_layers, target.hidden_size
        self.vocab_size, self.hidden_size, self.dtype = target.vocab_size, size, build.dtype
        self.layout = layout
        maker = copy(target)
        maker.build = build  # its experts are not spread over replicas, which draft by themselves
        templates = {
            layout.layer: maker.mtp_layer(),
            layout.embedding_norm: target.norm(),
            layout.hidden_norm: target.norm(),
            layout.projection: Linear(build, 2 * size, [Part("", size, 1)]),
            layout.norm: target.norm(),
        }
        parts = {path.format(index=index): module for path, module in templates.items()}
        for path, module in parts.items():
            _place(self, path, module)
        self._parts = tuple(parts.values())
        prefixes = "|".join(re.escape(path) for path in parts)
        shared = r"\.(embed_tokens|shared_head\.head|rotary_emb)\."
        self.weights = WeightTable(
            ignored=(rf"^(?!({prefixes})\.)", shared),
            renamed=target.weights.renamed,
        )
        # Not parts of this model: their weights are loaded.
        self._embed, self._project = target.embed, target.logits
        self._angles = target.angles

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embed(token_ids)

    def combine(self, hidden: Hidden) -> torch.Tensor:
        """The target's hidden states that rows take."""
        return hidden.states.to(self.dtype)

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute rows. Returns what `project` takes, and the hidden states for the next rows."""
        layer, *_, norm = self._parts
        assert isinstance(norm, Norm)
        x, residual = layer(self._input(embedded, hidden), None, self._own_angles(positions))
        states, residual = norm.add(x, residual)
        return states, states if self.layout.passes_normed else residual

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Cache the keys and values of rows that nothing is drafted from."""
        layer, *_ = self._parts
        assert isinstance(layer, DecoderLayer)
        layer.write(self._input(embedded, hidden), None, self._own_angles(positions))

    def _input(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer reads."""
        _, embedding_norm, hidden_norm, projection, _ = self._parts
        pair = [embedding_norm(embedded.to(self.dtype)), hidden_norm(hidden)]
        if self.layout.hidden_first:
            pair.reverse()
        projected: torch.Tensor = projection(torch.cat(pair, dim=-1))
        return projected

    def _own_angles(self, positions: torch.Tensor) -> Angles:
        *_, angles = self._angles(positions)
        return angles

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return self._project(Hidden(states), slice(None))


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Make `module` a part of `root` under a dotted path."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in dict(root.named_children()):
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)
