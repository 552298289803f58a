"""Those who follow a prefix cache know what is in it, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule
from kvcache.kv_fakes import (
    CROSS_GROUPS,
    ONE_GROUP,
    THREE_GROUPS,
    FakeRequest,
    full_group,
    layout_of,
    window_group,
)
from kvcache.test_kv_manager import ManagerMachine, run

from penstock.kvcache.landmarks import CacheReport, is_landmark, landmarks, split_keys
from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.prefix import CacheUpdate, PrefixKeys
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams


class Follower:
    """Rebuilds the cached hashes, with the number of each block."""

    def __init__(self):
        self.numbers = {}

    def on_stored(self, request, numbers, hash_of):
        for number in numbers:
            assert hash_of(number) not in self.numbers
            self.numbers[hash_of(number)] = number

    def on_removed(self, block_hash):
        del self.numbers[block_hash]

    def on_cleared(self):
        self.numbers.clear()


def apply(update, known):
    if update is not None:
        known = set() if update.cleared else known
        return known - set(split_keys(update.removed)) | set(split_keys(update.stored))
    return known


class FollowedMachine(ManagerMachine):
    follower = None

    @precondition(lambda self: self.follower is not None)
    @rule()
    def reset(self):
        self.manager.reset_prefix_cache()

    @precondition(lambda self: self.follower is not None)
    @rule()
    def take(self):
        self.known = apply(self.report.take(), self.known)

    @invariant()
    def followers_know_what_is_cached(self):
        if not hasattr(self, "manager"):
            return
        if self.follower is None:
            self.follower, self.report, self.known = Follower(), CacheReport(()), set()
            self.manager.observe(self.follower)
            self.manager.observe(self.report)
        numbers = self.follower.numbers
        assert numbers.keys() == set(self.manager.cached_hashes())
        self.known = apply(self.report.take(), self.known)
        assert self.known == {h[:8] for h, number in numbers.items() if is_landmark(number + 1)}


TestFollowed = FollowedMachine.TestCase
TestFollowed.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_report_begins_with_what_is_cached_already():
    manager = KVCacheManager(layout_of(ONE_GROUP, 20))
    run(manager, FakeRequest("a", list(range(10))))
    report = CacheReport(manager.cached_hashes())
    manager.observe(report)
    assert apply(report.take(), set()) == {h[:8] for h in manager.cached_hashes()}
    assert report.take() is None


def test_what_was_stored_and_removed_in_between_is_removed():
    report = CacheReport(())
    report.on_stored(None, [0], lambda number: b"a" * 32)
    report.on_removed(b"a" * 32)
    assert report.take() == CacheUpdate(removed=b"a" * 8)
    report.on_removed(b"b" * 32)  # it was never reported
    assert report.take() is None


@pytest.mark.parametrize(
    ("groups", "block_size"),
    [
        (ONE_GROUP, 4),
        (THREE_GROUPS, 4),
        ([window_group(2, 5), full_group(8)], 8),
        ([window_group(2, 5)], 2),
        (CROSS_GROUPS, 4),
        (CROSS_GROUPS[1:], None),
        ([], None),
    ],
)
def test_the_group_that_keeps_most_stands_for_all(groups, block_size):
    manager = KVCacheManager(layout_of(groups, 20), model_fingerprint="m", kv_dtype="float16")
    keys = None if block_size is None else PrefixKeys("m", "float16", block_size)
    assert manager.prefix_keys == keys


def test_without_prefix_caching_there_are_no_keys():
    assert KVCacheManager(layout_of(ONE_GROUP, 20), enable_prefix_caching=False).prefix_keys is None


@pytest.mark.parametrize("groups", [ONE_GROUP, [window_group(2, 5), full_group(8)]])
def test_a_reported_prefix_is_found_with_the_keys_of_the_engine(groups):
    manager = KVCacheManager(layout_of(groups, 40), model_fingerprint="m", kv_dtype="float16")
    report = CacheReport(())
    manager.observe(report)
    tokens = list(range(50))
    run(manager, FakeRequest("a", tokens, cache_salt="salt"))
    request = EngineRequest(
        request_id="r", prompt_token_ids=tokens, params=SamplingParams(), seed=0, cache_salt="salt"
    )
    found = [key for _, key in landmarks(manager.prefix_keys, request)]
    assert found
    assert set(found) == apply(report.take(), set())
