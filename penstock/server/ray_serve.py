"""The Ray Serve application: engines as replicas of a deployment, scaled by their own metrics.

Every replica is a whole server without sockets: the API, and an engine in a process of its own,
which is restarted if it dies. Ray Serve's proxies listen and choose the replica.
Import this module only for Ray Serve.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from penstock.config import EngineConfig, ServerConfig
from penstock.config.ray_serve import RayServeConfig, read_serve_args
from penstock.engine.async_client import AsyncEngineClient
from penstock.observability.logs import setup_logging
from penstock.server.app import build_app
from penstock.server.run import start
from penstock.server.shared import shared_here

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

LOAD = "penstock_load"


def application(args: dict[str, Any]) -> Any:
    """Build the application: ``serve run penstock.server.ray_serve:application model=...``.

    `args` are options of the engine, the server and `RayServeConfig`. Raises `ConfigError`.
    """
    config, server_config, own = read_serve_args(args)
    resources = ray.cluster_resources() if ray.is_initialized() else {}
    deployment = serve.deployment(serve.ingress(_entrance)(EngineReplica)).options(
        name="Penstock", **deployment_options(config, server_config, own, resources)
    )
    return deployment.bind(config, server_config, own)


def deployment_options(
    config: EngineConfig,
    server_config: ServerConfig,
    own: RayServeConfig,
    resources: Mapping[str, float],
) -> dict[str, Any]:
    """Ray Serve's options of the deployment: the user's, and defaults for the others."""
    options: dict[str, Any] = {
        "ray_actor_options": _actor_options(config, resources),
        "max_ongoing_requests": max(server_config.max_queued_requests, 1),  # the engine queues them
        "graceful_shutdown_timeout_s": server_config.shutdown_timeout,
    } | (own.deployment_config or {})
    if scaling := options.get("autoscaling_config"):
        policy = {"policy_function": f"{__name__}:choose_num_replicas"}
        options["autoscaling_config"] = {"policy": policy, **scaling}
    return options


def _actor_options(config: EngineConfig, resources: Mapping[str, float]) -> dict[str, float]:
    """What a replica asks Ray for. Ranks that are actors ask for themselves."""
    parallel, device = config.parallel, config.device
    if parallel.distributed_executor_backend == "ray":
        return {"num_cpus": 1}
    num_ranks = parallel.num_ranks * parallel.num_engines
    if device.device == "cuda" or (device.device == "auto" and resources.get("GPU")):
        return {"num_gpus": num_ranks}
    return {"num_cpus": (device.cpu_threads or 1) * num_ranks}


class EngineReplica:
    """A replica of the deployment. Ray Serve calls its methods."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: EngineConfig, server_config: ServerConfig, own: RayServeConfig
    ) -> None:
        setup_logging(config.observability.log_level, config.observability.log_format)
        parallel = config.parallel
        if parallel.distributed_executor_backend == "ray" and parallel.ray_address is None:
            address = ray.get_runtime_context().gcs_address
            config = replace(config, parallel=replace(parallel, ray_address=address))
        self._own = own
        self._client = AsyncEngineClient(server_config)
        self._client.spawn(config)
        try:
            self._service = await start(config, server_config, self._client)
        except BaseException:
            await self._client.close()
            raise
        self.api = build_app(self._service, shared_here(self._service, self._client))

    async def check_health(self) -> None:
        """Raise if the engine is gone for good: Ray Serve then replaces the replica."""
        if self._client.is_lost:
            raise await self._client.wait_until_lost()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {LOAD: self.load()}

    def load(self) -> float:
        """How many replicas this one's requests are enough for, with its targets."""
        status = self._client.status()
        running = sum(each.num_running for each in status) / self._client.max_num_seqs
        usage = max(sum(each.kv_cache_usage for each in status) / len(status), running)
        waiting = sum(each.num_waiting for each in status)
        return usage / self._own.target_usage + waiting / self._own.target_queued_requests

    async def close(self) -> None:
        """End the engine. Requests have ended."""
        self._service.close()
        await self._client.close()


def _entrance() -> Callable[[dict[str, Any], Receive, Send], Awaitable[None]]:
    """The ASGI app of a replica: its API, and its end."""

    async def enter(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await serve.get_replica_context().servable_object.api(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await serve.get_replica_context().servable_object.close()
        await send({"type": "lifespan.shutdown.complete"})

    return enter


def choose_num_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray Serve's autoscaling policy: as many replicas as their loads add up to.

    Ray Serve rounds up, keeps to the configured limits, and waits for the configured delays.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads:  # none has reported yet
        return context.target_num_replicas, {}
    mean = sum(loads.values()) / len(loads)
    return math.ceil(mean * context.current_num_replicas), {}
