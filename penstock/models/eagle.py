"""EAGLE: one decoder layer that drafts from a target's last hidden state and its tokens.

A row has the embedding of a token, and the hidden state before it: of the target, after its last
norm, where the target computed it, otherwise of the draft layer itself. Checkpoints are those of
the EAGLE authors and of the speculators library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary, rotary_parameters
from penstock.layers.sublayers import GatedMLP, RotaryAttention
from penstock.models.base import Hidden, Model, WeightTable
from penstock.models.config import DecoderConfig, check_fixed, read_head
from penstock.models.eagle_head import EagleHead


class EagleLayer(nn.Module):
    """A decoder layer without a norm before attention."""

    def __init__(self, build: Build, config: DecoderConfig, names: list[str]) -> None:
        super().__init__()
        size = config.hidden_size
        qkv_bias, output_bias = _has(names, "q_proj.bias"), _has(names, "o_proj.bias")
        self.rotary = Rotary(
            build, config.head_dim, config.max_position, rotary_parameters(config.raw)
        )
        self.self_attn = RotaryAttention(
            build, "layers.0", size, config.num_heads, config.num_kv_heads, config.head_dim,
            self.rotary, qkv_bias=qkv_bias, output_bias=output_bias,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(build, size, config.rms_norm_eps)
        self.mlp = GatedMLP(build, size, config.intermediate_size)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The caller adds both results."""
        attended = self.self_attn(x, self.rotary.angles(positions))
        x, residual = self.post_attention_layernorm.add(attended, x)
        return self.mlp(x), residual


class Eagle(EagleHead):
    vocabulary = None  # it drafts all of the target's tokens

    weights = WeightTable(
        # The layer's first norm is not used, and often not trained.
        ignored=(r"\.rotary_emb\.inv_freq$", r"^layers\.0\.input_layernorm\."),
        renamed={r"^model\.": "", r"^fusion_fc\.": "fc.", r"^transformer\.": "layers.0."},
    )

    def __init__(
        self, build: Build, raw: Mapping[str, Any], target: Model, names: list[str]
    ) -> None:
        """`names`: of the checkpoint's tensors. They say which biases and norms there are."""
        check_fixed(raw, layernorms=False)
        config = read_head(raw, build.tp.size, "EAGLE")
        size = config.hidden_size
        num_logits = config.vocab_size if _has(names, "lm_head.weight") else None
        super().__init__(build, config, target, _has(names, "embed_tokens.weight"), num_logits)
        self.target_size = size
        self.fc = Linear(build, 2 * size, [Part("", size, 1)], bias=_has(names, "fc.bias"))
        self.layers = nn.ModuleList([EagleLayer(build, config, names)])
        has_norm = any(name.removeprefix("model.") == "norm.weight" for name in names)
        self.norm = RMSNorm(build, size, config.rms_norm_eps) if has_norm else None

    def combine(self, hidden: Hidden) -> torch.Tensor:
        """The target's hidden states that rows take."""
        return hidden.states.to(self.dtype)

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute rows. Returns what `project` takes, and the hidden states for the next rows."""
        x, residual = self.layers[0](self._input(embedded, hidden), positions)
        states = x + residual if self.norm is None else self.norm.add(x, residual)[0]
        return states, states

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Cache the keys and values of rows that nothing is drafted from."""
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        layer.self_attn.write(self._input(embedded, hidden), layer.rotary.angles(positions))

    def _input(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What attention reads."""
        projected: torch.Tensor = self.fc(torch.cat([embedded.to(self.dtype), hidden], dim=-1))
        return projected


def _has(names: list[str], ending: str) -> bool:
    return any(name.endswith(ending) for name in names)
