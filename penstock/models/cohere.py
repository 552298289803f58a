"""Cohere's Command R: attention and MLP in parallel after one layer norm.

It has interleaved rotary embedding and scaled logits. Command R+ also normalizes each head's
queries and keys.
"""

from __future__ import annotations

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.loadable import copy_shard
from penstock.layers.norm import LayerNorm, Norm
from penstock.layers.sublayers import Angles, RotaryAttention, Stream
from penstock.models.base import Hidden
from penstock.models.config import read_float
from penstock.models.decoder import DecoderLM
from penstock.ops.blocks import Weight


class HeadsNorm(LayerNorm):
    """One norm per head, each with its own weights. A rank has those of its own heads."""

    def __init__(self, build: Build, num_heads: int, head_dim: int, eps: float) -> None:
        self.num_shards = min(build.tp.size, num_heads)  # surplus ranks share heads
        self.full_shape = (num_heads, head_dim)
        super().__init__(build, (num_heads // self.num_shards, head_dim), eps)
        self.tp = build.tp

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {("weight", ""): self.full_shape}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        copy_shard(self.weight, tensor, self.tp, self.num_shards)


class CohereLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, attention: RotaryAttention, mlp: nn.Module, norm: Norm) -> None:
        super().__init__()
        self.input_layernorm = norm
        self.self_attn = attention
        self.mlp = mlp

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn(x, angles) + self.mlp(x), residual


class CohereForCausalLM(DecoderLM):
    defaults = {
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }
    interleaved_rotary = True

    def norm(self) -> LayerNorm:
        return LayerNorm(self.build, self.config.hidden_size, self.config.rms_norm_eps)

    def layer(self, index: int) -> CohereLayer:
        return CohereLayer(self.attention(index), self.mlp(index), self.norm())

    def attention(self, index: int) -> RotaryAttention:
        config = self.config
        attention = self.rotary_attention(index, self.attention_bias)
        if config.raw.get("use_qk_norm", False):
            attention.use_norms(
                HeadsNorm(self.build, config.num_heads, config.head_dim, config.rms_norm_eps),
                HeadsNorm(self.build, config.num_kv_heads, config.head_dim, config.rms_norm_eps),
            )
        return attention

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        # Scale the hidden states, not the logits: they are smaller.
        scale = read_float(self.config.raw, "logit_scale", 0.0625)
        return super().logits(Hidden(hidden.states[rows] * scale), slice(None), out)
