"""Pipeline stages in one process, one after the other: cheap, and as exact as in many processes."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

from penstock import LLM
from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.distributed.stage_link import StageLink
from penstock.engine import build
from penstock.executor.base import merge_capabilities
from penstock.executor.finished_jobs import FinishedJobs
from penstock.executor.routed_experts import with_routed_experts
from penstock.executor.worker import Worker
from penstock.loading.source import resolve_source
from penstock.platforms.platform import detect_platform
from penstock.protocol.step import StepMasks, StepPlan, StepResult, settled


class QueueLink(StageLink):
    """A link over queues, one in front of each stage."""

    def __init__(
        self, stages: RankGroup, device: torch.device, queues: list[deque[torch.Tensor]]
    ) -> None:
        super().__init__(stages, device)
        self._queues = queues

    def _receive(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._queues[self._stages.rank].popleft())

    def _send(self, tensor: torch.Tensor) -> None:
        self._queues[self._stages.rank + 1].append(tensor)


class LocalStages:
    """An `Executor` whose stages run in the engine's own thread."""

    def __init__(self, config: EngineConfig) -> None:
        source = resolve_source(config.model, config.load)
        platform = detect_platform(config.device)
        size = config.parallel.pipeline_parallel_size
        self.workers = [
            Worker(config, source, platform, Mesh(pp=RankGroup(stage, size)))
            for stage in range(size)
        ]
        self.queues: list[deque[torch.Tensor]] = [deque() for _ in self.workers]
        self.capabilities = merge_capabilities([w.capabilities() for w in self.workers], size)
        self._jobs = FinishedJobs()
        self.metrics = [Counter[str]() for _ in self.workers]

    def launch(self, plan: StepPlan) -> None:
        for worker in self.workers:
            worker.launch(plan)
        assert not any(self.queues), "every stage took what it was handed"

    def sample(self, masks: StepMasks | None) -> None:
        for worker in self.workers:
            worker.sample(masks)

    def collect(self) -> StepResult:
        results = [worker.collect() for worker in self.workers]
        for own, of_stage in zip(self.metrics, results, strict=True):
            own.update(of_stage.metrics)
        jobs = self._jobs.merge([result.finished_jobs for result in results])
        result = results[-1]
        if result.failure is None:
            for worker in self.workers[:-1]:
                worker.settle(result.step_id, settled(result))
            result = with_routed_experts(results)
        return msgspec.structs.replace(result, finished_jobs=jobs)

    def call(self, method: str, *args: Any) -> Any:
        def link(stages: RankGroup, device: torch.device, via_host: bool) -> StageLink:
            return QueueLink(stages, device, self.queues)

        if method == "reset":
            self._jobs.clear()
        with patch("penstock.executor.worker.StageLink", link):
            first, *_ = [getattr(worker, method)(*args) for worker in self.workers]
            return first

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        self.workers = []


@pytest.fixture
def local_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with pipeline_parallel_size have their stages in this process."""
    monkeypatch.setattr(build, "MultiProcessExecutor", LocalStages)


def stages_of(llm: LLM) -> list[Worker]:
    return executor_of(llm).workers


def executor_of(llm: LLM) -> LocalStages:
    executor = llm.engine.executor
    assert isinstance(executor, LocalStages)
    return executor
