"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts."""

from __future__ import annotations

import torch
from torch import nn

from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.gated_delta_net import DeltaNetConfig, GatedDeltaNet
from penstock.layers.linear import Linear, Part, row_linear
from penstock.layers.norm import Norm, ZeroCentredNorm
from penstock.layers.rotary import Rotary
from penstock.layers.sublayers import Angles
from penstock.models.base import MtpLayout, WeightTable
from penstock.models.config import DecoderConfig, layer_kind, read_int
from penstock.models.decoder import DecoderLayer, DecoderLM
from penstock.models.experts import is_sparse, make_qwen_experts
from penstock.protocol.errors import ModelError

LINEAR, FULL = "linear_attention", "full_attention"


class GatedAttention(nn.Module):
    """Attention with a gated output. The gates are projected with the queries, head by head."""

    def __init__(self, build: Build, name: str, config: DecoderConfig, rotary: Rotary) -> None:
        super().__init__()
        ranks, head_dim = build.tp.size, config.head_dim
        kv_shards = min(ranks, config.num_kv_heads)
        bias = bool(config.raw.get("attention_bias", False))
        self.head_dim = head_dim
        self.num_heads = config.num_heads // ranks
        self.num_kv_heads = config.num_kv_heads // kv_shards
        self.rotary = rotary
        parts = [
            Part("q_proj", config.num_heads * 2 * head_dim, ranks),
            Part("k_proj", config.num_kv_heads * head_dim, kv_shards),
            Part("v_proj", config.num_kv_heads * head_dim, kv_shards),
        ]
        self.qkv_proj = Linear(build, config.hidden_size, parts, bias)
        self.o_proj = row_linear(build, config.num_heads * head_dim, config.hidden_size, bias)
        self.q_norm = ZeroCentredNorm(build, head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCentredNorm(build, head_dim, config.rms_norm_eps)
        self.attention = Attention(build, name, self.num_heads, self.num_kv_heads, head_dim)

    def forward(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        query, gate, key, value = self._heads(x, angles)
        attended = self.attention(query, key, value) * torch.sigmoid(gate.flatten(1))
        return self.o_proj(attended)

    def write(self, x: torch.Tensor, angles: Angles) -> None:
        """Cache keys and values of rows whose output nobody needs."""
        self.attention.write(*self._heads(x, angles)[2:])

    def _heads(self, x: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, ...]:
        """Query, gate, key and value: [n, heads, head_dim] each."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        counts = [2 * self.num_heads, self.num_kv_heads, self.num_kv_heads]
        both, key, value = heads.split(counts, dim=1)
        query, gate = both.unflatten(1, (-1, 2)).unbind(2)
        query, key = self.rotary(self.q_norm(query), self.k_norm(key), angles)
        return query, gate, key, value


class Qwen3NextForCausalLM(DecoderLM):
    weights = WeightTable(
        ignored=(r"\.rotary_emb\.inv_freq$", r"^mtp\."),
        renamed={r"\.linear_attn\.": ".self_attn."},
    )
    mtp_layout = MtpLayout(
        layer="mtp.layers.{depth}",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        passes_normed=True,
        num_layers=1,
    )
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    }

    def norm(self) -> Norm:
        return ZeroCentredNorm(self.build, self.config.hidden_size, self.config.rms_norm_eps)

    def layer(self, index: int) -> DecoderLayer:
        name = f"model.layers.{index}"
        mixer: GatedDeltaNet | GatedAttention
        if mixer_of_layer(self.config, index) == LINEAR:
            mixer = GatedDeltaNet(self.build, name, self._delta_net())
        else:
            mixer = GatedAttention(self.build, name, self.config, self.rotary)
        return DecoderLayer(mixer, self.mlp(index), self.norm(), self.norm())

    def mtp_layer(self, depth: int) -> DecoderLayer:
        """With attention, and its own numbering: it is the first layer of its kind."""
        name = f"model.layers.{self.config.num_layers + depth}"
        mixer = GatedAttention(self.build, name, self.config, self.rotary)
        return DecoderLayer(mixer, self.mlp(0), self.norm(), self.norm())

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        if not is_sparse(config, index):
            return super().mlp(index)
        return make_qwen_experts(self.build, config, renormalize=True, is_shared=True)

    def _delta_net(self) -> DeltaNetConfig:
        config, raw = self.config, self.config.raw
        keys = read_int(raw, "linear_num_key_heads", 16)
        values = read_int(raw, "linear_num_value_heads", 32)
        if values % keys:
            raise ModelError(
                f"config.json: linear_num_value_heads ({values}) must be a multiple of "
                f"linear_num_key_heads ({keys})"
            )
        return DeltaNetConfig(
            hidden_size=config.hidden_size,
            num_key_heads=keys,
            num_value_heads=values,
            key_dim=read_int(raw, "linear_key_head_dim", 128),
            value_dim=read_int(raw, "linear_value_head_dim", 128),
            conv_width=read_int(raw, "linear_conv_kernel_dim", 4, low=2),
            norm_eps=config.rms_norm_eps,
            by_key_head=bool(raw.get("linear_by_key_head", True)),  # set by GGUF files
        )


def mixer_of_layer(config: DecoderConfig, index: int) -> str:
    """The token mixer of layer `index`: LINEAR or FULL."""
    kind = layer_kind(config, index, LINEAR, FULL)
    if kind is not None:
        return kind
    interval = read_int(config.raw, "full_attention_interval", 4)
    return FULL if (index + 1) % interval == 0 else LINEAR
