"""Gemma 2: sliding windows in every other layer, sandwich norms, soft-capped scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.norm import ZeroCentredNorm
from penstock.layers.sublayers import GatedMLP, RotaryAttention
from penstock.models.base import Hidden
from penstock.models.config import DecoderConfig, layer_kind, read_float, read_int
from penstock.models.decoder import DecoderLM
from penstock.protocol.errors import ModelError

WINDOWED, FULL = "sliding_attention", "full_attention"


class GeluMLP(GatedMLP):
    """down(gelu(gate(x)) * up(x))."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Gemma2ForCausalLM(DecoderLM):
    defaults = {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    nullable = ("attn_logit_softcapping", "final_logit_softcapping")  # null: no cap
    activations = ("gelu_pytorch_tanh",)

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().settings(raw)
        # "hidden_act" is a leftover from Gemma 1, whose files had the wrong one.
        settings["hidden_act"] = settings.get("hidden_activation") or cls.activations[0]
        return settings

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)
        self.final_cap = read_cap(config, "final_logit_softcapping")
        # Rounded to the type of the weights, as in training: the root is not exact in 16 bits.
        scale = torch.tensor(math.sqrt(config.hidden_size), dtype=build.dtype)
        self.embedding_multiplier = scale.item()

    def norm(self) -> ZeroCentredNorm:
        return ZeroCentredNorm(self.build, self.config.hidden_size, self.config.rms_norm_eps)

    def layer(self, index: int) -> nn.Module:
        return self.sandwich_layer(index)

    def mlp(self, index: int) -> nn.Module:
        return GeluMLP(self.build, self.config.hidden_size, self.config.intermediate_size)

    def is_windowed(self, index: int) -> bool:
        """Whether layer `index` has a sliding window."""
        return layer_is_windowed(self.config, index, period=2)

    def attention(self, index: int) -> RotaryAttention:
        return self.gemma_attention(index)

    @property
    def window(self) -> int | None:
        """Tokens that a windowed layer sees. If bidirectional, half of them on each side."""
        window = self.config.sliding_window
        return window if window is None or self.is_causal else window // 2 + 1

    def gemma_attention(self, index: int, **options: Any) -> RotaryAttention:
        config = self.config
        scalar = read_float(config.raw, "query_pre_attn_scalar", config.head_dim)
        if scalar <= 0:
            raise ModelError(f"config.json: query_pre_attn_scalar must be above 0, got {scalar}")
        return self.rotary_attention(
            index,
            self.attention_bias,
            window=self.window if self.is_windowed(index) else None,
            scale=scalar**-0.5,
            softcap=read_cap(config, "attn_logit_softcapping"),
            **options,
        )

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = super().logits(hidden, rows, out)
        if self.final_cap is None:
            return logits
        return logits.div_(self.final_cap).tanh_().mul_(self.final_cap)


def layer_is_windowed(
    config: DecoderConfig, index: int, period: int, period_name: str | None = None
) -> bool:
    """Whether `layer_types` makes a layer windowed. Without it, every `period`-th layer is full.

    `period_name` is the setting that overrides the period, if there is one. Files with
    `layer_types` may write it in another form (EXAONE 4 has "LLLG"), so it is not read then.
    """
    kind = layer_kind(config, index, WINDOWED, FULL)
    if kind is not None:
        return kind == WINDOWED
    if period_name is not None:
        period = read_int(config.raw, period_name, period)
    return (index + 1) % period != 0


def read_cap(config: DecoderConfig, name: str) -> float | None:
    """A bound on scores or logits; None if there is none."""
    if config.raw.get(name) is None:
        return None
    cap = read_float(config.raw, name, 0.0)
    if cap <= 0:
        raise ModelError(f"config.json: {name} must be above 0, got {cap}")
    return cap
