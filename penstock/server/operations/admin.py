"""Routes for operators and load balancers: health, version, load, cache reset."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

import penstock
from penstock.engine.client import ReplicaState, ReplicaStatus
from penstock.server.http.errors import describe_errors
from penstock.server.service import Service

router = APIRouter(tags=["Operations"])


class Version(BaseModel):
    version: str


class EngineLoad(BaseModel):
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = Field(
        default=0.0, description="Fraction of the KV cache in use, 0 to 1."
    )


class ReplicaLoad(EngineLoad):
    engine: int = Field(description="Index of the replica, as in the metrics' label `engine`.")
    state: ReplicaState
    server_load: int = Field(description="Number of unfinished requests on this replica.")


class ServerLoad(EngineLoad):
    server_load: int = Field(description="Number of unfinished requests.")
    replicas: list[ReplicaLoad]


@router.get("/health", response_class=Response, responses=describe_errors(400, 503))
async def health(
    request: Request,
    replica: Annotated[str | None, Query(description="Index of a replica.")] = None,
) -> Response:
    """Health check: 200 while an engine can run requests, else 503.

    With `replica`, 200 while that replica takes requests.
    """
    service: Service = request.app.state.service
    service.check_health(replica)
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
    return await health(request, None)


@router.post("/reset_prefix_cache", response_class=Response, responses=describe_errors(401, 503))
async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache. Later requests compute their prompts again."""
    return await _call(request, "reset_prefix_cache")


@router.post("/start_profile", response_class=Response, responses=describe_errors(400, 401, 503))
async def start_profile(request: Request) -> Response:
    """Start the torch profiler. Requires --profiler-config."""
    return await _call(request, "start_profile", None)


@router.post("/stop_profile", response_class=Response, responses=describe_errors(400, 401, 503))
async def stop_profile(request: Request) -> Response:
    """Stop the profiler and write its traces into torch_profiler_dir, one file per rank."""
    return await _call(request, "stop_profile")


async def _call(request: Request, method: str, *args: object) -> Response:
    """Run a method of the engines, if any can run requests."""
    service: Service = request.app.state.service
    service.check_health()
    await service.client.call(method, *args)
    return Response()


@router.get("/version", responses=describe_errors(401))
async def version() -> Version:
    """Show the version of Penstock."""
    return Version(version=penstock.__version__)


@router.get("/load", responses=describe_errors(401))
async def load(request: Request) -> ServerLoad:
    """Show the current load, in sum and by replica, at most a tenth of a second old.

    KV cache usage is the mean of the replicas'.
    """
    service: Service = request.app.state.service
    replicas = [load_of(item) for item in service.client.status()]
    usages = [item.kv_cache_usage for item in replicas]
    return ServerLoad(
        server_load=service.client.num_requests,
        num_requests_running=sum(item.num_requests_running for item in replicas),
        num_requests_waiting=sum(item.num_requests_waiting for item in replicas),
        kv_cache_usage=sum(usages) / len(usages),
        replicas=replicas,
    )


def load_of(replica: ReplicaStatus) -> ReplicaLoad:
    return ReplicaLoad(
        engine=replica.index,
        state=replica.state,
        server_load=replica.num_requests,
        num_requests_running=replica.num_running,
        num_requests_waiting=replica.num_waiting,
        kv_cache_usage=replica.kv_cache_usage,
    )
