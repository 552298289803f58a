"""KVCacheManager: what requests hold and share, in one group and in three."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcache.kv_fakes import ONE_GROUP, REGISTRY, THREE_GROUPS, FakeRequest, layout_of, window_group

from penstock.kvcache.manager import KVCacheManager


def manager_of(groups=ONE_GROUP, num_blocks=20, **kwargs):
    return KVCacheManager(layout_of(groups, num_blocks), registry=REGISTRY, **kwargs)


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


def test_kept_blocks_stay_taken_until_they_are_freed():
    manager = manager_of()
    request = FakeRequest("a", list(range(10)))
    run(manager, request)
    manager.keep(request)
    assert manager.pool.num_free == 19 - 3
    manager.free_kept("a", 0)
    manager.free_kept("never seen", 0)
    assert manager.pool.num_free == 19


def test_a_model_without_kv_groups_allocates_nothing():
    manager = manager_of([], num_blocks=1)
    request = FakeRequest("a", [1, 2, 3])
    assert manager.fits(manager.match(request), 10**9)
    assert run(manager, request) == 0
    manager.free(request)
    assert manager.usage == 0.0


class ManagerMachine(RuleBasedStateMachine):
    """Requests over a tiny alphabet come, grow, share, leave; `content` is what blocks hold."""

    @initialize(groups=st.sampled_from([ONE_GROUP, THREE_GROUPS]), num_blocks=st.integers(4, 24))
    def start(self, groups, num_blocks):
        self.groups = groups
        self.manager = manager_of(groups, num_blocks)
        self.requests = {}
        self.content = {}  # (block id, offset) -> (group, history up to that token)
        self.counter = self.step = self.collected = 0

    def write(self, request, start, end):
        for group, table in enumerate(self.manager.block_ids(request)):
            size = self.groups[group].block_size
            for position in range(start, end):
                history = (request.cache_salt, *request.token_ids[: position + 1])
                slot = (table[position // size], position % size)
                assert slot[0] != 0
                self.content[slot] = (group, history)

    def check_reads(self, request, num_tokens):
        """What the next token reads is the request's own history."""
        for group, table in enumerate(self.manager.block_ids(request)):
            rules = self.manager.groups[group]
            window = getattr(rules.spec, "window", num_tokens + 1)
            for position in range(max(num_tokens - window + 1, 0), num_tokens):
                history = (request.cache_salt, *request.token_ids[: position + 1])
                slot = (table[position // rules.block_size], position % rules.block_size)
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
        assert self.manager.allocate(request, len(tokens) - prefix.num_tokens) is not None
        self.compute(request, len(tokens))

    def compute(self, request, end):
        self.write(request, request.num_computed_tokens, end)
        request.num_computed_tokens = end
        request.last_step_id = self.step
        self.requests[request.request_id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if self.manager.allocate(request, 1) is None:
            assert self.manager.num_missing(request, 1) > self.manager.pool.num_free
            return
        request.token_ids.append(token)
        self.compute(request, len(request.token_ids))

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

    @rule()
    def launch(self):
        self.step += 1

    @precondition(lambda self: self.collected < self.step)
    @rule()
    def collect(self):
        self.collected += 1
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
    def every_request_reads_its_own_history(self):
        for request in getattr(self, "requests", {}).values():
            self.check_reads(request, request.num_computed_tokens)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestManagerAtLength(ManagerMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=80, deadline=None)
