"""EAGLE-3: one decoder layer that drafts from a target's hidden states and its tokens.

A row has the embedding of a token, and the hidden state before it: of the target where the target
computed it, otherwise of the draft layer itself. Checkpoints are those of the EAGLE authors and of
the speculators library.
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
from penstock.models.config import DecoderConfig, read_head, read_int
from penstock.models.draft_vocabulary import DraftVocabulary
from penstock.models.eagle_head import EagleHead
from penstock.protocol.errors import ModelError


class DraftLayer(nn.Module):
    """A decoder layer whose attention sees embeddings and hidden states side by side."""

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        bias = bool(config.raw.get("attention_bias", False))
        rotary = Rotary(build, config.head_dim, config.max_position, rotary_parameters(config.raw))
        self.rotary = rotary
        self.hidden_norm = RMSNorm(build, size, eps)
        self.input_layernorm = RMSNorm(build, size, eps)
        self.self_attn = RotaryAttention(
            build, "layers.0", size, config.num_heads, config.num_kv_heads, config.head_dim,
            rotary, qkv_bias=bias, output_bias=bias, input_size=2 * size,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(build, size, eps)
        self.mlp = GatedMLP(build, size, config.intermediate_size)


class Eagle3(EagleHead):
    weights = WeightTable(
        ignored=(r"^t2d$", r"\.rotary_emb\.inv_freq$"),
        renamed={r"^model\.": "", r"^midlayer\.": "layers.0.", r"^d2t$": "vocabulary.d2t"},
    )

    def __init__(
        self, build: Build, raw: Mapping[str, Any], target: Model, names: list[str]
    ) -> None:
        """`names`: of the checkpoint's tensors. They say whether it has an embedding and a head."""
        config = read_head(raw, build.tp.size, "EAGLE-3")
        own = {name.removeprefix("model.") for name in names}
        draft_vocab_size = read_int(raw, "draft_vocab_size", config.vocab_size)
        is_smaller = draft_vocab_size < config.vocab_size
        has_head = is_smaller or not names or "lm_head.weight" in own
        super().__init__(
            build,
            config,
            target,
            "embed_tokens.weight" in own,
            draft_vocab_size if has_head else None,
        )
        self.config = config
        self.target_size = read_int(raw, "target_hidden_size", config.hidden_size)
        self.norms_residual = raw.get("norm_before_residual") is True
        inputs = read_int(raw, "num_aux_hidden_states", 3) * self.target_size
        self.fc = Linear(build, inputs, [Part("", config.hidden_size, 1)])
        self.layers = nn.ModuleList([DraftLayer(build, config)])
        self.norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.vocabulary: DraftVocabulary | None = None
        if is_smaller or "d2t" in own:
            self.vocabulary = DraftVocabulary(
                "d2t", draft_vocab_size, config.vocab_size, build.device
            )

    def combine(self, hidden: Hidden) -> torch.Tensor:
        """The target's hidden states of some layers, [n, target_size] each -> [n, hidden_size]."""
        combined: torch.Tensor = self.fc(torch.cat(hidden.aux, dim=-1).to(self.dtype))
        return combined

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute rows. Returns what `project` takes, and the hidden states for the next rows."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        x, normed = self._input(layer, embedded, hidden)
        residual = normed if self.norms_residual else hidden
        x = layer.self_attn(x, layer.rotary.angles(positions))
        x, residual = layer.post_attention_layernorm.add(x, residual)
        return self.norm.add(layer.mlp(x), residual)

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Cache the keys and values of rows that nothing is drafted from."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        x, _ = self._input(layer, embedded, hidden)
        layer.self_attn.write(x, layer.rotary.angles(positions))

    def _input(
        self, layer: DraftLayer, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and the normed hidden states in it."""
        normed = layer.hidden_norm(hidden)
        return torch.cat([layer.input_layernorm(embedded.to(self.dtype)), normed], dim=-1), normed


def aux_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs a head reads, of `num_layers`."""
    inner = raw.get("eagle_config")
    given = raw.get("eagle_aux_hidden_state_layer_ids")
    if given is None and isinstance(inner, dict):
        given = inner.get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(given, list) and given and all(type(index) is int for index in given)
    if not is_list or not all(0 <= index < num_layers for index in given):
        raise ModelError(
            f"config.json: eagle_aux_hidden_state_layer_ids must be layers of the target, 0 to "
            f"{num_layers - 1}, got {given!r:.100}"
        )
    return tuple(given)
