"""EngineGroup: replicas whose experts are spread over all of their ranks, as one engine.

Every replica has a core of its own: queue, scheduler and KV cache. Their steps begin and end
together. If a rank fails, the engine does, and all replicas are restarted with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import fields

import msgspec

from penstock.engine.core import EngineCore, StepWatcher
from penstock.executor.interrupts import interrupts_held
from penstock.executor.lanes import LaneExecutor
from penstock.protocol.adapter import Adapter, AdapterJob
from penstock.protocol.delta import EngineDelta
from penstock.protocol.media import MediaJob
from penstock.protocol.request import EngineRequest
from penstock.protocol.step import Job, StepPlan
from penstock.scheduler.stats import AdapterStats, SchedulerStats, SpeculationStats

NO_STEP = -1  # the id of a step without a plan


class EngineGroup(EngineCore):
    """An engine core whose requests are dealt to others. Not thread-safe."""

    def __init__(self, cores: Sequence[EngineCore], executor: LaneExecutor) -> None:
        first = cores[0]
        super().__init__(first.scheduler, executor, first.grammars)
        self.cores = cores

    def watch(self, watcher: StepWatcher) -> None:
        for core in self.cores:
            core.watch(watcher)

    def add(self, request: EngineRequest) -> None:
        """Queue a request at the core with the fewest."""
        self._check_open()
        min(self.cores, key=lambda core: core.num_unfinished).add(request)

    def abort(self, request_ids: Sequence[str]) -> list[EngineDelta]:
        return [delta for core in self.cores for delta in core.abort(request_ids)]

    def reset_prefix_cache(self) -> None:
        for core in self.cores:
            core.reset_prefix_cache()

    def has_work(self) -> bool:
        has_steps = self._must_reset or any(core.has_work() for core in self.cores)
        return self._why_over is None and has_steps

    @property
    def num_unfinished(self) -> int:
        return sum(core.num_unfinished for core in self.cores)

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(core.num_scheduled_tokens for core in self.cores)

    @property
    def num_kv_blocks(self) -> int:
        return sum(core.num_kv_blocks for core in self.cores)

    def _step(self) -> list[EngineDelta]:
        if self._must_reset:
            self._must_reset = False
            return [delta for core in self.cores for delta in core.recover()]
        with interrupts_held():  # a lane that was left out would keep the others waiting
            begun = [core.begin_step() for core in self.cores]
            deltas = [delta for _, own in begun for delta in own]
            plans = [plan for plan, _ in begun]
            if any(plan is not None for plan in plans):
                deltas += self._launch_all(plans)
        for core, (plan, own) in zip(self.cores, begun, strict=True):
            deltas += core.end_step(plan, own)
        return deltas

    def _launch_all(self, plans: Sequence[StepPlan | None]) -> list[EngineDelta]:
        """Launch a step in all replicas, with the jobs of all: adapters change shared experts."""
        computes = any(plan is not None and plan.scheduled for plan in plans)
        shared: list[Job] = [
            msgspec.structs.replace(job, lane=lane)
            for lane, plan in enumerate(plans)
            for job in ([] if plan is None else plan.jobs)
            if isinstance(job, AdapterJob)
        ]
        deltas: list[EngineDelta] = []
        for core, plan in zip(self.cores, plans, strict=True):
            if plan is None:
                core.join_step(StepPlan(step_id=NO_STEP, scheduled=[], jobs=shared, joins=computes))
                continue
            jobs = [*shared, *(job for job in plan.jobs if isinstance(job, MediaJob))]
            deltas += core.launch_step(msgspec.structs.replace(plan, jobs=jobs, joins=computes))
        return deltas

    def _publish_kv_events(self) -> None:
        for core in self.cores:
            core._publish_kv_events()

    def stats(self) -> SchedulerStats:
        """Sums over all cores; of the usage of the KV cache, the mean."""
        stats = [core.stats() for core in self.cores]
        sums = {
            field.name: sum(getattr(own, field.name) for own in stats)
            for field in fields(SchedulerStats)
        }
        sums["kv_cache_usage"] /= len(stats)
        return SchedulerStats(**sums)

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        return all_done([core.load_adapter(adapter) for core in self.cores])

    def pin_adapter(self, adapter: Adapter) -> Future[None]:
        return all_done([core.pin_adapter(adapter) for core in self.cores])

    def unload_adapter(self, digest: str) -> None:
        for core in self.cores:
            core.unload_adapter(digest)

    def adapter_stats(self) -> AdapterStats | None:
        """Each replica has its own slots and copies."""
        stats = [own for core in self.cores if (own := core.adapter_stats()) is not None]
        if not stats:
            return None
        return AdapterStats(
            max_loras=stats[0].max_loras,
            running=sorted({name for own in stats for name in own.running}),
            waiting=sorted({name for own in stats for name in own.waiting}),
            num_copies=sum(own.num_copies for own in stats),
            num_loads=sum(own.num_loads for own in stats),
            num_evictions=sum(own.num_evictions for own in stats),
            num_placements=sum(own.num_placements for own in stats),
            num_waits=sum(own.num_waits for own in stats),
            longest_wait_s=max(own.longest_wait_s for own in stats),
            most_overtakes=max(own.most_overtakes for own in stats),
        )

    def speculation_stats(self) -> SpeculationStats | None:
        stats = [own for core in self.cores if (own := core.speculation_stats()) is not None]
        if not stats:
            return None
        places = [own.num_accepted_tokens_per_pos for own in stats]
        return SpeculationStats(
            sum(own.num_drafts for own in stats),
            sum(own.num_draft_tokens for own in stats),
            sum(own.num_accepted_tokens for own in stats),
            [sum(counts) for counts in zip(*places, strict=True)],
        )

    def take_metrics(self) -> dict[str, int]:
        counts = [core.take_metrics() for core in self.cores]
        names = {name for own in counts for name in own}
        return {name: sum(own.get(name, 0) for own in counts) for name in names}

    def close(self) -> None:
        self._why_over = self._why_over or "the engine is closed"
        for core in self.cores:
            core.close()


def all_done(parts: Sequence[Future[None]]) -> Future[None]:
    """Done once all parts are. It fails as the first of them that does."""
    whole = Future[None]()

    def settle(_: Future[None]) -> None:
        if all(part.done() for part in parts) and not whole.done():
            errors = (part.exception() for part in parts)
            error = next((error for error in errors if error is not None), None)
            whole.set_result(None) if error is None else whole.set_exception(error)

    for part in parts:
        part.add_done_callback(settle)
    return whole
