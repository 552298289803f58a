"""HttpMetrics: the metrics of HTTP requests and of this process. They have no prefix."""

from __future__ import annotations

from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, Summary

from penstock.observability.declared import OF_HTTP, Declared
from penstock.observability.metrics import render_registry
from penstock.server.http.exchange import HttpExchange

T = TypeVar("T", Counter, Histogram, Summary)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        declared = {item.name: item for item in OF_HTTP}
        self._requests = self._make(Counter, declared["http_requests"])
        self._durations = self._make(Histogram, declared["http_request_duration_seconds"])
        self._request_sizes = self._make(Summary, declared["http_request_size_bytes"])
        self._response_sizes = self._make(Summary, declared["http_response_size_bytes"])

    def on_exchange(self, exchange: HttpExchange) -> None:
        """Count a request whose response has ended."""
        method = exchange.method if exchange.method in METHODS else "other"
        handler, status = exchange.handler, f"{exchange.status // 100}xx"
        self._requests.labels(handler=handler, method=method, status=status).inc()
        self._durations.labels(handler=handler, method=method).observe(exchange.duration_s)
        self._request_sizes.labels(handler=handler).observe(exchange.num_bytes_received)
        self._response_sizes.labels(handler=handler).observe(exchange.num_bytes_sent)

    def render(self) -> bytes:
        return render_registry(self._registry)

    def _make(self, kind: type[T], item: Declared) -> T:
        more: dict[str, Any] = {"buckets": item.buckets} if item.buckets else {}
        return kind(item.name, item.help, item.labels, registry=self._registry, **more)
