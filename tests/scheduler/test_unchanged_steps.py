"""What did not change is not planned again, and nobody is searched for among thousands."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from fake_device import make_request
from plans import answer, long_request, scheduler_of

from penstock.protocol.delta import EngineDelta
from penstock.protocol.step import RequestResult, ScheduledRequest
from penstock.scheduler import scheduler as scheduler_module
from penstock.scheduler.request import RequestState
from penstock.scheduler.running import RunningRequests

BLOCK_SIZE = 4  # of `scheduler_of`


class Calls:
    """Counts the calls of an object's methods."""

    def __init__(self, monkeypatch, watched, *names):
        self.counts = Counter()
        for name in names:
            monkeypatch.setattr(watched, name, self._counting(name, getattr(watched, name)))

    def _counting(self, name, method):
        def call(*args, **kwargs):
            self.counts[name] += 1
            return method(*args, **kwargs)

        return call


def test_a_decoding_request_has_the_same_row_in_every_step_without_new_blocks():
    scheduler = scheduler_of()
    scheduler.add(long_request("a", prompt=[2] * BLOCK_SIZE))
    scheduler.update(answer(scheduler.schedule()))
    rows = []
    for _ in range(2 * BLOCK_SIZE):
        plan = scheduler.schedule()
        rows += plan.scheduled
        scheduler.update(answer(plan))
    unchanged = [row for row in rows if not row.new_block_ids]
    assert len(unchanged) == 2 * (BLOCK_SIZE - 1)
    assert all(row is unchanged[0] for row in unchanged)


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_blocks_are_seen_to_once_a_block_not_once_a_token(monkeypatch, num_in_flight):
    scheduler = scheduler_of()
    calls = Calls(monkeypatch, scheduler.kv, "allocate", "publish")
    scheduler.add(long_request("a", prompt=[2] * BLOCK_SIZE, max_tokens=4 * BLOCK_SIZE))
    in_flight = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        if plan is None or len(in_flight) == num_in_flight:
            scheduler.update(answer(in_flight.pop(0)))
    # Once for the prompt and once for each block after it; the last token ends the request.
    assert calls.counts["allocate"] <= 1 + 4
    assert calls.counts["publish"] <= 1 + 4 + 1


def test_a_request_that_waits_for_its_last_tokens_is_in_no_step():
    scheduler = scheduler_of()
    scheduler.add(long_request("a", prompt=[2] * BLOCK_SIZE, max_tokens=3))
    plans = [scheduler.schedule() for _ in range(3)]
    assert scheduler.schedule() is None
    reasons = [scheduler.update(answer(plan))[0].finish_reason for plan in plans]
    assert [reason is not None for reason in reasons] == [False, False, True]


def test_a_row_from_before_a_preemption_is_not_taken_for_one_of_after_it():
    scheduler = scheduler_of()
    scheduler.add(long_request("a", prompt=[2] * BLOCK_SIZE))
    scheduler.update(answer(scheduler.schedule()))
    before = scheduler.schedule()
    state = scheduler._requests["a"]
    scheduler._running.remove(state)
    scheduler._preempt(state)
    assert scheduler.update(answer(before)) == []
    assert len(state.output_token_ids) == 1


@pytest.mark.parametrize(
    "fields", [{"logprobs": 0}, {"prompt_logprobs": 0}, {"thinking_token_budget": 5}]
)
def test_a_request_that_wants_more_than_tokens_is_planned_every_time(fields):
    request = make_request("a", [2], **fields)
    assert not RequestState(request, 0, max_model_len=40).gives_only_tokens


def test_an_abort_compares_the_request_with_no_other(monkeypatch):
    class Compared(RequestState):
        num_comparisons = 0
        __hash__ = RequestState.__hash__

        def __eq__(self, other):
            Compared.num_comparisons += 1
            return self is other

    monkeypatch.setattr(scheduler_module, "RequestState", Compared)
    scheduler = scheduler_of(num_blocks=200, max_num_seqs=64, max_num_batched_tokens=256)
    for number in range(64):
        scheduler.add(long_request(f"r{number}"))
    scheduler.update(answer(scheduler.schedule()))
    assert scheduler.stats().num_running == 64
    for number in (63, 31, 0):
        scheduler.finish([f"r{number}"])
    assert Compared.num_comparisons == 0


def test_running_requests_keep_their_order_whoever_leaves():
    states = [RequestState(make_request(f"r{n}", [2]), n, max_model_len=40) for n in range(6)]
    running = RunningRequests()
    for state in states[:5]:
        running.append(state)
    running.remove(states[1])
    assert running.pop() is states[4]
    running.append(states[5])
    assert running.in_order() == [states[0], states[2], states[3], states[5]]


def test_by_rank_the_last_is_the_highest_whenever_it_came():
    states = [RequestState(make_request(f"r{n}", [2]), n, max_model_len=40) for n in range(5)]
    running = RunningRequests()
    for state, rank in zip(states, (3, 1, 4, 0, 2), strict=True):
        state.rank = (rank,)
        running.insert_by_rank(state)
    assert running.pop() is states[2]
    running.remove(states[1])
    assert [state.rank for state in running.in_order()] == [(0,), (2,), (3,)]


@pytest.mark.parametrize(
    "made",
    [
        EngineDelta(request_id="a", token_ids=[1]),
        RequestResult(request_id="a", incarnation=0, token_ids=[1]),
        ScheduledRequest("a", 0, 1, True),
    ],
    ids=lambda made: type(made).__name__,
)
def test_what_every_step_makes_of_every_request_is_nothing_for_the_collector(made):
    assert not gc.is_tracked(made)


def test_requests_without_drafts_are_not_planned_again_beside_one_that_has_some(monkeypatch):
    scheduler = scheduler_of(num_drafts=2)
    for name in ("a", "b"):
        scheduler.add(long_request(name, prompt=[2] * BLOCK_SIZE, max_tokens=40))
    calls = Calls(monkeypatch, scheduler.kv, "allocate")
    rows = []
    for _ in range(1 + 2 * BLOCK_SIZE):
        plan = scheduler.schedule()
        assert plan.num_drafts == 2
        own, other = plan.scheduled
        rows.append(other)
        scheduler.update(answer(plan, found(own, 2), found(other, 0)))
        assert [own.num_drafts, other.num_drafts] == [2 * (len(rows) > 1), 0]
    unchanged = [row for row in rows[1:] if not row.new_block_ids]
    assert len(unchanged) == 2 * (BLOCK_SIZE - 1)
    assert all(row is unchanged[0] for row in unchanged)
    # One call a step for the request with drafts, one a block for the other.
    assert calls.counts["allocate"] == len(rows) + 3


def found(row, num_drafts):
    """One token is sampled, and the drafter found `num_drafts` for the next step."""
    return RequestResult(
        request_id=row.request_id,
        incarnation=row.incarnation,
        token_ids=[7],
        num_drafts=num_drafts,
    )
