from __future__ import annotations

import logging
import re

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcache.kv_fakes import FULL

from penstock.kvcache.groups import rules_for
from penstock.kvcache.layout import (
    MAX_GROUPS,
    blocks_for_request,
    longest_request,
    make_layout,
    padding,
    plan_groups,
)
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LatentSpec,
    RecurrentSpec,
    SlidingWindowSpec,
)
from penstock.runner.kv_memory import KVMemory


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
    assert plan_groups({}, 16, 100) == ([], 0)
    for size in ({"memory_bytes": 0}, {"num_blocks": 9}):
        layout = make_layout({}, 16, 100, **size)
        assert layout.groups == []
        assert layout.total_bytes == 0
        assert longest_request(layout, 100) == 100


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


def model_layout(num_windowed, num_full, max_model_len=32768, window=1024):
    heads = {"num_kv_heads": 16, "head_dim": 128, "dtype": "bfloat16"}
    specs = {
        **{f"w{i}": SlidingWindowSpec(window=window, **heads) for i in range(num_windowed)},
        **{f"f{i}": FullAttentionSpec(**heads) for i in range(num_full)},
    }
    return make_layout(specs, 16, max_model_len, memory_bytes=2**36, max_step_tokens=8192)


@pytest.mark.parametrize(
    ("num_windowed", "num_full"), [(52, 10), (22, 4), (12, 12), (21, 21), (40, 8), (25, 5)]
)
def test_models_with_windows_lose_little_to_padding(num_windowed, num_full):
    layout = model_layout(num_windowed, num_full)
    assert len(layout.groups) <= 8
    for num_tokens in (100, 1000, 4000, 32768):
        assert padding(layout, num_tokens) <= 0.13


def test_a_long_request_takes_little_more_than_its_full_layers_do():
    layout = model_layout(52, 10)
    all_full = 62 * 32768 * layout.groups[0].spec.bytes_per_token()
    blocks = blocks_for_request(layout.groups, 32768, max_step_tokens=1)
    assert blocks * layout.page_bytes * layout.layers_per_page < 0.21 * all_full


def test_one_layer_that_differs_does_not_make_a_group_of_every_layer():
    assert len(model_layout(47, 1).groups) <= MAX_GROUPS


def test_the_log_says_how_much_is_padding(caplog):
    logger = logging.getLogger("penstock.kvcache.layout")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", logger.name):
            model_layout(52, 10)
            (line,) = {record.getMessage() for record in caplog.records}
            assert "6 groups of up to 11 layers" in line
            assert re.search(r"padding takes [0-9.]+ % of what a request of 32768 tokens", line)
            caplog.clear()
            model_layout(12, 12)
            assert not caplog.records, "nothing is padded"
    finally:
        logger.removeHandler(caplog.handler)


STATE_SHAPES = ((16, 64, 64), (3, 1024))


def hybrid_layout(num_heads=2, block_size=16, layers=(36, 12)):
    state = RecurrentSpec(shapes=STATE_SHAPES, dtypes=("float32", "bfloat16"))
    heads = FullAttentionSpec(num_kv_heads=num_heads, head_dim=128, dtype="bfloat16")
    specs = {f"s{i}": state for i in range(layers[0])} | {f"a{i}": heads for i in range(layers[1])}
    return make_layout(specs, block_size, 4096, num_blocks=1000, max_step_tokens=512)


def test_blocks_of_tokens_grow_until_a_state_fits_their_page():
    layout = hybrid_layout()
    states, attention = layout.groups[0], layout.groups[-1]
    assert states.spec.block_bytes(1) == 16 * 64 * 64 * 4 + 3 * 1024 * 2
    assert attention.block_size in (128, 256)
    assert states.block_size == attention.block_size
    for group in layout.groups:
        assert group.spec.block_bytes(group.block_size) <= layout.page_bytes
    assert padding(layout, 4096) < 0.5


def test_a_state_smaller_than_a_page_leaves_the_block_size_alone():
    layout = hybrid_layout(num_heads=64)
    assert {group.block_size for group in layout.groups} == {16}


def test_states_alone_are_kept_once_in_so_many_tokens_as_they_are_worth():
    layout = hybrid_layout(layers=(4, 0))
    (group,) = layout.groups
    assert layout.page_bytes == group.spec.block_bytes(1)
    assert group.block_size == 128  # 66 pages of 4096 bytes


@given(
    kinds=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    size=st.sampled_from([1, 4, 16]),
    head_dim=st.sampled_from([8, 24, 64]),
)
def test_any_mix_of_layers_fits_its_pages(kinds, size, head_dim):
    heads = {"num_kv_heads": 2, "head_dim": head_dim, "dtype": "int8"}
    known = [
        FullAttentionSpec(**heads),
        SlidingWindowSpec(window=8, **heads),
        ChunkedLocalSpec(chunk=8, **heads),
        CrossAttentionSpec(max_tokens=20, **heads),
        LatentSpec(entry_size=40, dtype="bfloat16"),
        RecurrentSpec(shapes=((5, 3, 7), (9,)), dtypes=("float32", "bfloat16")),
    ]
    specs = {f"layer.{index}": known[kind] for index, kind in enumerate(kinds)}
    layout = make_layout(specs, size, 64, num_blocks=1000, max_step_tokens=16)
    placed = [name for group in layout.groups for name in group.layer_names]
    assert sorted(placed) == sorted(specs)
    memory = KVMemory(layout, torch.device("cpu"))
    for group in layout.groups:
        assert group.spec.block_bytes(group.block_size) <= layout.page_bytes
        for name in group.layer_names:
            parts = memory.states.get(name) or (memory.caches[name],)
            assert all(len(part) == layout.num_blocks for part in parts)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=type(layout)) == layout


@torch.inference_mode()
def test_layers_of_a_group_and_blocks_of_a_layer_do_not_overlap():
    kinds = {
        "state": RecurrentSpec(shapes=((5, 3), (9,)), dtypes=("float32", "bfloat16")),
        "latent": LatentSpec(entry_size=6, dtype="float32"),
        "heads": FULL,
    }
    specs = {f"{kind}.{index}": spec for kind, spec in kinds.items() for index in range(2)}
    layout = make_layout(specs, 4, 16, num_blocks=40)
    assert [len(group.layer_names) for group in layout.groups] == [2, 2, 2]
    memory = KVMemory(layout, torch.device("cpu"))
    assert memory.caches["latent.0"].shape[2:] == (6,)
    # Blocks 3, 4 and 5 belong to the three groups: fill each layer's, then look at all of them.
    views = []
    for name in specs:
        block = 3 + list(kinds).index(name[:-2])
        parts = memory.states.get(name) or (memory.caches[name],)
        views += [part[block] for part in parts]
    for number, view in enumerate(views, 1):
        view.fill_(number)
    for number, view in enumerate(views, 1):
        assert (view == number).all()


def test_a_cache_too_small_for_a_step_says_so():
    heads = {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    specs = {"window": SlidingWindowSpec(window=8, **heads)}
    with pytest.raises(ConfigError, match="lower max_num_batched_tokens"):
        make_layout(specs, 4, 1000, num_blocks=20, max_step_tokens=256)
    layout = make_layout(specs, 4, 1000, num_blocks=20, max_step_tokens=32)
    assert longest_request(layout, 10**6) == 10**6


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


DRAFT = FullAttentionSpec(num_kv_heads=1, head_dim=4, dtype="float16")  # 16 bytes a token


def test_draft_layers_use_the_block_table_of_the_targets_full_attention():
    plain = make_layout(layers(window=3, full=2), 16, 100, num_blocks=99)
    layout = make_layout(
        layers(window=3, full=2), 16, 100, num_blocks=99, draft_specs={"draft.0": DRAFT}
    )
    assert layout.groups == plain.groups
    assert layout.page_bytes == plain.page_bytes
    assert layout.groups[layout.draft_group].spec == FULL
    assert layout.draft_layers == {"draft.0": DRAFT}
    assert layout.block_bytes == plain.block_bytes + 16 * 16


def test_draft_layers_share_the_budget_of_the_cache():
    specs = layers(full=30)
    memory = 30 * 64 * 16 * 50
    layout = make_layout(specs, 16, 100, memory_bytes=memory, draft_specs={"draft.0": DRAFT})
    assert layout.num_blocks == memory // (30 * 64 * 16 + 16 * 16) < 50
    assert layout.total_bytes <= memory
    assert padding(layout, 100) == 0


def test_draft_layers_have_groups_where_the_target_keeps_no_more_than_a_window():
    window = SlidingWindowSpec(num_kv_heads=1, head_dim=4, dtype="float16", window=8)
    drafts = {"draft.0": DRAFT, "draft.1": window}
    layout = make_layout(layers(window=3), 16, 100, num_blocks=99, draft_specs=drafts)
    assert layout.draft_layers == {}
    of_drafts = [group for group in layout.groups if group.layer_names[0].startswith("draft.")]
    assert {name for group in of_drafts for name in group.layer_names} == set(drafts)
    assert {group.spec for group in of_drafts} == {DRAFT}, "no block is dropped"


@torch.inference_mode()
@given(
    kinds=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    drafts=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    size=st.sampled_from([1, 4, 16]),
)
def test_any_draft_layers_fit_beside_any_target(kinds, drafts, size):
    heads = {"num_kv_heads": 2, "head_dim": 8, "dtype": "int8"}
    known = [
        FullAttentionSpec(**heads),
        SlidingWindowSpec(window=8, **heads),
        ChunkedLocalSpec(chunk=8, **heads),
        LatentSpec(entry_size=40, dtype="bfloat16"),
        RecurrentSpec(shapes=((5, 3, 7), (9,)), dtypes=("float32", "bfloat16")),
    ]
    specs = {f"layer.{index}": known[kind] for index, kind in enumerate(kinds)}
    draft_specs = {f"draft.{index}": known[kind] for index, kind in enumerate(drafts)}
    sizes = {"num_blocks": 400, "max_step_tokens": 4}
    layout = make_layout(specs, size, 16, draft_specs=draft_specs, **sizes)
    if layout.draft_layers:
        assert layout.groups == make_layout(specs, size, 16, **sizes).groups
    memory = KVMemory(layout, torch.device("cpu"))
    for name, spec in draft_specs.items():
        group = layout.groups[memory.group_of(name)]
        rules = rules_for(group.spec, group.block_size)
        assert rules.num_droppable(1000) == 0, "a drafter may write any of a request's blocks"
        assert memory.caches[name].shape[:1] == (layout.num_blocks,)
        assert memory.caches[name][0].nbytes == spec.block_bytes(group.block_size)
    # No layer of a group shares a byte of a block with another: each finds what was written last.
    names = memory.layer_names[memory.group_of("draft.0")]
    views = {name: memory.caches[name][5] for name in names}
    for number, view in enumerate(views.values(), 1):
        view.fill_(number)
    for number, (name, view) in enumerate(views.items(), 1):
        assert (view == number).all(), name
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=type(layout)) == layout


def test_inputs_of_drafts_are_taken_from_the_memory_and_named_if_it_is_too_small() -> None:
    state = RecurrentSpec(
        shapes=((16,),), dtypes=("float32",), inputs=((8, "bfloat16"), (2, "float32"))
    )
    specs = {f"layer{index}": state for index in range(3)}
    layout = make_layout(specs, 4, 64, memory_bytes=64_000)
    drafting = make_layout(specs, 4, 64, memory_bytes=64_000, num_draft_rows=100)
    assert drafting.draft_input_bytes == 100 * 3 * (8 * 2 + 2 * 4)
    assert drafting.num_blocks == (64_000 - drafting.draft_input_bytes) // layout.block_bytes
    assert drafting.total_bytes <= 64_000 < drafting.total_bytes + layout.block_bytes
    stages = [(["layer0"], 64_000), (["layer1", "layer2"], 64_000)]
    staged = make_layout(specs, 4, 64, memory_bytes=64_000, num_draft_rows=100, stages=stages)
    assert staged.draft_input_bytes == 3 * drafting.draft_input_bytes, (
        "the last step, two in flight"
    )
    with pytest.raises(ConfigError, match=r"inputs of drafts take .* num_speculative_tokens"):
        make_layout(specs, 4, 64, memory_bytes=64_000, num_draft_rows=1000)
