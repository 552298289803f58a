"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from penstock.engine.metrics_observer import MetricsObserver
from penstock.observability.metrics import CONTENT_TYPE
from penstock.server.http.errors import describe_errors
from penstock.server.operations.http_metrics import HttpMetrics
from penstock.server.operations.throughput import ThroughputLog
from penstock.server.responses.runner import ResponseRunner
from penstock.server.service import Service

router = APIRouter(tags=["Operations"])


@router.get("/metrics", response_class=PlainTextResponse, responses=describe_errors(401))
async def metrics(request: Request) -> PlainTextResponse:
    """Metrics in Prometheus format, listed in docs/metrics.md."""
    observer: MetricsObserver = request.app.state.metrics
    service: Service = request.app.state.service
    observer.show_running(service.client.replicas.running)
    observer.count_tokens()
    runner: ResponseRunner = request.app.state.responses
    observer.show_stored(runner.store.num_entries, runner.store.num_bytes)
    http: HttpMetrics = request.app.state.http_metrics
    return PlainTextResponse(observer.metrics.render() + http.render(), media_type=CONTENT_TYPE)


def observe(service: Service) -> MetricsObserver:
    """Attach the metrics and the throughput log to a service."""
    observer = MetricsObserver(service.config, service.model_names[0])
    for replica, info in service.client.replicas.infos.items():
        observer.on_ready(replica, info)
    service.client.observers.append(observer)
    service.on_tool_turn = observer.on_tool_turn
    if not service.config.observability.disable_log_stats:
        service.client.observers.append(ThroughputLog())
    return observer
