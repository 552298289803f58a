"""Shared: what all API processes of a server have in common, beside the engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.engine.async_client import AsyncEngineClient
from penstock.server.http.exchange import ExchangeObserver
from penstock.server.operations.metrics import ServerMetrics
from penstock.server.responses.store import ResponseStore, memory_store
from penstock.server.service import Service


@dataclass(frozen=True)
class Shared:
    store: ResponseStore
    metrics: Callable[[], Awaitable[bytes]]  # as text
    on_exchange: ExchangeObserver  # counts an HTTP request
    on_tool_turn: Callable[[bool, bool, str], None]  # see `Service`
    on_media_lookup: Callable[[bool], None]  # see `MediaFrontend`
    # Cancels a background response, by owner and id, that another API process may run.
    stop_elsewhere: Callable[[str, str], Awaitable[None]] | None = None


def shared_here(service: Service, client: AsyncEngineClient) -> Shared:
    """Of a server whose only API process is this one."""
    store = memory_store(service.server_config)
    metrics = ServerMetrics(service.config, client, store)

    async def render() -> bytes:
        return metrics.render()

    observer = metrics.observer
    return Shared(
        store, render, metrics.http.on_exchange, observer.on_tool_turn, observer.on_media_lookup
    )
