"""How requests end, and what becomes of those that go on."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest
from fake_device import EOS, expected_output, make_request
from harness import Engine
from plans import answer, long_request, scheduler_of, shares

from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import PromptLogprobs, RequestResult, StepResult, TokenLogprobs
from penstock.protocol.structured import StructuredOutputsParams
from penstock.scheduler.request import RequestState

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


def test_stop_tokens_of_a_request_that_has_many_go_with_it():
    state = RequestState(make_request("a", [2], stop_token_ids=list(range(1000))), 0, 64)
    many = weakref.ref(state.stop_ids)
    assert 999 in state.stop_ids
    del state
    gc.collect()
    assert many() is None


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


def test_nothing_is_kept_of_requests_that_left_the_queue():
    engine = Engine(num_blocks=12, max_num_seqs=2, depth=2)
    names = [f"left {index}" for index in range(4)]
    for name in names:
        engine.add(long_request(name))
    engine.turn()
    engine.hear(engine.scheduler.finish(reversed(names)))  # some run, some wait
    while engine.device.in_flight:
        engine.collect()
    gc.collect()
    states = [thing for thing in gc.get_objects() if type(thing) is RequestState]
    assert [state.request_id for state in states if state.request_id in names] == []
