"""Requests that wait for something."""

from __future__ import annotations

from fake_device import make_request
from harness import Engine
from plans import scheduler_of


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
