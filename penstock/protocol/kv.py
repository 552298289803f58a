"""How a model's KV cache is laid out: specs by layer, groups of layers, pages of one size."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one layer keeps of each token. Subclasses say which tokens it needs to keep."""

    def bytes_per_token(self) -> int:
        raise NotImplementedError


class FullAttentionSpec(KVCacheSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of every token."""

    num_kv_heads: int  # on one rank
    head_dim: int
    dtype: str  # "float32", "bfloat16", "float16", "int8"

    @property
    def entry_size(self) -> int:
        """Elements that a head's key, or value, of one token takes."""
        return self.head_dim + (INT8_SCALE_BYTES if self.dtype == "int8" else 0)

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.entry_size * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
INT8_SCALE_BYTES = 4  # each head of a token has a scale of its own, a float32, behind its numbers

# Code takes any KVCacheSpec; a decoder must be told which ones there are, as a union.
if TYPE_CHECKING:
    AnyKVCacheSpec: TypeAlias = KVCacheSpec
else:
    AnyKVCacheSpec = FullAttentionSpec


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one spec that share a block table."""

    spec: AnyKVCacheSpec
    block_size: int  # tokens in a block
    layer_names: list[str]


class KVCacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All groups and the one pool of pages that serves them.

    Every block of every group has the same size in bytes: `page_bytes` for each of at most
    `layers_per_page` layers.
    """

    groups: list[KVCacheGroup]
    num_blocks: int  # block 0, the null block, included
    page_bytes: int  # one layer's share of a block

    @property
    def layers_per_page(self) -> int:
        return max((len(group.layer_names) for group in self.groups), default=0)

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.page_bytes * self.layers_per_page
