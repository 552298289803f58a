from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcache.kv_fakes import FULL

from penstock.kvcache.layout import blocks_for_request, make_layout
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import LatentSpec, SlidingWindowSpec


def layers(**counts):
    """`full=2, window=3`: that many layers of each spec; FULL takes 64 bytes a token."""
    specs = {
        "full": FULL,
        "window": SlidingWindowSpec(num_kv_heads=1, head_dim=8, dtype="float32", window=8),
        "small": LatentSpec(entry_size=5, dtype="float32"),
    }
    return {f"{kind}.{i}": specs[kind] for kind, count in counts.items() for i in range(count)}


def test_a_model_of_one_kind_is_one_group():
    layout = make_layout(layers(full=30), 16, 100, memory_bytes=30 * 64 * 16 * 50)
    assert [len(group.layer_names) for group in layout.groups] == [30]
    assert layout.groups[0].block_size == 16
    assert layout.page_bytes == 64 * 16
    assert layout.num_blocks == 50
    assert layout.total_bytes == 30 * 64 * 16 * 50


def test_a_count_of_blocks_overrides_the_memory():
    assert make_layout(layers(full=2), 16, 100, num_blocks=9).num_blocks == 9


def test_a_model_without_kv_needs_no_memory():
    layout = make_layout({}, 16, 100, memory_bytes=0)
    assert layout.groups == []
    assert layout.total_bytes == 0


def test_the_block_size_is_scaled_before_the_page_is_padded():
    layout = make_layout(layers(full=2, small=2), 16, 100, num_blocks=99)
    full, small = layout.groups
    assert (full.block_size, small.block_size) == (16, 32)
    assert small.block_size * small.spec.bytes_per_token() <= layout.page_bytes


def test_many_layers_of_one_kind_are_split_so_that_few_pages_stay_empty():
    layout = make_layout(layers(window=24, full=4), 16, 100, num_blocks=99)
    sizes = [len(group.layer_names) for group in layout.groups]
    assert sum(sizes) == 28
    assert len(sizes) * max(sizes) <= 28 * 9 / 8
    assert len(sizes) <= 7


@given(
    full=st.integers(0, 20),
    window=st.integers(0, 20),
    small=st.integers(0, 20),
    size=st.sampled_from([1, 4, 16]),
)
def test_every_layer_is_in_one_group_and_every_group_fits_the_page(full, window, small, size):
    specs = layers(full=full, window=window, small=small)
    layout = make_layout(specs, size, 10, num_blocks=10_000)
    placed = [name for group in layout.groups for name in group.layer_names]
    assert sorted(placed) == sorted(specs)
    for group in layout.groups:
        assert group.block_size % size == 0
        assert group.block_size * group.spec.bytes_per_token() <= layout.page_bytes
        assert all(specs[name] == group.spec for name in group.layer_names)


def test_too_little_memory_is_refused_with_the_length_that_would_fit():
    memory = 2 * 64 * 16 * 5  # five blocks, one of them null
    with pytest.raises(ConfigError, match=r"GiB.*max_model_len=1000.*GiB") as caught:
        make_layout(layers(full=2), 16, 1000, memory_bytes=memory)
    longest = int(re.search(r"at most (\d+)", str(caught.value)).group(1))
    assert longest == 64
    assert make_layout(layers(full=2), 16, longest, memory_bytes=memory).num_blocks == 5
    with pytest.raises(ConfigError):
        make_layout(layers(full=2), 16, longest + 1, memory_bytes=memory)


def test_no_memory_at_all_is_refused_without_a_length():
    with pytest.raises(ConfigError, match="more memory") as caught:
        make_layout(layers(full=2), 16, 1000, memory_bytes=-5)
    assert "at most" not in str(caught.value)


@given(length=st.integers(1, 300), num_blocks=st.integers(1, 40))
def test_a_layout_that_is_made_can_hold_one_request_of_full_length(length, num_blocks):
    specs = layers(full=3, window=2, small=2)
    try:
        layout = make_layout(specs, 4, length, num_blocks=num_blocks)
    except ConfigError:
        return
    assert blocks_for_request(layout.groups, length) < layout.num_blocks
