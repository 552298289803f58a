"""GET /metrics, and the observer that updates the metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from penstock.config import EngineConfig
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import Observer, RequestRecord
from penstock.observability.metrics import CONTENT_TYPE, Metrics
from penstock.protocol.delta import FinishReason
from penstock.scheduler.stats import AdapterStats, SchedulerStats, SpeculationStats
from penstock.server.http.errors import describe_errors
from penstock.server.operations.throughput import ThroughputLog
from penstock.server.responses.runner import ResponseRunner
from penstock.server.service import Service
from penstock.text.frontend import is_first_child

router = APIRouter(tags=["Operations"])

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
COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


@router.get("/metrics", response_class=PlainTextResponse, responses=describe_errors(401))
async def metrics(request: Request) -> PlainTextResponse:
    """Metrics in Prometheus format, listed in docs/metrics.md."""
    observer: MetricsObserver = request.app.state.metrics
    service: Service = request.app.state.service
    if not service.client.is_healthy:
        observer.show(SchedulerStats())
    observer.count_tokens()
    runner: ResponseRunner = request.app.state.responses
    observer.show_stored(runner.store.num_entries, runner.store.num_bytes)
    return PlainTextResponse(observer.metrics.render(), media_type=CONTENT_TYPE)


def observe(service: Service) -> MetricsObserver:
    """Attach the metrics and the throughput log to a service."""
    observer = MetricsObserver(service.config, service.model_names[0])
    if service.client.info is not None:
        observer.on_ready(service.client.info)
    service.client.observers.append(observer)
    if not service.config.observability.disable_log_stats:
        service.client.observers.append(ThroughputLog())
    return observer


class MetricsObserver(Observer):
    """Updates the metrics from events of requests and the engine."""

    def __init__(self, config: EngineConfig, model_name: str) -> None:
        self.metrics = Metrics(model_name)
        self._cache_config = config.cache
        # The engine's latest. Its counters restart with it.
        self._stats, self._adapters = SchedulerStats(), AdapterStats()
        self._speculation = SpeculationStats()
        # Not in the metrics yet: updating a counter per token would be too slow.
        self._num_tokens = 0
        self._gaps = Counter[float]()  # seconds between tokens; equal for the tokens of a step
        self._ended = {
            reason: self.metrics.counter("request_success", finished_reason=reason.value)
            for reason in FinishReason
        }

    def on_ready(self, info: EngineInfo) -> None:
        self._stats, self._adapters = SchedulerStats(), AdapterStats()
        self._speculation = SpeculationStats()
        self.show(self._stats)  # clears the last engine's values: an idle engine sends no stats
        self.metrics.gauge(
            "cache_config_info",
            block_size=str(self._cache_config.block_size),
            cache_dtype=self._cache_config.kv_cache_dtype,
            enable_prefix_caching=str(self._cache_config.enable_prefix_caching).lower(),
            num_blocks=str(info.num_kv_blocks),
        ).set(1)

    def on_restart(self) -> None:
        self.metrics.counter("engine_restarts").inc()

    def on_replay(self, record: RequestRecord) -> None:
        self.metrics.counter("requests_replayed").inc()

    def on_quarantine(self, num_requests: int) -> None:
        self.metrics.counter("requests_quarantined").inc(num_requests)

    def on_submit(self, record: RequestRecord) -> None:
        if is_first_child(record.request) and not record.request.pools:
            self._observe(
                request_params_n=record.request.sampling.n,
                request_params_max_tokens=record.request.max_tokens,
            )

    def on_tokens(self, record: RequestRecord, num_tokens: int, previous_at: float | None) -> None:
        assert record.last_token_at is not None
        self._num_tokens += num_tokens
        if previous_at is not None:
            self._gaps[record.last_token_at - previous_at] += 1
            return
        waited_s = record.last_token_at - record.submitted_at
        self.metrics.counter("prompt_tokens").inc(len(record.request.prompt_token_ids))
        self._observe(
            time_to_first_token_seconds=waited_s,
            request_prefill_time_seconds=record.prefill_s,
            request_queue_time_seconds=max(waited_s - record.prefill_s, 0.0),
        )

    def on_finish(self, record: RequestRecord) -> None:
        assert record.finish_reason is not None
        assert record.finished_at is not None
        self._ended[record.finish_reason].inc()
        if record.finish_reason not in COMPLETED:
            return
        if record.request.pools:
            self._count_pooled(record, record.finished_at - record.submitted_at)
            return
        num_tokens = len(record.token_ids)
        self._observe(
            request_prompt_tokens=len(record.request.prompt_token_ids),
            request_generation_tokens=num_tokens,
            e2e_request_latency_seconds=record.finished_at - record.submitted_at,
        )
        if record.first_token_at is not None and record.last_token_at is not None:
            decode_s = record.last_token_at - record.first_token_at
            self._observe(
                request_decode_time_seconds=decode_s,
                request_inference_time_seconds=record.prefill_s + decode_s,
            )
            if num_tokens > 1:
                self._observe(request_time_per_output_token_seconds=decode_s / (num_tokens - 1))

    def _count_pooled(self, record: RequestRecord, latency_s: float) -> None:
        """Count a pooling request, which generates no tokens."""
        num_tokens = len(record.request.prompt_token_ids)
        self.metrics.counter("prompt_tokens").inc(num_tokens)
        self._observe(
            request_prompt_tokens=num_tokens,
            e2e_request_latency_seconds=latency_s,
            request_prefill_time_seconds=record.prefill_s,
            request_inference_time_seconds=record.prefill_s,
            request_queue_time_seconds=max(latency_s - record.prefill_s, 0.0),
        )

    def on_stats(self, stats: EngineStats) -> None:
        now, before, self._stats = stats.scheduler, self._stats, stats.scheduler
        self.show(now)
        self.count_tokens()
        self._count(COUNTERS, before, now)
        for num_tokens in stats.step_tokens:
            self._observe(iteration_tokens_total=num_tokens)
        for name, count in stats.metrics.items():
            self.metrics.counter(name).inc(count)

        if stats.adapters is not None:
            self._show_adapters(stats.adapters)
        if stats.speculation is not None:
            self._count_drafts(stats.speculation)

    def _count_drafts(self, now: SpeculationStats) -> None:
        before, self._speculation = self._speculation, now
        self._count(DRAFT_COUNTERS, before, now)
        per_position = before.num_accepted_tokens_per_pos or [0] * len(
            now.num_accepted_tokens_per_pos
        )
        for position, (old, count) in enumerate(
            zip(per_position, now.num_accepted_tokens_per_pos, strict=True)
        ):
            self.metrics.counter(
                "spec_decode_num_accepted_tokens_per_pos", position=str(position)
            ).inc(count - old)

    def _show_adapters(self, now: AdapterStats) -> None:
        before, self._adapters = self._adapters, now
        if (now.max_loras, now.running, now.waiting) != (
            before.max_loras, before.running, before.waiting,
        ):  # fmt: skip
            self.metrics.show_info(
                "lora_requests_info",
                time.time(),
                max_lora=str(now.max_loras),
                running_lora_adapters=",".join(now.running),
                waiting_lora_adapters=",".join(now.waiting[:MAX_WAITING_NAMES]),
            )
        self._set(ADAPTER_GAUGES, now)
        self._count(ADAPTER_COUNTERS, before, now)

    def count_tokens(self) -> None:
        """Add the pending token counts to the metrics."""
        self.metrics.counter("generation_tokens").inc(self._num_tokens)
        for gap_s, count in self._gaps.items():
            self.metrics.histogram("inter_token_latency_seconds").observe_many(gap_s, count)
        self._num_tokens = 0
        self._gaps.clear()

    def show(self, stats: SchedulerStats) -> None:
        """Set the gauges."""
        self._set(GAUGES, stats)

    def show_stored(self, num_entries: int, num_bytes: int) -> None:
        self.metrics.gauge("stored_responses").set(num_entries)
        self.metrics.gauge("stored_response_bytes").set(num_bytes)

    def _set(self, names: Mapping[str, str], stats: object) -> None:
        for name, field in names.items():
            self.metrics.gauge(name).set(getattr(stats, field))

    def _count(self, names: Mapping[str, str], before: object, now: object) -> None:
        for name, field in names.items():
            self.metrics.counter(name).inc(getattr(now, field) - getattr(before, field))

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self.metrics.histogram(name).observe(value)
