"""How many drafts requests bring to a step: with times and acceptance that the test makes up."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_device import make_request
from harness import Engine

from penstock.protocol.limits import StepLimits
from penstock.protocol.step import RequestResult, ScheduledRequest
from penstock.scheduler.plan import PlannedStep
from penstock.scheduler.request import RequestState
from penstock.scheduler.running import RunningRequests
from penstock.scheduler.speculation import Speculation
from penstock.scheduler.step_costs import NUM_TRIALS, StepCosts

LIMITS = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "max_model_len": 1 << 20}


class World:
    """Runs decode steps of requests whose drafts hold with given probabilities.

    `seconds(rows, drafts)` is the time of a step that computes `rows` and proposes `drafts` for
    each request. `matches`: the share of steps after which a request has drafts at all, which it
    then knows.
    """

    def __init__(self, rates, seconds, num_drafts=4, matches=None, **limits):
        self.rng = random.Random(1)
        self.now = 0.0
        self.seconds, self.matches = seconds, matches
        limits = StepLimits(num_drafts=num_drafts, adapts_drafts=True, **LIMITS, **limits)
        self.speculation = Speculation(limits, lambda: self.now)
        self.running = RunningRequests()
        self.rates = {}
        for index, rate in enumerate(rates):
            request = make_request(f"r{index}", [1, 2], max_tokens=1 << 19)
            state = RequestState(request, index, limits.max_model_len)
            state.enter(0)
            state.advance(0, 2, 0)
            state.confirm(ScheduledRequest(state.request_id, 0, 2, True), 1)
            state.token_ids.append(1)
            self.running.append(state)
            self.rates[state] = rate
        self.num_tokens = self.num_proposed = 0

    def run(self, num_steps):
        """Returns tokens per second."""
        start, self.num_tokens = self.now, 0
        for step_id in range(num_steps):
            step = PlannedStep(step_id, 1 << 20)
            self.speculation.plan(step, self.running)
            self.num_proposed += step.num_drafts > 0
            planned = []
            for state in self.running.in_order():
                count = self.speculation.num_to_verify(state)
                step.add(state, 1 + count, count, [])
                planned.append((state, count))
            self.now += self.seconds(step.num_tokens, step.num_drafts)
            for state, count in planned:
                self.apply(state, count, step.num_drafts)
            self.speculation.record_time(step)
        return self.num_tokens / (self.now - start)

    def apply(self, state, count, num_proposed):
        held = 0
        while held < count and self.rng.random() < self.rates[state]:
            held += 1
        has_drafts = None
        if self.matches is not None:
            has_drafts = num_proposed if self.rng.random() < self.matches else 0
        row = ScheduledRequest(state.request_id, 0, 1 + count, True, [], count)
        result = RequestResult(
            request_id=state.request_id,
            incarnation=0,
            token_ids=[1] * (held + 1),
            num_drafts=has_drafts,
        )
        state.confirm(row, held + 1)
        state.token_ids += result.token_ids
        self.speculation.record(state, row, result)
        self.num_tokens += held + 1


def gpu(rows, drafts):
    """Flat up to 128 rows, then linear. Each draft costs a small model's step."""
    return 4.0 * max(1.0, rows / 128) + 0.2 * drafts


def h200(rows, drafts):
    """Milliseconds of an 8B model."""
    return 4.0 + 0.0245 * rows + 0.3 * drafts


def cpu(rows, drafts):
    return 6.0 + 2.0 * rows


def best_speed(num_requests, rate, seconds, num_drafts):
    tokens, speeds = 0.0, []
    for count in range(num_drafts + 1):
        tokens += rate**count
        speeds.append(num_requests * tokens / seconds(num_requests * (1 + count), count))
    return max(speeds), speeds[0]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("num_requests", [1, 8, 64, 256])
def test_drafts_are_chosen_that_give_nearly_the_most_tokens_per_second(num_requests, rate):
    world = World([rate] * num_requests, gpu, num_lookahead=4, max_in_flight=2)
    world.run(200)  # learns
    best, without = best_speed(num_requests, rate, gpu, 4)
    speed = world.run(1000)
    assert speed > 0.93 * best
    assert speed > 0.97 * without


def test_a_drafter_that_does_not_pay_hardly_runs():
    world = World([0.1] * 256, gpu, num_lookahead=4, max_in_flight=2)
    world.run(200)
    world.num_proposed = 0
    world.run(1000)
    assert 0 < world.num_proposed < 50  # tried again now and then


def test_drafts_come_back_when_they_begin_to_hold():
    world = World([0.0] * 64, gpu, num_lookahead=4, max_in_flight=2)
    before = world.run(500)
    world.rates = dict.fromkeys(world.rates, 1.0)
    world.run(1000)
    assert world.run(500) > 1.5 * before


def test_requests_bring_drafts_as_their_own_acceptance_deserves():
    world = World([0.9, 0.05], cpu, num_drafts=5, matches=1.0)
    world.run(200)
    good, bad = world.running.in_order()
    verified = [0, 0]
    for _ in range(100):
        for index, state in enumerate((good, bad)):
            state.num_drafts = 5
            verified[index] += world.speculation.num_to_verify(state)
    assert verified[0] > 200 > 20 > verified[1] > 0


def test_drafts_of_a_request_that_hardly_hold_cost_little():
    world = World([0.05], cpu, num_drafts=5, matches=0.5)
    world.run(200)
    assert world.run(2000) > 0.97 / cpu(1, 0)


def test_drafts_that_hold_are_used_whenever_a_request_has_some():
    world = World([0.95], cpu, num_drafts=5, matches=0.5)
    world.run(200)
    assert world.run(2000) > 1.3 / cpu(1, 0)


def test_without_a_drafter_nothing_is_planned_or_recorded():
    world = World([0.5], cpu, num_drafts=0)
    world.run(10)
    assert world.num_proposed == 0
    assert world.speculation.stats().num_drafts == 0


def test_counts_add_up():
    world = World([0.7] * 4, gpu, num_lookahead=4, max_in_flight=2)
    world.run(300)
    stats = world.speculation.stats()
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
    assert stats.num_accepted_tokens == world.num_tokens - 4 * 300
    assert stats.num_drafts <= stats.num_draft_tokens
    per_position = stats.num_accepted_tokens_per_pos
    assert per_position == sorted(per_position, reverse=True)


def test_a_time_counts_after_a_few_trials_and_ignores_outliers():
    costs = StepCosts()
    costs.record(1, 0, 9.0)  # compiles
    assert not costs.knows(1, 0)
    for _ in range(NUM_TRIALS):
        costs.record(1, 0, 2.0)
    assert costs.seconds(1, 0) == 2.0
    costs.record(1, 0, 1000.0)
    assert costs.seconds(1, 0) < 2.3


def test_a_step_that_was_in_flight_beside_a_slow_one_does_not_count():
    costs = StepCosts()
    for seconds in (9.0, 9.0, 0.01, 2.0, 2.0):
        costs.record(1, 0, seconds)
    assert costs.seconds(1, 0) == 2.0


def test_larger_steps_are_expected_to_take_what_rows_of_prompts_take():
    costs = StepCosts()
    costs.record_prompts(16, 5.0)  # too few rows to tell
    for _ in range(NUM_TRIALS):
        costs.record(256, 0, 10.0)
    assert costs.seconds(512, 1) == 10.0
    for seconds in (40.0, 0.0, 20.0, 20.0):
        costs.record_prompts(1000, seconds)
    # Each of them took 20.0, of which 10.0 are not for its 1000 rows.
    assert costs.seconds(512, 1) == pytest.approx(10.0 + 256 * 0.01, rel=0.1)
    assert costs.seconds(256, 1) == 10.0


def test_a_device_that_rows_keep_busy_never_sees_many_drafts():
    """As 256 streams on an H200, for which no number of drafts pays."""
    world = World([0.7] * 256, h200, num_lookahead=4, max_in_flight=2)
    world.speculation._num_drafts = 0  # as after prompts of many requests
    for _ in range(4):
        world.speculation._costs.record_prompts(8192, h200(8192, 0))
    without = 256 / h200(256, 0)
    assert world.run(100) > 0.97 * without  # also while it learns
    assert world.run(500) > 0.985 * without


def test_steps_that_capture_graphs_do_not_make_trials_expensive():
    """The first two steps of each size take long, also with many requests that need no drafts."""
    seen = Counter()

    def seconds(rows, drafts):
        seen[rows, drafts] += 1
        return h200(rows, drafts) + (60.0 if seen[rows, drafts] <= 2 else 0.0)

    world = World([0.7] * 256, seconds, num_lookahead=4, max_in_flight=2)
    world.speculation._num_drafts = 0  # as after prompts of many requests
    for _ in range(4):
        world.speculation._costs.record_prompts(8192, h200(8192, 0))
    world.run(70)  # with a first trial
    assert seen[512, 0] == 1
    without = 256 / h200(256, 0)
    assert world.run(200) > 0.99 * without
    assert world.run(8000) > 0.99 * without
    assert seen[512, 0] > 3  # it still tries


def test_a_device_that_is_slow_for_some_steps_does_not_bring_drafts_back():
    slow = set()
    world = World([0.7] * 256, lambda *size: h200(*size) * (1.3 if slow else 1.0), num_lookahead=4)
    for _ in range(4):
        world.speculation._costs.record_prompts(8192, h200(8192, 0))
    world.run(30)
    slow.add(True)
    world.run(10)
    slow.clear()
    world.num_proposed = 0
    world.run(20)
    assert world.num_proposed == 0


def test_a_wrong_time_without_drafts_is_corrected_while_there_are_drafts():
    world = World([0.7] * 256, h200, num_lookahead=4)
    for _ in range(4):
        world.speculation._costs.record_prompts(8192, h200(8192, 0))
    world.run(30)
    world.speculation._costs._estimates[256, 0].seconds *= 1.5
    world.run(30)
    assert world.speculation._num_drafts > 0
    world.run(1000)
    assert world.speculation._num_drafts == 0


def test_a_choice_for_few_requests_does_not_outlive_the_arrival_of_many():
    world = World([0.9], gpu, num_lookahead=4, max_in_flight=2)
    world.run(400)
    assert world.speculation._num_drafts == 4
    for state in World([0.1] * 300, gpu).running.in_order():
        world.running.append(state)
        world.rates[state] = 0.1
    world.num_proposed = 0
    world.run(1)
    assert world.num_proposed == 0  # first what a step of so many takes at all


def test_an_unknown_time_comes_from_the_nearest_known_steps():
    costs = StepCosts()
    for _ in range(NUM_TRIALS):
        costs.record(1, 0, 2.0)
        costs.record(4, 2, 3.0)
        costs.record(64, 0, 9.0)
    assert costs.seconds(8, 2) == 3.0
    assert costs.seconds(128, 0) == 9.0
    assert costs.seconds(22, 0) == pytest.approx(2 + 7 * 21 / 63)  # between its neighbours
    assert costs.seconds(1, 2) == 2.0
    assert not costs.knows(8, 0)
    assert costs.knows(64, 0)
    costs.record(1, 2, 2.0)
    costs.record(1, 2, 2.0)
    costs.record(1, 2, 2.0)
    assert costs.seconds_per_row(1, 4, 2) == pytest.approx(1 / 3)
    assert costs.seconds_per_row(1, 3, 2) == 0.0


def test_drafts_that_are_tried_again_are_verified_by_requests_on_the_fast_path():
    limits = {"num_drafts": 3, "adapts_drafts": True, "num_lookahead": 3, "max_model_len": 512}
    engine = Engine(num_blocks=256, **limits)
    engine.add(make_request("a", [2, 3], max_tokens=400, ignore_eos=True))
    speculation = engine.scheduler.speculation
    speculation._choose = lambda *args: setattr(speculation, "_num_drafts", 0)
    speculation._choose()
    speculation._clock = lambda: 1.0  # no step takes long
    for _ in range(150):
        engine.turn()
    # Two tries of one draft each, beside those before K was chosen.
    assert [plan.num_drafts for plan in engine.plans].count(1) == 2
    assert sum(row.num_drafts == 1 for plan in engine.plans for row in plan.scheduled) == 2


def test_a_drafter_that_knows_its_chances_is_told_what_a_draft_must_bring():
    world = World([0.9], cpu, num_drafts=5, matches=1.0, drafts_have_chances=True)
    world.run(200)
    step = PlannedStep(0, 1 << 20)
    world.speculation.plan(step, world.running)
    # A row takes 2.0, in which the request gets that many tokens otherwise.
    assert step.least_chance == pytest.approx(2.0 * world.run(100), rel=0.2)
    (state,) = world.running.in_order()
    state.num_drafts = 3
    assert world.speculation.num_to_verify(state) == 3  # the drafter left out what does not pay


def test_among_many_requests_a_draft_must_hold_more_often_to_pay():
    """Who is ahead waits for the others: the steps that all take together are not saved."""
    least = []
    for num_requests in (1, 4, 16):
        world = World([0.9] * num_requests, cpu, 5, matches=1.0, drafts_have_chances=True)
        world.run(200)
        step = PlannedStep(1, 1 << 20)
        world.speculation.plan(step, world.running)
        row = world.speculation._seconds_per_row(num_requests, 1)
        least.append((step.least_chance, row * world.run(100)))
    assert least[0][0] == pytest.approx(least[0][1], rel=0.2)
    for found, alone in least[1:]:
        assert alone < found < 1
    assert least[1][0] < least[2][0]


def test_a_drafter_that_knows_its_chances_proposes_everything_if_nothing_adapts():
    engine = Engine(num_blocks=64, num_drafts=3, drafts_have_chances=True)
    engine.add(make_request("a", [2, 3], max_tokens=20, ignore_eos=True))
    for _ in range(6):
        engine.turn()
    assert len(engine.plans) > 2
    assert {plan.least_chance for plan in engine.plans} == {0.0}
