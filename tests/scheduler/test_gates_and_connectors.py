"""Requests that wait for something, and tokens that come from elsewhere."""

from __future__ import annotations

from fake_device import make_request
from harness import Engine
from plans import scheduler_of, shares

from penstock.kvcache.connector import BlockFate


def test_a_request_at_a_gate_holds_up_nobody_and_keeps_its_place():
    engine = Engine(max_num_seqs=1)
    engine.gate.pending.add("a")
    for name in "abc":
        engine.add(make_request(name, [2], max_tokens=1))
    engine.launch()
    engine.gate.pending.clear()
    engine.drain()
    assert [row.request_id for plan in engine.plans for row in plan.scheduled] == ["b", "a", "c"]


def test_a_request_that_fails_at_a_gate_ends_with_its_error_though_nothing_runs():
    engine = Engine()
    engine.gate.failing["a"] = "unknown adapter 'x'"
    engine.add(make_request("a", [2]))
    assert not engine.launch()
    assert engine.endings["a"].error == "unknown adapter 'x'"
    assert not engine.scheduler.has_unfinished()


def test_a_gate_that_breaks_fails_only_the_request_it_was_asked_about():
    class BrokenGate:
        def poll(self, request):
            raise KeyError("x")

    scheduler = scheduler_of(gates=[BrokenGate()])
    scheduler.add(make_request("a", [2]))
    assert scheduler.schedule() is None
    (delta,) = scheduler.take_deltas()
    assert "BrokenGate" in delta.error


class FakeConnector:
    def __init__(self):
        self.remote = {}
        self.kept = {}

    def match(self, request, num_local):
        return self.remote.get(request.request_id, 0)

    def on_finish(self, request, block_ids):
        if request.request_id in self.kept:
            self.kept[request.request_id] = block_ids
            return BlockFate.KEEP
        return BlockFate.FREE


def test_tokens_that_a_connector_brings_are_not_computed():
    connector = FakeConnector()
    engine = Engine(connector=connector)
    engine.device.loads_remote_kv = True
    connector.remote = {"a": 6, "all": 100}
    engine.add(make_request("a", [2] * 10))
    engine.add(make_request("all", [3] * 10))
    engine.launch()
    assert shares(engine.plans[0]) == {"a": 4, "all": 1}
    engine.drain()
    engine.check_outputs()


def test_a_connector_that_does_not_know_yet_is_asked_again_and_holds_up_nobody():
    connector = FakeConnector()
    connector.remote["a"] = None
    engine = Engine(connector=connector)
    for name in "ab":
        engine.add(make_request(name, [2] * 10))
    engine.launch()
    assert shares(engine.plans[0]) == {"b": 10}
    connector.remote["a"] = 0
    engine.drain()
    engine.check_outputs()


def test_blocks_that_a_connector_keeps_are_freed_when_it_lets_go():
    connector = FakeConnector()
    connector.kept["a"] = None
    engine = Engine(connector=connector)
    engine.add(make_request("a", [2] * 10, max_tokens=2))
    engine.drain()
    pool = engine.kv.pool
    assert len(connector.kept["a"][0]) == pool.num_usable - pool.num_free > 0
    engine.scheduler.release_kept(["a", "unknown"])
    engine.check_nothing_is_left()
