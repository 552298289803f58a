"""StepProfiler: traces of a rank's steps, by the torch profiler."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from penstock.config.profiler import ProfilerSettings

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records from `start` to `stop`, and then writes a file for https://ui.perfetto.dev."""

    def __init__(
        self,
        settings: ProfilerSettings,
        rank: int,
        device: torch.device,
        prefix: str | None = None,
    ) -> None:
        self._folder = Path(settings.torch_profiler_dir)
        self._name = f"rank{rank}" if prefix is None else f"{prefix}-rank{rank}"
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            with_stack=settings.torch_profiler_with_stack,
            record_shapes=settings.torch_profiler_record_shapes,
            profile_memory=settings.torch_profiler_with_memory,
            with_flops=settings.torch_profiler_with_flops,
        )

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        path = self._folder / f"{self._name}-{time.time_ns()}.pt.trace.json"
        self._profile.export_chrome_trace(str(path))
        logger.info("The profile is in %s", path)
