"""What the scheduler promises, one promise a test."""

from __future__ import annotations

import msgspec
import pytest
from fake_device import EOS, expected_output, make_request
from harness import Engine, limits_of
from kvcache.kv_fakes import ONE_GROUP, layout_of

from penstock.kvcache.connector import BlockFate
from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import ConfigError, InputError
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import PromptLogprobs, RequestResult, StepResult, TokenLogprobs
from penstock.protocol.structured import StructuredOutputsParams
from penstock.scheduler.scheduler import Scheduler


def scheduler_of(num_blocks=64, connector=None, gates=(), **limits):
    kv = KVCacheManager(layout_of(ONE_GROUP, num_blocks))
    return Scheduler(limits_of(**limits), kv, gates, connector)


def long_request(request_id, prompt=(2, 3), **kwargs):
    return make_request(request_id, prompt, **{"max_tokens": 30, "ignore_eos": True, **kwargs})


def answer(plan, *results, tokens=7):
    """A result for every row of a plan: `tokens` where it samples, unless given in `results`."""
    given = {result.request_id: result for result in results}
    return StepResult(
        step_id=plan.step_id,
        results=[
            given.get(row.request_id)
            or RequestResult(
                request_id=row.request_id,
                incarnation=row.incarnation,
                token_ids=[tokens] if row.samples else [],
            )
            for row in plan.scheduled
        ],
    )


def shares(plan):
    return {row.request_id: row.num_tokens for row in plan.scheduled}


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


def test_without_chunked_prefill_a_step_must_hold_the_longest_request():
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        limits_of(enable_chunked_prefill=False, max_num_batched_tokens=39)


# -- how requests end


@pytest.mark.parametrize(
    ("params", "tokens", "ending"),
    [
        ({}, [5, EOS], ([5, EOS], FinishReason.STOP, None)),
        (
            {"ignore_eos": True, "max_tokens": 3},
            [5, EOS, 6],
            ([5, EOS, 6], FinishReason.LENGTH, None),
        ),
        ({"stop_token_ids": [9]}, [5, 9], ([5, 9], FinishReason.STOP, 9)),
        ({"stop_token_ids": [EOS]}, [EOS], ([EOS], FinishReason.STOP, None)),
        (
            {"stop_token_ids": [9], "min_tokens": 3},
            [9, EOS, 9],
            ([9, EOS, 9], FinishReason.STOP, 9),
        ),
        ({"max_tokens": 1}, [EOS], ([EOS], FinishReason.STOP, None)),
    ],
    ids=["eos", "ignored eos", "stop token", "eos as stop token", "min_tokens", "eos at the limit"],
)
def test_a_request_ends_at(params, tokens, ending):
    scheduler = scheduler_of()
    scheduler.add(make_request("a", [2], **params))
    seen = []
    for token in tokens:
        (delta,) = scheduler.update(answer(scheduler.schedule(), tokens=token))
        seen += delta.token_ids
    assert (seen, delta.finish_reason, delta.stop_reason) == ending
    assert not scheduler.has_unfinished()


def test_a_request_ends_at_max_model_len():
    engine = Engine(max_model_len=12, depth=2)
    engine.add(make_request("a", [2] * 10, max_tokens=100, ignore_eos=True))
    engine.drain()
    assert len(engine.tokens["a"]) == 2
    assert engine.endings["a"].finish_reason is FinishReason.LENGTH


def test_a_request_that_forbids_every_token_is_at_fault_itself():
    scheduler = scheduler_of(vocab_size=50)
    params = SamplingParams(max_tokens=9, allowed_token_ids=[7])
    request = long_request("own", [1, 7])
    scheduler.add(msgspec.structs.replace(request, params=params, bad_words_token_ids=[[7, 7, 7]]))
    plan = scheduler.schedule()
    fault = RequestResult(request_id="own", incarnation=0, token_ids=[7], fault="no token")
    (delta,) = scheduler.update(answer(plan, fault))
    assert delta.finish_reason is FinishReason.ERROR
    assert delta.error_field == "allowed_token_ids"
    assert "after 1 token of output" in delta.error


@pytest.mark.parametrize("restricts", [{"allowed_token_ids": [7]}, {"min_tokens": 2}, {}])
def test_a_fault_under_a_grammar_is_blamed_on_what_restricts_it_besides(restricts):
    scheduler = scheduler_of(vocab_size=50)
    grammar = StructuredOutputsParams(regex="a+")
    params = SamplingParams(max_tokens=9, structured_outputs=grammar, **restricts)
    scheduler.add(msgspec.structs.replace(long_request("own", [1, 7]), params=params))
    fault = RequestResult(request_id="own", incarnation=0, token_ids=[7], fault="no token")
    (delta,) = scheduler.update(answer(scheduler.schedule(), fault))
    assert delta.finish_reason is FinishReason.ERROR
    assert delta.error_field == ("structured_outputs" if restricts else None)
    assert all(name in delta.error for name in restricts or ["no token"])


def test_a_fault_ends_its_request_alone_and_its_blocks_are_not_shared():
    scheduler = scheduler_of()
    scheduler.add(long_request("bad", [2] * 9))
    scheduler.add(long_request("good", [3] * 9))
    plan = scheduler.schedule()
    fault = RequestResult(request_id="bad", incarnation=0, fault="not a number")
    deltas = {delta.request_id: delta for delta in scheduler.update(answer(plan, fault))}
    assert deltas["bad"].finish_reason is FinishReason.ERROR
    assert deltas["bad"].error == "not a number"
    assert deltas["good"].token_ids == [7]
    scheduler.add(long_request("again", [2] * 9))
    scheduler.add(long_request("alike", [3] * 9))
    assert {
        new.request_id: new.num_computed_tokens for new in scheduler.schedule().new_requests
    } == {
        "again": 0,
        "alike": 8,
    }


def test_a_row_without_its_token_fails_that_request_alone():
    scheduler = scheduler_of()
    scheduler.add(long_request("a"))
    plan = scheduler.schedule()
    (delta,) = scheduler.update(StepResult(step_id=plan.step_id, results=[]))
    assert delta.finish_reason is FinishReason.ERROR
    assert "0 tokens" in delta.error


def test_an_abort_ends_waiting_and_running_requests_and_ignores_unknown_ones():
    scheduler = scheduler_of(max_num_seqs=1)
    scheduler.add(long_request("running"))
    scheduler.add(long_request("waiting"))
    scheduler.schedule()
    deltas = scheduler.finish(["waiting", "unknown", "running", "running"])
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [
        ("waiting", FinishReason.ABORT),
        ("running", FinishReason.ABORT),
    ]
    assert not scheduler.has_unfinished()


def test_a_stop_text_found_by_the_frontend_ends_a_request_with_it():
    scheduler = scheduler_of()
    scheduler.add(long_request("a"))
    (delta,) = scheduler.finish(["a"], FinishReason.STOP, stop_reason="\n\n")
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "\n\n")


def test_fail_ends_requests_with_an_error():
    scheduler = scheduler_of()
    scheduler.add(long_request("a"))
    (delta,) = scheduler.fail(["a", "unknown"], "the model is gone")
    assert (delta.finish_reason, delta.error) == (FinishReason.ERROR, "the model is gone")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (make_request("x", []), "prompt_token_ids"),
        (make_request("x", [2] * 40), "prompt_token_ids"),
        (make_request("known", [2]), "request_id"),
        (make_request("x", [2], max_tokens=2, output_token_ids=[3, 4]), "output_token_ids"),
    ],
    ids=["empty prompt", "prompt as long as the model", "id in use", "replay with nothing left"],
)
def test_add_refuses_and_harms_nobody(request_, field):
    engine = Engine(max_model_len=40)
    engine.add(make_request("known", [2, 3]))
    with pytest.raises(InputError) as caught:
        engine.scheduler.add(request_)
    assert caught.value.field == field
    engine.drain()
    engine.check_outputs()
    engine.check_nothing_is_left()


# -- replays, logprobs, the prefix cache


def test_a_replay_goes_on_where_its_client_left_off():
    request = long_request("a", [2, 3, 4], max_tokens=9, min_tokens=6, stop_token_ids=[5])
    output, reason, _ = expected_output(request, 40)
    for num_seen in range(len(output)):
        engine = Engine()
        engine.add(msgspec.structs.replace(request, output_token_ids=output[:num_seen]))
        engine.drain()
        assert engine.tokens["a"] == output[num_seen:]
        assert engine.endings["a"].finish_reason is reason
        (new,) = engine.plans[0].new_requests
        assert new.num_prompt_tokens == 3


def test_prompt_logprobs_are_delivered_once_even_over_a_preemption():
    scheduler = scheduler_of(num_blocks=11, max_num_batched_tokens=20, max_model_len=40)
    scheduler.add(long_request("a", [2] * 16))
    scheduler.add(long_request("b", [3] * 20, read_prefix_cache=False, prompt_logprobs=0))

    def with_logprobs(plan, start, count):
        entry = TokenLogprobs([3], [-1.0], 1)
        (row,) = [row for row in plan.scheduled if row.request_id == "b"]
        return RequestResult(
            request_id="b",
            incarnation=row.incarnation,
            token_ids=[7] if row.samples else [],
            prompt_logprobs=PromptLogprobs(start, [entry] * count),
        )

    plan = scheduler.schedule()
    assert shares(plan) == {"a": 16, "b": 4}
    deltas = scheduler.update(answer(plan, with_logprobs(plan, 1, 3)))
    assert [d.prompt_logprobs.start for d in deltas if d.prompt_logprobs] == [1]
    while "b" in shares(plan) or scheduler.stats().num_preemptions == 0:
        plan = scheduler.schedule()
        scheduler.update(answer(plan))
    while "b" not in shares(plan):
        plan = scheduler.schedule()
        scheduler.update(answer(plan))
    (new,) = plan.new_requests
    assert new.num_prompt_logprobs == 3
    assert new.num_computed_tokens == 0


def test_deltas_say_how_many_prompt_tokens_were_cached():
    engine = Engine()
    for name in "ab":
        engine.add(long_request(name, [2] * 10, max_tokens=2))
        engine.drain()
    assert engine.endings["a"].num_cached_tokens == 0
    assert engine.endings["b"].num_cached_tokens == 8


# -- gates and connectors


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


# -- speculation


def test_a_decoding_request_brings_its_drafts_and_counters_are_corrected():
    scheduler = scheduler_of(num_speculative_tokens=3)
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
    scheduler = scheduler_of(num_speculative_tokens=3)
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


# -- the queue


def test_a_request_that_waits_longer_than_the_queue_allows_is_sent_away(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("penstock.scheduler.scheduler.time.monotonic", lambda: now[0])
    scheduler = scheduler_of(max_num_seqs=1, queue_timeout_s=5.0)
    replay = long_request("replay", output_token_ids=[4])
    for request in (long_request("runs"), long_request("waits"), replay):
        scheduler.add(request)
    scheduler.update(answer(scheduler.schedule()))
    now[0] += 4.0
    scheduler.add(long_request("late"))
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
