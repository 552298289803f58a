"""Tracing: OpenTelemetry spans of HTTP requests, of completions and of calls to tool servers.

Imported only with `otlp_traces_endpoint`. A client's `traceparent` header is the parent of its
request's span. Tool servers are sent the span of their call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

import penstock
from penstock.engine.observer import Observer, RequestRecord
from penstock.protocol.delta import FinishReason
from penstock.protocol.errors import ConfigError
from penstock.server.http.asgi import HttpMiddleware

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(
        "otlp_traces_endpoint needs OpenTelemetry: pip install 'penstock[otel]'"
    ) from error

FLUSH_MS = 5000  # for the last spans, when the server ends
TRACED_METHODS = frozenset({"POST", "DELETE"})  # not health checks, metrics and pages

PROPAGATOR = TraceContextTextMapPropagator()


def connect_collector(endpoint: str) -> Tracing:
    """Trace to a collector that takes OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "otlp_traces_endpoint takes OTLP over HTTP, such as http://localhost:4318/v1/traces, "
            f"got {endpoint!r}"
        )
    if parts.path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    attributes = {"service.name": "penstock", "service.version": penstock.__version__}
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)


class Tracing:
    """Makes the spans and gives them to `provider`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer = provider.get_tracer("penstock", penstock.__version__)

    @contextlib.contextmanager
    def call_tool(self, server: str, name: str) -> Iterator[dict[str, str]]:
        """The span of a call to a tool server. Yields the trace context to send with it."""
        attributes = {"gen_ai.tool.name": name, "server.name": server}
        with self.tracer.start_as_current_span(
            f"execute_tool {name}", kind=trace.SpanKind.CLIENT, attributes=attributes
        ):
            sent: dict[str, str] = {}
            PROPAGATOR.inject(sent)
            yield sent

    def close(self) -> None:
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


class TraceContext(HttpMiddleware):
    """Makes a span of each HTTP request, under the client's."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        super().__init__(app)
        self._tracer = tracing.tracer

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in TRACED_METHODS:
            await self.app(scope, receive, send)
            return
        parent = PROPAGATOR.extract(dict(Headers(scope=scope)))
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}",
            parent,
            kind=trace.SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "penstock.request_id": scope["state"]["request_id"],
            },
        ) as span:

            async def send_noting(message: Any) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(trace.StatusCode.ERROR)
                await send(message)

            await self.app(scope, receive, send_noting)


class RequestSpans(Observer):
    """Makes the span of each completion, with its queue, prefill and decode, when it has ended."""

    def __init__(self, tracing: Tracing, model_name: str) -> None:
        self._tracer = tracing.tracer
        self._model_name = model_name
        self._parents: dict[str, contexts.Context] = {}  # by request id

    def on_submit(self, record: RequestRecord) -> None:
        if not record.request.is_search_step:
            self._parents[record.request_id] = contexts.get_current()

    def on_finish(self, record: RequestRecord) -> None:
        if not record.request.is_search_step:
            self._trace(record, self._parents.pop(record.request_id, None))

    def on_search(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            self._trace(record, contexts.get_current())

    def _trace(self, record: RequestRecord, parent: contexts.Context | None) -> None:
        assert record.finished_at is not None
        assert record.finish_reason is not None
        since_boot_ns = time.time_ns() - time.monotonic_ns()

        def wall_ns(at: float) -> int:
            return since_boot_ns + int(at * 1e9)

        began, ended = record.submitted_at, record.finished_at
        span = self._tracer.start_span(
            "llm_request", parent, attributes=self._attributes(record), start_time=wall_ns(began)
        )
        if record.finish_reason is FinishReason.ERROR:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span, parent)
        first = record.first_token_at or ended
        started = max(first - record.prefill_s, began) if record.prefill_s else first
        phases = {
            "queue": (began, started),
            "prefill": (started, first),
            "decode": (record.first_token_at, record.last_token_at),
        }
        for name, (start, end) in phases.items():
            if start is not None and end is not None and end > start:
                part = self._tracer.start_span(name, inside, start_time=wall_ns(start))
                part.end(wall_ns(end))
        span.end(wall_ns(ended))

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        request = record.request
        assert record.finish_reason is not None
        assert record.finished_at is not None
        attributes: dict[str, Any] = {
            "gen_ai.request.id": record.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [record.finish_reason.value],
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": len(record.token_ids),
            "gen_ai.latency.e2e": record.finished_at - record.submitted_at,
        }
        if record.replica is not None:
            attributes["penstock.engine"] = record.replica
        if not request.pools:
            params = request.sampling
            attributes |= {
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": params.n,
            }
        if record.first_token_at is not None:
            waited_s = record.first_token_at - record.submitted_at
            attributes["gen_ai.latency.time_to_first_token"] = waited_s
            attributes["gen_ai.latency.time_in_queue"] = max(waited_s - record.prefill_s, 0.0)
        return attributes
