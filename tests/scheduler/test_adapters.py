"""Which requests with LoRA adapters run, and when adapters come and go."""

from __future__ import annotations

import random

import pytest
from fake_device import make_adapter, make_request
from harness import Engine
from plans import scheduler_of

from penstock.protocol.adapter import DropAdapter, FetchAdapter, PlaceAdapter
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import InputError
from penstock.protocol.step import StepFailure


def lora_engine(max_loras=1, max_cpu_loras=4, **options):
    return Engine(max_loras=max_loras, max_cpu_loras=max_cpu_loras, **options)


def long_request(request_id, adapter=None, **fields):
    adapter = make_adapter(adapter) if adapter else None
    fields = {"max_tokens": 8, "ignore_eos": True, "adapter": adapter, **fields}
    return make_request(request_id, [2, 3], **fields)


def run(engine, turns=1):
    """Turns of the core's loop on a device that fetches at once."""
    for _ in range(turns):
        engine.device.end_fetches()
        engine.turn()


def run_until_loaded(engine, *names):
    for name in names:
        answer = engine.scheduler.adapters.load(make_adapter(name))
        while not answer.done():
            run(engine)


def jobs_of(engine):
    return [job for plan in engine.plans for job in plan.jobs]


def admitted(engine):
    return [new.request_id for plan in engine.plans for new in plan.new_requests]


def test_a_request_for_an_adapter_is_refused_if_lora_is_off():
    scheduler = scheduler_of()
    with pytest.raises(InputError, match="adapter 'A' needs an engine with enable_lora"):
        scheduler.add(long_request("a", "A"))
    assert not scheduler.has_unfinished()


def test_a_request_waits_for_its_adapter_while_others_go_on():
    engine = lora_engine()
    engine.add(long_request("a", "A"))
    engine.add(long_request("base"))
    for _ in range(3):
        engine.turn()
    assert admitted(engine) == ["base"]
    assert engine.scheduler.adapters.stats().waiting == ["A"]
    engine.device.end_fetch(make_adapter("A").digest)
    engine.drain()
    assert admitted(engine) == ["base", "a"]
    engine.check_outputs()
    engine.check_nothing_is_left()


def test_an_adapter_is_fetched_once_and_placed_once_for_all_of_its_requests():
    engine = lora_engine()
    for name in "abc":
        engine.add(long_request(name, "A"))
    engine.drain()
    adapter = make_adapter("A")
    assert jobs_of(engine) == [FetchAdapter(adapter), PlaceAdapter(adapter.digest, 0)]


def test_the_step_that_admits_a_request_places_its_adapter():
    engine = lora_engine()
    engine.add(long_request("a", "A"))
    engine.drain()
    (plan,) = [plan for plan in engine.plans if plan.new_requests]
    assert plan.jobs == [PlaceAdapter(make_adapter("A").digest, plan.new_requests[0].adapter_slot)]


def test_a_failed_fetch_ends_the_requests_that_wait_for_it_and_no_others():
    engine = lora_engine()
    for name, adapter in [("a", "A"), ("b", "B"), ("c", "A"), ("d", None)]:
        engine.add(long_request(name, adapter))
    engine.turn()
    engine.device.end_fetch(make_adapter("A").digest, "rank 64 is above max_lora_rank=16")
    engine.drain()
    for name in "ac":
        ending = engine.endings[name]
        assert ending.finish_reason is FinishReason.ERROR
        assert ending.error == (
            "LoRA adapter 'A' cannot be loaded: rank 64 is above max_lora_rank=16"
        )
        assert ending.error_field == "model"
    assert engine.endings["b"].finish_reason is FinishReason.LENGTH
    assert engine.endings["d"].finish_reason is FinishReason.LENGTH
    assert DropAdapter(make_adapter("A").digest) in jobs_of(engine)
    engine.check_nothing_is_left()


def test_an_adapter_that_failed_is_fetched_again_for_the_next_request():
    engine = lora_engine()
    engine.add(long_request("a", "A"))
    engine.turn()
    engine.device.end_fetch(make_adapter("A").digest, "no such file")
    run(engine)
    assert engine.endings["a"].error
    engine.add(long_request("b", "A"))
    engine.drain()
    assert engine.endings["b"].finish_reason is FinishReason.LENGTH


def test_a_request_without_a_slot_does_not_stop_those_behind_it():
    engine = lora_engine(max_loras=1)
    run_until_loaded(engine, "A", "B")
    for name, adapter in [("a", "A"), ("b", "B"), ("c", "A"), ("d", None)]:
        engine.add(long_request(name, adapter))
    engine.launch()
    assert admitted(engine) == ["a", "c", "d"]
    engine.drain()
    assert admitted(engine) == ["a", "c", "d", "b"]


@pytest.mark.parametrize("max_num_seqs", [2, 5])
def test_the_first_parked_request_is_overtaken_by_at_most_max_num_seqs_others(max_num_seqs):
    engine = lora_engine(max_loras=1, max_num_seqs=max_num_seqs)
    run_until_loaded(engine, "A", "B")
    engine.add(long_request("first", "A"))
    engine.launch()
    engine.add(long_request("parked", "B"))
    for index in range(10 * max_num_seqs):
        engine.add(long_request(f"r{index}", "A", max_tokens=3 + index % 5))
    engine.add(long_request("base"))
    engine.drain()
    with_adapter = [name for name in admitted(engine) if name != "base"]
    assert with_adapter.index("parked") == 1 + max_num_seqs
    assert engine.scheduler.adapters.stats().most_overtakes == max_num_seqs


@pytest.mark.parametrize("seed", range(20))
def test_overtaking_is_bounded_by_the_requests_that_wait_before(seed):
    """Counted from outside, by the order of arrival and of admission."""
    rng = random.Random(seed)
    engine = lora_engine(max_loras=2, max_cpu_loras=8, max_num_seqs=3, num_blocks=200)
    run_until_loaded(engine, *"ABCDEFGH")
    names, num_before = [f"r{index}" for index in range(150)], {}
    for index, name in enumerate(names):
        num_before[name] = index - len(admitted(engine))
        adapter = rng.choice("AAAABBCDEFGH")
        engine.add(long_request(name, adapter, max_tokens=1 + rng.randrange(6)))
        run(engine, turns=rng.randrange(3) if index % 10 else 8)
    engine.drain()
    engine.check_outputs()
    engine.check_nothing_is_left()
    turn = {name: index for index, name in enumerate(admitted(engine))}
    for index, name in enumerate(names):
        overtakers = [later for later in names[index + 1 :] if turn[later] < turn[name]]
        assert len(overtakers) <= (num_before[name] + 1) * engine.limits.max_num_seqs
    stats = engine.scheduler.adapters.stats()
    assert stats.most_overtakes <= engine.limits.max_num_seqs
    assert stats.num_waits > 0
    assert stats.longest_wait_s > 0


def test_the_least_recently_used_copy_makes_place_and_pinned_ones_stay():
    engine = lora_engine(max_loras=2, max_cpu_loras=3)
    adapters = engine.scheduler.adapters
    adapters.load(make_adapter("A"), pin=True)
    run_until_loaded(engine, "A", "B", "C")
    engine.add(long_request("b", "B"))
    engine.drain()
    run_until_loaded(engine, "D")
    assert engine.device.copies == {make_adapter(name).digest for name in "ABD"}
    run_until_loaded(engine, "E")
    assert engine.device.copies == {make_adapter(name).digest for name in "ADE"}
    assert adapters.stats().num_evictions == 2


def test_one_slot_is_left_for_adapters_that_are_not_pinned():
    engine = lora_engine(max_loras=2)
    adapters = engine.scheduler.adapters
    adapters.load(make_adapter("A"), pin=True)
    with pytest.raises(InputError, match="one of 2 slots must be left for others"):
        adapters.load(make_adapter("B"), pin=True)
    adapters.unload(make_adapter("A").digest)
    adapters.load(make_adapter("B"), pin=True)


def test_a_pinned_adapter_keeps_its_slot():
    engine = lora_engine(max_loras=2)
    engine.scheduler.adapters.load(make_adapter("A"), pin=True)
    for index, adapter in enumerate("ABCDA"):
        engine.add(long_request(f"r{index}", adapter))
        engine.drain()
    placed = [job.digest for job in jobs_of(engine) if isinstance(job, PlaceAdapter)]
    assert placed == [make_adapter(name).digest for name in "ABCD"]


def test_a_load_is_answered_though_all_copies_are_in_use():
    engine = lora_engine(max_loras=1, max_cpu_loras=1)
    engine.add(long_request("a", "A", max_tokens=30))
    run(engine, turns=3)
    assert engine.scheduler.adapters.stats().running == ["A"]
    good = engine.scheduler.adapters.load(make_adapter("B"))
    bad = engine.scheduler.adapters.load(make_adapter("C"))
    engine.turn()
    engine.device.end_fetch(make_adapter("B").digest)
    engine.turn()
    engine.turn()
    engine.device.end_fetch(make_adapter("C").digest, "it has no tensors")
    engine.turn()
    engine.turn()
    assert good.result(timeout=0) is None
    with pytest.raises(InputError, match="LoRA adapter 'C' cannot be loaded: it has no tensors"):
        bad.result(timeout=0)
    assert engine.device.most_copies == 2
    engine.drain()
    assert engine.device.copies == {make_adapter("A").digest}


def test_an_unloaded_adapter_stays_until_its_requests_have_ended():
    engine = lora_engine()
    engine.add(long_request("a", "A"))
    run(engine, turns=3)
    engine.scheduler.adapters.unload(make_adapter("A").digest)
    run(engine)
    assert engine.device.copies == {make_adapter("A").digest}
    while engine.scheduler.has_unfinished():
        run(engine)
    assert engine.device.copies == set()
    assert engine.endings["a"].finish_reason is FinishReason.LENGTH


def test_an_earlier_request_displaces_the_copy_of_later_waiting_ones():
    engine = lora_engine(max_loras=1, max_cpu_loras=1)
    engine.add(long_request("a", "A"))
    run(engine, turns=3)
    engine.add(long_request("b", "B"))
    for index in range(20):
        engine.add(long_request(f"c{index}", "A"))
    engine.drain()
    order = admitted(engine)
    assert order.index("b") <= 1 + engine.limits.max_num_seqs
    engine.check_outputs()


def test_the_same_prompt_shares_blocks_only_with_requests_of_the_same_adapter():
    engine = lora_engine(max_loras=2)
    prompt = [2, 3] * 15
    hits = []
    for index, adapter in enumerate([None, "A", "B", "A", None, "B"]):
        adapter = make_adapter(adapter) if adapter else None
        engine.add(make_request(f"r{index}", prompt, max_tokens=1, adapter=adapter))
        engine.drain()
        hits.append(engine.endings[f"r{index}"].num_cached_tokens > 0)
    assert hits == [False, False, False, True, True, True]


def test_preemption_gives_the_slot_back():
    engine = lora_engine(max_loras=1, num_blocks=12, max_num_seqs=4)
    run_until_loaded(engine, "A", "B")
    for index in range(4):
        engine.add(long_request(f"a{index}", "A", max_tokens=30))
    engine.add(long_request("b", "B", max_tokens=30))
    engine.drain()
    assert engine.scheduler.stats().num_preemptions > 0
    engine.check_outputs()
    engine.check_nothing_is_left()


@pytest.mark.parametrize("failure", [StepFailure.ERROR, StepFailure.OUT_OF_MEMORY, None])
def test_jobs_of_steps_that_never_ran_are_sent_again(failure):
    engine = lora_engine(max_loras=1, depth=2)
    engine.add(long_request("a", "A"))
    engine.launch()
    engine.device.fail()
    engine.hear(engine.scheduler.retry(failure))
    engine.add(long_request("b", "B"))
    engine.drain()
    if failure is None:  # an interrupt is nobody's fault
        assert engine.endings["a"].finish_reason is FinishReason.LENGTH
    else:
        assert "cannot be loaded: the engine failed" in engine.endings["a"].error
    assert engine.endings["b"].finish_reason is FinishReason.LENGTH
    engine.check_nothing_is_left()


def test_slots_are_filled_again_after_a_step_failed():
    engine = lora_engine(max_loras=1)
    run_until_loaded(engine, "A")
    engine.add(long_request("a", "A"))
    engine.add(long_request("b", "A"))
    engine.launch()
    engine.device.fail()
    engine.hear(engine.scheduler.retry(StepFailure.ERROR))
    engine.drain()
    placed = [job for job in jobs_of(engine) if isinstance(job, PlaceAdapter)]
    assert len(placed) == 2
    engine.check_outputs()
    engine.check_nothing_is_left()
