"""Runs the server: starts the engine and HTTP, handles signals, shuts down."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import penstock
from penstock.config import EngineConfig, ServerConfig
from penstock.config.lora_modules import AdapterPlaces, parse_lora_module
from penstock.engine.async_client import AsyncEngineClient
from penstock.engine.heap import return_large_blocks
from penstock.engine.outputs import start_engine
from penstock.protocol.errors import ConfigError
from penstock.protocol.processes import collector_at_rest
from penstock.server.http.sockets import listening_socket
from penstock.server.outside import connect_outside
from penstock.server.serving import StopRequest, serve_http

if TYPE_CHECKING:
    from penstock.server.adapters.registry import AdapterRegistry
    from penstock.server.service import Service

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOST_EXIT_CODE = 3  # the engine kept dying


async def serve(config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal. Returns the exit code.

    The first SIGTERM, SIGINT or SIGHUP gives requests `shutdown_timeout` seconds to finish. A
    second one (except SIGHUP) stops at once. An engine that dies is restarted until the restart
    policy gives up. Raises the engine's error if it cannot start, before anything is served.
    """
    return_large_blocks()  # request bodies can be large
    with listening_socket(server_config) as listener:
        stop = StopSignals()
        client = AsyncEngineClient(server_config)
        client.spawn(config)
        try:
            if server_config.api_server_count > 1:
                from penstock.server.processes.run import serve_in_processes

                is_started = await serve_in_processes(config, server_config, client, listener, stop)
            else:
                is_started = await _serve_here(config, server_config, client, listener, stop)
            is_lost = is_started and client.is_lost and not stop.is_urgent
            return LOST_EXIT_CODE if is_lost else stop.exit_code
        finally:
            if stop.is_urgent:
                client.kill()
            await client.close()


async def start(
    config: EngineConfig, server_config: ServerConfig, client: AsyncEngineClient
) -> Service:
    """Load the model in the engine, and the frontend meanwhile. Returns the service."""
    if not config.lora.enable_lora:
        refuse_adapters(server_config)
    tracing, tool_servers = await connect_outside(server_config)
    config, source, frontend = await start_engine(
        client,
        config,
        seeds=random.SystemRandom(),  # replicas and restarts must not repeat each other
        meanwhile=import_app,
    )
    from penstock.server.service import Service
    from penstock.text.text_pool import TextPool

    if frontend.tokenizer is not None:
        frontend.pool = TextPool(frontend.tokenizer)
    fingerprint = system_fingerprint(config, source.fingerprint)
    adapters = await start_adapters(config, server_config, client)
    return Service(
        config, server_config, client, frontend, tool_servers, fingerprint, adapters, tracing
    )


def import_app() -> None:
    """Import the routes and their schemas, while the engine loads."""
    with collector_at_rest():
        importlib.import_module("penstock.server.app")


def refuse_adapters(server_config: ServerConfig) -> None:
    """Raise `ConfigError` for options that need adapters."""
    for name in ("lora_modules", "lora_resolver", "allowed_lora_paths"):
        if getattr(server_config, name):
            raise ConfigError(f"{name} needs enable_lora: give --enable-lora, too")


async def start_adapters(
    config: EngineConfig, server_config: ServerConfig, client: AsyncEngineClient
) -> AdapterRegistry | None:
    """Load the adapters of the command line. Raises `ConfigError`. None without LoRA."""
    if not config.lora.enable_lora:
        return None
    from penstock.server.adapters.engine import EngineAdapters
    from penstock.server.adapters.registry import AdapterRegistry
    from penstock.server.adapters.sources import find_adapter

    registry = AdapterRegistry(
        EngineAdapters(client),
        base_names=[*config.model.names, config.model.model],
        resolver=AdapterPlaces.parse("lora_resolver", server_config.lora_resolver),
        allowed=AdapterPlaces.parse("allowed_lora_paths", server_config.allowed_lora_paths),
        num_host=config.lora.num_host_adapters,
        find=partial(find_adapter, download_dir=config.load.download_dir),
    )
    try:
        await registry.load_all([parse_lora_module(text) for text in server_config.lora_modules])
    except BaseException:
        registry.close()
        raise
    client.observers.append(registry)
    return registry


def system_fingerprint(config: EngineConfig, model_fingerprint: str) -> str:
    """A fingerprint that is equal for servers with the same answers to the same seeds."""
    parts = (
        penstock.__version__,
        model_fingerprint,
        config.model.dtype,
        config.model.model_impl,
        config.load.gguf_compute,
        config.load.quantization,
        config.cache.kv_cache_dtype,
    )
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


async def _serve_here(
    config: EngineConfig,
    server_config: ServerConfig,
    client: AsyncEngineClient,
    listener: socket.socket,
    stop: StopSignals,
) -> bool:
    """Serve in this process. Returns False if it is stopped before that."""
    service = await stop.unless_stopped(start(config, server_config, client))
    if service is None:
        return False
    from penstock.server.app import build_app
    from penstock.server.shared import shared_here

    app = build_app(service, shared_here(service, client))
    telling = asyncio.ensure_future(tell_stop(client, server_config, stop))
    try:
        await serve_http(
            *(service, app, stop, [listener]),
            on_start=lambda _: announce(service.config, server_config, listener),
        )
    finally:
        telling.cancel()
        service.close()
    return True


async def tell_stop(client: AsyncEngineClient, config: ServerConfig, stop: StopRequest) -> None:
    """Log what a shutdown waits for."""
    await stop.requested.wait()
    num, limit_s = client.num_requests, config.shutdown_timeout
    logger.info("Shutting down; %d requests have %g s to finish", num, limit_s)


def announce(config: EngineConfig, server: ServerConfig, listener: socket.socket) -> None:
    """Print the server's URLs to standard output, if it is open."""
    url = server.url
    if server.uds is None:
        url = url.replace(f":{server.port}", f":{listener.getsockname()[1]}", 1)
    try:
        print(
            f"Penstock serves {', '.join(config.model.names)}\n"
            f"  API   {url}/v1\n"
            f"  docs  {url}/docs\n"
            f"  page  {url}/",
            flush=True,
        )
    except OSError as error:  # a full disk or a reader that has left: serve anyway
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit would fail
        logger.warning("Serving at %s; standard output cannot be written to: %s", url, error)


class StopSignals(StopRequest):
    """SIGTERM, SIGINT and SIGHUP: the first requests a shutdown, the second an immediate one.

    A closing terminal may send SIGHUP twice, so SIGHUP is never urgent. If SIGHUP is ignored
    (nohup), it stays ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = signal.SIGTERM
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    @property
    def exit_code(self) -> int:
        """0 after a clean shutdown, 128 + signal after an immediate one."""
        return 128 + self._last if self.is_urgent else 0

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.requested.is_set():
            self.requested.set()
        elif number != signal.SIGHUP:
            self.urgent.set()
        else:
            return
        self._last = number

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None if a signal arrives first."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.requested.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
                self.urgent.set()  # there is nothing to drain yet
