"""The router alone: which replica a request goes to, and what the router remembers of it."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.engine import routing
from penstock.engine.messages import EngineInfo
from penstock.engine.routing import ReplicaRouter
from penstock.kvcache.hashing import HashChain, hash_root
from penstock.kvcache.landmarks import CacheReport, is_landmark, landmarks
from penstock.protocol.adapter import Adapter
from penstock.protocol.limits import StepLimits
from penstock.protocol.prefix import CacheUpdate, PrefixKeys
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams

BLOCK_SIZE = 4
KEYS = PrefixKeys("a model", "float32", BLOCK_SIZE)
LIMITS = StepLimits(max_model_len=2**20, max_num_seqs=64, max_num_batched_tokens=64)
INFO = EngineInfo(LIMITS, num_kv_blocks=10_000, prefix_keys=KEYS)


def make_router(num_replicas, policy="prefix"):
    router = ReplicaRouter(policy)
    for replica in range(num_replicas):
        router.add(replica, INFO)
    return router


def make_request(request_id, prompt, **fields):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=8),
        seed=0,
        **fields,
    )


def prompt_of(seed, num_tokens=4096):
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(num_tokens)]


class Traffic:
    """Sends requests one after the other, each of which ends before the next one comes."""

    def __init__(self, router, allowed):
        self.router, self.allowed, self.num_sent = router, allowed, 0

    def send(self, prompt, session=None, **fields):
        chosen = self.begin(prompt, session, **fields)
        self.router.finished(str(self.num_sent))
        return chosen

    def begin(self, prompt, session=None, **fields):
        self.num_sent += 1
        request = make_request(str(self.num_sent), prompt, **fields)
        return self.router.choose(request, session, self.allowed)


def all_landmarks(prompt, **fields):
    return b"".join(key for _, key in landmarks(KEYS, make_request("r", prompt, **fields)))


# -- landmarks


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 255, 256, 257, 1000, 5003])
@pytest.mark.parametrize("fields", [{}, {"cache_salt": "s"}, {"adapter": Adapter("a", "d", "/")}])
def test_landmarks_are_the_first_bytes_of_the_engines_hashes(num_tokens, fields):
    prompt = prompt_of(num_tokens, num_tokens)
    request = make_request("r", prompt, **fields)
    adapter = request.adapter.digest if request.adapter else None
    chain = HashChain(hash_root("a model", "float32", request.cache_salt, adapter), 2)
    chain.extend(prompt)
    expected = [
        (n * BLOCK_SIZE, chain.hashes[2 * n - 1][:8])
        for n in range(1, num_tokens // BLOCK_SIZE + 1)
        if is_landmark(n)
    ]
    assert landmarks(KEYS, request) == expected


def test_a_long_prefix_has_few_landmarks_and_no_large_gap():
    found = [n for n in range(1, 65537) if is_landmark(n)]
    assert found[:64] == list(range(1, 65))
    assert len(found) < 400
    assert all(b - a <= max(a / 32, 1) for a, b in itertools.pairwise(found))


def test_output_tokens_of_a_replay_are_hashed_like_a_prompt():
    prompt = prompt_of(1, 64)
    replay = make_request("r", prompt[:40], output_token_ids=prompt[40:])
    assert landmarks(KEYS, replay) == landmarks(KEYS, make_request("r", prompt))


# -- prefix


def test_a_prefix_goes_where_it_is_cached():
    traffic = Traffic(make_router(4), range(4))
    homes = {seed: traffic.send(prompt_of(seed)) for seed in range(4)}
    assert sorted(homes.values()) == [0, 1, 2, 3]
    for seed, home in homes.items():
        assert traffic.send([*prompt_of(seed), 1, 2, 3]) == home


def test_a_burst_with_one_prefix_stays_together_before_anything_is_published():
    traffic = Traffic(make_router(4), range(4))
    chosen = {traffic.begin([*prompt_of(0), i]) for i in range(routing.ALWAYS_ALLOWED)}
    assert len(chosen) == 1


def test_a_burst_with_one_prefix_spreads_when_its_replica_is_too_busy():
    traffic = Traffic(make_router(4), range(4))
    chosen = Counter(traffic.begin([*prompt_of(0), i]) for i in range(200))
    assert max(chosen.values()) <= routing.MAX_IMBALANCE * 200 / 4 + 1


def test_a_popular_prefix_is_copied_once_its_requests_cost_more_than_the_copy():
    """Also if they come one at a time: no replica does all the work."""
    traffic = Traffic(make_router(3), range(3))
    chosen = Counter(traffic.send([*prompt_of(0, 512), i]) for i in range(300))
    assert max(chosen.values()) <= 1.3 * 100


def keep_busy(router, num_replicas):
    """One unfinished request for each replica."""
    for replica in range(num_replicas):
        router.choose(
            make_request(f"busy {replica}", prompt_of(1000 + replica, 64)), None, [replica]
        )


def test_under_load_no_replica_has_many_more_requests_of_late_than_the_mean():
    """However much of their prompts it has cached."""
    router = make_router(4)
    traffic = Traffic(router, range(4))
    keep_busy(router, 4)
    chosen = Counter(traffic.send([*prompt_of(0, 20_000), i]) for i in range(60))
    assert max(chosen.values()) <= routing.MAX_RECENT * 15 + routing.RECENT_SLACK + 1


def test_a_session_stays_under_load_while_its_replica_has_few_unfinished_requests():
    router = make_router(4)
    traffic = Traffic(router, range(4))
    keep_busy(router, 4)
    assert len({traffic.send(prompt_of(i, 64), "s") for i in range(60)}) == 1


def test_a_long_conversation_stays_while_nobody_else_is_there():
    traffic = Traffic(make_router(3), range(3))
    history, chosen = prompt_of(0), set()
    for turn in range(30):
        chosen.add(traffic.send(history))
        history += prompt_of(turn + 1, 200)
    assert len(chosen) == 1


@pytest.mark.parametrize(
    "fields", [{"cache_salt": "mine"}, {"adapter": Adapter("a", "digest", "/")}]
)
def test_prefixes_of_another_salt_or_adapter_do_not_count(fields):
    router = make_router(2)
    traffic = Traffic(router, range(2))
    home = traffic.send(prompt_of(0))
    assert traffic.send(prompt_of(0), **fields) == 1 - home  # it has had less to do
    assert traffic.send(prompt_of(0), **fields) == 1 - home
    assert traffic.send(prompt_of(0)) == home


def test_requests_of_an_adapter_go_where_it_was_used():
    traffic = Traffic(make_router(4), range(4))
    adapters = [Adapter(f"a{i}", f"digest {i}", "/") for i in range(4)]
    homes = [traffic.send(prompt_of(i, 8), adapter=adapters[i]) for i in range(4)]
    assert sorted(homes) == [0, 1, 2, 3]
    again = [traffic.send(prompt_of(100 + i, 8), adapter=adapters[i]) for i in range(4)]
    assert again == homes


def test_a_request_that_may_not_read_the_cache_goes_to_the_idle_replica():
    traffic = Traffic(make_router(2), range(2))
    home = traffic.begin(prompt_of(0))
    assert traffic.begin(prompt_of(0), read_prefix_cache=False) == 1 - home


def test_a_session_stays_on_its_replica():
    traffic = Traffic(make_router(4), range(4))
    home = traffic.send(prompt_of(0), session="s", tenant="t")
    assert all(traffic.send(prompt_of(i), "s", tenant="t") == home for i in range(1, 20))
    others = {traffic.send(prompt_of(i), "s", tenant=f"t{i}") for i in range(20, 24)}
    assert len(others) > 1  # another tenant's session of that name is another session


def test_a_session_moves_when_its_replica_is_gone_and_stays_there():
    router = make_router(3)
    home = Traffic(router, range(3)).send(prompt_of(0), "s")
    rest = [i for i in range(3) if i != home]
    traffic = Traffic(router, rest)
    moved = traffic.send(prompt_of(1), "s")
    assert {traffic.send(prompt_of(i), "s") for i in range(2, 9)} == {moved}


def test_a_session_leaves_a_replica_that_is_too_busy():
    router = make_router(2)
    traffic = Traffic(router, range(2))
    home = traffic.begin(prompt_of(0), "s")
    chosen = Counter(traffic.begin(prompt_of(i), "s") for i in range(1, 40))
    assert chosen[1 - home] > 10


def test_sessions_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(routing, "MAX_SESSIONS", 3)
    router = make_router(2)
    traffic = Traffic(router, range(2))
    for i in range(20):
        traffic.send(prompt_of(i, 8), f"s{i}")
    assert list(router._sessions) == [("", f"s{i}") for i in (17, 18, 19)]


# -- what replicas report


def test_what_a_replica_reports_is_found_there():
    router = make_router(2)
    stored = all_landmarks(prompt_of(0))
    router.published(1, CacheUpdate(stored))
    traffic = Traffic(router, range(2))
    assert traffic.send(prompt_of(0)) == 1


@pytest.mark.parametrize("how", ["removed", "cleared", "restarted"])
def test_what_a_replica_lost_is_not_expected_there(how):
    router = make_router(2)
    stored = all_landmarks(prompt_of(0))
    router.published(1, CacheUpdate(stored))
    if how == "restarted":
        router.remove(1)
        router.add(1, INFO)
    else:
        removed = stored if how == "removed" else b""
        router.published(1, CacheUpdate(removed=removed, cleared=how == "cleared"))
    assert Traffic(router, range(2)).send(prompt_of(0)) == 0
    assert not router._replicas[1].keys


def test_replicas_with_another_version_of_the_model_are_looked_up_by_its_hashes():
    router = make_router(1)
    new = PrefixKeys("new weights", "float32", BLOCK_SIZE)
    router.add(1, msgspec.structs.replace(INFO, prefix_keys=new))
    keys = [key for _, key in landmarks(new, make_request("r", prompt_of(0)))]
    router.published(1, CacheUpdate(b"".join(keys)))
    assert Traffic(router, range(2)).send(prompt_of(0)) == 1


def test_replicas_without_a_prefix_cache_are_chosen_by_load():
    router = ReplicaRouter("prefix")
    for replica in range(3):
        router.add(replica, msgspec.structs.replace(INFO, prefix_keys=None))
    traffic = Traffic(router, range(3))
    assert sorted(traffic.begin(prompt_of(0)) for _ in range(3)) == [0, 1, 2]


def test_the_index_is_bounded(monkeypatch):
    monkeypatch.setattr(routing, "MAX_KEYS", 200)
    router = make_router(2)
    traffic = Traffic(router, range(2))
    for seed in range(50):
        traffic.send(prompt_of(seed, 64))
    assert all(len(replica.keys) <= 100 for replica in router._replicas.values())
    assert len(router._holders) <= 200


# -- the other policies


def test_round_robin_takes_turns():
    traffic = Traffic(make_router(3, "round-robin"), range(3))
    assert [traffic.begin(prompt_of(0), "s") for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    traffic.allowed = (0, 2)
    assert [traffic.begin(prompt_of(0)) for _ in range(3)] == [2, 0, 2]


def test_least_loaded_takes_the_replica_with_the_fewest_requests():
    router = make_router(3, "least-loaded")
    traffic = Traffic(router, range(3))
    assert sorted(traffic.begin(prompt_of(0)) for _ in range(6)) == [0, 0, 1, 1, 2, 2]
    placed = next(i for i in ("1", "2", "3") if router._placed[i] == 1)
    router.finished(placed)
    assert traffic.begin(prompt_of(0)) == 1


@pytest.mark.parametrize("policy", ["prefix", "least-loaded", "round-robin"])
def test_only_allowed_replicas_are_chosen(policy):
    traffic = Traffic(make_router(4, policy), [2])
    assert {traffic.begin(prompt_of(0), "s") for _ in range(20)} == {2}


def test_one_replica_needs_no_hashes(monkeypatch):
    def fail(*args):
        raise AssertionError("hashed for nothing")

    monkeypatch.setattr(routing, "landmarks", fail)
    assert Traffic(make_router(1), [0]).send(prompt_of(0)) == 0


def test_a_request_that_moves_counts_once():
    router = make_router(2)
    request = make_request("r", prompt_of(0))
    for replica in (0, 1, 1):
        assert router.choose(request, None, [replica]) == replica
    loads = [(r.num_requests, r.num_waiting_tokens) for r in router._replicas.values()]
    assert loads == [(0, 0), (1, 4096)]
    router.started("r")
    router.started("r")
    assert router._replicas[1].num_waiting_tokens == 0
    router.finished("r")
    router.finished("r")
    assert router._replicas[1].num_requests == 0


# -- anything that may happen


class AnyOrder(RuleBasedStateMachine):
    """Replicas come, go and report, requests come and go: counts and index stay consistent."""

    def __init__(self):
        super().__init__()
        self.router = ReplicaRouter("prefix")
        self.caches: dict[int, CacheReport] = {}
        self.placed: dict[str, int] = {}
        self.num_requests = 0
        self.come(0)

    @rule(replica=st.integers(0, 5))
    def come(self, replica):
        self.leave(replica, keep_one=False)
        self.router.add(replica, INFO)
        self.caches[replica] = CacheReport(())

    @rule(replica=st.integers(0, 5))
    def leave(self, replica, keep_one=True):
        if replica in self.caches and not (keep_one and len(self.caches) == 1):
            self.router.remove(replica)
            del self.caches[replica]
            self.placed = {i: at for i, at in self.placed.items() if at != replica}

    @rule(
        seed=st.integers(0, 3),
        num_tokens=st.integers(0, 40),
        session=st.sampled_from([None, "a", "b"]),
        salt=st.sampled_from([None, "salt"]),
        adapter=st.sampled_from([None, Adapter("a", "d", "/")]),
        data=st.data(),
    )
    def request(self, seed, num_tokens, session, salt, adapter, data):
        allowed = data.draw(st.sets(st.sampled_from(sorted(self.caches)), min_size=1))
        self.num_requests += 1
        request_id = str(self.num_requests)
        prompt = prompt_of(seed, num_tokens)
        request = make_request(request_id, prompt, cache_salt=salt, adapter=adapter)
        chosen = self.router.choose(request, session, allowed)
        assert chosen in allowed
        self.placed[request_id] = chosen

    @rule(index=st.integers(1, 30))
    def start(self, index):
        self.router.started(str(index))

    @rule(index=st.integers(1, 30))
    def finish(self, index):
        self.router.finished(str(index))
        self.placed.pop(str(index), None)

    @rule(replica=st.integers(0, 5), numbers=st.lists(st.integers(0, 70)), seed=st.integers(0, 3))
    def report(self, replica, numbers, seed):
        report = self.caches.get(replica, CacheReport(()))
        chain = HashChain(hash_root("a model", "float32"), BLOCK_SIZE)
        chain.extend(prompt_of(seed, 71 * BLOCK_SIZE))
        half = len(numbers) // 2
        report.on_stored(None, numbers[:half], chain.hashes.__getitem__)
        for number in numbers[half:]:
            report.on_removed(chain.hashes[number])
        if (update := report.take()) is not None:
            self.router.published(replica, update)  # also from a replica that is gone

    @invariant()
    def counts_are_those_of_the_requests(self):
        loads = Counter(self.placed.values())
        for index, replica in self.router._replicas.items():
            assert replica.num_requests == loads[index]
            assert replica.num_waiting_tokens == sum(replica.waiting.values())
            assert self.placed.keys() >= replica.waiting.keys()

    @invariant()
    def the_index_is_that_of_the_replicas(self):
        bits = [replica.bit for replica in self.router._replicas.values()]
        assert len(set(bits)) == len(bits)
        holders = Counter()
        for replica in self.router._replicas.values():
            for key in replica.keys:
                holders[key] |= replica.bit
        assert holders == self.router._holders


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
