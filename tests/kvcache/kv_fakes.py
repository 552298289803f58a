"""Small KV groups, and requests reduced to what the cache asks of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.kvcache.groups import RULES
from penstock.protocol.kv import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheLayout,
    SlidingWindowSpec,
)

REGISTRY = RULES

FULL = FullAttentionSpec(num_kv_heads=1, head_dim=8, dtype="float32")


def full_group(block_size):
    return KVCacheGroup(spec=FULL, block_size=block_size, layer_names=[f"full.{block_size}"])


def window_group(block_size, window):
    spec = SlidingWindowSpec(num_kv_heads=1, head_dim=8, dtype="float32", window=window)
    return KVCacheGroup(spec=spec, block_size=block_size, layer_names=[f"window.{block_size}"])


ONE_GROUP = [full_group(4)]
THREE_GROUPS = [full_group(4), window_group(2, 5), window_group(8, 3)]


def layout_of(groups, num_blocks):
    return KVCacheLayout(groups=list(groups), num_blocks=num_blocks, page_bytes=64)


@dataclass
class FakeRequest:
    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    last_step_id: int = 0
    cache_salt: str | None = None
    read_prefix_cache: bool = True
    confirmed: int = field(default=0)
