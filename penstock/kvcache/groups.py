"""GroupRules: decide which blocks a KV group keeps, drops and shares. One class per KVCacheSpec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from penstock.protocol.kv import (
    UNBOUNDED,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentSpec,
    RecurrentSpec,
    SlidingWindowSpec,
)


class GroupRules(ABC):
    """How one KV group uses its blocks. Block i holds tokens i * size to (i + 1) * size."""

    shares = True  # whether full blocks enter the prefix cache

    def __init__(self, spec: KVCacheSpec, block_size: int) -> None:
        self.spec = spec
        self.block_size = block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Length of the block table for `num_tokens` tokens, gaps included."""
        return -(-num_tokens // self.block_size)

    def num_slots(self, num_blocks: int) -> int:
        """Maximum tokens for a block table of this length."""
        return num_blocks * self.block_size

    @abstractmethod
    def longest_prefix(self, cached: Sequence[object], limit: int) -> int:
        """Return the length of the longest cached prefix, at most `limit` tokens.

        It is a whole number of blocks. `cached[i]` is None if block i is not in the cache.
        """

    @abstractmethod
    def num_droppable(self, num_tokens: int) -> int:
        """How many leading blocks are not read by any token from position `num_tokens` on."""

    @abstractmethod
    def next_drop(self, num_tokens: int) -> int:
        """The next token count, above `num_tokens`, at which `num_droppable` may change."""

    @abstractmethod
    def max_held(self, num_tokens: int, step_tokens: int) -> int:
        """Maximum blocks a request holds at once until it reaches `num_tokens` tokens.

        It computes at most `step_tokens` tokens per step and drops blocks between steps.
        """


class KeepAllRules(GroupRules):
    """Every token attends to all tokens before it."""

    def longest_prefix(self, cached: Sequence[object], limit: int) -> int:
        num_blocks = limit // self.block_size
        if not all(cached[:num_blocks]):
            num_blocks = cached.index(None)
        return num_blocks * self.block_size

    def num_droppable(self, num_tokens: int) -> int:
        return 0

    def next_drop(self, num_tokens: int) -> int:
        return UNBOUNDED

    def max_held(self, num_tokens: int, step_tokens: int) -> int:
        return self.num_blocks(num_tokens)


class KeepRecentRules(GroupRules):
    """A token attends to at most `reach` tokens before it."""

    reach: int

    def longest_prefix(self, cached: Sequence[object], limit: int) -> int:
        end = limit // self.block_size
        while end > 0:
            num_gaps, start = self.num_droppable(end * self.block_size), end
            while start > num_gaps and cached[start - 1] is not None:
                start -= 1
            if start <= num_gaps:
                break
            end = start - 1  # every longer prefix needs the missing block, too
        return end * self.block_size

    def max_held(self, num_tokens: int, step_tokens: int) -> int:
        span = self.reach + min(step_tokens, num_tokens)  # consecutive, at any offset
        return min(self.num_blocks(num_tokens), (span - 2) // self.block_size + 2)


class SlidingWindowRules(KeepRecentRules):
    def __init__(self, spec: SlidingWindowSpec, block_size: int) -> None:
        super().__init__(spec, block_size)
        self.reach = spec.window - 1

    def num_droppable(self, num_tokens: int) -> int:
        return max(num_tokens - self.reach, 0) // self.block_size

    def next_drop(self, num_tokens: int) -> int:
        return (self.num_droppable(num_tokens) + 1) * self.block_size + self.reach


class ChunkedLocalRules(KeepRecentRules):
    def __init__(self, spec: ChunkedLocalSpec, block_size: int) -> None:
        super().__init__(spec, block_size)
        self.chunk = spec.chunk
        self.reach = spec.chunk - 1

    def num_droppable(self, num_tokens: int) -> int:
        return num_tokens // self.chunk * self.chunk // self.block_size

    def next_drop(self, num_tokens: int) -> int:
        return (num_tokens // self.chunk + 1) * self.chunk


class RecurrentRules(KeepRecentRules):
    """Block i holds the state after its last token. The last block holds the current state.

    A step reads the state before its first token and writes a state into every block it reaches.
    A full block, which other requests may share, is never written again.
    """

    reach = 1

    def num_droppable(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0) // self.block_size

    def next_drop(self, num_tokens: int) -> int:
        return (self.num_droppable(num_tokens) + 1) * self.block_size + 1


class CrossAttentionRules(KeepAllRules):
    """Block i holds tokens of the encoder's sequence. The first token needs all of them.

    Nothing is shared: equal prefixes may belong to different encoder sequences.
    """

    shares = False

    def __init__(self, spec: CrossAttentionSpec, block_size: int) -> None:
        super().__init__(spec, block_size)
        self.length = super().num_blocks(spec.max_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        return self.length if num_tokens > 0 else 0

    def num_slots(self, num_blocks: int) -> int:
        return UNBOUNDED if num_blocks == self.length else 0

    def longest_prefix(self, cached: Sequence[object], limit: int) -> int:
        return 0


MakeRules = Callable[..., GroupRules]  # takes a spec and a block size
RulesRegistry = Mapping[type[KVCacheSpec], MakeRules]

RULES: RulesRegistry = MappingProxyType(
    {
        FullAttentionSpec: KeepAllRules,
        LatentSpec: KeepAllRules,
        SlidingWindowSpec: SlidingWindowRules,
        ChunkedLocalSpec: ChunkedLocalRules,
        RecurrentSpec: RecurrentRules,
        CrossAttentionSpec: CrossAttentionRules,
    }
)


def rules_for(spec: KVCacheSpec, block_size: int, registry: RulesRegistry = RULES) -> GroupRules:
    return registry[type(spec)](spec, block_size)
