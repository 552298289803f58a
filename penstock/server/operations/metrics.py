"""GET /metrics, and the observer that updates the metrics."""

from __future__ import annotations

import time
from collections import Counter

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

NO_STATS = SchedulerStats(
    num_running=0,
    num_waiting=0,
    num_steps_in_flight=0,
    num_preemptions=0,
    kv_cache_usage=0.0,
    num_prefix_queries=0,
    num_prefix_hits=0,
)
NO_ADAPTERS = AdapterStats(
    max_loras=0,
    running=[],
    waiting=[],
    num_copies=0,
    num_loads=0,
    num_evictions=0,
    num_placements=0,
    num_waits=0,
    longest_wait_s=0.0,
    most_overtakes=0,
)
NO_DRAFTS = SpeculationStats(0, 0, 0, [])
MAX_WAITING_NAMES = 64  # in a label
COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


@router.get("/metrics", response_class=PlainTextResponse, responses=describe_errors(401))
async def metrics(request: Request) -> PlainTextResponse:
    """Metrics in Prometheus format, listed in docs/metrics.md."""
    observer: MetricsObserver = request.app.state.metrics
    service: Service = request.app.state.service
    if not service.client.is_healthy:
        observer.show(NO_STATS)
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
        self._stats = NO_STATS  # the engine's latest; its counters restart with it
        self._adapters = NO_ADAPTERS
        self._speculation = NO_DRAFTS
        # Not in the metrics yet: updating a counter per token would be too slow.
        self._num_tokens = 0
        self._gaps = Counter[float]()  # seconds between tokens; equal for the tokens of a step
        self._ended = {
            reason: self.metrics.counter("request_success", finished_reason=reason.value)
            for reason in FinishReason
        }

    def on_ready(self, info: EngineInfo) -> None:
        self._stats, self._adapters, self._speculation = NO_STATS, NO_ADAPTERS, NO_DRAFTS
        self.show(NO_STATS)  # clears the last engine's values: an idle engine sends no stats
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
        if is_first_child(record.request):
            if record.request.pools:
                return
            self.metrics.histogram("request_params_n").observe(record.request.sampling.n)
            self.metrics.histogram("request_params_max_tokens").observe(record.request.max_tokens)

    def on_tokens(self, record: RequestRecord, num_tokens: int, previous_at: float | None) -> None:
        assert record.last_token_at is not None
        self._num_tokens += num_tokens
        if previous_at is not None:
            self._gaps[record.last_token_at - previous_at] += 1
            return
        waited_s = record.last_token_at - record.submitted_at
        self.metrics.counter("prompt_tokens").inc(len(record.request.prompt_token_ids))
        self.metrics.histogram("time_to_first_token_seconds").observe(waited_s)
        self.metrics.histogram("request_prefill_time_seconds").observe(record.prefill_s)
        self.metrics.histogram("request_queue_time_seconds").observe(
            max(waited_s - record.prefill_s, 0.0)
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
        self.metrics.histogram("request_prompt_tokens").observe(
            len(record.request.prompt_token_ids)
        )
        self.metrics.histogram("request_generation_tokens").observe(num_tokens)
        self.metrics.histogram("e2e_request_latency_seconds").observe(
            record.finished_at - record.submitted_at
        )
        if record.first_token_at is not None and record.last_token_at is not None:
            decode_s = record.last_token_at - record.first_token_at
            self.metrics.histogram("request_decode_time_seconds").observe(decode_s)
            self.metrics.histogram("request_inference_time_seconds").observe(
                record.prefill_s + decode_s
            )
            if num_tokens > 1:
                self.metrics.histogram("request_time_per_output_token_seconds").observe(
                    decode_s / (num_tokens - 1)
                )

    def _count_pooled(self, record: RequestRecord, latency_s: float) -> None:
        """Count a pooling request, which generates no tokens."""
        num_tokens = len(record.request.prompt_token_ids)
        self.metrics.counter("prompt_tokens").inc(num_tokens)
        self.metrics.histogram("request_prompt_tokens").observe(num_tokens)
        self.metrics.histogram("e2e_request_latency_seconds").observe(latency_s)
        self.metrics.histogram("request_prefill_time_seconds").observe(record.prefill_s)
        self.metrics.histogram("request_inference_time_seconds").observe(record.prefill_s)
        self.metrics.histogram("request_queue_time_seconds").observe(
            max(latency_s - record.prefill_s, 0.0)
        )

    def on_stats(self, stats: EngineStats) -> None:
        now, before, self._stats = stats.scheduler, self._stats, stats.scheduler
        self.show(now)
        self.count_tokens()
        self.metrics.counter("num_preemptions").inc(now.num_preemptions - before.num_preemptions)
        self.metrics.counter("prefix_cache_queries").inc(
            now.num_prefix_queries - before.num_prefix_queries
        )
        self.metrics.counter("prefix_cache_hits").inc(now.num_prefix_hits - before.num_prefix_hits)
        for num_tokens in stats.step_tokens:
            self.metrics.histogram("iteration_tokens_total").observe(num_tokens)
        for name, count in stats.metrics.items():
            self.metrics.counter(name).inc(count)

        if stats.adapters is not None:
            self._show_adapters(stats.adapters)
        if stats.speculation is not None:
            self._count_drafts(stats.speculation)

    def _count_drafts(self, now: SpeculationStats) -> None:
        before, self._speculation = self._speculation, now
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            new = getattr(now, name) - getattr(before, name)
            self.metrics.counter(f"spec_decode_{name}").inc(new)
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
        self.metrics.gauge("lora_host_adapters").set(now.num_copies)
        self.metrics.gauge("lora_longest_wait_seconds").set(now.longest_wait_s)
        self.metrics.gauge("lora_most_overtakes").set(now.most_overtakes)
        self.metrics.counter("lora_loads").inc(now.num_loads - before.num_loads)
        self.metrics.counter("lora_evictions").inc(now.num_evictions - before.num_evictions)
        self.metrics.counter("lora_placements").inc(now.num_placements - before.num_placements)
        self.metrics.counter("lora_waits").inc(now.num_waits - before.num_waits)

    def count_tokens(self) -> None:
        """Add the pending token counts to the metrics."""
        self.metrics.counter("generation_tokens").inc(self._num_tokens)
        for gap_s, count in self._gaps.items():
            self.metrics.histogram("inter_token_latency_seconds").observe_many(gap_s, count)
        self._num_tokens = 0
        self._gaps.clear()

    def show(self, stats: SchedulerStats) -> None:
        """Set the gauges."""
        self.metrics.gauge("num_requests_running").set(stats.num_running)
        self.metrics.gauge("num_requests_waiting").set(stats.num_waiting)
        self.metrics.gauge("kv_cache_usage_perc").set(stats.kv_cache_usage)

    def show_stored(self, num_entries: int, num_bytes: int) -> None:
        self.metrics.gauge("stored_responses").set(num_entries)
        self.metrics.gauge("stored_response_bytes").set(num_bytes)
