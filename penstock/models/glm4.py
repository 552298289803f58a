"""GLM-4 (0414): norms before and behind attention and MLP, and rotary positions over half a head,
its dimensions interleaved."""

from __future__ import annotations

import torch
from torch import nn

from penstock.layers.blocks import Angles, RotaryAttention
from penstock.layers.norm import Norm
from penstock.models.decoder import DecoderLM


class Glm4Layer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self, attention: RotaryAttention, mlp: nn.Module, norms: tuple[Norm, Norm, Norm, Norm]
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm, self.post_self_attn_layernorm = norms[:2]
        self.post_attention_layernorm, self.post_mlp_layernorm = norms[2:]

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_self_attn_layernorm(self.self_attn(x, angles))
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.post_mlp_layernorm(self.mlp(x)), residual


class Glm4ForCausalLM(DecoderLM):
    defaults = {
        "rms_norm_eps": 1.5625e-7,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
    }
    interleaved_rotary = True

    def layer(self, index: int) -> Glm4Layer:
        norms = (self.norm(), self.norm(), self.norm(), self.norm())
        return Glm4Layer(self.attention(index), self.mlp(index), norms)

    def attention(self, index: int) -> RotaryAttention:
        # The output projection has no bias, whatever attention_bias says.
        return self.rotary_attention(
            index, qkv_bias=bool(self.config.raw.get("attention_bias", True))
        )
