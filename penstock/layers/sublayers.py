"""The sublayers of most decoder layers: attention with rotary embedding, and the gated MLP."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.linear import column_linear, qkv_linear, row_linear
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary

Angles = tuple[torch.Tensor, torch.Tensor]
Stream = tuple[torch.Tensor, torch.Tensor]  # the residual stream: last output, and the rest


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, build: Build, hidden_size: int, intermediate_size: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.gate_up_proj = column_linear(
            build, hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias
        )
        self.down_proj = row_linear(build, intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x)))


class RotaryAttention(nn.Module):
    """Grouped-query attention with rotary embedding and optional norms on queries and keys.

    Without `rotary`, the layer ignores positions. `scale` multiplies the scores.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary | None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        chunk: int | None = None,
        kind: Literal["causal", "bidirectional"] = "causal",
        input_size: int | None = None,  # of x; default: hidden_size
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotary = rotary
        self.num_heads = num_heads // build.tp.size
        self.num_kv_heads = max(num_kv_heads // build.tp.size, 1)
        self.qkv_proj = qkv_linear(
            build, input_size or hidden_size, num_heads, num_kv_heads, head_dim, qkv_bias
        )
        self.o_proj = row_linear(build, num_heads * head_dim, hidden_size, output_bias)
        self.attention = Attention(
            build, name, self.num_heads, self.num_kv_heads, head_dim, scale, window,
            kind, softcap, has_sinks, chunk,
        )  # fmt: skip
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(build, head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(build, head_dim, qk_norm_eps)
        # Not every device has the fused op. It needs rotary embedding over the whole head.
        is_plain = (
            rotary is not None and rotary.table.shape[-1] == head_dim and not rotary.interleaved
        ) and kind == "causal"
        self.fused = build.ops.find("norm_rotate_write") if is_plain else None

    def use_norms(self, q_norm: nn.Module, k_norm: nn.Module) -> None:
        """Use norms of [n, heads, head_dim] other than one RMSNorm per head."""
        self.q_norm, self.k_norm = q_norm, k_norm
        self.fused = None  # does not support them

    def forward(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        if self.fused is not None:
            query, key, value = self._write_fused(qkv, angles)
            return self.o_proj(self.attention.attend(query, key=key, value=value))
        return self.o_proj(self.attention(*self._heads(qkv, angles)))

    def write(self, x: torch.Tensor, angles: Angles) -> None:
        """Cache keys and values of rows whose output nobody needs."""
        if self.fused is not None:
            self._write_fused(self.qkv_proj(x), angles)
            return
        both = self.qkv_proj.last_parts(x, "k_proj", "v_proj")
        self.attention.write(*self._heads(both, angles, num_heads=0)[1:])

    def _heads(
        self, qkv: torch.Tensor, angles: Angles, num_heads: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value: [n, heads, head_dim] each. `num_heads`: of the queries."""
        num_heads = self.num_heads if num_heads is None else num_heads
        counts = [num_heads, self.num_kv_heads, self.num_kv_heads]
        heads = qkv.reshape(-1, sum(counts), self.head_dim)
        query, key, value = torch.split(heads, counts, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query) if num_heads else query, self.k_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, key, angles)
        return query, key, value

    def _write_fused(
        self, qkv: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.fused is not None
        q_norm, k_norm = self.q_norm, self.k_norm
        assert isinstance(q_norm, RMSNorm | None)
        assert isinstance(k_norm, RMSNorm | None)
        return self.attention.write_fused(
            self.fused,
            qkv,
            q_norm.weight if q_norm is not None else None,
            k_norm.weight if k_norm is not None else None,
            q_norm.eps if q_norm is not None else 0.0,
            angles,
        )
