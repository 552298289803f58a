"""Metrics: the Prometheus registry of one model's metrics, and how registries are rendered."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric as Family

from penstock.observability.declared import (
    OF_ENGINES,
    OF_MODEL,
    PREFIX,
    WAITING_REASONS,
    Declared,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class BulkHistogram(prometheus_client.Histogram):
    """A histogram that can count the tokens of a whole step at once.

    It uses private attributes of the library, so the library's version is bounded.
    """

    def observe_many(self, amount: float, count: int) -> None:
        """Same as calling `observe(amount)` `count` times."""
        self._sum.inc(amount * count)
        self._buckets[bisect.bisect_left(self._upper_bounds, amount)].inc(count)


Instrument = TypeVar("Instrument", Gauge, Counter, BulkHistogram)


class WithoutCreated:
    """A registry without the `_created` samples that the library adds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


def render_registry(registry: CollectorRegistry) -> bytes:
    """Render in Prometheus's text format, which has the type `CONTENT_TYPE`."""
    return generate_latest(WithoutCreated(registry))


class Metrics:
    """The declared metrics of one model, in their own registry."""

    def __init__(self, model_name: str, prefix: str = PREFIX) -> None:
        self._model_name = model_name
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self._shown: dict[tuple[str, str], dict[str, str]] = {}  # labels, by metric and engine
        self._instruments = {item.name: self._make(item) for item in OF_MODEL}
        # Metrics without extra labels are shown from the start. They are looked up often.
        self._plain = {
            item.name: self._instruments[item.name].labels(model_name=model_name)
            for item in OF_MODEL
            if not item.labels
        }

    def gauge(self, name: str, **labels: str) -> Gauge:
        return self._find(Gauge, name, labels)

    def counter(self, name: str, **labels: str) -> Counter:
        return self._find(Counter, name, labels)

    def histogram(self, name: str, **labels: str) -> BulkHistogram:
        return self._find(BulkHistogram, name, labels)

    def show_info(self, name: str, value: float, engine: str, **labels: str) -> None:
        """Set an engine's gauge whose labels are the information, in place of its earlier ones."""
        self._forget_info(name, engine)
        self._shown[name, engine] = labels
        self.gauge(name, engine=engine, **labels).set(value)

    def forget_engine(self, engine: str) -> None:
        """Drop the gauges of an engine that is gone. Its counters stay."""
        for item in OF_ENGINES:
            if item.kind == "gauge" and not item.labels:
                self._instruments[item.name].remove(self._model_name, engine)
        for reason in WAITING_REASONS:
            self._instruments["num_requests_waiting_by_reason"].remove(
                self._model_name, engine, reason
            )
        for name, other in list(self._shown):
            if other == engine:
                self._forget_info(name, engine)

    def _forget_info(self, name: str, engine: str) -> None:
        labels = self._shown.pop((name, engine), None)
        if labels is not None:
            (declared,) = (item for item in OF_ENGINES if item.name == name)
            values = [labels[label] for label in declared.labels]
            self._instruments[name].remove(self._model_name, engine, *values)

    def render(self) -> bytes:
        """Render in Prometheus's text format, which has the type `CONTENT_TYPE`."""
        return render_registry(self._registry)

    def collect(self) -> Iterator[Family]:
        """Collect the values of all metrics."""
        return WithoutCreated(self._registry).collect()

    def _make(self, item: Declared) -> Gauge | Counter | BulkHistogram:
        name, labels = self._prefix + item.name, ("model_name", *item.labels)
        if item.kind == "gauge":
            return Gauge(name, item.help, labels, registry=self._registry)
        if item.kind == "counter":
            return Counter(name, item.help, labels, registry=self._registry)
        return BulkHistogram(name, item.help, labels, registry=self._registry, buckets=item.buckets)

    def _find(self, kind: type[Instrument], name: str, labels: dict[str, str]) -> Instrument:
        instrument = self._instruments[name] if labels else self._plain[name]
        assert isinstance(instrument, kind), f"{name} is not a {kind.__name__}"
        return instrument.labels(model_name=self._model_name, **labels) if labels else instrument
