"""The attention layer: writes the step's keys and values, then attends, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.context import current_context
from penstock.protocol.kv import FullAttentionSpec, KVCacheSpec


@runtime_checkable
class CachedLayer(Protocol):
    """A layer that keeps something of its requests, whatever it is."""

    name: str  # in the forward context

    def kv_spec(self, dtype: str) -> KVCacheSpec | None:
        """What it keeps, where keys and values are of this type; None if nothing."""


class Attention(nn.Module):
    """`causal` reads and writes the paged KV cache; `bidirectional` needs whole requests."""

    def __init__(
        self,
        build: Build,
        name: str,
        num_heads: int,  # on this rank
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        window: int | None = None,
        kind: Literal["causal", "bidirectional"] = "causal",
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.name = name
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.kind = kind

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[n, heads, head_dim] each -> [n, heads * head_dim]."""
        context = current_context()
        if self.kind == "bidirectional":
            output = self.ops.varlen_attention(query, key, value, context.query_starts, self.scale)
        else:
            cache, metadata = context.caches[self.name], context.attention[self.name]
            self.ops.write_kv(key, value, cache, metadata.slot_mapping)
            output = self.ops.paged_attention(query, cache, metadata, self.scale, self.window)
        return output.flatten(1)  # type: ignore[no-any-return]

    def forward_fused(
        self,
        norm_rotate_write: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """As `forward`, from the projection's output, where one op norms, rotates and caches."""
        context = current_context()
        cache, metadata = context.caches[self.name], context.attention[self.name]
        query, key, value = norm_rotate_write(
            qkv, q_weight, k_weight, eps, *angles, cache, metadata.slot_mapping, self.num_heads
        )
        output = self.ops.paged_attention(
            query, cache, metadata, self.scale, self.window, key=key, value=value
        )
        return output.flatten(1)  # type: ignore[no-any-return]

    def kv_spec(self, dtype: str) -> KVCacheSpec | None:
        """What this layer keeps in the cache; None if nothing."""
        if self.kind == "bidirectional":
            return None
        return FullAttentionSpec(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype
        )
