"""InProcessExecutor: runs one device in the engine's own thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh
from penstock.executor.worker import Worker
from penstock.loading.source import ModelSource
from penstock.platforms.platform import detect_platform
from penstock.protocol.step import StepMasks, StepPlan, StepResult
from penstock.runner.drafter import Drafter
from penstock.runner.logits_processors import LogitsProcessor
from penstock.runner.runner import ModelRunner


class InProcessExecutor:
    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        processors: Sequence[str | type[LogitsProcessor]] = (),
        drafter: Drafter | None = None,
    ) -> None:
        platform = detect_platform(config.device)
        self._worker: Worker | None = Worker(config, source, platform, Mesh(), processors, drafter)
        self.capabilities = self.worker.capabilities()

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "the executor is closed"
        return self._worker

    @property
    def runner(self) -> ModelRunner:
        assert self.worker.runner is not None, "start() comes first"
        return self.worker.runner

    def launch(self, plan: StepPlan) -> None:
        self.worker.launch(plan)

    def sample(self, masks: StepMasks | None) -> None:
        self.worker.sample(masks)

    def collect(self) -> StepResult:
        return self.worker.collect()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)

    def check_alive(self) -> None:
        pass  # the worker lives in the caller's process

    def close(self) -> None:
        self._worker = None  # frees the weights and the cache
