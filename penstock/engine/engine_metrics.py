"""EngineMetrics: turns the snapshots of one replica's engines into metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping

from penstock.config import CacheConfig
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.observability.declared import OF_ENGINES
from penstock.observability.metrics import Metrics
from penstock.scheduler.stats import AdapterStats, SchedulerStats, SpeculationStats

# Metrics that are fields of the engine's snapshots.
GAUGES = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "kv_cache_usage_perc": "kv_cache_usage",
}
COUNTERS = {
    "num_preemptions": "num_preemptions",
    "prefix_cache_queries": "num_prefix_queries",
    "prefix_cache_hits": "num_prefix_hits",
}
ADAPTER_GAUGES = {
    "lora_host_adapters": "num_copies",
    "lora_longest_wait_seconds": "longest_wait_s",
    "lora_most_overtakes": "most_overtakes",
}
ADAPTER_COUNTERS = {
    "lora_loads": "num_loads",
    "lora_evictions": "num_evictions",
    "lora_placements": "num_placements",
    "lora_waits": "num_waits",
}
DRAFT_COUNTERS = {
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
MAX_WAITING_NAMES = 64  # in a label


class EngineMetrics:
    """The metrics with the label `engine` of one replica.

    An engine's counters start at zero with it. The metrics add up those of its predecessors.
    """

    def __init__(self, metrics: Metrics, replica: int, cache_config: CacheConfig) -> None:
        self._metrics = metrics
        self._label = str(replica)
        self._cache_config = cache_config
        self._forget()
        for item in OF_ENGINES:  # show counters from the start
            if not item.labels and item.kind == "counter":
                metrics.counter(item.name, engine=self._label)
        self._step_tokens = metrics.histogram("iteration_tokens_total", engine=self._label)
        self._set(ADAPTER_GAUGES, self._adapters)

    def _forget(self) -> None:
        self._stats, self._adapters = SchedulerStats(), AdapterStats()  # the engine's latest
        self._speculation = SpeculationStats()

    def begin(self, info: EngineInfo) -> None:
        """An engine is ready."""
        self._forget()
        self.show(self._stats)  # clears the last engine's values: an idle engine sends no stats
        self._metrics.show_info(
            "cache_config_info",
            1,
            engine=self._label,
            block_size=str(self._cache_config.block_size),
            cache_dtype=self._cache_config.kv_cache_dtype,
            enable_prefix_caching=str(self._cache_config.enable_prefix_caching).lower(),
            num_gpu_blocks=str(info.num_kv_blocks),
        )

    def take(self, stats: EngineStats) -> None:
        """The engine's state."""
        now, before, self._stats = stats.scheduler, self._stats, stats.scheduler
        self.show(now)
        self._count(COUNTERS, before, now)
        for num_tokens in stats.step_tokens:
            self._step_tokens.observe(num_tokens)
        for name, count in stats.metrics.items():
            self._metrics.counter(name, engine=self._label).inc(count)
        if stats.adapters is not None:
            self._show_adapters(stats.adapters)
        if stats.speculation is not None:
            self._count_drafts(stats.speculation)

    def show(self, stats: SchedulerStats) -> None:
        """Set the gauges."""
        self._set(GAUGES, stats)
        waiting = {"capacity": stats.num_waiting - stats.num_deferred}
        waiting["deferred"] = stats.num_deferred
        for reason, count in waiting.items():
            self._metrics.gauge(
                "num_requests_waiting_by_reason", engine=self._label, reason=reason
            ).set(count)

    def _count_drafts(self, now: SpeculationStats) -> None:
        before, self._speculation = self._speculation, now
        self._count(DRAFT_COUNTERS, before, now)
        per_position = before.num_accepted_tokens_per_pos or [0] * len(
            now.num_accepted_tokens_per_pos
        )
        for position, (old, count) in enumerate(
            zip(per_position, now.num_accepted_tokens_per_pos, strict=True)
        ):
            self._metrics.counter(
                "spec_decode_num_accepted_tokens_per_pos",
                engine=self._label,
                position=str(position),
            ).inc(count - old)

    def _show_adapters(self, now: AdapterStats) -> None:
        before, self._adapters = self._adapters, now
        if (now.max_loras, now.running, now.waiting) != (
            before.max_loras, before.running, before.waiting,
        ):  # fmt: skip
            self._metrics.show_info(
                "lora_requests_info",
                time.time(),
                engine=self._label,
                max_lora=str(now.max_loras),
                running_lora_adapters=",".join(now.running),
                waiting_lora_adapters=",".join(now.waiting[:MAX_WAITING_NAMES]),
            )
        self._set(ADAPTER_GAUGES, now)
        self._count(ADAPTER_COUNTERS, before, now)

    def _set(self, names: Mapping[str, str], stats: object) -> None:
        for name, field in names.items():
            self._metrics.gauge(name, engine=self._label).set(getattr(stats, field))

    def _count(self, names: Mapping[str, str], before: object, now: object) -> None:
        for name, field in names.items():
            counter = self._metrics.counter(name, engine=self._label)
            counter.inc(getattr(now, field) - getattr(before, field))
