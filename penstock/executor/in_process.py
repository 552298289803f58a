"""One device, driven from the engine's own thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from penstock.config import EngineConfig
from penstock.distributed.group import Group
from penstock.executor.worker import Worker
from penstock.loading.source import ModelSource
from penstock.platforms.platform import detect_platform
from penstock.protocol.errors import EngineDeadError, OutOfMemory
from penstock.protocol.kv import KVCacheLayout
from penstock.protocol.step import StepMasks, StepPlan, StepResult
from penstock.runner.drafter import Drafter
from penstock.runner.logits_processors import LogitsProcessor
from penstock.runner.runner import ModelRunner, StepHandle


class InProcessExecutor:
    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        processors: Sequence[str | type[LogitsProcessor]] = (),
        drafter: Drafter | None = None,
    ) -> None:
        platform = detect_platform(config.device)
        self._worker: Worker | None = Worker(config, source, platform, Group(), processors, drafter)
        self.capabilities = self.worker.capabilities()

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "the executor is closed"
        return self._worker

    @property
    def runner(self) -> ModelRunner:
        assert self.worker.runner is not None, "start() comes first"
        return self.worker.runner

    def start(self, layout: KVCacheLayout, max_model_len: int) -> None:
        self.worker.start(layout, max_model_len)

    def launch(self, plan: StepPlan) -> StepHandle:
        with device_errors():
            return self.runner.launch(plan)

    def sample(self, handle: StepHandle, masks: StepMasks | None = None) -> None:
        with device_errors():
            self.runner.sample(handle, masks)

    def collect(self, handle: StepHandle) -> StepResult:
        with device_errors():
            return self.runner.collect(handle)

    def check_alive(self) -> None:
        pass  # who calls is alive

    def close(self) -> None:
        self._worker = None  # with it go the weights and the cache


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Tell a want of memory, and a device that is lost, from whatever else may go wrong."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(error) from error
    except torch.AcceleratorError as error:  # every later call fails, too
        raise EngineDeadError(f"the device failed: {error}") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # what torch raises for a CPU
            raise _out_of_memory(error) from error
        raise


def _out_of_memory(error: Exception) -> OutOfMemory:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the allocator keeps may be in pieces that fit nothing
    return OutOfMemory(f"not enough memory for the step: {str(error).splitlines()[0]:.300}")
