"""EngineCore: the loop that plans, launches and collects steps, several of them in flight."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.executor.base import Executor
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import EngineDeadError, OutOfMemory
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import StepPlan, StepResult
from penstock.scheduler.scheduler import Scheduler, SchedulerStats
from penstock.structured.manager import GrammarManager

logger = logging.getLogger(__name__)

STALLED_WAIT_S = 0.001  # between looks at requests that something outside keeps waiting


@dataclass(frozen=True)
class FailedStep:
    """Stands in the queue for a step that could not be launched: results come in order."""

    step_id: int


class StepWatcher(Protocol):
    """Told of every step, so that it is known what was computed if that never ends."""

    def begin(self, plan: StepPlan) -> None:
        """A step is about to be launched."""

    def end(self) -> None:
        """The oldest step in flight is done, and its results are taken in."""


class EngineCore:
    """Owns the scheduler and the executor. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        max_model_len: int,
        grammars: GrammarManager | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.grammars = grammars
        self.executor = executor
        self.max_model_len = max_model_len
        self.watcher: StepWatcher | None = None
        self._in_flight: deque[Any] = deque()
        self._is_closed = False

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `InputError` for one that could never run."""
        self._check_open()
        self.scheduler.add(request)

    def abort(
        self,
        request_ids: Sequence[str],
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[EngineDelta]:
        """End requests now, wherever they are. Ids that are not there any more are ignored."""
        return self.scheduler.finish(request_ids, reason)

    def reset_prefix_cache(self) -> None:
        """Forget the prompts that are cached: later requests compute theirs anew."""
        self._check_open()
        self.scheduler.reset_prefix_cache()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return not self._is_closed and (bool(self._in_flight) or self.scheduler.has_unfinished())

    def step(self) -> list[EngineDelta]:
        """Launch the next step, and collect the oldest one if the queue is full or idle."""
        self._check_open()
        plan = self.scheduler.schedule()
        deltas = self.scheduler.take_deltas()
        if plan is not None:
            if self.watcher is not None:
                self.watcher.begin(plan)
            deltas += self._launch(plan)
        queue_is_full = len(self._in_flight) >= self.executor.capabilities.max_in_flight
        if self._in_flight and (plan is None or queue_is_full):
            deltas += self._update()
        elif plan is None and not deltas and self.grammars is not None:
            self.grammars.wait(STALLED_WAIT_S)  # for a grammar that all there is waits for
        return deltas

    def _launch(self, plan: StepPlan) -> list[EngineDelta]:
        """Start a step. If that fails, its requests are tried again: see `Scheduler.retry`.

        An interrupt (Ctrl-C) is raised once the queue is in order again.
        """
        deltas: list[EngineDelta] = []
        try:
            if plan.masked:
                handle = self._launch_masked(plan, deltas)
            else:
                handle = self.executor.launch(plan)
                self.executor.sample(handle)
        except BaseException as error:
            is_over = isinstance(error, EngineDeadError) or not isinstance(error, Exception)
            if not is_over:
                logger.exception("Step %d failed; its requests are tried again", plan.step_id)
                while self._in_flight:  # what earlier steps bring counts
                    deltas += self._update()
            self._in_flight.append(FailedStep(plan.step_id))
            if is_over:
                self.scheduler.fail([item.request_id for item in plan.scheduled], str(error))
                raise
            deltas += self.scheduler.retry(plan, isinstance(error, OutOfMemory))
            return deltas
        self._in_flight.append(handle)
        return deltas

    def _launch_masked(self, plan: StepPlan, deltas: list[EngineDelta]) -> Any:
        """Start a step in which requests with a grammar sample. Adds what it collects to `deltas`.

        Their masks follow from the tokens before. Where those are known, masks are filled in
        another thread while the model computes. On a device that computes by itself, the model
        is launched first; then earlier steps are collected, and masks are filled meanwhile.
        """
        assert self.grammars is not None
        if not self._in_flight:
            masks = self.grammars.start_masks(plan)
            try:
                handle = self.executor.launch(plan)
            except BaseException:
                wait([masks])  # grammars must not be looked at beside what comes next
                raise
            self.executor.sample(handle, masks.result())
            return handle
        handle = self.executor.launch(plan)
        while self._in_flight:
            deltas += self._update()
        self.executor.sample(handle, self.grammars.masks(plan))
        return handle

    def _update(self) -> list[EngineDelta]:
        """Take in the oldest step in flight."""
        deltas = self.scheduler.update(self._collect())
        if self.watcher is not None:
            self.watcher.end()
        return deltas

    def _collect(self) -> StepResult:
        handle = self._in_flight[0]
        if isinstance(handle, FailedStep):
            result = StepResult(step_id=handle.step_id, results=[])
        else:
            result = self.executor.collect(handle)
        self._in_flight.popleft()  # only now: an interrupted wait can be taken up again
        return result

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("the engine is closed; nothing more can be run on it")

    def close(self) -> None:
        """Give everything back, in the middle of requests if need be. Safe to call twice."""
        self._is_closed = True
        self._in_flight.clear()
        try:
            if self.grammars is not None:
                self.grammars.close()
        finally:
            self.executor.close()
