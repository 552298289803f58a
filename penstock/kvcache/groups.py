"""What each kind of layer needs of the cache: one class a KVCacheSpec, found by its type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

from penstock.protocol.kv import FullAttentionSpec, KVCacheSpec


class GroupRules(ABC):
    """How one group of layers uses its blocks. Block i holds tokens i * size to (i + 1) * size."""

    def __init__(self, spec: KVCacheSpec, block_size: int) -> None:
        self.spec = spec
        self.block_size = block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Length of the block table for so many tokens, gaps included."""
        return -(-num_tokens // self.block_size)

    @abstractmethod
    def longest_prefix(self, is_cached: Callable[[int], bool], limit: int) -> int:
        """The most tokens, at most `limit`, that cached blocks can stand in for.

        Always whole blocks. `is_cached(i)` says whether block i of the request is in the cache.
        """

    @abstractmethod
    def num_droppable(self, num_tokens: int) -> int:
        """How many leading blocks no token from position `num_tokens` on will read."""


class FullAttentionRules(GroupRules):
    """Every token reads all tokens before it."""

    def longest_prefix(self, is_cached: Callable[[int], bool], limit: int) -> int:
        num_blocks = 0
        while num_blocks < limit // self.block_size and is_cached(num_blocks):
            num_blocks += 1
        return num_blocks * self.block_size

    def num_droppable(self, num_tokens: int) -> int:
        return 0


RulesRegistry = Mapping[type[KVCacheSpec], type[GroupRules]]

RULES: RulesRegistry = MappingProxyType({FullAttentionSpec: FullAttentionRules})


def rules_for(spec: KVCacheSpec, block_size: int, registry: RulesRegistry = RULES) -> GroupRules:
    return registry[type(spec)](spec, block_size)
