"""MetricsObserver: updates the metrics from events of requests and engines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.config import EngineConfig
from penstock.engine.engine_metrics import EngineMetrics
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import Observer, RequestRecord
from penstock.engine.request_metrics import RequestMetrics
from penstock.observability.metrics import Metrics
from penstock.scheduler.stats import SchedulerStats


class MetricsObserver(Observer):
    """Updates the metrics from events of requests and the engine."""

    def __init__(self, config: EngineConfig, model_name: str) -> None:
        self.metrics = Metrics(model_name, config.observability.metrics_prefix)
        self._cache_config = config.cache
        self._engines: dict[int, EngineMetrics] = {}  # by replica
        self._requests: dict[int | None, RequestMetrics] = {}  # by replica
        # Completions that have not ended of client's requests, and the longest of the others.
        self._families: dict[str, tuple[int, int]] = {}

    def _engine(self, replica: int) -> EngineMetrics:
        if replica not in self._engines:
            self._engines[replica] = EngineMetrics(self.metrics, replica, self._cache_config)
            self._requests_of(replica)
        return self._engines[replica]

    def _requests_of(self, replica: int | None) -> RequestMetrics:
        if replica not in self._requests:
            self._requests[replica] = RequestMetrics(self.metrics, replica)
        return self._requests[replica]

    def on_ready(self, replica: int, info: EngineInfo) -> None:
        self._engine(replica).begin(info)

    def on_restart(self, replica: int) -> None:
        self.metrics.counter("engine_restarts", engine=str(replica)).inc()

    def on_api_restart(self) -> None:
        """An API process replaces one that died."""
        self.metrics.counter("api_process_restarts").inc()

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

    def on_tokens(self, record: RequestRecord, num_tokens: int, previous_at: float | None) -> None:
        self._requests_of(record.replica).take_tokens(record, num_tokens, previous_at)

    def on_finish(self, record: RequestRecord) -> None:
        if not record.request.is_search_step:
            self._finish(record)

    def on_search(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            if record.first_token_at is not None:
                self._requests_of(record.replica).take_first_token(record)
            self._finish(record)

    def _finish(self, record: RequestRecord) -> None:
        metrics = self._requests_of(record.replica)
        metrics.finish(record)
        if record.request.pools:
            return
        num_left, num_tokens = self._families.pop(record.family, (record.request.sampling.n, 0))
        num_tokens = max(num_tokens, len(record.token_ids))
        if num_left > 1:
            self._families[record.family] = num_left - 1, num_tokens
        else:
            metrics.finish_family(record, num_tokens)

    def on_stats(self, replica: int, stats: EngineStats) -> None:
        self._engine(replica).take(stats)
        self.count_tokens()

    def count_tokens(self) -> None:
        """Add the pending token counts to the metrics."""
        for requests in self._requests.values():
            requests.count_tokens()

    def on_tool_turn(self, is_streaming: bool, called: bool, api: str) -> None:
        """A completion of a request with tools has ended."""
        self.metrics.counter(
            "tool_call_parser_invocations",
            mode="streaming" if is_streaming else "non_streaming",
            outcome="tool_call" if called else "no_tool_call",
            request_type=api,
        ).inc()

    def on_media_lookup(self, is_hit: bool) -> None:
        """Media were looked up in the cache of a frontend. Safe to call from any thread."""
        self.metrics.counter("mm_cache_queries").inc()
        if is_hit:
            self.metrics.counter("mm_cache_hits").inc()

    def show_stored(self, num_entries: int, num_bytes: int) -> None:
        self.metrics.gauge("stored_responses").set(num_entries)
        self.metrics.gauge("stored_response_bytes").set(num_bytes)
