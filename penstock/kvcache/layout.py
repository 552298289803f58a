"""Decides how layers form KV groups, the size of a page, and whether the cache is large enough."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from penstock.kvcache.groups import RULES, RulesRegistry, rules_for
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import (
    STATE_ALIGNMENT,
    UNBOUNDED,
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheLayout,
    KVCacheSpec,
    LatentSpec,
)

logger = logging.getLogger(__name__)

MAX_PADDING = 0.15  # padding per used memory that is accepted for fewer, larger groups
MAX_GROUPS = 16  # each group has its own block table to fill in every step
CHECKPOINT_BYTES = 4096  # maximum bytes per token for recurrent-state checkpoints
NO_LAYERS: Mapping[str, KVCacheSpec] = MappingProxyType({})


def make_layout(
    specs: Mapping[str, KVCacheSpec],
    block_size: int,
    max_model_len: int,
    *,
    memory_bytes: int | None = None,
    num_blocks: int | None = None,
    must_hold: int | None = None,
    max_step_tokens: int = UNBOUNDED,
    draft_specs: Mapping[str, KVCacheSpec] = NO_LAYERS,
    num_draft_rows: int = 0,
    stages: Sequence[tuple[Collection[str], int]] = (),
    registry: RulesRegistry = RULES,
) -> KVCacheLayout:
    """Lay out the cache of `specs` (by layer name) in `memory_bytes`, or in `num_blocks` blocks.

    With pipeline `stages`, each has the memory for some of the layers, and the one with the fewest
    blocks counts. `draft_specs` are the layers of a drafter (see `plan_layout`), `num_draft_rows`
    the rows of a step that may belong to requests with drafts. Raises ConfigError if the cache
    cannot hold the null block and one request of `must_hold` (or `max_model_len`) tokens, computed
    in steps of at most `max_step_tokens`. The scheduler relies on this to finish every request.
    """
    assert (memory_bytes is None) != (num_blocks is None), "give a budget or a count"
    layout = plan_layout(
        specs, block_size, max_model_len, draft_specs, registry, num_stages=max(len(stages), 1)
    )
    if not layout.groups:
        return layout
    layout = msgspec.structs.replace(
        layout, num_draft_rows=num_draft_rows, num_draft_steps=1 + len(stages)
    )
    if num_blocks is None:
        assert memory_bytes is not None
        shares = [(layout.of_layers(names), budget) for names, budget in stages]
        num_blocks = min(
            max(budget - share.draft_input_bytes, 0) // share.block_bytes
            for share, budget in shares or [(layout, memory_bytes)]
            if share.block_bytes
        )
    layout = msgspec.structs.replace(layout, num_blocks=num_blocks, max_step_tokens=max_step_tokens)
    _check_capacity(layout, must_hold or max_model_len, registry)
    waste = padding(layout, max_model_len, registry)
    if waste > 0:
        logger.info(
            "KV cache: %d groups of up to %d layers share %d bytes per layer and block; padding "
            "takes %.1f %% of what a request of %d tokens holds",
            len(layout.groups), layout.layers_per_page, layout.page_bytes, 100 * waste,
            max_model_len,
        )  # fmt: skip
    return layout


def plan_layout(
    specs: Mapping[str, KVCacheSpec],
    block_size: int,
    max_model_len: int,
    draft_specs: Mapping[str, KVCacheSpec] = NO_LAYERS,
    registry: RulesRegistry = RULES,
    num_stages: int = 1,
) -> KVCacheLayout:
    """Lay out a cache that has only the null block.

    The layers of a drafter use the block table of the first group that keeps all tokens: a group
    of their own would split the other layers into smaller groups. If no group keeps all tokens,
    the layers are grouped like any others.
    """
    groups, page_bytes = plan_groups(specs, block_size, max_model_len, registry, num_stages)
    if draft_specs:
        for index, group in enumerate(groups):
            if isinstance(group.spec, FullAttentionSpec | LatentSpec):
                return KVCacheLayout(
                    groups=groups,
                    num_blocks=1,
                    page_bytes=page_bytes,
                    draft_layers=dict(draft_specs),
                    draft_group=index,
                )
        drafts = {name: _keep_all(spec) for name, spec in draft_specs.items()}
        groups, page_bytes = plan_groups({**specs, **drafts}, block_size, max_model_len, registry)
    return KVCacheLayout(groups=groups, num_blocks=1, page_bytes=page_bytes)


def _keep_all(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec without its window. A drafter that catches up writes blocks behind the window."""
    if not isinstance(spec, AttentionSpec):
        return spec
    return FullAttentionSpec(
        num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=spec.dtype
    )


def plan_groups(
    specs: Mapping[str, KVCacheSpec],
    block_size: int,
    max_model_len: int,
    registry: RulesRegistry = RULES,
    num_stages: int = 1,
) -> tuple[list[KVCacheGroup], int]:
    """Return the KV groups and the size of a page (one layer's share of a block).

    `block_size` applies to the spec with the most bytes per token. Other specs get the largest
    block size, by powers of two, that fits the same page. The rest of the page is padding. If a
    recurrent state is larger than the page, the page grows first. A model without KV has no groups.
    """
    if not specs:
        return [], 0
    page_bytes = _choose_page(specs.values(), block_size)
    sizes = {
        spec: _fill_page(spec, block_size, page_bytes)
        for spec in specs.values()
        if spec.bytes_per_token() > 0
    }
    # State checkpoints are spaced like the largest blocks of the other layers, and cost as much.
    longest = max(sizes.values(), default=0) or _space_checkpoints(block_size, page_bytes)
    groups = [
        KVCacheGroup(spec=spec, block_size=sizes.get(spec, longest), layer_names=part)
        for spec, part in _split_by_spec(specs, sizes, longest, max_model_len, registry, num_stages)
    ]
    return groups, page_bytes


def blocks_for_request(
    groups: Iterable[KVCacheGroup],
    num_tokens: int,
    registry: RulesRegistry = RULES,
    max_step_tokens: int = UNBOUNDED,
) -> int:
    """Maximum blocks that one request of `num_tokens` tokens holds at once, over all groups."""
    return sum(
        rules_for(group.spec, group.block_size, registry).max_held(num_tokens, max_step_tokens)
        for group in groups
    )


def padding(layout: KVCacheLayout, num_tokens: int, registry: RulesRegistry = RULES) -> float:
    """The share of padding in the bytes that a request of `num_tokens` tokens holds.

    What draft layers have for blocks of other groups is padding, too.
    """
    held = used = 0
    draft_bytes = layout.block_bytes - layout.page_bytes * layout.layers_per_page
    for index, group in enumerate(layout.groups):
        rules = rules_for(group.spec, group.block_size, registry)
        num_blocks = rules.max_held(num_tokens, 1)
        held += num_blocks * layout.block_bytes
        used += num_blocks * len(group.layer_names) * group.spec.block_bytes(group.block_size)
        if index == layout.draft_group:
            used += num_blocks * draft_bytes
    return 1 - used / held if held else 0.0


def _choose_page(specs: Iterable[KVCacheSpec], block_size: int) -> int:
    """Return a page size that fits a block of every layer.

    A recurrent state may be larger than any block of tokens. Then either blocks grow by powers of
    two until the state fits, or the state's size is the page size. The choice with less padding
    over all layers wins.
    """
    specs = list(specs)
    page = max(block_size * spec.bytes_per_token() for spec in specs)
    state = max((spec.block_bytes(1) for spec in specs if spec.bytes_per_token() == 0), default=0)
    if state == 0:
        return page
    pages = [_round_up(max(state, page), STATE_ALIGNMENT)]
    if 0 < page < state:
        while page < state:
            page *= 2
        pages.insert(0, _round_up(page, STATE_ALIGNMENT))

    def used(page: int) -> float:
        filled = (spec.block_bytes(_fill_page(spec, block_size, page)) for spec in specs)
        return sum(filled) / (len(specs) * page)

    return max(pages, key=used)


def _fill_page(spec: KVCacheSpec, block_size: int, page_bytes: int) -> int:
    """Double the block size while it fits the page. A recurrent state keeps the given size."""
    if spec.bytes_per_token() > 0:
        while spec.block_bytes(2 * block_size) <= page_bytes:
            block_size *= 2
    return block_size


def _space_checkpoints(block_size: int, page_bytes: int) -> int:
    """Tokens between two state checkpoints, for a model with recurrent layers only."""
    while block_size * CHECKPOINT_BYTES < page_bytes:
        block_size *= 2
    return block_size


def _split_by_spec(
    specs: Mapping[str, KVCacheSpec],
    sizes: Mapping[KVCacheSpec, int],
    checkpoint: int,
    max_model_len: int,
    registry: RulesRegistry,
    num_stages: int,
) -> list[tuple[KVCacheSpec, list[str]]]:
    """Split the layers of each spec into parts of nearly equal size.

    With pipeline stages, a part has layers of every stage, if there are enough: a stage has a
    buffer for each of its layers in the largest part.
    """
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    rules = [rules_for(spec, sizes.get(spec, checkpoint), registry) for spec in by_spec]
    largest = _choose_group_size(
        [len(names) for names in by_spec.values()],
        [each.max_held(max_model_len, 1) for each in rules],
    )
    parts = []
    for spec, names in by_spec.items():
        num_parts = -(-len(names) // largest)
        if num_stages > 1:
            parts += [(spec, names[first::num_parts]) for first in range(num_parts)]
            continue
        bounds = [index * len(names) // num_parts for index in range(num_parts + 1)]
        parts += [(spec, names[start:end]) for start, end in itertools.pairwise(bounds)]
    return parts


def _choose_group_size(layer_counts: list[int], blocks_held: list[int]) -> int:
    """Return the maximum layers per group: the largest that keeps padding low.

    Smaller groups leave pages of their blocks empty. The padding must be low for short requests,
    which hold about the same number of blocks in every group, and for the longest request, which
    holds `blocks_held` blocks in a group of each spec.
    """

    def waste(size: int) -> float:
        return max(
            sum(
                -(-count // size) * size * held
                for count, held in zip(layer_counts, mix, strict=True)
            )
            / sum(count * held for count, held in zip(layer_counts, mix, strict=True))
            - 1
            for mix in ([1] * len(layer_counts), blocks_held)
        )

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in layer_counts)

    largest = max(layer_counts)
    sizes = [s for s in range(largest, 0, -1) if num_groups(s) <= MAX_GROUPS] or [largest]
    return next((s for s in sizes if waste(s) <= MAX_PADDING), min(sizes, key=waste))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check_capacity(layout: KVCacheLayout, max_model_len: int, registry: RulesRegistry) -> None:
    step_tokens, num_blocks = layout.max_step_tokens, layout.num_blocks
    block_bytes = layout.block_bytes
    needed = blocks_for_request(layout.groups, max_model_len, registry, step_tokens) + 1
    if needed <= num_blocks:
        return
    low = longest_request(layout, max_model_len, registry)
    remedy = "give the cache more memory (kv_cache_memory_bytes, gpu_memory_utilization)"
    if low >= 2:
        remedy = f"set max_model_len to at most {low}, or {remedy}"
    if blocks_for_request(layout.groups, max_model_len, registry, 1) < num_blocks:
        remedy = f"lower max_num_batched_tokens, or {remedy}"
    if layout.draft_input_bytes:
        remedy += (
            f". The inputs of drafts take {_gib(layout.draft_input_bytes)}, less with a smaller "
            "max_num_seqs or num_speculative_tokens"
        )
    raise ConfigError(
        f"the KV cache needs {_gib(needed * block_bytes)} ({needed} blocks) for one request of "
        f"max_model_len={max_model_len} tokens, but has {_gib(num_blocks * block_bytes)} "
        f"({num_blocks} blocks): {remedy}"
    )


def longest_request(
    layout: KVCacheLayout, max_model_len: int, registry: RulesRegistry = RULES
) -> int:
    """Maximum tokens, up to `max_model_len`, of a request that fits beside the null block."""
    low, high = 0, max_model_len + 1  # `low` fits; `high` does not, or is above the maximum
    while high - low > 1:
        middle = (low + high) // 2
        needed = blocks_for_request(layout.groups, middle, registry, layout.max_step_tokens) + 1
        low, high = (middle, high) if needed <= layout.num_blocks else (low, middle)
    return low


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
