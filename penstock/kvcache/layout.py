"""How a model's layers share one pool of equal pages, and whether the memory is enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from penstock.kvcache.groups import RULES, RulesRegistry, rules_for
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import KVCacheGroup, KVCacheLayout, KVCacheSpec

MAX_PADDED_LAYERS = 1 / 8  # share of pages left empty that fewer, larger groups are worth


def make_layout(
    specs: Mapping[str, KVCacheSpec],
    block_size: int,
    max_model_len: int,
    *,
    memory_bytes: int | None = None,
    num_blocks: int | None = None,
    registry: RulesRegistry = RULES,
) -> KVCacheLayout:
    """Lay out the cache of `specs` (by layer name) in `memory_bytes`, or in `num_blocks` blocks.

    `block_size` is the block size of the spec with the most bytes a token; the others' are scaled
    up by powers of two while they fit its page, and what is left of the page is padding.
    Refuses a cache that cannot hold one request of `max_model_len` tokens besides the null block:
    the scheduler counts on it to finish any request, if need be alone.
    """
    assert (memory_bytes is None) != (num_blocks is None), "give a budget or a count"
    if not specs:
        return KVCacheLayout(groups=[], num_blocks=1, page_bytes=0)
    page_bytes = block_size * max(spec.bytes_per_token() for spec in specs.values())
    groups = [
        KVCacheGroup(
            spec=spec, block_size=_fill_page(spec, block_size, page_bytes), layer_names=part
        )
        for spec, part in _split_by_spec(specs)
    ]
    block_bytes = page_bytes * max(len(group.layer_names) for group in groups)
    if num_blocks is None:
        assert memory_bytes is not None
        num_blocks = max(memory_bytes, 0) // block_bytes
    _check_capacity(groups, num_blocks, block_bytes, max_model_len, registry)
    return KVCacheLayout(groups=groups, num_blocks=num_blocks, page_bytes=page_bytes)


def blocks_for_request(
    groups: Iterable[KVCacheGroup], num_tokens: int, registry: RulesRegistry = RULES
) -> int:
    """The most blocks that one request of `num_tokens` tokens holds, over all groups."""
    return sum(
        rules_for(group.spec, group.block_size, registry).num_blocks(num_tokens) for group in groups
    )


def _fill_page(spec: KVCacheSpec, block_size: int, page_bytes: int) -> int:
    while 2 * block_size * spec.bytes_per_token() <= page_bytes:
        block_size *= 2
    return block_size


def _split_by_spec(specs: Mapping[str, KVCacheSpec]) -> list[tuple[KVCacheSpec, list[str]]]:
    """Layers of one spec, cut into parts that are as even as can be."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    largest = _choose_group_size([len(names) for names in by_spec.values()])
    parts = []
    for spec, names in by_spec.items():
        num_parts = -(-len(names) // largest)
        bounds = [index * len(names) // num_parts for index in range(num_parts + 1)]
        parts += [(spec, names[start:end]) for start, end in itertools.pairwise(bounds)]
    return parts


def _choose_group_size(layer_counts: list[int]) -> int:
    """The most layers a group: as many as leave few pages of smaller groups empty."""
    num_layers = sum(layer_counts)
    for size in range(max(layer_counts), 1, -1):
        num_slots = sum(-(-count // size) * size for count in layer_counts)
        if num_slots - num_layers <= MAX_PADDED_LAYERS * num_layers:
            return size
    return 1


def _check_capacity(
    groups: list[KVCacheGroup],
    num_blocks: int,
    block_bytes: int,
    max_model_len: int,
    registry: RulesRegistry,
) -> None:
    needed = blocks_for_request(groups, max_model_len, registry) + 1
    if needed <= num_blocks:
        return
    low = longest_request(groups, num_blocks, max_model_len, registry)
    remedy = "give the cache more memory (kv_cache_memory_bytes, gpu_memory_utilization)"
    if low >= 2:
        remedy = f"set max_model_len to at most {low}, or {remedy}"
    raise ConfigError(
        f"the KV cache needs {_gib(needed * block_bytes)} ({needed} blocks) for one request of "
        f"max_model_len={max_model_len} tokens, but has {_gib(num_blocks * block_bytes)} "
        f"({num_blocks} blocks): {remedy}"
    )


def longest_request(
    groups: list[KVCacheGroup],
    num_blocks: int,
    max_model_len: int,
    registry: RulesRegistry = RULES,
) -> int:
    """The most tokens, up to `max_model_len`, of a request that fits besides the null block."""
    low, high = 0, max_model_len + 1  # low tokens fit, high tokens do not or need not
    while high - low > 1:
        middle = (low + high) // 2
        fits = blocks_for_request(groups, middle, registry) + 1 <= num_blocks
        low, high = (middle, high) if fits else (low, middle)
    return low


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
