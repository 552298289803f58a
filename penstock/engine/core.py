"""EngineCore: owns the loop that plans, launches and collects steps. Several may be in flight."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Protocol

from penstock.executor.base import Executor
from penstock.kvcache.landmarks import CacheReport
from penstock.protocol.adapter import Adapter
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import EngineDeadError, InputError
from penstock.protocol.prefix import CacheUpdate
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import StepFailure, StepMasks, StepPlan
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.stats import AdapterStats, SchedulerStats, SpeculationStats
from penstock.structured.manager import GrammarManager

if TYPE_CHECKING:
    from penstock.engine.kv_events import KVEvents

logger = logging.getLogger(__name__)

STALLED_WAIT_S = 0.001  # polling interval while all requests wait at a gate or for adapters


class StepWatcher(Protocol):
    """Is told of every step. If one never ends, it knows which requests were in it."""

    def begin(self, plan: StepPlan) -> None:
        """A step is about to be launched."""

    def end(self) -> None:
        """The oldest step in flight is done and its results were applied."""


class EngineCore:
    """Owns the scheduler and the executor. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        grammars: GrammarManager | None = None,
        kv_events: KVEvents | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.limits = scheduler.limits
        self.grammars = grammars
        self.executor = executor
        self.watcher: StepWatcher | None = None
        self.can_profile = False  # set if the workers have a profiler
        self._is_profiling = False
        self._kv_events = kv_events
        self._cache_report: CacheReport | None = None
        self._metrics = Counter[str]()  # counted by workers since `take_metrics`
        self._in_flight: deque[int] = deque()  # ids of steps
        self._has_joined = False  # this core launched a step without a plan
        self._must_reset = False  # a step was interrupted: the workers' state is unknown
        self._why_over: str | None = None  # set once the engine is closed or dead

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    @property
    def num_scheduled_tokens(self) -> int:
        return self.scheduler.num_scheduled_tokens

    @property
    def num_kv_blocks(self) -> int:
        return self.scheduler.kv.pool.num_usable

    def watch(self, watcher: StepWatcher) -> None:
        """Tell `watcher` of every step from now on."""
        self.watcher = watcher

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `InputError` if it could never run."""
        self._check_open()
        self.scheduler.add(request)

    def abort(self, request_ids: Sequence[str]) -> list[EngineDelta]:
        """End requests now, waiting or running. Unknown ids are ignored."""
        return self.scheduler.finish(request_ids, FinishReason.ABORT)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Later requests compute their whole prompts."""
        self._check_open()
        self.scheduler.kv.reset_prefix_cache()
        self._publish_kv_events()

    def start_profile(self, prefix: str | None) -> None:
        """Start the profiler of all workers. Raises `InputError` if they have none."""
        self._check_open()
        if not self.can_profile:
            raise InputError(
                'the profiler is off: set profiler_config={"torch_profiler_dir": FOLDER}'
            )
        if self._is_profiling:
            raise InputError("the profiler is running already")
        if prefix is not None and not re.fullmatch(r"[\w-][\w.-]{,99}", prefix):
            raise InputError(
                "profile_prefix must be at most 100 letters, digits, _, - and ., "
                f"got {prefix!r:.80}",
                "profile_prefix",
            )
        self.executor.call("start_profile", prefix)
        self._is_profiling = True

    def stop_profile(self) -> None:
        """Stop the profiler. The workers write their traces."""
        self._check_open()
        if not self._is_profiling:
            raise InputError("the profiler is not running: start_profile comes first")
        self._is_profiling = False
        self.executor.call("stop_profile")

    def report_cache(self) -> None:
        """From now on, report changes of the prefix cache. The first report has all of it."""
        if self._cache_report is None:
            self._cache_report = CacheReport(self.scheduler.kv.cached_hashes())
            self.scheduler.kv.observe(self._cache_report)

    def take_cache_update(self) -> CacheUpdate | None:
        """Return what changed in the prefix cache, if somebody wants to know."""
        return None if self._cache_report is None else self._cache_report.take()

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        """Load a LoRA adapter ahead of its requests, beside the steps.

        The future is done once all workers hold the adapter. It fails with `InputError` if they
        cannot. Steps must be run meanwhile, as with requests.
        """
        self._check_open()
        return self.scheduler.adapters.load(adapter)

    def pin_adapter(self, adapter: Adapter) -> Future[None]:
        """As `load_adapter`. The adapter then stays in host memory and in its slot.

        Raises `InputError` if no slot would be left for other adapters.
        """
        self._check_open()
        return self.scheduler.adapters.load(adapter, pin=True)

    def unload_adapter(self, digest: str) -> None:
        """Unpin a LoRA adapter, and free its memory once its requests have ended."""
        self._check_open()
        self.scheduler.adapters.unload(digest)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        has_steps = bool(self._in_flight) or self._must_reset
        return self._why_over is None and (has_steps or self.scheduler.has_unfinished())

    def step(self) -> list[EngineDelta]:
        """Launch a step. Collect the oldest one if the queue is full or nothing was launched."""
        self._check_open()
        try:
            deltas = self._step()
            self._publish_kv_events()
            return deltas
        except EngineDeadError as error:
            self._why_over = str(error)
            raise
        except BaseException:  # an interrupt: the step's progress is unknown
            self._must_reset = True
            raise

    def _step(self) -> list[EngineDelta]:
        if self._must_reset:
            return self._recover(None)
        plan, deltas = self.begin_step()
        if plan is not None:
            deltas += self.launch_step(plan)
        return deltas + self.end_step(plan, deltas)

    # -- the parts of a step, which cores in a group run together

    def begin_step(self) -> tuple[StepPlan | None, list[EngineDelta]]:
        """Plan the next step."""
        return self.scheduler.schedule(), self.scheduler.take_deltas()

    def launch_step(self, plan: StepPlan) -> list[EngineDelta]:
        """Launch a planned step."""
        if self.watcher is not None:
            self.watcher.begin(plan)
        return self._launch(plan)

    def join_step(self, plan: StepPlan) -> None:
        """Launch a step that this core did not plan, because other replicas have one."""
        self._has_joined = True
        self.executor.launch(plan)

    def end_step(self, plan: StepPlan | None, deltas: Sequence[EngineDelta]) -> list[EngineDelta]:
        """Collect the oldest step if the queue is full or nothing was launched.

        `deltas` are those that the step has had so far.
        """
        if self._has_joined:
            self._has_joined = False
            return self.scheduler.finish_jobs(self.executor.collect().finished_jobs)
        ended: list[EngineDelta] = []
        queue_is_full = len(self._in_flight) >= self.limits.max_in_flight
        if self._in_flight and (plan is None or queue_is_full):
            ended = self._update()
        elif plan is None and not deltas and self.grammars is not None:
            self.grammars.wait(STALLED_WAIT_S)  # all requests wait for grammars
        is_empty = plan is not None and not plan.scheduled
        if is_empty and not deltas and not ended and len(self._in_flight) <= 1:
            time.sleep(STALLED_WAIT_S)  # all requests wait for adapters
        return ended

    def recover(self) -> list[EngineDelta]:
        """Drop all steps in flight after an interrupt, and retry their requests."""
        self._has_joined = False
        return self._recover(None)

    def _publish_kv_events(self) -> None:
        if self._kv_events is not None:
            self._kv_events.flush()

    def _launch(self, plan: StepPlan) -> list[EngineDelta]:
        """Launch a step. A step with grammars samples once its masks are filled.

        Masks depend on all tokens before them. If no other step of its requests is in flight, these
        are known, and another thread fills the masks while the model computes. Otherwise earlier
        steps are collected after the launch, and the masks are filled while the model computes.
        """
        masks = None
        deltas: list[EngineDelta] = []
        self._in_flight.append(plan.step_id)
        try:
            tokens_are_known = len(self._in_flight) == 1 or self.limits.num_stages > 1
            if plan.masked and tokens_are_known:
                masks = self._start_masks(plan)
            self.executor.launch(plan)
            if plan.masked:
                while len(self._in_flight) > 1 and not tokens_are_known:
                    deltas += self._update()
                if self._in_flight:  # empty if an earlier step failed: then this one was skipped
                    self.executor.sample(self._masks_of(plan, masks))
        except BaseException:
            if masks is not None:
                wait([masks])  # grammars are not thread-safe
            raise
        return deltas

    def _start_masks(self, plan: StepPlan) -> Future[StepMasks] | None:
        assert self.grammars is not None
        try:
            return self.grammars.start_masks(plan)
        except Exception:
            logger.exception("Computing the masks of step %d ahead failed", plan.step_id)
            return None

    def _masks_of(self, plan: StepPlan, started: Future[StepMasks] | None) -> StepMasks | None:
        """Return None if the grammar library raises. The step then fails and is retried."""
        assert self.grammars is not None
        try:
            return self.grammars.masks(plan) if started is None else started.result()
        except Exception:
            logger.exception("Computing the masks of step %d failed", plan.step_id)
            return None

    def _update(self) -> list[EngineDelta]:
        """Collect the oldest step in flight and apply its result."""
        result = self.executor.collect()
        if result.failure is not None:
            logger.error("Step %d failed; retrying its requests", result.step_id)
            return self._recover(result.failure)
        self._forget_step()
        self._metrics.update(result.metrics)
        return self.scheduler.update(result)

    def _recover(self, failure: StepFailure | None) -> list[EngineDelta]:
        """Drop all steps in flight and retry their requests.

        The oldest step failed and later ones were skipped. `failure` is None after an interrupt.
        """
        self.executor.call("reset")
        while self._in_flight:
            self._forget_step()
        deltas = self.scheduler.retry(failure)
        self._must_reset = False
        return deltas

    def _forget_step(self) -> None:
        self._in_flight.popleft()
        if self.watcher is not None:
            self.watcher.end()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def adapter_stats(self) -> AdapterStats | None:
        """The state of LoRA adapters. None without LoRA."""
        adapters = self.scheduler.adapters
        return adapters.stats() if adapters.is_enabled else None

    def speculation_stats(self) -> SpeculationStats | None:
        """Counts of draft tokens. None without a drafter."""
        speculation = self.scheduler.speculation
        return speculation.stats() if speculation.is_enabled else None

    def take_metrics(self) -> dict[str, int]:
        """Return what workers counted since the last call, by the names of declared counters."""
        metrics, self._metrics = dict(self._metrics), Counter()
        return metrics

    def _check_open(self) -> None:
        if self._why_over is not None:
            raise EngineDeadError(f"{self._why_over}; nothing more can be run on it")

    def close(self) -> None:
        """Release all resources, even while requests run. Safe to call twice."""
        self._why_over = self._why_over or "the engine is closed"
        self._in_flight.clear()
        try:
            if self.grammars is not None:
                self.grammars.close()
            if self._kv_events is not None:
                self._kv_events.close()
                self._kv_events = None
        finally:
            self.executor.close()
