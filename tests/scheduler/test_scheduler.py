"""What a step computes and for whom, one promise a test."""

from __future__ import annotations

import msgspec
import pytest
from fake_device import EOS, make_request
from harness import Engine
from plans import answer, long_request, scheduler_of, shares

from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import ConfigError
from penstock.protocol.step import RequestResult, TokenLogprobs

# -- the budget


def test_running_requests_come_first_and_a_long_prompt_fills_what_is_left():
    scheduler = scheduler_of(max_num_batched_tokens=10)
    scheduler.add(long_request("a", [2] * 4))
    scheduler.update(answer(scheduler.schedule()))
    scheduler.add(long_request("b", [3] * 20))
    plans = []
    for _ in range(4):
        plans.append(scheduler.schedule())
        scheduler.update(answer(plans[-1]))
    assert [shares(plan) for plan in plans] == [
        {"a": 1, "b": 9},
        {"a": 1, "b": 9},
        {"a": 1, "b": 2},
        {"a": 1, "b": 1},
    ]
    assert [row.samples for plan in plans for row in plan.scheduled if row.request_id == "b"] == [
        False,
        False,
        True,
        True,
    ]


def test_a_threshold_leaves_room_for_others_beside_a_long_prompt():
    scheduler = scheduler_of(max_num_batched_tokens=10, long_prefill_token_threshold=6)
    scheduler.add(long_request("a", [2] * 20))
    scheduler.add(long_request("b", [3] * 3))
    assert shares(scheduler.schedule()) == {"a": 6, "b": 3}


def test_without_chunked_prefill_a_prompt_is_scheduled_whole_or_waits():
    scheduler = scheduler_of(max_num_batched_tokens=40, enable_chunked_prefill=False)
    scheduler.add(long_request("a", [2] * 30))
    scheduler.add(long_request("b", [3] * 20))
    plan = scheduler.schedule()
    assert shares(plan) == {"a": 30}
    scheduler.update(answer(plan))
    assert shares(scheduler.schedule()) == {"a": 1, "b": 20}


def test_no_more_requests_run_than_max_num_seqs():
    scheduler = scheduler_of(max_num_seqs=2)
    for name in "abc":
        scheduler.add(long_request(name))
    assert shares(scheduler.schedule()).keys() == {"a", "b"}


def test_priority_lets_the_lowest_number_in_first_then_the_earliest():
    scheduler = scheduler_of(max_num_seqs=3, policy="priority")
    scheduler.add(long_request("late", priority=1, arrival_time=2.0))
    scheduler.add(long_request("early", priority=1, arrival_time=1.0))
    scheduler.add(long_request("urgent", priority=0, arrival_time=3.0))
    assert list(shares(scheduler.schedule())) == ["urgent", "early", "late"]


# -- steps in flight


def test_a_decode_is_planned_before_the_token_it_reads_is_known():
    scheduler = scheduler_of()
    scheduler.add(long_request("a", [2] * 4))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shares(first) == {"a": 4}
    assert shares(second) == {"a": 1}
    assert second.scheduled[0].samples
    assert second.new_requests == []
    deltas = scheduler.update(answer(first, tokens=7)) + scheduler.update(answer(second, tokens=8))
    assert [delta.token_ids for delta in deltas] == [[7], [8]]


def test_no_step_is_planned_beyond_max_tokens():
    scheduler = scheduler_of()
    scheduler.add(long_request("a", max_tokens=2))
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is None


def test_what_comes_back_after_a_stop_is_dropped_and_the_row_is_released():
    scheduler = scheduler_of()
    scheduler.add(make_request("a", [2] * 4))
    first, second = scheduler.schedule(), scheduler.schedule()
    (delta,) = scheduler.update(answer(first, tokens=EOS))
    assert (delta.token_ids, delta.finish_reason) == ([EOS], FinishReason.STOP)
    assert scheduler.update(answer(second)) == []
    scheduler.add(make_request("b", [2]))
    assert scheduler.schedule().released_ids == ["a"]


def test_blocks_of_an_aborted_request_return_with_the_last_step_that_uses_them():
    scheduler = scheduler_of(num_blocks=11)
    scheduler.add(long_request("a", [2] * 30))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.finish(["a"])
    scheduler.add(long_request("b", [3] * 30))
    assert scheduler.schedule() is None
    scheduler.update(answer(first))
    assert scheduler.schedule() is None
    scheduler.update(answer(second))
    assert shares(scheduler.schedule()) == {"b": 30}


def test_an_id_may_be_used_again_while_steps_of_its_former_owner_are_in_flight():
    scheduler = scheduler_of()
    scheduler.add(long_request("a"))
    first = scheduler.schedule()
    scheduler.finish(["a"])
    scheduler.add(long_request("a"))
    second = scheduler.schedule()
    assert second.released_ids == ["a"]
    assert [new.request_id for new in second.new_requests] == ["a"]
    assert scheduler.update(answer(first, tokens=5)) == []
    assert [delta.token_ids for delta in scheduler.update(answer(second, tokens=6))] == [[6]]


def test_results_of_an_older_incarnation_are_dropped():
    engine = Engine(depth=3, num_blocks=12, max_model_len=40)
    for name in "ab":
        engine.add(long_request(name, [2] * 16 if name == "a" else [3] * 16))
    preempted = False
    while engine.scheduler.has_unfinished():
        before = engine.scheduler.stats().num_preemptions
        engine.turn()
        if engine.scheduler.stats().num_preemptions > before:
            preempted = preempted or bool(engine.device.in_flight)
    assert preempted
    engine.drain()
    engine.check_outputs()


# -- preemption


def test_the_last_admitted_is_preempted_and_comes_back_first():
    scheduler = scheduler_of(num_blocks=11, max_model_len=40)
    scheduler.add(long_request("a", [2] * 16))
    scheduler.add(long_request("b", [3] * 20))
    scheduler.update(answer(scheduler.schedule()))
    assert scheduler.stats().kv_cache_usage == 0.9
    plan = scheduler.schedule()  # a takes the last block, none is left for b
    assert shares(plan) == {"a": 1}
    assert plan.released_ids == ["b"]
    scheduler.add(long_request("c", [4] * 4))
    while "b" not in shares(plan):
        assert "c" not in shares(plan)  # the preempted one is first in line
        scheduler.update(answer(plan))
        plan = scheduler.schedule()
    (new,) = [new for new in plan.new_requests if new.request_id == "b"]
    assert new.token_ids == [3] * 20 + [7]
    assert new.num_prompt_tokens == 20


def test_the_lowest_priority_is_preempted_even_if_it_came_first():
    scheduler = scheduler_of(num_blocks=11, max_model_len=40, policy="priority")
    scheduler.add(long_request("low", [2] * 16, priority=5))
    scheduler.add(long_request("high", [3] * 20, priority=1))
    scheduler.update(answer(scheduler.schedule()))
    plan = scheduler.schedule()
    assert shares(plan) == {"high": 1}
    scheduler.update(answer(plan))
    assert scheduler.stats().num_preemptions == 1


def test_preemption_waits_for_blocks_that_come_back_instead_of_preempting_more():
    scheduler = scheduler_of(num_blocks=12, max_model_len=40)
    for name, token in zip("abc", (2, 3, 4), strict=True):
        scheduler.add(long_request(name, [token] * (12 if name == "a" else 16)))
    first = scheduler.schedule()  # 3 + 4 + 4 blocks: all there are
    assert scheduler.schedule() is None  # a needs one more: c goes, its blocks are still in use
    assert scheduler.stats().num_preemptions == 1
    assert scheduler.schedule() is None
    assert scheduler.stats().num_preemptions == 1
    scheduler.update(answer(first))
    assert shares(scheduler.schedule()) == {"a": 1, "b": 1}
    assert scheduler.stats().num_preemptions == 1


def test_nobody_is_admitted_before_all_of_it_fits():
    scheduler = scheduler_of(num_blocks=11, max_num_batched_tokens=16, max_model_len=40)
    scheduler.add(long_request("a", [2] * 10))
    scheduler.update(answer(scheduler.schedule()))
    scheduler.add(long_request("b", [3] * 32))
    scheduler.add(long_request("c", [4] * 4))
    assert shares(scheduler.schedule()) == {"a": 1}  # 3 of 10 blocks are taken, b needs 8


def test_a_cache_that_cannot_hold_one_request_is_refused():
    with pytest.raises(ConfigError, match="max_model_len=40"):
        scheduler_of(num_blocks=10, max_model_len=40)
    scheduler_of(num_blocks=11, max_model_len=40)


# -- speculation


def test_a_decoding_request_brings_its_drafts_and_counters_are_corrected():
    scheduler = scheduler_of(num_drafts=3)
    scheduler.add(long_request("a", [2] * 4))
    prefill, first, second = scheduler.schedule(), scheduler.schedule(), scheduler.schedule()
    assert [
        (plan.scheduled[0].num_tokens, plan.scheduled[0].num_drafts)
        for plan in (prefill, first, second)
    ] == [
        (4, 0),
        (4, 3),
        (4, 3),
    ]
    scheduler.update(answer(prefill))
    accepted = [
        RequestResult(request_id="a", incarnation=0, token_ids=tokens) for tokens in ([5, 6], [8])
    ]
    assert [d.token_ids for d in scheduler.update(answer(first, accepted[0]))] == [[5, 6]]
    assert [d.token_ids for d in scheduler.update(answer(second, accepted[1]))] == [[8]]
    state = scheduler._requests["a"]
    assert state.output_token_ids == [7, 5, 6, 8]
    assert state.num_computed_tokens == state.num_confirmed_tokens == 7
    assert state.num_placeholders == 0


def test_drafts_are_cut_at_the_stop_and_near_max_tokens():
    scheduler = scheduler_of(num_drafts=3)
    scheduler.add(make_request("a", [2] * 4, max_tokens=4))
    scheduler.update(answer(scheduler.schedule()))
    plan = scheduler.schedule()
    assert plan.scheduled[0].num_drafts == 2
    result = RequestResult(
        request_id="a",
        incarnation=0,
        token_ids=[5, EOS, 6],
        logprobs=[TokenLogprobs([t], [0.0], 1) for t in (5, EOS, 6)],
    )
    (delta,) = scheduler.update(answer(plan, result))
    assert delta.token_ids == [5, EOS]
    assert len(delta.logprobs) == 2
    assert delta.finish_reason is FinishReason.STOP


# -- what crosses to the runner


def test_a_decode_plan_is_small_and_holds_neither_prompts_nor_block_tables():
    scheduler = scheduler_of(
        num_blocks=64 * 70, max_num_seqs=64, max_num_batched_tokens=64 * 250, max_model_len=300
    )
    for index in range(64):
        scheduler.add(long_request(f"request-{index:04d}", [index] * 242))
    first = scheduler.schedule()
    scheduler.update(answer(first))
    plan = scheduler.schedule()
    assert len(plan.scheduled) == 64
    assert plan.new_requests == []
    assert all(row.new_block_ids == [] for row in plan.scheduled)
    id_bytes = sum(len(row.request_id) + 1 for row in plan.scheduled)
    assert len(msgspec.msgpack.encode(plan)) - id_bytes < 8 * 64 + 32
    assert len(msgspec.msgpack.encode(first)) > 242 * 64
    scheduler.update(answer(plan))
    growing = scheduler.schedule()  # the 245th token begins a block
    assert all(len(row.new_block_ids[0]) <= 1 for row in growing.scheduled if row.new_block_ids)


def test_a_plan_survives_serialization():
    scheduler = scheduler_of()
    scheduler.add(long_request("a", [2] * 10))
    plan = scheduler.schedule()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=type(plan)) == plan
