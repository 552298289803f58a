"""LaneExecutor: ranks in lanes with requests of their own, and experts spread over all ranks.

A lane is a replica's ranks. All lanes step at once, because every layer with experts exchanges
tokens between them. A lane without requests joins the others without tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config import EngineConfig
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.protocol.step import StepMasks, StepPlan, StepResult


class LaneExecutor(MultiProcessExecutor):
    """Sends each lane its own plan. `lanes` are the executors of the engine's cores."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        size, count = config.parallel.tensor_parallel_size, config.parallel.num_lanes
        self.lanes = [Lane(self, range(lane * size, (lane + 1) * size)) for lane in range(count)]
        self._collected: dict[int, StepResult] = {}  # by the lane's first rank

    def call(self, method: str, *args: Any) -> Any:
        self._collected.clear()
        return super().call(method, *args)

    def launch_on(self, ranks: range, plan: StepPlan) -> None:
        self._send_plan(plan, ranks)

    def sample_on(self, ranks: range, masks: StepMasks | None) -> None:
        self._send("sample", (masks,), ranks=ranks)

    def collect_of(self, ranks: range) -> StepResult:
        """A lane's result. The first lane that asks waits for all: they end a step together."""
        if not self._collected:
            results: list[StepResult] = self._call("collect")
            ended = self._finished_jobs.merge([result.finished_jobs for result in results])
            for number, lane in enumerate(self.lanes):
                first = lane.ranks.start
                jobs = [job for job in ended if job.lane == number]
                self._collected[first] = msgspec.structs.replace(results[first], finished_jobs=jobs)
        return self._collected.pop(ranks.start)


class Lane:
    """The executor of one lane's core."""

    def __init__(self, group: LaneExecutor, ranks: range) -> None:
        self.ranks = ranks
        self.capabilities = group.capabilities
        self._group = group

    def launch(self, plan: StepPlan) -> None:
        self._group.launch_on(self.ranks, plan)

    def sample(self, masks: StepMasks | None) -> None:
        self._group.sample_on(self.ranks, masks)

    def collect(self) -> StepResult:
        return self._group.collect_of(self.ranks)

    def call(self, method: str, *args: Any) -> Any:
        """On the ranks of all lanes."""
        return self._group.call(method, *args)

    def check_alive(self) -> None:
        self._group.check_alive()

    def close(self) -> None:
        self._group.close()
