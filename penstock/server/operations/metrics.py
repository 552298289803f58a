"""GET /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from penstock.config import EngineConfig
from penstock.engine.async_client import AsyncEngineClient
from penstock.engine.metrics_observer import MetricsObserver
from penstock.observability.metrics import CONTENT_TYPE
from penstock.server.http.errors import describe_errors
from penstock.server.operations.http_metrics import HttpMetrics
from penstock.server.operations.throughput import ThroughputLog
from penstock.server.responses.store import ResponseStore

router = APIRouter(tags=["Operations"])


@router.get("/metrics", response_class=PlainTextResponse, responses=describe_errors(401))
async def metrics(request: Request) -> PlainTextResponse:
    """Metrics in Prometheus format, listed in docs/metrics.md."""
    render: Callable[[], Awaitable[bytes]] = request.app.state.metrics
    return PlainTextResponse(await render(), media_type=CONTENT_TYPE)


class ServerMetrics:
    """The metrics of a server. Also writes its throughput log."""

    def __init__(
        self, config: EngineConfig, client: AsyncEngineClient, store: ResponseStore
    ) -> None:
        self.observer = MetricsObserver(config, config.model.names[0])
        self.http = HttpMetrics()
        self._client = client
        self._store = store
        for replica, info in client.replicas.infos.items():
            self.observer.on_ready(replica, info)
        client.observers.append(self.observer)
        if not config.observability.disable_log_stats:
            client.observers.append(ThroughputLog())

    def render(self) -> bytes:
        """The metrics as text."""
        self.observer.show_running(self._client.replicas.running)
        self.observer.count_tokens()
        self.observer.show_stored(self._store.num_entries, self._store.num_bytes)
        return self.observer.metrics.render() + self.http.render()
