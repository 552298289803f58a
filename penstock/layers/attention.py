"""The attention layer: writes the step's keys and values to the cache, then attends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from penstock.layers.build import Build
from penstock.layers.context import current_context
from penstock.layers.loadable import copy_shard
from penstock.ops.attention import AttentionMetadata, SpanRows, span_attention
from penstock.ops.blocks import Weight
from penstock.protocol.errors import ModelError
from penstock.protocol.kv import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)


@runtime_checkable
class CachedLayer(Protocol):
    """A layer that keeps state of each request in the KV cache."""

    name: str  # key in the forward context

    def kv_spec(self, dtype: str) -> KVCacheSpec | None:
        """What the layer keeps, with keys and values of this type; None if nothing."""


class Attention(nn.Module):
    """Attention, causal or bidirectional.

    `causal` reads and writes the paged KV cache. `bidirectional` needs whole requests; its `window`
    is the number of visible tokens on each side. `window`, `chunk`, `softcap` and sinks (a loaded
    parameter) are those of `ops.paged_attention`. Blocks before the window or the chunk are freed
    while a request runs.
    """

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
        softcap: float | None = None,
        has_sinks: bool = False,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.tp = build.tp
        self.name = name
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        assert window is None or chunk is None, "a layer has a window or a chunk, not both"
        if kind == "bidirectional" and (softcap or has_sinks or chunk):
            raise ModelError(
                "bidirectional attention is not supported with soft caps, sinks or chunks"
            )
        # A window or chunk that no request exceeds has no effect. The layer is then like those
        # without one, and shares their KV group.
        self.window = window if window is not None and window < build.max_model_len else None
        self.chunk = chunk if chunk is not None and chunk < build.max_model_len else None
        self.kind = kind
        self.softcap = softcap
        self.sinks = build.empty(num_heads) if has_sinks else None
        self.kv_scales = (1.0, 1.0)  # of keys and values in an fp8 cache
        # Passed to the op only if the layer has them: not every implementation supports them.
        self.extras: dict[str, Any] = {}
        if softcap is not None:
            self.extras["softcap"] = softcap
        if self.sinks is not None:
            self.extras["sinks"] = self.sinks
        if self.chunk is not None:
            self.extras["chunk"] = self.chunk

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[n, heads, head_dim] each -> [n, heads * head_dim]."""
        if self.kind == "bidirectional":
            output = self.ops.varlen_attention(
                query, key, value, current_context().query_starts, self.scale, self.window
            )
            return output.flatten(1)
        self.write(key, value)
        return self.attend(query)

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache keys and values [n, kv_heads, head_dim]."""
        context = current_context()
        cache, metadata = context.caches[self.name], context.attention[self.name]
        self.ops.write_kv(key, value, cache, metadata.slot_mapping, **self._scales(cache))

    def write_fused(
        self,
        norm_rotate_write: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Like `write`, from the projection's output: one op norms, rotates and caches."""
        context = current_context()
        cache, metadata = context.caches[self.name], context.attention[self.name]
        return norm_rotate_write(
            qkv, q_weight, k_weight, eps, *angles, cache, metadata.slot_mapping, self.num_heads,
            **self._scales(cache),
        )  # fmt: skip

    def attend(self, query: torch.Tensor, **rows: torch.Tensor) -> torch.Tensor:
        """Attend to what is cached. `rows`: the step's keys and values, if the op may read them."""
        context = current_context()
        cache, metadata = context.caches[self.name], context.attention[self.name]
        output = self.ops.paged_attention(
            query, cache, metadata, self.scale, self.window, **rows, **self.extras,
            **self._scales(cache),
        )  # fmt: skip
        if context.spans:
            self._attend_spans(query, cache, metadata, context.spans, output)
        return output.flatten(1)

    def _attend_spans(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        spans: Sequence[SpanRows],
        output: torch.Tensor,
    ) -> None:
        """Compute the rows that see tokens after them, again."""
        assert self.sinks is None, "models with spans have none"
        assert self.chunk is None, "models with spans have none"
        scales = self._scales(cache)
        span_attention(
            query, cache, metadata, spans, output, self.scale, self.window, self.softcap, **scales
        )

    def _scales(self, cache: torch.Tensor) -> dict[str, tuple[float, float]]:
        """The scales of an fp8 cache, which are stored outside of it. Other caches have none."""
        return {"kv_scales": self.kv_scales} if cache.dtype == torch.float8_e4m3fn else {}

    def kv_spec(self, dtype: str) -> KVCacheSpec | None:
        """What this layer keeps in the cache; None if nothing."""
        if self.kind == "bidirectional":
            return None
        heads = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        if self.window is not None:
            return SlidingWindowSpec(**heads, dtype=dtype, window=self.window)
        if self.chunk is not None:
            return ChunkedLocalSpec(**heads, dtype=dtype, chunk=self.chunk)
        return FullAttentionSpec(**heads, dtype=dtype)

    def expected(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {} if self.sinks is None else {("sinks", ""): (self.num_heads * self.tp.size,)}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        assert self.sinks is not None
        copy_shard(self.sinks, tensor, self.tp)
