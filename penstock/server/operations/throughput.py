"""ThroughputLog: logs throughput every few seconds while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.observer import Observer, RequestRecord
from penstock.protocol.delta import FinishReason

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0


def call_later(delay_s: float, work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, work)


class ThroughputLog(Observer):
    """Observes requests. It does nothing while there are none."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], None] = call_later,
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._since: float | None = None  # start of the interval; None without work
        self._num_unfinished = 0
        self._num_prompt_tokens = 0  # in this interval, like the next field
        self._num_generated_tokens = 0
        self._num_pooled = 0
        self._pools = False  # an engine either generates or pools
        self._stats: dict[int, EngineStats] = {}  # by replica
        self._prefix_counts: dict[
            int, tuple[int, int]
        ] = {}  # queries and hits before this interval

    def on_ready(self, replica: int, info: EngineInfo) -> None:
        self._forget(replica)

    def on_death(self, replica: int) -> None:
        self._forget(replica)  # its requests run elsewhere now, or wait

    def on_gone(self, replica: int) -> None:
        self._forget(replica)

    def _forget(self, replica: int) -> None:
        self._prefix_counts.pop(replica, None)
        self._stats.pop(replica, None)

    def on_submit(self, record: RequestRecord) -> None:
        self._num_unfinished += 1
        self._pools = record.request.pools
        if self._since is None:
            self._begin()

    def on_tokens(self, record: RequestRecord, num_tokens: int, previous_at: float | None) -> None:
        self._num_generated_tokens += num_tokens
        if previous_at is None:
            self._num_prompt_tokens += len(record.request.prompt_token_ids)

    def on_finish(self, record: RequestRecord) -> None:
        self._num_unfinished -= 1
        if record.request.pools and record.finish_reason is FinishReason.STOP:
            self._num_pooled += 1
            self._num_prompt_tokens += len(record.request.prompt_token_ids)

    def on_stats(self, replica: int, stats: EngineStats) -> None:
        self._stats[replica] = stats

    def _begin(self) -> None:
        self._since = self._clock()
        self._num_prompt_tokens = self._num_generated_tokens = self._num_pooled = 0
        self._call_later(INTERVAL_S, self._on_time)

    def _on_time(self) -> None:
        assert self._since is not None
        elapsed_s = max(self._clock() - self._since, 1e-9)
        if self._stats:
            self._log(elapsed_s)
        self._since = None
        if self._num_unfinished:
            self._begin()

    def _log(self, elapsed_s: float) -> None:
        states = [stats.scheduler for stats in self._stats.values()]
        queries, hits = self._count_prefixes()
        if self._pools:
            made = f"pooling {self._num_pooled / elapsed_s:.1f} inputs/s"
        else:
            made = f"generation {self._num_generated_tokens / elapsed_s:.1f} tok/s"
        logger.info(
            "Throughput: prompt %.1f tok/s, %s; %d running, %d waiting; KV cache %.1f %% used; "
            "prefix hits %s",
            self._num_prompt_tokens / elapsed_s,
            made,
            sum(state.num_running for state in states),
            sum(state.num_waiting for state in states),
            100 * sum(state.kv_cache_usage for state in states) / len(states),
            f"{100 * hits / queries:.1f} %" if queries else "-",
        )

    def _count_prefixes(self) -> tuple[int, int]:
        """Prefix queries and hits since the last interval, on all replicas together."""
        queries = hits = 0
        for replica, stats in self._stats.items():
            before = self._prefix_counts.get(replica, (0, 0))
            now = stats.scheduler.num_prefix_queries, stats.scheduler.num_prefix_hits
            self._prefix_counts[replica] = now
            queries, hits = queries + now[0] - before[0], hits + now[1] - before[1]
        return queries, hits
