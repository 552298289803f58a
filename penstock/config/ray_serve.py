"""Options of the Ray Serve application, and how its arguments are read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.engine import EngineConfig, all_options
from penstock.config.options import Option, coerce, option, options_of, require
from penstock.config.server import ServerConfig
from penstock.protocol.errors import ConfigError

_OF_SOCKETS = ("host", "port", "uds", "api_server_count", "max_connections", "root_path",
               "ssl_keyfile", "ssl_certfile", "ssl_ca_certs")  # fmt: skip


@dataclass(frozen=True)
class RayServeConfig:
    target_usage: float = option(
        0.8,
        "With autoscaling: how full an engine should be, by its KV cache or by running requests of "
        "max_num_seqs, whichever is more.",
    )
    target_queued_requests: float = option(
        8.0, "With autoscaling: queued requests per additional replica."
    )
    deployment_config: dict[str, Any] | None = option(
        None,
        "Ray Serve's own options of a deployment, such as num_replicas, autoscaling_config or "
        "ray_actor_options.",
    )

    def __post_init__(self) -> None:
        require(self, "target_usage", "target_queued_requests", above=0)


def read_serve_args(
    args: Mapping[str, Any],
) -> tuple[EngineConfig, ServerConfig, RayServeConfig]:
    """Options of the engine, the server and Ray Serve, by name. Raises `ConfigError`.

    `serve run` gives all values as texts.
    """
    engine = {each.name: each for options in all_options().values() for each in options}
    server = {each.name: each for each in options_of(ServerConfig)}
    own = {each.name: each for each in options_of(RayServeConfig)}
    declared = {**engine, **server, **own}
    given: dict[str, Any] = {}
    for key, value in args.items():
        name = key.replace("-", "_")
        if name in _OF_SOCKETS:
            raise ConfigError(f"{name} is for penstock serve: on Ray Serve, proxies listen")
        given[name] = _typed(declared[name], value) if name in declared else value
    settings = {name: given.pop(name) for name in [*given] if name in server}
    of_ray = {name: given.pop(name) for name in [*given] if name in own}
    config = EngineConfig.from_options(given)
    if config.parallel.nnodes > 1:
        raise ConfigError("nnodes is for penstock serve: use distributed_executor_backend=ray")
    return config, ServerConfig.from_options(settings), RayServeConfig(**of_ray)


def _typed(declared: Option, value: Any) -> Any:
    if isinstance(value, str) and (declared.type is not str or declared.is_list):
        with contextlib.suppress(ValueError):  # a size such as 4GiB, or a list's only text
            value = json.loads(value)
    return coerce(declared, value)
