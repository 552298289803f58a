"""Multi-token prediction (MTP): layers after a model's last one, which draft its next tokens.

A row of the first layer has the embedding of a token, and the model's hidden state before it. A row
of a further layer has the hidden state that the layer before it computed for the row before. So
layer i drafts the token i + 2 positions on. Embedding and output head are the model's own.
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
    """Not a model of its own: its `layers` draft.

    Their parts have the names of the checkpoint, so that quantized ones are found there.
    """

    def __init__(self, build: Build, target: DecoderLM, layout: MtpLayout, num_layers: int) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = target.vocab_size, target.hidden_size
        maker = copy(target)
        maker.build = build  # its experts are not spread over replicas, which draft by themselves
        parts: dict[str, nn.Module] = {}  # by path; layers may share some

        def part(path: str, depth: int, module: nn.Module) -> nn.Module:
            path = path.format(index=target.config.num_layers + depth, depth=depth)
            return parts.setdefault(path, module)

        size = target.hidden_size
        self.layers = [
            MtpLayer(
                target,
                build.dtype,
                layout,
                layer=part(layout.layer, depth, maker.mtp_layer(depth)),
                embedding_norm=part(layout.embedding_norm, depth, target.norm()),
                hidden_norm=part(layout.hidden_norm, depth, target.norm()),
                projection=part(
                    layout.projection, depth, Linear(build, 2 * size, [Part("", size, 1)])
                ),
                norm=part(layout.norm, depth, target.norm()),
            )
            for depth in range(num_layers)
        ]
        for path, module in parts.items():
            _place(self, path, module)
        prefixes = "|".join(re.escape(path) for path in parts)
        shared = r"\.(embed_tokens|shared_head\.head|rotary_emb)\."
        self.weights = WeightTable(
            ignored=(rf"^(?!({prefixes})\.)", shared),
            renamed=target.weights.renamed,
        )


class MtpLayer:
    """A layer that drafts (`DraftHead`). Its parts belong to the `MtpHead`."""

    vocabulary = None  # it drafts all of the target's tokens

    def __init__(
        self,
        target: DecoderLM,
        dtype: torch.dtype,
        layout: MtpLayout,
        *,
        layer: nn.Module,
        embedding_norm: nn.Module,
        hidden_norm: nn.Module,
        projection: nn.Module,
        norm: nn.Module,
    ) -> None:
        assert isinstance(norm, Norm)
        self.hidden_size, self.dtype = target.hidden_size, dtype
        self.embed, self._project, self._angles = target.embed, target.logits, target.angles
        self._layout, self._layer, self._norm = layout, layer, norm
        self._embedding_norm, self._hidden_norm = embedding_norm, hidden_norm
        self._projection = projection

    def combine(self, hidden: Hidden) -> torch.Tensor:
        """The target's hidden states that rows take."""
        return hidden.states.to(self.dtype)

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute rows. Returns what `project` takes, and the hidden states for the next rows."""
        x, residual = self._layer(self._input(embedded, hidden), None, self._own_angles(positions))
        states, residual = self._norm.add(x, residual)
        return states, states if self._layout.passes_normed else residual

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Cache the keys and values of rows whose output nobody needs."""
        assert isinstance(self._layer, DecoderLayer)
        self._layer.write(self._input(embedded, hidden), None, self._own_angles(positions))

    def _input(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer reads."""
        pair = [self._embedding_norm(embedded.to(self.dtype)), self._hidden_norm(hidden)]
        if self._layout.hidden_first:
            pair.reverse()
        projected: torch.Tensor = self._projection(torch.cat(pair, dim=-1))
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
