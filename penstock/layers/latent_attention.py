"""Multi-head latent attention (MLA): keys and values of all heads from one short vector.

The cache keeps only that vector and a rotated part that all heads share. The op decides between the
absorbed and the expanded form (`penstock.ops.latent_attention`). Both need only the matrix of the
checkpoint's ``kv_b_proj``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.context import current_context
from penstock.layers.linear import Linear, Part, column_linear, row_linear
from penstock.layers.norm import RMSNorm
from penstock.layers.quantization import DenseMethod
from penstock.layers.rotary import Rotary
from penstock.layers.sublayers import Angles
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import INT8_SCALE_BYTES, LatentSpec

NORM_EPS = 1e-6  # of the norms on compressed vectors, whatever the other norms have


@dataclass(frozen=True)
class LatentConfig:
    """An architecture's settings of its latent attention."""

    hidden_size: int
    num_heads: int
    q_rank: int | None  # of compressed queries; None: not compressed
    kv_rank: int  # of compressed keys and values
    nope_dim: int  # of a head's query and key, without positions
    rope_dim: int  # the rotated part; all heads share the key's
    value_dim: int
    scale: float  # of the scores
    bias: bool = False  # of the projections from and to hidden states, except uncompressed queries
    interleaved: bool = True  # dimensions (2i, 2i + 1) rotate together, else (i, i + rope_dim / 2)


class LatentAttention(nn.Module):
    """Called like RotaryAttention. `rotary` spans the rotated part."""

    def __init__(self, build: Build, name: str, config: LatentConfig, rotary: Rotary) -> None:
        super().__init__()
        self.ops = build.ops
        self.name = name
        self.config = config
        self.rotary = rotary
        self.num_heads = config.num_heads // build.tp.size
        self.entry_size = config.kv_rank + config.rope_dim
        query_size = config.num_heads * (config.nope_dim + config.rope_dim)
        latent = Part("kv_a_proj_with_mqa", self.entry_size, 1)  # replicated on every rank
        if config.q_rank is None:
            self.q_proj = column_linear(build, config.hidden_size, {"": query_size})
            self.a_proj = Linear(build, config.hidden_size, [latent], config.bias)
        else:
            parts = [Part("q_a_proj", config.q_rank, 1), latent]
            self.a_proj = Linear(build, config.hidden_size, parts, config.bias)
            self.q_a_layernorm = RMSNorm(build, config.q_rank, NORM_EPS)
            self.q_b_proj = column_linear(build, config.q_rank, {"": query_size})
        self.kv_a_layernorm = RMSNorm(build, config.kv_rank, NORM_EPS)
        up_size = config.num_heads * (config.nope_dim + config.value_dim)
        self.kv_b_proj = column_linear(build, config.kv_rank, {"": up_size})
        self.kv_b_proj.takes_adapters = False  # the op multiplies with its matrix
        self.o_proj = row_linear(
            build, config.num_heads * config.value_dim, config.hidden_size, config.bias
        )
        self.fused = build.ops.find("norm_rotate_latent")

    def finish_loading(self) -> None:
        """Dequantize kv_b_proj if it is packed: the op multiplies with its floats."""
        packed, build = self.kv_b_proj, self.kv_b_proj.build
        weight = getattr(packed, "weight", None)
        shape = (packed.out_features, packed.in_features)
        if isinstance(weight, torch.Tensor) and (weight.shape, weight.dtype) == (
            shape,
            build.dtype,
        ):
            return
        identity = torch.eye(packed.in_features, dtype=build.dtype, device=build.device)
        dense = Linear(
            replace(build, linear_method=DenseMethod()),
            packed.in_features,
            [*packed.parts.values()],
        )
        dense.weight.copy_(packed(identity).t())
        dense.takes_adapters = False
        self.kv_b_proj = dense

    def forward(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        query, rope, entries = self._write(x, angles)
        context = current_context()
        attended = self.ops.latent_attention(
            query[..., : self.config.nope_dim], rope, context.caches[self.name],
            context.attention[self.name], self._up(), self.config.scale, entries,
        )  # fmt: skip
        return self.o_proj(attended.flatten(1))

    def write(self, x: torch.Tensor, angles: Angles) -> None:
        """Cache the entries of rows whose output nobody needs."""
        self._write(x, angles)

    def _write(
        self, x: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [n, heads, nope_dim + rope_dim], their rotated part, and what is cached."""
        config = self.config
        compressed = self.a_proj(x)
        if config.q_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(compressed[:, : config.q_rank]))
        query = query.unflatten(-1, (self.num_heads, -1))
        entries = compressed[:, -self.entry_size :]
        context = current_context()
        cache, metadata = context.caches[self.name], context.attention[self.name]
        if self.fused is not None:
            rope, entries = self.fused(
                query, entries, self.kv_a_layernorm.weight, NORM_EPS, *angles, config.interleaved,
                cache, metadata.slot_mapping,
            )  # fmt: skip
        else:
            rope, entries = self._norm_and_rotate(query, entries, angles)
            self.ops.write_latent(entries, cache, metadata.slot_mapping)
        return query, rope, entries

    def _up(self) -> torch.Tensor:
        """[heads, nope_dim + value_dim, kv_rank]: a view of kv_b_proj's weight."""
        return self.kv_b_proj.weight.view(self.num_heads, -1, self.config.kv_rank)

    def _norm_and_rotate(
        self, query: torch.Tensor, compressed: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated part of queries, and the step's cache entries [n, kv_rank + rope_dim]."""
        config = self.config
        query_rope = query[..., config.nope_dim :]
        latent, key_rope = compressed[:, : config.kv_rank], compressed[:, config.kv_rank :]
        key_rope = key_rope[:, None]  # [n, 1, rope_dim]
        if config.interleaved:
            query_rope, key_rope = _to_halves(query_rope), _to_halves(key_rope)
        query_rope, key_rope = self.ops.rotate_pair(query_rope, key_rope, *angles)
        return query_rope, torch.cat([self.kv_a_layernorm(latent), key_rope[:, 0]], dim=-1)

    def kv_spec(self, dtype: str) -> LatentSpec:
        """What this layer keeps in the cache."""
        if dtype == "float8_e4m3":
            raise ConfigError(
                "kv_cache_dtype=fp8 is for keys and values; this model keeps latent vectors: "
                "choose auto, bfloat16 or float16"
            )
        scale_size = INT8_SCALE_BYTES if dtype == "int8" else 0
        return LatentSpec(entry_size=self.entry_size + scale_size, dtype=dtype)


def _to_halves(x: torch.Tensor) -> torch.Tensor:
    """Separate pairs of neighbours. Done to queries and keys alike, so products do not change."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
