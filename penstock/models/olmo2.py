"""OLMo 2: norms after attention and MLP, and norms over all query and all key heads at once."""

from __future__ import annotations

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.loadable import copy_shard
from penstock.layers.norm import Norm, RMSNorm
from penstock.layers.sublayers import Angles, RotaryAttention, Stream
from penstock.models.config import DecoderConfig
from penstock.models.decoder import DecoderLM
from penstock.ops.blocks import Weight


class AllHeadsNorm(RMSNorm):
    """A norm over all heads of a token together, including those on other ranks."""

    def __init__(self, build: Build, num_heads: int, head_dim: int, eps: float) -> None:
        self.num_shards = min(build.tp.size, num_heads)  # surplus ranks share heads
        self.full_size = num_heads * head_dim
        super().__init__(build, self.full_size // self.num_shards, eps)
        self.tp = build.tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, head_dim] -> the same."""
        flat = x.flatten(1)
        if self.tp.size == 1:
            return super().forward(flat).view(x.shape)
        x32 = flat.float()
        # If ranks share heads, all heads are shared equally often, so the mean is the same.
        square = self.tp.all_reduce(x32.pow(2).mean(-1, keepdim=True)) / self.tp.size
        normed = self.weight * (x32 * torch.rsqrt(square + self.eps)).to(x.dtype)
        return normed.view(x.shape)

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {("weight", ""): (self.full_size,)}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        copy_shard(self.weight, tensor, self.tp, self.num_shards)


def use_all_heads_norms(attention: RotaryAttention, build: Build, config: DecoderConfig) -> None:
    """Normalize all queries of a token at once, and all keys."""
    attention.use_norms(
        AllHeadsNorm(build, config.num_heads, config.head_dim, config.rms_norm_eps),
        AllHeadsNorm(build, config.num_kv_heads, config.head_dim, config.rms_norm_eps),
    )


class Olmo2Layer(nn.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)). The next layer does the last addition."""

    def __init__(self, attention: RotaryAttention, mlp: nn.Module, norms: list[Norm]) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.post_attention_layernorm, self.post_feedforward_layernorm = norms

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        x = x if residual is None else x + residual
        x = x + self.post_attention_layernorm(self.self_attn(x, angles))
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Olmo2ForCausalLM(DecoderLM):
    defaults = {"rms_norm_eps": 1e-5}

    def layer(self, index: int) -> Olmo2Layer:
        return Olmo2Layer(self.attention(index), self.mlp(index), [self.norm(), self.norm()])

    def attention(self, index: int) -> RotaryAttention:
        attention = self.rotary_attention(index, self.attention_bias)
        use_all_heads_norms(attention, self.build, self.config)
        return attention
