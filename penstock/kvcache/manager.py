"""KVCacheManager: decides which blocks each request holds and which blocks requests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import cycle, repeat
from typing import Protocol

from penstock.kvcache.block_pool import Block, BlockKey, BlockPool
from penstock.kvcache.groups import RULES, GroupRules, KeepAllRules, RulesRegistry, rules_for
from penstock.kvcache.hashing import HashChain, hash_root
from penstock.protocol.kv import UNBOUNDED, KVCacheLayout
from penstock.protocol.prefix import PrefixKeys


class CacheableRequest(Protocol):
    """The attributes of a request that the cache reads."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]:
        """All known tokens: the prompt, then the output."""

    @property
    def num_computed_tokens(self) -> int:
        """An upper bound while steps are in flight."""

    @property
    def last_step_id(self) -> int:
        """The last step that uses its blocks, or 0."""

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def adapter_digest(self) -> str | None: ...
    @property
    def adapter_name(self) -> str | None: ...
    @property
    def media_hashes(self) -> dict[int, bytes]: ...
    @property
    def read_prefix_cache(self) -> bool: ...


@dataclass(frozen=True)
class CachedPrefix:
    """The longest prefix of a request that is cached in every group, and its blocks.

    Valid until the next call that takes blocks. A null block is a gap: the group does not need it.
    """

    num_tokens: int
    blocks: list[list[Block]]  # by group


class CacheObserver(Protocol):
    """Is told how the prefix cache changes. Only blocks of the main group count."""

    def on_stored(
        self, request: CacheableRequest, numbers: Sequence[int], hash_of: Callable[[int], bytes]
    ) -> None:
        """A request published its blocks `numbers`, in order. `hash_of` knows those before, too."""

    def on_removed(self, block_hash: bytes) -> None:
        """A block is reused for something else."""

    def on_cleared(self) -> None:
        """The cache was emptied."""


class _Holding:
    """One request's blocks and their hashes."""

    __slots__ = ("chain", "may_publish", "next_event", "num_published", "num_slots", "tables")

    def __init__(self, chain: HashChain, num_groups: int) -> None:
        self.chain = chain
        self.tables: list[list[Block]] = [[] for _ in range(num_groups)]
        self.num_slots = 0  # tokens that fit into the tables
        self.num_published = [0] * num_groups  # blocks, by group
        self.next_event = 0  # token count at which a group can publish or drop its next block
        self.may_publish = True


class KVCacheManager:
    """Allocates blocks to requests, all or nothing, and owns the prefix cache."""

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        model_fingerprint: str = "",
        kv_dtype: str = "auto",
        enable_prefix_caching: bool = True,
        registry: RulesRegistry = RULES,
    ) -> None:
        self.pool = BlockPool(layout.num_blocks)
        self.num_spare = 0  # tokens past those of a step that get blocks, too, if enough are free
        self._null = self.pool.null_block
        self.groups = [rules_for(g.spec, g.block_size, registry) for g in layout.groups]
        self.num_prefix_queries = 0  # tokens of requests that may read the cache
        self.num_prefix_hits = 0  # of these, tokens found in the cache
        self._caches = enable_prefix_caching and bool(self.groups)
        self._unit = math.gcd(*(group.block_size for group in self.groups)) or 1
        self._max_step_tokens = layout.max_step_tokens
        self._hash_root = lru_cache(1024)(partial(hash_root, model_fingerprint, kv_dtype))
        self._holdings: dict[str, _Holding] = {}
        self._observers: list[CacheObserver] = []
        self._main_group = self._find_main_group()
        self.prefix_keys: PrefixKeys | None = None  # None: no prefix is cached
        if self._caches and self._main_group is not None:
            block_size = self.groups[self._main_group].block_size
            self.prefix_keys = PrefixKeys(model_fingerprint, kv_dtype, block_size)

    # -- capacity

    @property
    def usage(self) -> float:
        """Share of the blocks that are held or draining, 0 to 1."""
        return (self.pool.num_usable - self.pool.num_free) / max(self.pool.num_usable, 1)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a single request of this length fits into the cache."""
        held = sum(group.max_held(num_tokens, self._max_step_tokens) for group in self.groups)
        return held <= self.pool.num_usable

    def block_ids(self, request: CacheableRequest) -> list[list[int]]:
        """The request's block tables, by group."""
        holding = self._holdings.get(request.request_id)
        tables = holding.tables if holding else []
        return [[block.id for block in table] for table in tables]

    # -- a request is admitted

    def match(self, request: CacheableRequest) -> CachedPrefix:
        """Return the longest cached prefix. It excludes the last token, which must be computed."""
        if not (self._caches and request.read_prefix_cache):
            return CachedPrefix(0, [[] for _ in self.groups])
        chain = self._holding(request).chain
        chain.extend(request.token_ids)
        cached = [self._cached(chain, group) for group in range(len(self.groups))]
        limit, num_agreeing = len(request.token_ids) - 1, 0
        groups = cycle(zip(self.groups, cached, strict=True))
        while num_agreeing < len(self.groups):  # each group may shorten the prefix again
            rules, blocks = next(groups)
            served = rules.longest_prefix(blocks, limit)
            num_agreeing = num_agreeing + 1 if served == limit else 1
            limit = served
        return CachedPrefix(limit, list(map(self._prefix, self.groups, cached, repeat(limit))))

    def fits(self, prefix: CachedPrefix, num_tokens: int) -> bool:
        """Whether a request that begins with `prefix` can reach `num_tokens` with the free blocks.

        A block that it drops on the way is free for its next block, unless others hold it, too.
        """
        step_tokens = min(self._max_step_tokens, num_tokens - prefix.num_tokens)
        num_needed = 0
        for rules, blocks in zip(self.groups, prefix.blocks, strict=True):
            num_revived = self.pool.num_free_of(blocks)
            num_new = rules.num_blocks(num_tokens) - len(blocks)
            num_needed += min(rules.max_held(num_tokens, step_tokens), num_new + num_revived)
        return num_needed <= self.pool.num_free

    def adopt(self, request: CacheableRequest, prefix: CachedPrefix) -> None:
        """Give a request without blocks the shared blocks of its prefix."""
        holding = self._holding(request)
        for rules, blocks in zip(self.groups, prefix.blocks, strict=True):
            self.pool.touch(*blocks[rules.num_droppable(prefix.num_tokens) :])
        holding.tables = [list(blocks) for blocks in prefix.blocks]
        holding.num_published = [len(blocks) for blocks in prefix.blocks]
        self._count_slots(holding)
        self._find_next_event(holding, prefix.num_tokens)
        if self._caches and request.read_prefix_cache:
            self.num_prefix_queries += len(request.token_ids)
            self.num_prefix_hits += prefix.num_tokens

    # -- a running request

    def allocate(
        self, request: CacheableRequest, num_new: int, num_lookahead: int = 0
    ) -> list[list[int]] | None:
        """Allocate blocks for `num_new` tokens after the computed ones, and `num_lookahead` drafts.

        It also takes blocks for `num_spare` more tokens if enough are free. Returns the ids of new
        blocks by group, or [] if none are needed. Returns None and changes nothing if there are not
        enough free blocks.
        """
        holding = self._holding(request)
        num_slots = request.num_computed_tokens + num_new + num_lookahead
        if num_slots + self.num_spare <= holding.num_slots:
            return []
        missing = self._missing(holding, num_slots + self.num_spare)
        if self.num_spare and sum(missing) > self.pool.num_free:
            missing = self._missing(holding, num_slots)
        if sum(missing) > self.pool.num_free:
            return None
        new_blocks = [self.pool.take(num_blocks) for num_blocks in missing]
        for table, blocks in zip(holding.tables, new_blocks, strict=True):
            table += blocks
        self._count_slots(holding)
        return [[block.id for block in blocks] for blocks in new_blocks]

    def num_slots(self, request: CacheableRequest) -> int:
        """Token count, computed tokens included, up to which `allocate` takes no block."""
        return self._holding(request).num_slots

    def num_missing(self, request: CacheableRequest, num_new: int) -> int:
        """How many blocks `allocate` would take."""
        num_slots = request.num_computed_tokens + num_new
        return sum(self._missing(self._holding(request), num_slots))

    def publish(self, request: CacheableRequest, num_confirmed_tokens: int) -> int:
        """Publish full blocks of the confirmed tokens, and drop blocks that are no longer read.

        Returns the token count at which this must be called again.
        """
        holding = self._holdings[request.request_id]
        if num_confirmed_tokens < holding.next_event:
            return holding.next_event
        publishes = self._caches and holding.may_publish
        if publishes:
            holding.chain.extend(request.token_ids)
        for group, rules in enumerate(self.groups):
            num_full = num_confirmed_tokens // rules.block_size
            if publishes and rules.shares:
                self._publish_blocks(request, holding, group, num_full)
            holding.num_published[group] = num_full
            if num_droppable := rules.num_droppable(num_confirmed_tokens):
                self._drop(request, holding.tables[group], num_droppable)
        return self._find_next_event(holding, num_confirmed_tokens)

    # -- a request ends

    def free(self, request: CacheableRequest) -> None:
        """Free all blocks. Blocks in use by steps in flight return once these are collected."""
        self.pool.free(self._let_go(request), request.last_step_id)

    def collect(self, step_id: int) -> None:
        """The step is done: blocks that were freed while it used them may be reused."""
        self.pool.collect(step_id)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests keep their blocks but publish no more."""
        self.pool.forget_all()
        for observer in self._observers:
            observer.on_cleared()
        for holding in self._holdings.values():
            holding.may_publish = not any(holding.tables)

    # -- those who follow the prefix cache

    def observe(self, observer: CacheObserver) -> None:
        """Tell `observer` of every change of the prefix cache from now on."""
        self._observers.append(observer)
        self.pool.on_evict = self._on_evict

    def cached_hashes(self) -> Iterable[bytes]:
        """The hashes of all cached blocks of the main group."""
        return () if self._main_group is None else self.pool.cached_hashes(self._main_group)

    def _on_evict(self, key: BlockKey) -> None:
        if key[1] == self._main_group:
            for observer in self._observers:
                observer.on_removed(key[0])

    def _find_main_group(self) -> int | None:
        """The group that stands for all: the first that keeps and shares all tokens, or else the
        first that shares some. None if no group shares blocks."""
        shared = [i for i, rules in enumerate(self.groups) if rules.shares]
        keeps_all = [i for i in shared if isinstance(self.groups[i], KeepAllRules)]
        return next(iter(keeps_all or shared), None)

    # -- details

    def _holding(self, request: CacheableRequest) -> _Holding:
        holding = self._holdings.get(request.request_id)
        if holding is None:
            root = self._hash_root(request.cache_salt, request.adapter_digest)
            holding = _Holding(HashChain(root, self._unit, request.media_hashes), len(self.groups))
            self._holdings[request.request_id] = holding
            self._count_slots(holding)
            self._find_next_event(holding, 0)
        return holding

    def _cached(self, chain: HashChain, group: int) -> list[Block | None]:
        """The cached block for each full block of a request, or None."""
        units_per_block = self.groups[group].block_size // self._unit
        return self.pool.lookup(chain.hashes[units_per_block - 1 :: units_per_block], group)

    def _prefix(
        self, rules: GroupRules, cached: list[Block | None], num_tokens: int
    ) -> list[Block]:
        num_gaps, num_blocks = rules.num_droppable(num_tokens), num_tokens // rules.block_size
        blocks = [block for block in cached[num_gaps:num_blocks] if block is not None]
        assert len(blocks) == max(num_blocks - num_gaps, 0), "longest_prefix counted one too many"
        return [self._null] * num_gaps + blocks

    def _missing(self, holding: _Holding, num_slots: int) -> list[int]:
        return [
            max(rules.num_blocks(num_slots) - len(table), 0)
            for rules, table in zip(self.groups, holding.tables, strict=True)
        ]

    def _publish_blocks(
        self, request: CacheableRequest, holding: _Holding, group: int, num_full: int
    ) -> None:
        units_per_block = self.groups[group].block_size // self._unit
        hashes, new = holding.chain.hashes, []
        for index in range(holding.num_published[group], num_full):
            block = holding.tables[group][index]
            if block is not self._null:
                key = (hashes[(index + 1) * units_per_block - 1], group)
                if self.pool.publish(block, key):
                    new.append(index)
        if self._observers and new and group == self._main_group:
            for observer in self._observers:
                observer.on_stored(request, new, lambda i: hashes[(i + 1) * units_per_block - 1])

    def _drop(self, request: CacheableRequest, table: list[Block], num_droppable: int) -> None:
        null, index = self._null, num_droppable - 1
        dropped = []
        while index >= 0 and table[index] is not null:  # all blocks before a gap are gaps
            dropped.append(table[index])
            table[index] = null
            index -= 1
        self.pool.free(reversed(dropped), request.last_step_id)

    def _count_slots(self, holding: _Holding) -> None:
        """Store the token count up to which `allocate` has nothing to do."""
        slots = [
            rules.num_slots(len(table))
            for rules, table in zip(self.groups, holding.tables, strict=True)
        ]
        holding.num_slots = min(slots, default=UNBOUNDED)

    def _find_next_event(self, holding: _Holding, num_confirmed_tokens: int) -> int:
        """Store and return the token count below which `publish` has nothing to do."""
        at = UNBOUNDED
        for rules, num_published in zip(self.groups, holding.num_published, strict=True):
            full = (num_published + 1) * rules.block_size
            at = min(at, full, rules.next_drop(num_confirmed_tokens))
        holding.next_event = at
        return at

    def _let_go(self, request: CacheableRequest) -> list[Block]:
        holding = self._holdings.pop(request.request_id, None)
        return self._tails_first(holding.tables) if holding else []

    def _tails_first(self, tables: Iterable[list[Block]]) -> list[Block]:
        """Sort blocks by position, last first: then a cached prefix is evicted from its end."""
        placed = [
            (index * rules.block_size, block)
            for rules, table in zip(self.groups, tables, strict=True)
            for index, block in enumerate(table)
            if block is not self._null
        ]
        placed.sort(key=lambda item: item[0], reverse=True)
        return [block for _, block in placed]
