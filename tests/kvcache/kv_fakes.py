"""Small KV groups, and requests reduced to what the cache asks of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from penstock.kvcache.groups import RULES
from penstock.protocol.kv import (
    UNBOUNDED,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheLayout,
    LatentSpec,
    RecurrentSpec,
    SlidingWindowSpec,
)

REGISTRY = RULES

HEADS = {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
FULL = FullAttentionSpec(**HEADS)
STATE = RecurrentSpec(shapes=((2, 3), (4,)), dtypes=("float32", "bfloat16"))


def group_of(spec, block_size):
    return KVCacheGroup(
        spec=spec, block_size=block_size, layer_names=[f"{type(spec).__name__}.{block_size}"]
    )


def full_group(block_size):
    return group_of(FULL, block_size)


def window_group(block_size, window):
    return group_of(SlidingWindowSpec(window=window, **HEADS), block_size)


ONE_GROUP = [full_group(4)]
THREE_GROUPS = [full_group(4), window_group(2, 5), window_group(8, 3)]
HYBRID_GROUPS = [group_of(STATE, 4), window_group(2, 5), group_of(STATE, 4)]
CROSS_GROUPS = [
    group_of(ChunkedLocalSpec(chunk=6, **HEADS), 4),
    group_of(CrossAttentionSpec(max_tokens=7, **HEADS), 4),
]


@st.composite
def any_groups(draw):
    """One to four groups of any kind."""
    sizes = st.sampled_from([1, 2, 3, 4, 8])
    lengths = st.integers(1, 12)
    specs = st.one_of(
        st.just(FULL),
        st.just(LatentSpec(entry_size=5, dtype="float32")),
        st.just(STATE),
        lengths.map(lambda n: SlidingWindowSpec(window=n, **HEADS)),
        lengths.map(lambda n: ChunkedLocalSpec(chunk=n, **HEADS)),
        lengths.map(lambda n: CrossAttentionSpec(max_tokens=n, **HEADS)),
    )
    return draw(st.lists(st.builds(group_of, specs, sizes), min_size=1, max_size=4))


def is_cross(group):
    return isinstance(group.spec, CrossAttentionSpec)


def is_recurrent(group):
    return isinstance(group.spec, RecurrentSpec)


def positions_read(group, position):
    """Which tokens' entries the token at `position` reads besides its own."""
    spec, first = group.spec, 0
    if isinstance(spec, SlidingWindowSpec):
        first = max(position - spec.window + 1, 0)
    elif isinstance(spec, ChunkedLocalSpec):
        first = position // spec.chunk * spec.chunk
    elif is_recurrent(group):
        first = max(position - 1, 0)
    return range(position if is_cross(group) else first, position)


def slot_of(group, table, position):
    """Where the entry of a token lies; a state takes a block for itself."""
    offset = 0 if is_recurrent(group) else position % group.block_size
    return table[position // group.block_size], offset


def layout_of(groups, num_blocks, max_step_tokens=UNBOUNDED):
    return KVCacheLayout(
        groups=list(groups), num_blocks=num_blocks, page_bytes=64, max_step_tokens=max_step_tokens
    )


@dataclass
class FakeRequest:
    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    last_step_id: int = 0
    cache_salt: str | None = None
    adapter_digest: str | None = None
    media_hashes: dict[int, bytes] = field(default_factory=dict)
    adapter_name: str | None = None
    read_prefix_cache: bool = True
    confirmed: int = field(default=0)


class StepsInFlight(RuleBasedStateMachine):
    """Steps are launched and collected in order. `on_collect` follows each that is collected."""

    step = collected = 0

    def on_collect(self):
        raise NotImplementedError

    @rule()
    def launch(self):
        self.step += 1

    @precondition(lambda self: self.collected < self.step)
    @rule()
    def collect(self):
        self.collected += 1
        self.on_collect()
