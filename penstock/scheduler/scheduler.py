"""Scheduler: decides which requests share each step's token budget; turns results into deltas."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.adapter import FinishedJob
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import ConfigError, InputError, waited_too_long
from penstock.protocol.kv import UNBOUNDED
from penstock.protocol.limits import StepLimits
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import (
    RequestResult,
    ScheduledRequest,
    StepFailure,
    StepPlan,
    StepResult,
)
from penstock.scheduler.adapters import Adapters
from penstock.scheduler.encoder_budget import EncoderBudget
from penstock.scheduler.gates import Gate, Gatekeeper
from penstock.scheduler.grammars import Grammars
from penstock.scheduler.limits import check_length, chunk, find_spans, share
from penstock.scheduler.plan import PlannedStep
from penstock.scheduler.policy import POLICIES, WaitingQueue
from penstock.scheduler.queue_timeouts import QueueTimeouts
from penstock.scheduler.request import RequestState, RequestStatus
from penstock.scheduler.running import RunningRequests
from penstock.scheduler.speculation import Speculation
from penstock.scheduler.stats import SchedulerStats
from penstock.scheduler.step_retries import StepRetries
from penstock.scheduler.stopping import StopRules, delta_of


class Scheduler:
    """Decides what each step computes.

    `schedule` may be called again before the results of earlier steps are passed to `update`.
    Results must arrive in the order of the plans. A request's tokens do not depend on the number
    of steps in flight, on the batch or on preemption. Every request finishes: the cache can hold
    any single request, and the first in the running order is never preempted for another.
    """

    def __init__(
        self,
        limits: StepLimits,
        kv_manager: KVCacheManager,
        gates: Sequence[Gate] = (),
        grammars: Grammars | None = None,
        *,
        policy: str = "fcfs",
        queue_timeout_s: float | None = None,
        vocab_size: int = UNBOUNDED,
        max_loras: int = 0,
        max_cpu_loras: int = 0,
    ) -> None:
        if not kv_manager.can_ever_hold(limits.max_model_len):
            raise ConfigError(
                f"the KV cache of {kv_manager.pool.num_usable} blocks cannot hold one request of "
                f"max_model_len={limits.max_model_len} tokens: lower max_model_len"
            )
        self.limits = limits
        self.num_scheduled_tokens = 0  # since the start
        self.kv = kv_manager  # KV blocks and prefix cache
        self.kv.num_spare = limits.num_lookahead
        self._grammars = grammars
        self._policy = POLICIES[policy]()
        self.adapters = Adapters(max_loras, max_cpu_loras, limits.max_num_seqs, self._policy)
        self.encoder = EncoderBudget(limits)
        self._requests: dict[str, RequestState] = {}  # unfinished
        self._gatekeeper = Gatekeeper(gates if grammars is None else [grammars, *gates])
        self._waiting = WaitingQueue(self._policy)
        self._retries = StepRetries(self._policy, limits)
        self._running = RunningRequests()
        self._stops = StopRules(grammars, vocab_size)
        self.speculation = Speculation(limits)
        self._in_flight: deque[PlannedStep] = deque()
        self._released_ids: list[str] = []  # the runner drops these at the next plan
        self._deltas: list[EngineDelta] = []  # of requests that ended outside a step
        self._sequence = itertools.count()
        self._queue_timeouts = QueueTimeouts(queue_timeout_s)
        self._last_step_id = self._num_preemptions = 0
        self._refused: RequestState | None = None  # the last request that did not fit
        self._num_free_when_refused = 0

    # -- requests come and go

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises InputError and changes nothing if it cannot run."""
        if request.request_id in self._requests:
            raise InputError(f"request_id {request.request_id!r} is in use", "request_id")
        check_length(request, self.limits.max_model_len)
        self.adapters.check(request)
        self.encoder.check(request)
        spans = find_spans(request, self.limits)
        state = RequestState(request, next(self._sequence), self.limits.max_model_len, spans)
        self._requests[request.request_id] = state
        self._gatekeeper.push(state)
        self._queue_timeouts.add(state)

    def finish(
        self,
        request_ids: Iterable[str],
        reason: FinishReason = FinishReason.ABORT,
        stop_reason: int | str | None = None,
    ) -> list[EngineDelta]:
        """End requests now, waiting or running. Unknown ids are ignored."""
        return [self._end(state, reason, stop_reason) for state in self._known(request_ids)]

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def has_unfinished(self) -> bool:
        """Whether there are requests, or jobs for workers."""
        return bool(self._requests) or self.adapters.has_work

    def stats(self) -> SchedulerStats:
        num_held = sum(state.status is RequestStatus.WAITING for state in self._retries)
        num_held += len(self._gatekeeper) + self.adapters.num_parked
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + num_held,
            num_deferred=num_held,
            num_steps_in_flight=len(self._in_flight),
            num_preemptions=self._num_preemptions,
            kv_cache_usage=self.kv.usage,
            num_prefix_queries=self.kv.num_prefix_queries,
            num_prefix_hits=self.kv.num_prefix_hits,
        )

    # -- a step is planned

    def schedule(self) -> StepPlan | None:
        """Plan a step. Returns None if there is nothing to do now.

        A plan may have jobs and no tokens. It may be empty, if results of jobs are awaited and no
        step in flight can bring them. The runner drops the plan's `released_ids` before it adds
        its `new_requests`.
        """
        self._pass_gates()
        self._end_long_waits()
        self.encoder.begin_step()
        budget = self._retries.num_tokens
        step = PlannedStep(self._last_step_id + 1, budget)
        self.speculation.plan(step, self._running)
        if self._retries:
            self._try_alone(step)
        elif self._continue_running(step):
            self._admit_waiting(step, self._waiting)
        step.jobs = [*self.adapters.take_jobs(), *self.encoder.take_jobs()]
        must_poll = not self._in_flight and self.adapters.must_poll
        if not (step.states or step.jobs or must_poll):
            return None
        self._last_step_id = step.step_id
        self.num_scheduled_tokens += budget - step.budget
        self._in_flight.append(step)
        released_ids, self._released_ids = self._released_ids, []
        return step.plan(released_ids)

    def take_deltas(self) -> list[EngineDelta]:
        """Return deltas of requests that ended outside a step, unless `update` already has."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _pass_gates(self) -> None:
        ready, failed = self._gatekeeper.poll()
        for state in ready:
            if self._stops.is_complete(state):
                self._deltas.append(self._end(state, FinishReason.STOP))
            else:
                self._waiting.push(state)
                self.adapters.enqueue(state)
        for state, why in failed:
            self._deltas.append(self._fail(state, why.error, why.field, why.can_retry))

    def _end_long_waits(self) -> None:
        """Fail requests that exceeded the queue timeout before their first step."""
        for state in self._queue_timeouts.take_late():
            assert self._queue_timeouts.timeout_s is not None
            error = waited_too_long(self._queue_timeouts.timeout_s)
            self._deltas.append(self._fail(state, error, can_retry=True))

    def _continue_running(self, step: PlannedStep) -> bool:
        """Schedule the running requests. Returns False if KV blocks ran out."""
        enough_blocks = True
        for state in self._running.share(self.limits.num_stages):
            if step.budget == 0:
                break
            is_ready = state.num_computed_tokens < state.ready_until
            if is_ready and (step.without_drafts or not state.num_drafts):
                step.repeat(state)
                continue
            if state.status is not RequestStatus.RUNNING:
                continue  # preempted by a request before it
            most = self.speculation.num_to_verify(state)
            num_tokens, num_drafts = share(self.limits, state, step.budget, most)
            num_tokens = self.encoder.limit(state, state.num_computed_tokens, num_tokens)
            if num_tokens == 0:
                continue
            if not enough_blocks and self.kv.num_missing(state, num_tokens) > 0:
                continue  # free blocks are reserved for an earlier request that waits for more
            block_ids = self.kv.allocate(state, num_tokens - num_drafts, num_drafts)
            if block_ids is None:
                enough_blocks = False
                block_ids = self._make_room(state, num_tokens, num_drafts)
            if block_ids is not None:
                self.encoder.take(state, num_tokens)
                step.add(state, num_tokens, num_drafts, block_ids)
                state.make_ready(self.kv.num_slots(state))
        return enough_blocks

    def _admit_waiting(self, step: PlannedStep, waiting: WaitingQueue) -> None:
        """Admit waiting requests in order while the token budget and the KV blocks last.

        A request that cannot have its adapter now is parked, and those behind it go on.
        """
        is_trial = waiting is not self._waiting
        while step.budget > 0 and len(self._running) < self.limits.max_num_seqs:
            if not is_trial:
                for state in self.adapters.wake():
                    waiting.put_back(state)
            if not waiting:
                break
            state = waiting.peek()
            if is_trial and not self.adapters.demand(state):
                break
            if not is_trial and not self.adapters.can_admit(state):
                self.adapters.park(waiting.pop())
                continue
            if self._refused is state and self.kv.pool.num_free <= self._num_free_when_refused:
                break  # it did not fit, and no block was freed since: skip the prefix lookup
            prefix = self.kv.match(state)
            num_known = len(state.token_ids)
            num_tokens = chunk(self.limits, num_known - prefix.num_tokens, step.budget)
            num_tokens = self.encoder.limit(state, prefix.num_tokens, num_tokens)
            if num_tokens == 0:
                break
            if not self.kv.fits(prefix, num_known):
                self._refused, self._num_free_when_refused = state, self.kv.pool.num_free
                break
            self._refused = None
            waiting.pop()
            self._policy.insert_running(self._running, state)
            self.kv.adopt(state, prefix)
            state.enter(prefix.num_tokens)
            new_block_ids = self.kv.allocate(state, num_tokens)
            assert new_block_ids is not None, "there was room for all of the request"
            slot = self.adapters.admit(state)
            self.encoder.take(state, num_tokens)
            step.add_new(state, num_tokens, self.kv.block_ids(state), slot)
            state.make_ready(self.kv.num_slots(state))

    def _make_room(
        self, state: RequestState, num_tokens: int, num_drafts: int
    ) -> list[list[int]] | None:
        """Preempt requests from the end of the order until `state` gets its blocks.

        Returns None if `state` itself was preempted, or if it waits for the steps in flight. It
        waits if collecting them frees enough blocks. It also waits if it runs alone: collecting
        them drops its blocks outside the attention window, and the cache can hold one request.
        """
        while True:
            num_missing = self.kv.num_missing(state, num_tokens)
            if num_missing <= self.kv.pool.num_free:
                return self.kv.allocate(state, num_tokens - num_drafts, num_drafts)
            if num_missing <= self.kv.pool.num_free + self.kv.pool.num_draining:
                return None
            if len(self._running) == 1 and self._in_flight:
                return None
            victim = self._running.pop()
            self._preempt(victim)
            if victim is state:
                return None

    def _preempt(self, state: RequestState) -> None:
        self._take_back(state)
        self._waiting.push_preempted(state)
        self.adapters.enqueue(state)

    def _take_back(self, state: RequestState) -> None:
        """Take a request's blocks and its place in the runner. The caller queues it again."""
        self.kv.free(state)
        self.adapters.release(state)
        self.encoder.release(state)
        state.preempt()
        self._released_ids.append(state.request_id)
        self._num_preemptions += 1

    # -- a step fails

    def retry(self, failure: StepFailure | None) -> list[EngineDelta]:
        """Recover after the oldest step in flight failed. All steps in flight are discarded.

        The runner was reset, so every running request is preempted. After an out-of-memory error
        steps get smaller. After any other error the step's requests run one at a time. A request
        that cannot be retried ends with an error. `failure` is None if a step was interrupted:
        then no request is suspect.
        """
        deltas = []
        if failure is not None and not self._in_flight[0].states:
            deltas = self.finish_jobs(self.adapters.failed_fetches("the engine failed"))
        elif failure is not None:
            failed = self._in_flight[0]
            suspects = [state for state in failed.states if not state.is_finished]
            error = self._retries.take_in(failed, suspects, failure is StepFailure.OUT_OF_MEMORY)
            if error is not None:
                deltas = [self._fail(state, error) for state in suspects]
        for state in self._retries:
            self._waiting.remove(state)  # if it was preempted since
            self.adapters.unpark(state)
        for state in reversed(self._running.in_order()):  # the first in order gets the lowest rank
            self._take_back(state)
            state.rank = self._policy.rank_preempted(state)
            self.adapters.enqueue(state)
            if state not in self._retries:
                self._waiting.put_back(state)
        self._running.clear()
        self._released_ids.clear()
        self.adapters.reset([job for step in self._in_flight for job in step.jobs])
        self.encoder.reset()
        while self._in_flight:
            self.kv.collect(self._in_flight.popleft().step_id)
        return deltas

    def _try_alone(self, step: PlannedStep) -> None:
        """Run the suspect on trial, with nothing else in flight."""
        if self._in_flight:
            return
        if self._running:  # its prefill is chunked
            self._continue_running(step)
        else:
            self._admit_waiting(step, self._retries.queue())

    def _end_trial(self, step: PlannedStep) -> None:
        """Clear the suspect if this step produced its token, and queue it again."""
        state = self._retries.on_trial
        if state is None or state not in step.states or not state.has_sampled:
            return
        self._retries.acquit(state)
        self._running.remove(state)
        self._take_back(state)
        self._waiting.put_back(state)
        self.adapters.enqueue(state)

    # -- a step is done

    def update(self, result: StepResult) -> list[EngineDelta]:
        """Apply the result of the oldest step in flight. Returns the deltas for clients."""
        step = self._in_flight.popleft()
        assert step.step_id == result.step_id, "results come in the order of the plans"
        self.kv.collect(step.step_id)
        deltas = self.take_deltas()
        for state, planned, item in step.match(result.results):
            if planned is state.decode_row and state.take_token(item):
                deltas.append(EngineDelta(request_id=item.request_id, token_ids=item.token_ids))
            elif state.incarnation == planned.incarnation and not state.is_finished:
                deltas += self._apply(state, planned, item)
        deltas += self.finish_jobs(result.finished_jobs)
        self._end_trial(step)
        self.speculation.record_time(step)
        if result.results:
            self._retries.count_good_step()
        return deltas

    def finish_jobs(self, jobs: Iterable[FinishedJob]) -> list[EngineDelta]:
        """Jobs that ran beside the steps have ended. Returns the deltas of requests that failed."""
        failed = [item for job in jobs for item in self.adapters.finish(job)]
        return [self._fail(state, error, "model") for state, error in failed]

    def _apply(
        self, state: RequestState, planned: ScheduledRequest, result: RequestResult
    ) -> list[EngineDelta]:
        """Apply one step's result to a request. Returns its delta, if there is one."""
        stop = self._stops.find(state, planned, result)
        if stop is not None and stop.reason is FinishReason.ERROR:
            return [self._fail(state, stop.error, stop.error_field)]
        token_ids = result.token_ids
        first = state.num_confirmed_tokens
        state.confirm(planned, int(planned.samples) if state.pools else len(token_ids))
        self.speculation.record(state, planned, result)
        if stop is not None:
            token_ids = token_ids[: stop.num_tokens]
        state.token_ids += token_ids
        num_known = min(state.num_confirmed_tokens, len(state.token_ids))
        state.rest_until(self.kv.publish(state, num_known))
        if result.prompt_logprobs is not None:
            prompt_logprobs = result.prompt_logprobs
            state.num_prompt_logprobs = prompt_logprobs.start + len(prompt_logprobs.positions) - 1
        if stop is not None:
            self._retire(state, stop.reason, stop.stop_reason)
        elif not token_ids and result.prompt_logprobs is None and result.routed_experts is None:
            return []
        return [delta_of(state, planned, result, token_ids, first, stop)]

    # -- a request ends

    def _known(self, request_ids: Iterable[str]) -> list[RequestState]:
        return [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]

    def _fail(
        self,
        state: RequestState,
        error: str | None,
        error_field: str | None = None,
        can_retry: bool = False,
    ) -> EngineDelta:
        fields = {"error": error, "error_field": error_field, "can_retry": can_retry}
        return msgspec.structs.replace(self._end(state, FinishReason.ERROR), **fields)

    def _end(
        self, state: RequestState, reason: FinishReason, stop_reason: int | str | None = None
    ) -> EngineDelta:
        self._retire(state, reason, stop_reason)
        return EngineDelta(
            request_id=state.request_id,
            num_cached_tokens=state.num_cached_tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _retire(
        self, state: RequestState, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """Remove a request everywhere. Its results from steps in flight are ignored."""
        del self._requests[state.request_id]
        self._retries.acquit(state)
        if self._refused is state:
            self._refused = None
        if self._grammars is not None:
            self._grammars.drop(state.request_id)
        if state.status is RequestStatus.RUNNING:
            self._running.remove(state)
            self._released_ids.append(state.request_id)
            self.adapters.release(state)
            self.encoder.release(state)
        else:
            self._gatekeeper.remove(state)
            self._waiting.remove(state)
            self.adapters.forget(state)
        state.finish(reason, stop_reason)
        self.kv.free(state)
