"""StepQueue: owns a worker's steps in flight and turns a step's exception into a failed result."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.distributed.stage_link import EarlierStageFailed
from penstock.platforms.platform import is_out_of_memory
from penstock.protocol.errors import EngineDeadError
from penstock.protocol.step import StepFailure, StepMasks, StepPlan, StepResult
from penstock.runner.runner import ModelRunner, StepHandle

logger = logging.getLogger(__name__)


@dataclass
class _QueuedStep:
    plan: StepPlan
    handle: StepHandle | None = None
    result: StepResult | None = None
    failure: StepFailure | None = None


class StepQueue:
    """Runs steps in order. After a failed step, skips later ones until `reset`."""

    def __init__(self, runner: ModelRunner, fails_alone: bool = True) -> None:
        self._runner = runner
        self._fails_alone = fails_alone  # False: other replicas wait for this step
        self._steps: deque[_QueuedStep] = deque()
        self._has_failed = False

    def launch(self, plan: StepPlan) -> None:
        step = _QueuedStep(plan, failure=StepFailure.SKIPPED if self._has_failed else None)
        self._steps.append(step)
        if step.failure is not None:
            self._runner.skip(plan)
        self._run(step, self._launch)
        if step.failure is not None:
            self._runner.hand_on_failure(plan, step.failure)

    def sample(self, masks: StepMasks | None) -> None:
        self._run(self._steps[-1], lambda step: self._sample(step, masks))

    def collect(self) -> StepResult:
        step = self._steps.popleft()
        self._run(step, self._collect)
        if step.failure is not None:
            return StepResult(step_id=step.plan.step_id, failure=step.failure)
        assert step.result is not None
        return step.result

    def reset(self) -> None:
        """Forget all requests and run steps again."""
        self._steps.clear()
        self._has_failed = False
        self._runner.reset()

    def _run(self, step: _QueuedStep, part: Callable[[_QueuedStep], None]) -> None:
        if step.failure is not None:
            return
        try:
            part(step)
        except Exception as error:
            if isinstance(error, EngineDeadError):
                raise
            if isinstance(error, torch.AcceleratorError):  # all later calls fail, too
                raise EngineDeadError(f"the device failed: {error}") from error
            if not self._fails_alone:
                raise EngineDeadError(f"a step failed that other replicas wait for: {error}") from (
                    error
                )
            if isinstance(error, EarlierStageFailed):
                step.failure = error.failure
            else:
                logger.exception("Step %d failed", step.plan.step_id)
                step.failure = _failure_of(error)
            self._has_failed = True

    def _launch(self, step: _QueuedStep) -> None:
        step.handle = self._runner.launch(step.plan)

    def _sample(self, step: _QueuedStep, masks: StepMasks | None) -> None:
        if step.plan.masked and masks is None:
            raise ValueError("a step with grammars has no masks")
        assert step.handle is not None
        self._runner.sample(step.handle, masks)

    def _collect(self, step: _QueuedStep) -> None:
        assert step.handle is not None
        step.result = self._runner.collect(step.handle)


def _failure_of(error: Exception) -> StepFailure:
    if not is_out_of_memory(error):
        return StepFailure.ERROR
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the allocator's cached memory may be fragmented
    return StepFailure.OUT_OF_MEMORY
