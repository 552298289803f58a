"""MetricsObserver: updates the metrics from events of requests and engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from penstock.config import EngineConfig
from penstock.engine.engine_metrics import EngineMetrics
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import Observer, RequestRecord
from penstock.observability.metrics import Metrics
from penstock.protocol.delta import FinishReason
from penstock.scheduler.stats import SchedulerStats
from penstock.text.frontend import is_first_child

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


class MetricsObserver(Observer):
    """Updates the metrics from events of requests and the engine."""

    def __init__(self, config: EngineConfig, model_name: str) -> None:
        self.metrics = Metrics(model_name)
        self._cache_config = config.cache
        self._engines: dict[int, EngineMetrics] = {}  # by replica
        # Not in the metrics yet: updating a counter per token would be too slow.
        self._num_tokens = 0
        self._gaps = Counter[float]()  # seconds between tokens; equal for the tokens of a step
        self._ended = {
            reason: self.metrics.counter("request_success", finished_reason=reason.value)
            for reason in FinishReason
        }

    def _engine(self, replica: int) -> EngineMetrics:
        if replica not in self._engines:
            self._engines[replica] = EngineMetrics(self.metrics, replica, self._cache_config)
        return self._engines[replica]

    def on_ready(self, replica: int, info: EngineInfo) -> None:
        self._engine(replica).begin(info)

    def on_restart(self, replica: int) -> None:
        self.metrics.counter("engine_restarts", engine=str(replica)).inc()

    def on_gone(self, replica: int) -> None:
        self._engines.pop(replica, None)
        self.metrics.forget_engine(str(replica))

    def show_running(self, replicas: Collection[int]) -> None:
        """Clear the gauges of engines that are not among these, the running ones."""
        for replica, engine in self._engines.items():
            if replica not in replicas:
                engine.show(SchedulerStats())

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

    def on_stats(self, replica: int, stats: EngineStats) -> None:
        self._engine(replica).take(stats)
        self.count_tokens()

    def count_tokens(self) -> None:
        """Add the pending token counts to the metrics."""
        self.metrics.counter("generation_tokens").inc(self._num_tokens)
        for gap_s, count in self._gaps.items():
            self.metrics.histogram("inter_token_latency_seconds").observe_many(gap_s, count)
        self._num_tokens = 0
        self._gaps.clear()

    def show_stored(self, num_entries: int, num_bytes: int) -> None:
        self.metrics.gauge("stored_responses").set(num_entries)
        self.metrics.gauge("stored_response_bytes").set(num_bytes)

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self.metrics.histogram(name).observe(value)
