"""KV events: what an engine publishes about its prefix cache, for load balancers that index it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config.options import naming_option, option, options_of, parse_keys, require
from penstock.protocol.errors import ConfigError


@dataclass(frozen=True)
class KVEventsSettings:
    """The keys of `kv_events_config`."""

    enable_kv_cache_events: bool = option(False, "Publish KV events.")
    publisher: Literal["zmq", "null"] = option(
        "zmq", "zmq: publish on a ZeroMQ PUB socket; null: publish nothing."
    )
    endpoint: str = option(
        "tcp://*:5557",
        "Address of the PUB socket. It is bound if it names * or a file (ipc://), and connected to "
        "otherwise. The port is offset by data_parallel_rank.",
    )
    replay_endpoint: str | None = option(
        None,
        "Address of a ROUTER socket that replays past batches; same rules as endpoint.",
    )
    buffer_steps: int = option(10_000, "Number of past batches that can be sent again.")
    hwm: int = option(
        100_000, "Maximum batches that wait for a slow subscriber; then it misses some."
    )
    max_queue_size: int = option(
        100_000, "Maximum batches that wait to be published; then the engine waits."
    )
    topic: str = option("", "Topic of the messages.")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> KVEventsSettings:
        """Raises `ConfigError`, which names the key."""
        return cls(**parse_keys(cls, given, "kv_events_config"))

    def __post_init__(self) -> None:
        require(self, "hwm", "max_queue_size", least=1)
        require(self, "buffer_steps", least=0)
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is not None:
                _check_address(name, address)

    def at_rank(self, address: str, rank: int) -> str:
        """The address of a rank: each has a port or a file of its own."""
        if rank == 0:
            return address
        if address.startswith("tcp://"):
            host, port = address.rsplit(":", 1)
            return f"{host}:{int(port) + rank}"
        return f"{address}_dp{rank}"


def _check_address(name: str, address: str) -> None:
    rule = f"{name} must be tcp://HOST:PORT or ipc://PATH, got {address!r}"
    scheme, _, place = address.partition("://")
    if scheme not in ("tcp", "ipc") or not place:
        raise ConfigError(rule)
    if scheme == "tcp":
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(rule)


@dataclass(frozen=True)
class KVEventsConfig:
    kv_events_config: dict[str, Any] | None = option(
        None,
        'KV events for external load balancers, as JSON such as {"enable_kv_cache_events": true}. '
        "Keys: "
        + ", ".join(key.name for key in options_of(KVEventsSettings))
        + "; see docs/scaling.md. Default: off.",
    )

    def __post_init__(self) -> None:
        with naming_option("kv_events_config"):
            _ = self.settings

    @property
    def settings(self) -> KVEventsSettings | None:
        """None: no events are published."""
        if self.kv_events_config is None:
            return None
        settings = KVEventsSettings.parse(self.kv_events_config)
        is_on = settings.enable_kv_cache_events and settings.publisher != "null"
        return settings if is_on else None
