"""Speculation: decides how many draft tokens each request brings to a step.

A step verifies the drafts that its predecessor proposed. The output does not depend on their
number. Therefore the number may depend on the load and on measured times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from penstock.protocol.limits import StepLimits
from penstock.protocol.step import RequestResult, ScheduledRequest
from penstock.scheduler.plan import PlannedStep
from penstock.scheduler.probes import Probes
from penstock.scheduler.request import RequestState
from penstock.scheduler.running import RunningRequests
from penstock.scheduler.stats import SpeculationStats
from penstock.scheduler.step_costs import NUM_TRIALS, StepCosts

DECAY = 0.99  # of a request's counts, per verified step
HOST_DECAY = 0.9  # where requests have drafts now and then: those hold in bursts
SPEED_DECAY = 0.95  # of the tokens and the seconds of decode steps, per step
AVERAGE_DECAY = 0.995  # of the counts of all requests, per verified proposal
PRIOR_WEIGHT = 8.0  # drafts that the engine's average counts for in a request's rate
HOST_PRIOR_WEIGHT = 4.0  # the same, with HOST_DECAY
FIRST_RATE = 0.7  # assumed share of drafts that hold, before any was verified
MAX_SAMPLED = 32  # requests whose rates the choice of K looks at
LEAST_GAIN = 1.03  # in tokens per second, for which drafts are proposed at all
LEAST_UNTRIED = 1.18  # the same, if the time of such a step was never measured
CHECK_SHARE = 0.0025  # of what drafts gain, for timing steps without them again
PLAN_EVERY = 8  # steps between two choices of K
MOST_GROWTH = 2  # of the number of requests, before K is chosen again at once
LOW_CHANCE = 0.5  # drafts with a higher one are proposed in every 64th step, whatever they cost
LOW_CHANCE_EVERY = 64
HOST_PROMPT_ROWS = 24  # of a step that shows what a row takes, where steps are not in flight
FIRST_PROBE, LAST_PROBE = 8, 256  # steps in which a request leaves its drafts out between trials


class Speculation:
    """Chooses the drafts that give the most tokens per second.

    A draft holds with a probability that is estimated for each request. The time of a step is
    measured by its number of rows and of drafts to propose.
    """

    def __init__(self, limits: StepLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._held, self._tried = FIRST_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT  # decayed counts
        self._num_drafts = limits.num_drafts  # the current K
        self._gain = 1.0  # in tokens per second, by the current K
        self._least_rate = 0.0  # probability to hold of a draft that pays
        self._steps_left = 0  # until K is chosen again
        self._most_running = 0  # requests for which the current K was meant
        self._last_end = 0.0  # when the last step was collected
        self._probes = Probes()
        self._num_to_probe = 0  # next steps, which verify drafts that are tried although K = 0
        self._verifies_probe = False  # the current one does
        self._accepted_by_position = [0] * limits.num_drafts
        self._num_proposals = self._num_verified = 0
        # Otherwise proposals cost next to nothing, and a request without one brings none.
        self._is_uniform = limits.num_lookahead > 0 or limits.max_in_flight > 1
        self._costs = StepCosts(*(() if self._is_uniform else (HOST_PROMPT_ROWS,)))
        self._plain_drafts = 0 if self._is_uniform else limits.num_drafts
        self._decay = DECAY if self._is_uniform else HOST_DECAY
        self._prior_weight = PRIOR_WEIGHT if self._is_uniform else HOST_PRIOR_WEIGHT
        # The drafter itself leaves out drafts that do not pay, if it is told what pays.
        self._leaves_choice = limits.drafts_have_chances and not self._is_uniform
        self._num_tokens = self._num_seconds = 0.0  # of recent decode steps, decayed
        self._num_held = 0  # drafts of the step that is collected
        self._measures_plain = False  # no request brings drafts, to learn what such a step takes

    @property
    def is_enabled(self) -> bool:
        return self._limits.num_drafts > 0

    def plan(self, step: PlannedStep, running: RunningRequests) -> None:
        """Set how many drafts are proposed after the step."""
        if not self.is_enabled:
            return
        if not self._limits.adapts_drafts:
            step.num_drafts, step.without_drafts = self._num_drafts, False
            return
        step.started_at = self._clock()
        num_running = max(len(running), 1)
        self._steps_left -= 1
        if self._steps_left <= 0 or num_running > self._most_running:
            self._steps_left = PLAN_EVERY
            self._most_running = MOST_GROWTH * num_running
            self._choose(num_running, running)
        step.num_drafts = self._num_drafts
        if self._leaves_choice:
            step.least_chance = self._least_rate
            if step.step_id % LOW_CHANCE_EVERY == 0:
                step.least_chance = min(self._least_rate, LOW_CHANCE)
        step.ends_probe = self._num_to_probe == 1
        self._verifies_probe = self._num_to_probe > 0
        self._num_to_probe = max(self._num_to_probe - 1, 0)
        if self._num_drafts == 0 and self._probes.is_due(step.started_at):
            step.num_drafts = 1
            self._num_to_probe = self._limits.num_stages  # one of them has the same requests
        step.without_drafts = not (step.num_drafts or self._verifies_probe)

    def num_to_verify(self, state: RequestState) -> int:
        """How many of its proposed drafts the request brings to the step."""
        if not state.num_drafts or self._measures_plain:
            return 0
        if not self._limits.adapts_drafts or self._verifies_probe or self._leaves_choice:
            return state.num_drafts
        rate, least = self._rate_of(state), self._least_rate
        count, chance = 0, rate
        while count < state.num_drafts and chance > least:
            count, chance = count + 1, chance * rate
        if count == 0:
            state.num_skipped_drafts += 1
            if state.num_skipped_drafts > state.probe_after:
                count = 1
        if count:
            state.num_skipped_drafts = 0
        return count

    def record(self, state: RequestState, planned: ScheduledRequest, result: RequestResult) -> None:
        """Learn from a step's result, and note how many drafts the request has now."""
        if not (self.is_enabled and planned.samples):
            return
        if result.num_drafts is not None and state.num_placeholders == 0:
            state.num_drafts = min(result.num_drafts, state.num_drafts)
        num_drafts = planned.num_drafts
        if num_drafts == 0 or not result.token_ids:
            return
        num_held = len(result.token_ids) - 1
        num_tried = min(num_held + 1, num_drafts)  # those after a rejected draft say nothing
        state.probe_after = FIRST_PROBE if num_held else min(2 * state.probe_after + 1, LAST_PROBE)
        state.drafts_held = state.drafts_held * self._decay + num_held
        state.drafts_tried = state.drafts_tried * self._decay + num_tried
        self._held = self._held * AVERAGE_DECAY + num_held
        self._tried = self._tried * AVERAGE_DECAY + num_tried
        self._num_held += num_held
        self._num_proposals += 1
        self._num_verified += num_drafts
        for position in range(num_held):
            self._accepted_by_position[position] += 1

    def record_time(self, step: PlannedStep) -> None:
        """Learn how long a step took, if all its requests decode. It has just been collected."""
        if not self._limits.adapts_drafts:
            return
        now = self._clock()
        started_at, self._last_end = max(step.started_at, self._last_end), now
        if step.is_decode and step.states:
            self._costs.record(step.num_tokens, step.num_drafts, now - started_at)
            self._probes.count_step()
            if step.ends_probe:
                self._probes.end(now, self._costs.seconds(len(step.states), 0))
            num_tokens = len(step.states) + self._num_held
            self._num_tokens = self._num_tokens * SPEED_DECAY + num_tokens
            self._num_seconds = self._num_seconds * SPEED_DECAY + now - started_at
        elif step.states:
            self._costs.record_prompts(step.num_tokens, now - started_at)
            self._probes.cancel()
        self._num_held = 0

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            num_drafts=self._num_proposals,
            num_draft_tokens=self._num_verified,
            num_accepted_tokens=sum(self._accepted_by_position),
            num_accepted_tokens_per_pos=list(self._accepted_by_position),
        )

    def _rate_of(self, state: RequestState) -> float:
        """The probability that the request's next draft holds."""
        prior, weight = self._held / self._tried, self._prior_weight
        return (state.drafts_held + prior * weight) / (state.drafts_tried + weight)

    def _choose(self, num_running: int, running: RunningRequests) -> None:
        """Choose K: the number of drafts per request with the most tokens per second."""
        if self._num_drafts and self._is_uniform:  # nobody else times steps without drafts
            lost = (NUM_TRIALS + 1) * (1.0 - 1.0 / self._gain)
            self._costs.forget_old(num_running, 0, int(lost / CHECK_SHARE))
        self._measures_plain = not self._costs.knows(num_running, self._plain_drafts)
        if self._measures_plain:
            self._num_drafts, self._steps_left = self._plain_drafts, 1
            return
        if self._leaves_choice:
            self._least_rate = self._break_even(num_running)
            return
        rates = [self._rate_of(state) for state in running.in_order()[:MAX_SAMPLED]]
        rates = rates or [self._held / self._tried]
        costs, best = self._costs, 0
        plain = most = 1.0 / costs.seconds(num_running, self._plain_drafts)
        chances, tokens = [1.0] * len(rates), 1.0  # of a request, in a step
        for count in range(1, self._limits.num_drafts + 1):
            chances = [chance * rate for chance, rate in zip(chances, rates, strict=True)]
            tokens += sum(chances) / len(rates)
            proposed = count if self._is_uniform else self._plain_drafts
            rows = num_running * (1 + count)
            speed, gain = tokens / costs.seconds(rows, proposed), 1.0
            if self._is_uniform:
                gain = LEAST_GAIN if costs.knows(rows, proposed) else LEAST_UNTRIED
            if speed > most and speed >= gain * plain:
                best, most = count, speed
        self._num_drafts = best if self._is_uniform else self._plain_drafts
        self._gain = most / plain
        self._least_rate = self._seconds_per_row(num_running, best) * most * num_running

    def _break_even(self, num_running: int) -> float:
        """The probability to hold at which a draft's row takes as long as its token saves.

        A request that is ahead of the others saves its own rows. Steps that all take together
        end with the slowest request, so it saves less of these the more others there are.
        """
        if not self._num_tokens:
            return 0.0
        row, token = self._seconds_per_row(num_running, 1), self._num_seconds / self._num_tokens
        saved = row + max(token - row, 0.0) / math.sqrt(num_running)
        return row / saved if saved else 0.0

    def _seconds_per_row(self, num_running: int, num_drafts: int) -> float:
        """What a draft adds to the time of a step to which requests bring `num_drafts`."""
        costs, count = self._costs, max(num_drafts, 1)
        if not self._is_uniform:
            most_rows = num_running * (1 + self._limits.num_drafts)
            return costs.seconds_per_row(num_running, most_rows, self._plain_drafts)
        rows = num_running * (1 + count)
        # A step with one draft less also saves a pass of the drafter: half of it, say.
        longer = costs.seconds(rows, count) - costs.seconds(rows - num_running, count - 1)
        return max(longer, 0.0) / num_running / 2
