"""Spans: what is traced, under which parent, and what reaches a collector."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from mcp import Client
from mcp.server.mcpserver import Context, MCPServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from penstock.engine.ledger import Ledger
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import ConfigError
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.server.http.middleware import RequestContext
from penstock.server.operations.tracing import (
    RequestSpans,
    TraceContext,
    Tracing,
    connect_collector,
)
from penstock.server.responses import tool_servers
from penstock.server.responses.tool_servers import ToolServer, ToolServers

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def run_request(tracing: Tracing, request_id: str, reason: FinishReason) -> None:
    """A completion, from its submission to its end."""
    ledger = Ledger([RequestSpans(tracing, "tiny")], on_retire=lambda record: None)
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=2, temperature=0.5),
        seed=0,
    )
    ledger.open([request], lambda ids, reason: None)
    record = ledger.records[request_id]
    record.submitted_at -= 3.0
    now = record.submitted_at + 2.0
    if reason is FinishReason.LENGTH:
        first = EngineDelta(request_id=request_id, token_ids=[4], prefill_s=0.5)
        ledger.take(record, first, now)
        last = EngineDelta(request_id=request_id, token_ids=[5], finish_reason=reason)
        ledger.take(record, last, now + 0.75)
    else:
        ledger.retire(record, reason)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def span_id(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


def test_a_request_has_spans_by_phase_under_the_clients(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        run_request(tracing, "mine", FinishReason.LENGTH)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    client = TestClient(RequestContext(TraceContext(app, tracing)))
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
    client.get("/metrics")  # not traced
    assert client.post("/v1/completions", headers=headers).status_code == 200
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/completions", "llm_request", "queue", "prefill", "decode"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}
    http, whole = spans["POST /v1/completions"], spans["llm_request"]
    parents = {name: f"{span.parent.span_id:016x}" for name, span in spans.items() if span.parent}
    assert parents["POST /v1/completions"] == CALLER
    assert parents["llm_request"] == span_id(http)
    assert parents["queue"] == parents["prefill"] == parents["decode"] == span_id(whole)
    assert http.attributes is not None
    assert http.attributes["http.response.status_code"] == 200
    durations = {name: seconds(spans[name]) for name in ("queue", "prefill", "decode")}
    assert durations == {
        "queue": pytest.approx(1.5, abs=1e-6),
        "prefill": pytest.approx(0.5, abs=1e-6),
        "decode": pytest.approx(0.75, abs=1e-6),
    }
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert whole.attributes["gen_ai.usage.completion_tokens"] == 2
    assert whole.attributes["gen_ai.request.temperature"] == 0.5
    assert whole.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(1.5)


def test_a_request_that_failed_in_the_queue_says_so(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    run_request(tracing, "mine", FinishReason.ERROR)
    queue, whole = exporter.get_finished_spans()
    assert (queue.name, whole.name) == ("queue", "llm_request")
    assert not whole.status.is_ok


def test_a_tool_server_gets_the_trace(
    tracing: Tracing, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MCPServer("warehouse", log_level="ERROR")

    @server.tool()
    def tell(ctx: Context[Any, Any]) -> str:
        """Tells what came with the call."""
        return json.dumps(dict(ctx.request_context.meta or {}))

    @contextlib.asynccontextmanager
    async def connect(url: str) -> AsyncGenerator[Client, None]:
        async with Client(server) as client:
            yield client

    monkeypatch.setattr(tool_servers, "_connect", connect)
    warehouse = ToolServer("warehouse", "http://warehouse", ())
    servers = ToolServers([warehouse], call_timeout_s=60.0, max_output_bytes=1000)
    servers.tracing = tracing
    result = asyncio.run(servers.call(warehouse, "tell", "{}"))
    (span,) = exporter.get_finished_spans()
    assert span.name == "execute_tool tell"
    assert result.output is not None, result.error
    sent = json.loads(result.output)["traceparent"]
    assert sent.rpartition("-")[0] == f"00-{span.context.trace_id:032x}-{span_id(span)}"


def test_spans_reach_a_collector() -> None:
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            tracing = connect_collector(f"http://127.0.0.1:{collector.server_port}")
            run_request(tracing, "mine", FinishReason.LENGTH)
            tracing.close()
        finally:
            collector.shutdown()
            thread.join()
    ((path, request),) = received
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert names == ["queue", "prefill", "decode", "llm_request"]


def test_an_endpoint_that_is_not_http_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes OTLP over HTTP, such as http://localhost:4318"):
        connect_collector("grpc://localhost:4317")
