"""KVCacheManager: what requests hold and share, in one group and in three."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kvcache.kv_fakes import (
    HEADS,
    ONE_GROUP,
    STATE,
    THREE_GROUPS,
    FakeRequest,
    StepsInFlight,
    any_groups,
    group_of,
    is_cross,
    layout_of,
    positions_read,
    slot_of,
    window_group,
)

from penstock.kvcache.groups import rules_for
from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.kv import (
    UNBOUNDED,
    ChunkedLocalSpec,
    CrossAttentionSpec,
)


def manager_of(groups=ONE_GROUP, num_blocks=20, step_tokens=UNBOUNDED, **kwargs):
    return KVCacheManager(layout_of(groups, num_blocks, step_tokens), **kwargs)


def run(manager, request, publish=True):
    """Admit a request, compute all of its tokens; how many were cached."""
    prefix = manager.match(request)
    manager.adopt(request, prefix)
    request.num_computed_tokens = prefix.num_tokens
    assert manager.allocate(request, len(request.token_ids) - prefix.num_tokens) is not None
    request.num_computed_tokens = len(request.token_ids)
    if publish:
        manager.publish(request, len(request.token_ids))
    return prefix.num_tokens


def test_a_second_request_shares_the_full_blocks_of_the_first():
    manager = manager_of()
    first, second = FakeRequest("a", list(range(10))), FakeRequest("b", list(range(10)))
    run(manager, first)
    assert run(manager, second) == 8
    assert manager.block_ids(first)[0][:2] == manager.block_ids(second)[0][:2]
    assert manager.block_ids(first)[0][2] != manager.block_ids(second)[0][2]
    assert (manager.num_prefix_queries, manager.num_prefix_hits) == (20, 8)


def test_a_hit_leaves_at_least_one_token_to_compute():
    manager = manager_of()
    run(manager, FakeRequest("a", list(range(8))))
    assert manager.match(FakeRequest("b", list(range(8)))).num_tokens == 4


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "x"}, {"read_prefix_cache": False}, {"token_ids": [9, *range(1, 10)]}],
    ids=["another salt", "no wish to read", "another first token"],
)
def test_there_is_no_hit_with(other):
    manager = manager_of()
    run(manager, FakeRequest("a", list(range(10))))
    request = FakeRequest("b", list(range(10)))
    vars(request).update(other)
    assert manager.match(request).num_tokens == 0


def test_prefix_caching_can_be_off():
    manager = manager_of(enable_prefix_caching=False)
    run(manager, FakeRequest("a", list(range(10))))
    assert manager.match(FakeRequest("b", list(range(10)))).num_tokens == 0


def test_nothing_is_shared_before_it_is_published():
    manager = manager_of()
    run(manager, FakeRequest("a", list(range(10))), publish=False)
    assert manager.match(FakeRequest("b", list(range(10)))).num_tokens == 0


def test_allocation_is_all_or_nothing():
    manager = manager_of(THREE_GROUPS, num_blocks=8)
    request = FakeRequest("a", list(range(16)))
    assert manager.allocate(request, 16) is None
    assert manager.pool.num_free == 7
    assert [len(ids) for ids in manager.allocate(request, 7)] == [2, 4, 1]
    assert manager.pool.num_free == 0


def test_lookahead_slots_are_allocated_and_not_asked_for_again():
    manager = manager_of()
    request = FakeRequest("a", [1, 2, 3])
    assert len(manager.allocate(request, 3, num_lookahead=3)[0]) == 2
    request.num_computed_tokens = 3
    assert manager.allocate(request, 5) == []


def test_fits_counts_cached_blocks_that_must_leave_the_free_list():
    manager = manager_of(num_blocks=4)
    request = FakeRequest("a", list(range(9)))
    run(manager, request)
    manager.free(request)
    prefix = manager.match(FakeRequest("b", list(range(9))))
    assert prefix.num_tokens == 8
    assert manager.fits(prefix, 12)
    assert not manager.fits(prefix, 13)


def test_tails_are_evicted_first():
    manager = manager_of(num_blocks=5)
    request = FakeRequest("a", list(range(16)))
    run(manager, request)
    manager.free(request)
    assert manager.allocate(FakeRequest("b", [50]), 1) is not None
    assert manager.match(FakeRequest("c", list(range(17)))).num_tokens == 12


def test_a_window_needs_only_its_last_blocks_and_gets_gaps_for_the_rest():
    manager = manager_of([window_group(2, 5)])
    first = FakeRequest("a", list(range(12)))
    run(manager, first)
    assert manager.block_ids(first)[0][:4] == [0] * 4  # dropped once computed past
    second = FakeRequest("b", list(range(12)))
    assert run(manager, second) == 10
    assert manager.block_ids(second)[0][:3] == [0] * 3


@pytest.mark.parametrize("groups", [ONE_GROUP, THREE_GROUPS], ids=["one group", "three"])
def test_a_hit_of_any_length_asks_the_pool_once_a_group(monkeypatch, groups):
    manager = manager_of(groups, num_blocks=200)
    tokens = list(range(161))
    run(manager, FakeRequest("a", tokens))
    calls = Counter()
    for name in ("lookup", "touch"):
        method = getattr(manager.pool, name)

        def counting(*args, name=name, method=method):
            calls[name] += 1
            return method(*args)

        monkeypatch.setattr(manager.pool, name, counting)
    assert run(manager, FakeRequest("b", tokens), publish=False) == 160
    assert calls == {"lookup": len(groups), "touch": len(groups)}


def test_a_hit_is_the_longest_prefix_that_every_group_can_serve():
    manager = manager_of(THREE_GROUPS, num_blocks=40)
    first = FakeRequest("a", list(range(21)))
    run(manager, first)
    assert manager.match(FakeRequest("b", list(range(20)))).num_tokens == 16
    assert manager.match(FakeRequest("c", list(range(16)))).num_tokens == 8


def test_a_group_that_is_asked_first_must_still_agree_with_what_a_later_one_can_serve():
    manager = manager_of([window_group(2, 3), *ONE_GROUP], num_blocks=40)
    request = FakeRequest("a", list(range(17)))
    manager.allocate(request, 17)
    window, full = ([manager.pool.blocks[i] for i in ids] for ids in manager.block_ids(request))
    manager.publish(request, 17)
    assert manager.match(FakeRequest("b", list(range(17)))).num_tokens == 16
    for evicted in (full[2], window[3]):
        manager.pool._forget(evicted)
    assert manager.match(FakeRequest("c", list(range(17)))).num_tokens == 4


def test_dropped_blocks_wait_for_the_steps_in_flight():
    manager = manager_of([window_group(2, 5)])
    request = FakeRequest("a", list(range(12)), last_step_id=1)
    run(manager, request)
    assert manager.pool.num_draining == 4
    manager.collect(1)
    assert manager.pool.num_draining == 0


def test_after_a_reset_running_requests_share_nothing_more():
    manager = manager_of([window_group(4, 3)])  # a window needs only the block before its hit
    request = FakeRequest("a", list(range(8)))
    run(manager, request)
    manager.reset_prefix_cache()
    request.token_ids += [8, 9, 10, 11]
    manager.allocate(request, 4)
    manager.publish(request, 12)
    assert manager.match(FakeRequest("b", list(range(13)))).num_tokens == 0
    manager.free(request)
    assert run(manager, FakeRequest("c", list(range(10)))) == 0
    assert manager.match(FakeRequest("d", list(range(10)))).num_tokens == 8


def test_a_model_without_kv_groups_allocates_nothing():
    manager = manager_of([], num_blocks=1)
    request = FakeRequest("a", [1, 2, 3])
    assert manager.fits(manager.match(request), 10**9)
    assert run(manager, request) == 0
    manager.free(request)
    assert manager.usage == 0.0


def test_a_state_is_given_back_when_the_next_one_is_kept():
    manager = manager_of([group_of(STATE, 4)])
    request = FakeRequest("a", list(range(11)))
    run(manager, request)
    assert [block_id != 0 for block_id in manager.block_ids(request)[0]] == [False, False, True]
    second = FakeRequest("b", list(range(11)))
    assert run(manager, second) == 8  # from the state behind eight tokens, which is all it needs
    request.token_ids += [11, 12]
    manager.allocate(request, 2)
    manager.publish(request, 12)
    assert manager.block_ids(request)[0][2] != 0  # token 12 continues it
    manager.publish(request, 13)
    assert manager.block_ids(request)[0][2] == 0


def test_a_chunk_that_is_full_is_no_longer_needed():
    manager = manager_of([group_of(ChunkedLocalSpec(chunk=8, **HEADS), 4)])
    request = FakeRequest("a", list(range(17)))
    run(manager, request)
    assert [block_id != 0 for block_id in manager.block_ids(request)[0]] == [False] * 4 + [True]
    assert manager.match(FakeRequest("b", [9] * 15)).num_tokens == 8  # nothing before it is read


def test_another_sequence_is_never_shared_and_held_to_the_end():
    manager = manager_of([group_of(CrossAttentionSpec(max_tokens=9, **HEADS), 4), *ONE_GROUP])
    first, second = FakeRequest("a", list(range(12))), FakeRequest("b", list(range(12)))
    assert (run(manager, first), run(manager, second)) == (0, 0)
    tables = manager.block_ids(first)[0], manager.block_ids(second)[0]
    assert [len(table) for table in tables] == [3, 3]
    assert not set(tables[0]) & set(tables[1])
    assert manager.allocate(first, 1) == [[], [manager.block_ids(first)[1][3]]]
    manager.free(first)
    manager.free(second)
    assert manager.pool.num_free == 19


@given(any_groups(), st.integers(1, 60), st.integers(1, 60), st.data())
def test_what_can_ever_be_held_can_be_computed_step_by_step_alone(groups, length, most, data):
    needed = sum(rules_for(g.spec, g.block_size).max_held(length, most) for g in groups)
    manager = manager_of(groups, num_blocks=needed + 1, step_tokens=most)
    assert manager.can_ever_hold(length)
    assert not manager_of(groups, needed, most).can_ever_hold(length)
    request = FakeRequest("a", [data.draw(st.integers(0, 1)) for _ in range(length)])
    assert manager.fits(manager.match(request), length)
    while request.num_computed_tokens < length:
        num_new = data.draw(st.integers(1, min(most, length - request.num_computed_tokens)))
        assert manager.allocate(request, num_new) is not None
        request.num_computed_tokens += num_new
        manager.publish(request, request.num_computed_tokens)
    manager.free(request)
    assert manager.pool.num_free == manager.pool.num_usable


class ManagerMachine(StepsInFlight):
    """Requests over a tiny alphabet come, grow, share, leave; `content` is what blocks hold."""

    @initialize(
        groups=st.one_of(st.sampled_from([ONE_GROUP, THREE_GROUPS]), any_groups()),
        num_blocks=st.integers(4, 24),
        step_tokens=st.sampled_from([1, 3, 7, UNBOUNDED]),
    )
    def start(self, groups, num_blocks, step_tokens):
        self.groups = groups
        self.step_tokens = step_tokens
        self.manager = manager_of(groups, num_blocks, step_tokens)
        self.requests = {}
        self.content = {}  # slot -> (group, history up to that token)
        self.counter = 0

    def write(self, request, start, end):
        for group, table in enumerate(self.manager.block_ids(request)):
            if is_cross(self.groups[group]):
                continue
            for position in range(start, end):
                slot = slot_of(self.groups[group], table, position)
                assert slot[0] != 0
                history = (request.cache_salt, *request.token_ids[: position + 1])
                self.content[slot] = (group, history)

    def check_reads(self, request, num_tokens):
        """What the next token reads is the request's own history."""
        for group, table in enumerate(self.manager.block_ids(request)):
            for position in positions_read(self.groups[group], num_tokens):
                slot = slot_of(self.groups[group], table, position)
                assert slot[0] != 0
                history = (request.cache_salt, *request.token_ids[: position + 1])
                assert self.content[slot] == (group, history)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        salt=st.sampled_from([None, "x"]),
    )
    def admit(self, tokens, salt):
        self.counter += 1
        request = FakeRequest(f"r{self.counter}", tokens, cache_salt=salt)
        prefix = self.manager.match(request)
        assert prefix.num_tokens < len(tokens)
        if not self.manager.fits(prefix, len(tokens)):
            self.manager.free(request)
            return
        self.manager.adopt(request, prefix)
        request.num_computed_tokens = request.confirmed = prefix.num_tokens
        self.check_reads(request, prefix.num_tokens)
        while request.num_computed_tokens < len(tokens):  # it fits: nothing can be missing
            num_new = min(len(tokens) - request.num_computed_tokens, self.step_tokens)
            self.manager.publish(request, request.num_computed_tokens)
            request.confirmed = request.num_computed_tokens
            assert self.manager.allocate(request, num_new) is not None
            self.compute(request, request.num_computed_tokens + num_new, step_id=0)
        request.last_step_id = self.step

    def compute(self, request, end, step_id):
        self.write(request, request.num_computed_tokens, end)
        request.num_computed_tokens = end
        request.last_step_id = step_id
        self.requests[request.request_id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if self.manager.allocate(request, 1) is None:
            assert self.manager.num_missing(request, 1) > self.manager.pool.num_free
            return
        request.token_ids.append(token)
        self.compute(request, len(request.token_ids), self.step)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def confirm(self, data):
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        request.confirmed = data.draw(st.integers(request.confirmed, request.num_computed_tokens))
        self.manager.publish(request, request.confirmed)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data):
        request = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        self.manager.free(request)

    def on_collect(self):
        self.manager.collect(self.collected)

    @invariant()
    def every_block_is_accounted_for(self):
        if not hasattr(self, "manager"):
            return
        pool = self.manager.pool
        held = Counter(
            block_id
            for request in self.requests.values()
            for table in self.manager.block_ids(request)
            for block_id in table
            if block_id != 0
        )
        assert {b.id: b.ref_count for b in pool.blocks if b.ref_count} == dict(held)
        assert pool.num_free + pool.num_draining + len(held) == pool.num_usable

    @invariant()
    def no_block_is_in_two_hands_that_write_to_it(self):
        for request in getattr(self, "requests", {}).values():
            for group, table in enumerate(self.manager.block_ids(request)):
                rules = self.manager.groups[group]
                first = request.num_computed_tokens // rules.block_size  # that is yet to be filled
                for block_id in table[0 if not rules.shares else first :]:
                    assert self.manager.pool.blocks[block_id].ref_count == 1
                    assert self.manager.pool.blocks[block_id].key is None

    @invariant()
    def every_request_reads_its_own_history(self):
        for request in getattr(self, "requests", {}).values():
            self.check_reads(request, request.num_computed_tokens)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.slow
class TestManagerAtLength(ManagerMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=80)
