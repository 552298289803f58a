"""Granite 3 (dense): Llama with multipliers."""

from __future__ import annotations

import torch

from penstock.layers.build import Build
from penstock.layers.sublayers import Angles, RotaryAttention, Stream
from penstock.models.base import Hidden
from penstock.models.config import DecoderConfig, read_float
from penstock.models.decoder import DecoderLayer
from penstock.models.llama import LlamaForCausalLM
from penstock.protocol.errors import ModelError


class GraniteLayer(DecoderLayer):
    """A decoder layer whose attention and MLP outputs are scaled in the sum."""

    residual_multiplier = 1.0

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, angles) * self.residual_multiplier
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x) * self.residual_multiplier, residual


class GraniteForCausalLM(LlamaForCausalLM):
    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__(build, config)
        self.embedding_multiplier = read_float(config.raw, "embedding_multiplier", 1.0)
        self.logits_scaling = read_float(config.raw, "logits_scaling", 1.0)
        if self.logits_scaling <= 0:
            raise ModelError(
                f"config.json: logits_scaling must be above 0, got {self.logits_scaling}"
            )

    def layer(self, index: int) -> GraniteLayer:
        layer = GraniteLayer(self.attention(index), self.mlp(index), self.norm(), self.norm())
        layer.residual_multiplier = read_float(self.config.raw, "residual_multiplier", 1.0)
        return layer

    def attention(self, index: int) -> RotaryAttention:
        scale = read_float(self.config.raw, "attention_multiplier", 1.0)
        return self.rotary_attention(index, self.attention_bias, scale=scale)

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        # Scale the hidden states, not the logits: they are smaller.
        return super().logits(Hidden(hidden.states[rows] / self.logits_scaling), slice(None), out)
