"""Requests that wait for their first turn, and how long they may."""

from __future__ import annotations

import msgspec
import pytest
from plans import answer, long_request, scheduler_of, shares

from penstock.protocol.delta import FinishReason


@pytest.fixture
def now(monkeypatch):
    """A clock that a test moves on."""
    now = [100.0]
    monkeypatch.setattr("penstock.scheduler.queue_timeouts.time.monotonic", lambda: now[0])
    return now


def test_a_request_that_waits_longer_than_the_queue_allows_is_sent_away(now):
    scheduler = scheduler_of(max_num_seqs=1, queue_timeout_s=5.0)
    replay = long_request("replay", output_token_ids=[4])
    for request in (long_request("runs"), long_request("waits"), replay):
        scheduler.add(msgspec.structs.replace(request, arrival_time=now[0]))
    scheduler.update(answer(scheduler.schedule()))
    now[0] += 4.0
    scheduler.add(long_request("late", arrival_time=now[0]))
    scheduler.update(answer(scheduler.schedule()))
    assert scheduler.take_deltas() == []
    now[0] += 2.0
    plan = scheduler.schedule()
    (delta,) = scheduler.take_deltas()
    assert delta.request_id == "waits"
    assert delta.can_retry
    assert delta.finish_reason is FinishReason.ERROR
    assert "waited longer than 5 s" in delta.error
    assert shares(plan) == {"runs": 1}, "what runs, runs on"
    assert scheduler.stats().num_waiting == 2


def test_the_time_before_this_engine_counts_except_for_who_ran_on_another(now):
    scheduler = scheduler_of(queue_timeout_s=5.0)
    scheduler.add(long_request("waited", arrival_time=now[0] - 6.0))
    ran = long_request("ran", arrival_time=now[0] - 6.0)
    scheduler.add(msgspec.structs.replace(ran, has_run=True))
    scheduler.add(long_request("fresh", arrival_time=now[0] - 1.0))
    assert shares(scheduler.schedule()).keys() == {"ran", "fresh"}
    assert [delta.request_id for delta in scheduler.take_deltas()] == ["waited"]
