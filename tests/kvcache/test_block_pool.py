"""The block pool, against a model that says everything the slow and obvious way."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from kvcache.kv_fakes import StepsInFlight

from penstock.kvcache.block_pool import BlockPool


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert [block.id for block in pool.take(4)] == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_freed_block_keeps_its_key_until_it_is_reused():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.publish(block, (b"a", 0))
    pool.free([block])
    assert pool.lookup([b"a"], 0) == [block]
    pool.take(2)
    assert pool.lookup([b"a"], 0) == [None]
    assert block.key is None


def test_the_first_block_with_a_key_keeps_it_and_another_group_is_another_key():
    pool = BlockPool(4)
    first, same, other = pool.take(3)
    pool.publish(first, (b"a", 0))
    pool.publish(same, (b"a", 0))
    pool.publish(other, (b"a", 1))
    assert pool.lookup([b"a"], 0) == [first]
    assert pool.lookup([b"a"], 1) == [other]
    assert same.key is None


def test_touching_a_cached_free_block_takes_it_off_the_free_list():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.publish(block, (b"a", 0))
    pool.free([block])
    pool.touch(block)
    assert pool.num_free == 1
    assert block not in pool.take(1)


def test_cached_blocks_are_reused_in_the_order_they_were_freed_and_after_nameless_ones():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for number, block in enumerate(blocks[:2]):
        pool.publish(block, (bytes([number]), 0))
    pool.free([blocks[1], blocks[0], blocks[2]])
    assert pool.take(3) == [blocks[2], blocks[1], blocks[0]]


def test_a_block_that_a_step_uses_comes_back_when_the_step_is_collected():
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.free(blocks, busy_until=2)
    assert (pool.num_free, pool.num_draining) == (0, 2)
    pool.collect(1)
    assert (pool.num_free, pool.num_draining) == (0, 2)
    pool.collect(2)
    assert (pool.num_free, pool.num_draining) == (2, 0)


def test_a_shared_block_stays_busy_for_the_holder_that_left_first():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.touch(block)
    pool.free([block], busy_until=3)
    pool.free([block], busy_until=1)
    pool.collect(1)
    pool.collect(2)
    assert pool.num_free == 0
    pool.collect(3)
    assert pool.num_free == 1


def test_freeing_a_block_twice_is_refused():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


class PoolMachine(StepsInFlight):
    """Holders are a list of block ids, one entry each; steps run and are collected in order."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7)
        self.holders = []
        self.busy = dict.fromkeys(range(1, 7), 0)
        self.keys = {}

    def free_ids(self):
        held = set(self.holders)
        return {b for b in range(1, 7) if b not in held and self.busy[b] <= self.collected}

    @rule(count=st.integers(1, 3))
    def take(self, count):
        if count > len(self.free_ids()):
            return
        for block in self.pool.take(count):
            assert block.id in self.free_ids()
            self.keys = {key: b for key, b in self.keys.items() if b != block.id}
            self.holders.append(block.id)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), busy=st.booleans())
    def free(self, data, busy):
        block_id = data.draw(st.sampled_from(self.holders))
        self.holders.remove(block_id)
        if busy:
            self.busy[block_id] = self.step
        self.pool.free([self.pool.blocks[block_id]], self.step if busy else 0)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), key=st.sampled_from([(b"a", 0), (b"a", 1), (b"b", 0)]))
    def publish(self, data, key):
        block_id = data.draw(st.sampled_from(self.holders))
        if block_id in self.keys.values():
            return
        self.pool.publish(self.pool.blocks[block_id], key)
        self.keys.setdefault(key, block_id)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def touch(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.keys.values())))
        self.pool.touch(self.pool.blocks[block_id])
        self.holders.append(block_id)

    def on_collect(self):
        self.pool.collect(self.collected)

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.keys.clear()

    @invariant()
    def agrees_with_the_model(self):
        for block in self.pool.blocks[1:]:
            assert block.ref_count == self.holders.count(block.id)
            assert self.pool.num_free_of([block]) == (block.id in self.free_ids())
        assert self.pool.num_free == len(self.free_ids())
        assert self.pool.num_free + self.pool.num_draining + len(set(self.holders)) == 6
        for key in [(b"a", 0), (b"a", 1), (b"b", 0)]:
            (found,) = self.pool.lookup([key[0]], key[1])
            assert (found.id if found else None) == self.keys.get(key)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=50)
