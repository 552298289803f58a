"""A second kind of KV group, and requests reduced to what the cache asks of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.kvcache.groups import RULES, GroupRules
from penstock.protocol.kv import FullAttentionSpec, KVCacheGroup, KVCacheLayout, KVCacheSpec


class WindowSpec(KVCacheSpec, frozen=True, kw_only=True, tag=True):
    """Keys and values of the last `window` tokens, the current one included."""

    window: int
    num_bytes: int = 64

    def bytes_per_token(self):
        return self.num_bytes


class WindowRules(GroupRules):
    def longest_prefix(self, is_cached, limit):
        run = 0  # cached blocks in a row, seen from the end
        for index in reversed(range(limit // self.block_size)):
            run = run + 1 if is_cached(index) else 0
            num_tokens = (index + run) * self.block_size
            if run and index <= self.num_droppable(num_tokens):
                return num_tokens
        return 0

    def num_droppable(self, num_tokens):
        return max(num_tokens - self.spec.window + 1, 0) // self.block_size


REGISTRY = {**RULES, WindowSpec: WindowRules}

FULL = FullAttentionSpec(num_kv_heads=1, head_dim=8, dtype="float32")


def full_group(block_size):
    return KVCacheGroup(spec=FULL, block_size=block_size, layer_names=[f"full.{block_size}"])


def window_group(block_size, window):
    spec = WindowSpec(window=window)
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
