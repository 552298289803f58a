"""OfflineMetrics: the metrics of an engine in this process, and what `LLM.get_metrics` returns."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric as Family

from penstock.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.ledger import Ledger
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.metrics_observer import MetricsObserver
from penstock.engine.observer import RequestRecord
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.request import EngineRequest

if TYPE_CHECKING:
    from penstock.media.frontend import MediaFrontend

REPLICA = 0  # the engine in this process


@dataclass
class Metric:
    """A metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Vector(Metric):
    """A counter per position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Histogram(Metric):
    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)  # cumulative, by upper bound


class _Nowhere:
    """Deltas reach the caller without the ledger."""

    def push(self, delta: EngineDelta) -> None:
        pass

    def fail(self, error: Exception) -> None:
        pass


class OfflineMetrics:
    """Follows an engine's requests and steps, as an engine's client does in another process."""

    def __init__(
        self, config: EngineConfig, engine: EngineCore, media: MediaFrontend | None
    ) -> None:
        self._engine = engine
        self._observer = MetricsObserver(config, config.model.names[0])
        if media is not None:
            media.on_lookup = self._observer.on_media_lookup
        self._observer.on_ready(REPLICA, EngineInfo(engine.limits, engine.num_kv_blocks))
        self._ledger = Ledger([self._observer], lambda record: None)
        self._step_tokens: list[int] = []
        self._num_scheduled = engine.num_scheduled_tokens

    def add(self, request: EngineRequest) -> None:
        """A request was given to the engine."""
        self._ledger.add(request, _Nowhere())
        self._ledger.records[request.request_id].replica = REPLICA

    def take(self, deltas: Iterable[EngineDelta]) -> None:
        """A step ended with these deltas."""
        num_scheduled, now = self._engine.num_scheduled_tokens, time.monotonic()
        if num_scheduled > self._num_scheduled:
            self._step_tokens.append(num_scheduled - self._num_scheduled)
        self._num_scheduled = num_scheduled
        for delta in deltas:
            record = self._ledger.records.get(delta.request_id)
            if record is not None:
                self._ledger.take(record, delta, now)

    def end(self, request_ids: Collection[str], reason: FinishReason) -> None:
        """Requests ended early."""
        self._ledger.end(request_ids, reason)

    def report_search(self, records: Sequence[RequestRecord]) -> None:
        """Beam searches ended."""
        for record in records:
            record.replica = REPLICA
        self._ledger.report_search(records)

    def read(self) -> list[Metric]:
        """The values now."""
        step_tokens, self._step_tokens = self._step_tokens, []
        stats = EngineStats(
            scheduler=self._engine.stats(),
            step_tokens=step_tokens,
            metrics=self._engine.take_metrics(),
            adapters=self._engine.adapter_stats(),
            speculation=self._engine.speculation_stats(),
        )
        self._observer.on_stats(REPLICA, stats)
        return [metric for family in self._observer.metrics.collect() for metric in _read(family)]


def _read(family: Family) -> list[Metric]:
    if family.type == "histogram":
        return [*_histograms(family)]
    if family.type == "gauge":
        return [Gauge(family.name, dict(each.labels), each.value) for each in family.samples]
    found: list[Metric] = []
    by_position: dict[tuple[tuple[str, str], ...], Vector] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "position"}
        if labels == sample.labels:
            found.append(Counter(family.name, labels, int(sample.value)))
            continue
        empty = Vector(family.name, labels, [])
        by_position.setdefault(tuple(labels.items()), empty).values.append(int(sample.value))
    return [*found, *by_position.values()]


def _histograms(family: Family) -> Iterable[Histogram]:
    by_labels: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        found = by_labels.setdefault(tuple(labels.items()), Histogram(family.name, labels))
        match sample.name.removeprefix(family.name):
            case "_bucket":
                found.buckets[sample.labels["le"]] = int(sample.value)
            case "_count":
                found.count = int(sample.value)
            case "_sum":
                found.sum = sample.value
    return by_labels.values()
