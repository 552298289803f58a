"""RequestMetrics: counts the requests of one replica, their tokens and their times."""

from __future__ import annotations

from collections import Counter

from penstock.engine.observer import RequestRecord
from penstock.observability.declared import OF_REQUESTS
from penstock.observability.metrics import Metrics
from penstock.protocol.delta import FinishReason

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
SOURCES = ("local_compute", "local_cache_hit")


class RequestMetrics:
    """The metrics of `OF_REQUESTS` with one value of the label `engine`.

    The label is empty for requests that ended before they were given to a replica, and for beam
    searches whose steps may run on several.
    """

    def __init__(self, metrics: Metrics, replica: int | None) -> None:
        label = "" if replica is None else str(replica)
        self._counters = {
            item.name: metrics.counter(item.name, engine=label)
            for item in OF_REQUESTS
            if item.kind == "counter" and not item.labels
        }
        self._histograms = {
            item.name: metrics.histogram(item.name, engine=label)
            for item in OF_REQUESTS
            if item.kind == "histogram"
        }
        self._ended = {
            reason: metrics.counter("request_success", engine=label, finished_reason=reason.value)
            for reason in FinishReason
        }
        self._computed, self._cached = (
            metrics.counter("prompt_tokens_by_source", engine=label, source=source)
            for source in SOURCES
        )
        # Not in the metrics yet: updating a counter per token would be too slow.
        self._num_tokens = 0
        self._gaps = Counter[float]()  # seconds between tokens; equal for the tokens of a step

    def take_tokens(
        self, record: RequestRecord, num_tokens: int, previous_at: float | None
    ) -> None:
        """New tokens arrived, the ones before them at `previous_at`."""
        assert record.last_token_at is not None
        self._num_tokens += num_tokens
        if previous_at is not None:
            self._gaps[record.last_token_at - previous_at] += 1
            return
        self._count_prompt(record)
        if not record.request.is_search_step:
            self.take_first_token(record)

    def take_first_token(self, record: RequestRecord) -> None:
        """A request got its first token."""
        assert record.first_token_at is not None
        waited_s = record.first_token_at - record.submitted_at
        self._observe(
            time_to_first_token_seconds=waited_s,
            request_prefill_time_seconds=record.prefill_s,
            request_queue_time_seconds=max(waited_s - record.prefill_s, 0.0),
        )

    def finish(self, record: RequestRecord) -> None:
        """A request ended."""
        assert record.finish_reason is not None
        assert record.finished_at is not None
        self._ended[record.finish_reason].inc()
        if record.finish_reason not in COMPLETED:
            return
        num_prompt = len(record.request.prompt_token_ids)
        latency_s = record.finished_at - record.submitted_at
        self._observe(
            request_prompt_tokens=num_prompt,
            request_prefill_kv_computed_tokens=num_prompt - record.num_cached_tokens,
            e2e_request_latency_seconds=latency_s,
        )
        if record.request.pools:  # it has generated no tokens
            self._count_prompt(record)
            self._observe(
                request_prefill_time_seconds=record.prefill_s,
                request_inference_time_seconds=record.prefill_s,
                request_queue_time_seconds=max(latency_s - record.prefill_s, 0.0),
            )
            return
        num_tokens = len(record.token_ids)
        self._observe(request_generation_tokens=num_tokens)
        if record.first_token_at is not None and record.last_token_at is not None:
            decode_s = record.last_token_at - record.first_token_at
            self._observe(
                request_decode_time_seconds=decode_s,
                request_inference_time_seconds=record.prefill_s + decode_s,
            )
            if num_tokens > 1:
                self._observe(request_time_per_output_token_seconds=decode_s / (num_tokens - 1))

    def finish_family(self, record: RequestRecord, max_num_tokens: int) -> None:
        """All completions of a client's request ended. `record` is the last of them."""
        self._observe(
            request_params_n=record.request.sampling.n,
            request_params_max_tokens=record.request.max_tokens,
            request_max_num_generation_tokens=max_num_tokens,
        )

    def count_tokens(self) -> None:
        """Add the pending token counts to the metrics."""
        self._counters["generation_tokens"].inc(self._num_tokens)
        for gap_s, count in self._gaps.items():
            self._histograms["inter_token_latency_seconds"].observe_many(gap_s, count)
        self._num_tokens = 0
        self._gaps.clear()

    def _count_prompt(self, record: RequestRecord) -> None:
        num_prompt, num_cached = len(record.request.prompt_token_ids), record.num_cached_tokens
        self._counters["prompt_tokens"].inc(num_prompt)
        self._counters["prompt_tokens_cached"].inc(num_cached)
        self._computed.inc(num_prompt - num_cached)
        self._cached.inc(num_cached)

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._histograms[name].observe(value)
