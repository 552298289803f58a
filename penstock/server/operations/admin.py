"""Routes for operators and load balancers: health, version, load, cache reset."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

import penstock
from penstock.server.http.errors import describe_errors
from penstock.server.service import Service

router = APIRouter(tags=["Operations"])


class Version(BaseModel):
    version: str


class ServerLoad(BaseModel):
    server_load: int = Field(description="Number of unfinished requests.")
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float = Field(description="Fraction of the KV cache in use, 0 to 1.")


@router.get("/health", response_class=Response, responses=describe_errors(503))
async def health(request: Request) -> Response:
    """Health check: 200 while the engine can run requests, else 503."""
    service: Service = request.app.state.service
    service.check_health()
    return Response()


@router.get("/ready", response_class=Response, responses=describe_errors(429, 503))
async def ready(request: Request) -> Response:
    """Readiness check: 200 if a request would be accepted, 429 if the queue is full, else 503."""
    service: Service = request.app.state.service
    service.check_health()
    service.check_capacity()
    return Response()


@router.get("/ping", response_class=Response, responses=describe_errors(503))
@router.post("/ping", response_class=Response, responses=describe_errors(503))
async def ping(request: Request) -> Response:
    """Same as /health."""
    return await health(request)


@router.post("/reset_prefix_cache", response_class=Response, responses=describe_errors(401, 503))
async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache. Later requests compute their prompts again."""
    service: Service = request.app.state.service
    service.check_health()
    await service.client.call("reset_prefix_cache")
    return Response()


@router.get("/version", responses=describe_errors(401))
async def version() -> Version:
    """Show the version of Penstock."""
    return Version(version=penstock.__version__)


@router.get("/load", responses=describe_errors(401))
async def load(request: Request) -> ServerLoad:
    """Show the current load, at most a tenth of a second old."""
    service: Service = request.app.state.service
    stats = service.client.stats
    return ServerLoad(
        server_load=len(service.client.records),
        num_requests_running=stats.scheduler.num_running if stats else 0,
        num_requests_waiting=stats.scheduler.num_waiting if stats else 0,
        kv_cache_usage=stats.scheduler.kv_cache_usage if stats else 0.0,
    )
