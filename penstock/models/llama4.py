"""Llama 4 (text): chunked attention with rotary embedding, alternating with full attention.

The full layers have no positions. The inputs of the experts are scaled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.sublayers import Angles, RotaryAttention
from penstock.models.config import DecoderConfig, layer_kind, read_float, read_int
from penstock.models.decoder import DecoderLM
from penstock.models.experts import make_experts, split_experts
from penstock.ops.blocks import Weight
from penstock.protocol.errors import ModelError

CHUNKED, FULL = "chunked_attention", "full_attention"

# The usual angles, and the factor of queries without positions, [n, 1, 1].
Llama4Angles = tuple[Angles, torch.Tensor | None]


class HeadNorm(nn.Module):
    """An RMSNorm of each head without weights. Checkpoints call it an L2 norm."""

    def __init__(self, build: Build, head_dim: int, eps: float) -> None:
        super().__init__()
        self.ops = build.ops
        self.eps = eps
        self.ones = torch.ones(head_dim, dtype=build.dtype, device=build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.ones, self.eps)


class Llama4Attention(RotaryAttention):
    """Norms follow the rotation. Without rotation, queries are scaled by their position."""

    def forward(self, x: torch.Tensor, given: Llama4Angles) -> torch.Tensor:  # type: ignore[override]
        angles, temperature = given
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [n, heads, head_dim]
        query, key, value = heads.split(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        if self.rotary is not None:
            query, key = self.rotary(query, key, angles)
            if self.q_norm is not None and self.k_norm is not None:
                query, key = self.q_norm(query), self.k_norm(key)
        elif temperature is not None:
            query = (query * temperature).to(query.dtype)
        return self.o_proj(self.attention(query, key, value))


class Llama4ForCausalLM(DecoderLM):
    weights = DecoderLM.weights.renaming(
        {r"\.feed_forward\.router\.": ".mlp.gate.", r"\.feed_forward\.": ".mlp."}
    )
    defaults = {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
    }
    interleaved_rotary = True
    attention_class = Llama4Attention

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().settings(raw)
        # Here `intermediate_size` is that of an expert and of the shared expert.
        settings["moe_intermediate_size"] = settings["intermediate_size"]
        settings["intermediate_size"] = settings["intermediate_size_mlp"]
        return settings

    def attention(self, index: int) -> RotaryAttention:
        config = self.config
        has_positions = layer_has_positions(config, index)
        attention = self.rotary_attention(
            index,
            self.attention_bias,
            has_positions=has_positions,
            chunk=chunk_of_layer(config, index),
        )
        if has_positions and config.raw.get("use_qk_norm", True):
            norm = HeadNorm(self.build, config.head_dim, config.rms_norm_eps)
            attention.use_norms(norm, norm)
        return attention

    def mlp(self, index: int) -> nn.Module:
        config = self.config
        if not layer_has_experts(config, index):
            return super().mlp(index)
        size = read_int(config.raw, "moe_intermediate_size")
        return make_experts(
            self.build, config, size, scoring="sigmoid", scale_inputs=True, shared_size=size
        )

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return split_experts(tensors, "feed_forward", self.hidden_size)

    def angles(self, positions: torch.Tensor) -> Sequence[Llama4Angles]:
        angles = self.rotary.angles(positions), self._temperature(positions)
        return [angles] * self.config.num_layers

    def _temperature(self, positions: torch.Tensor) -> torch.Tensor | None:
        """The factor of queries in layers without positions, [n, 1, 1]; None for 1."""
        raw = self.config.raw
        if not raw.get("attn_temperature_tuning", True):
            return None
        steps = torch.floor((positions.float() + 1.0) / read_int(raw, "floor_scale", 8192))
        return (torch.log1p(steps) * read_float(raw, "attn_scale", 0.1) + 1.0)[:, None, None]


def layer_has_positions(config: DecoderConfig, index: int) -> bool:
    """Whether layer `index` rotates its queries and keys."""
    given = config.raw.get("no_rope_layers")  # 1 if the layer has positions
    if not given:
        return (index + 1) % read_int(config.raw, "no_rope_layer_interval", 4) != 0
    if not isinstance(given, list) or len(given) < config.num_layers:
        raise ModelError(
            f"config.json: no_rope_layers must have a 0 or 1 for each of {config.num_layers} "
            f"layers, got {given!r:.80}"
        )
    return bool(given[index])


def chunk_of_layer(config: DecoderConfig, index: int) -> int | None:
    """The size of the attention chunks of layer `index`; None for full attention."""
    kind = layer_kind(config, index, CHUNKED, FULL)
    is_chunked = layer_has_positions(config, index) if kind is None else kind == CHUNKED
    return read_int(config.raw, "attention_chunk_size", 8192) if is_chunked else None


def layer_has_experts(config: DecoderConfig, index: int) -> bool:
    """Whether layer `index` has experts; other layers have an MLP."""
    given = config.raw.get("moe_layers")
    if given is None:
        return (index + 1) % read_int(config.raw, "interleave_moe_layer_step", 1) == 0
    if not isinstance(given, list) or not all(isinstance(layer, int) for layer in given):
        raise ModelError(f"config.json: moe_layers must list layers, got {given!r:.80}")
    return index in given
