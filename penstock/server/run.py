"""Runs the server: starts the engine and HTTP, handles signals, shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import penstock
from penstock.config import EngineConfig, ServerConfig
from penstock.config.lora_modules import AdapterPlaces, parse_lora_module
from penstock.engine.async_client import AsyncEngineClient
from penstock.engine.heap import return_large_blocks
from penstock.engine.outputs import start_engine
from penstock.protocol.errors import ConfigError, EngineDeadError
from penstock.server.http.sockets import listening_socket

if TYPE_CHECKING:
    import uvicorn

    from penstock.server.adapters.registry import AdapterRegistry
    from penstock.server.service import Service

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOST_EXIT_CODE = 3  # the engine kept dying
GRACE_S = 5.0  # for sending responses after the drain has ended
CANCEL_S = 10  # after that, before uvicorn cancels handlers whose clients are gone


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
            service = await stop.unless_stopped(start(config, server_config, client))
            if service is None:
                return stop.exit_code
            try:
                return await _serve_http(service, listener, stop)
            finally:
                service.close()
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
    tracing = None
    if server_config.otlp_traces_endpoint is not None:
        from penstock.server.operations.tracing import connect_collector

        tracing = connect_collector(server_config.otlp_traces_endpoint)
    tool_servers = None
    if server_config.tool_server:
        from penstock.server.responses.tool_servers import connect_tool_servers

        tool_servers = await connect_tool_servers(server_config)
    config, source, frontend = await start_engine(
        client,
        config,
        seeds=random.SystemRandom(),  # replicas and restarts must not repeat each other
        meanwhile=lambda: importlib.import_module("penstock.server.app"),
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


async def _serve_http(service: Service, listener: socket.socket, stop: StopSignals) -> int:
    import uvicorn

    from penstock.server.app import build_app
    from penstock.server.http.connections import ConnectionWatch, usable_connections
    from penstock.server.http.protocols import MAX_HEAD_BYTES, protocol_class

    config = service.server_config

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # `StopSignals` handles them

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce(service, listener)

    server = Server(
        uvicorn.Config(
            build_app(service),
            http=protocol_class(usable_connections(config.max_connections)),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
            log_config=None,  # `setup_logging` has done it
            log_level="warning",
            access_log=False,  # ours has the request's id and duration
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=2 if config.ssl_ca_certs else 0,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(config.shutdown_timeout + GRACE_S) + CANCEL_S,
        )
    )
    draining = asyncio.ensure_future(_drain(service, server, stop))
    losing = asyncio.ensure_future(_end_when_lost(service, server))
    watch = ConnectionWatch(config.request_read_timeout_s, config.slow_reader_timeout_s)
    watching = asyncio.ensure_future(watch.run(server.server_state.connections))
    try:
        await server.serve(sockets=[listener])
    finally:
        draining.cancel()
        losing.cancel()
        watching.cancel()
    is_lost = service.client.is_lost and not stop.is_urgent
    return LOST_EXIT_CODE if is_lost else stop.exit_code


async def _drain(service: Service, server: uvicorn.Server, stop: StopSignals) -> None:
    """At the first signal, refuse new requests. At the second or a timeout, end the others.

    Until then the server listens: a client that comes gets a 503, not a refused connection.
    """
    from penstock.server.http.connections import drop_all, end_arrivals

    await stop.requested.wait()
    timeout_s = service.server_config.shutdown_timeout
    num_left = len(service.client.records)
    logger.info("Shutting down; %d requests have %g s to finish", num_left, timeout_s)
    service.is_draining = True
    end_arrivals(server.server_state.connections)
    if running := set(server.server_state.tasks):
        done = asyncio.ensure_future(asyncio.wait(running))
        urgent = asyncio.ensure_future(stop.urgent.wait())
        await asyncio.wait({done, urgent}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        urgent.cancel()
    server.should_exit = True
    service.client.fail_all(EngineDeadError("the server is shutting down"))
    if not stop.is_urgent:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.urgent.wait(), GRACE_S)
        drop_all(server.server_state.connections)  # clients that do not read
    if stop.is_urgent:
        server.force_exit = True


async def _end_when_lost(service: Service, server: uvicorn.Server) -> None:
    """End the server once the engine is gone for good. Its process manager may restart it."""
    await service.client.wait_until_lost()
    server.should_exit = True


def announce(service: Service, listener: socket.socket) -> None:
    """Print the server's URLs to standard output, if it is open."""
    config, url = service.server_config, service.server_config.url
    if config.uds is None:
        url = url.replace(f":{config.port}", f":{listener.getsockname()[1]}", 1)
    try:
        print(
            f"Penstock serves {', '.join(service.model_names)}\n"
            f"  API   {url}/v1\n"
            f"  docs  {url}/docs\n"
            f"  page  {url}/",
            flush=True,
        )
    except OSError as error:  # a full disk or a reader that has left: serve anyway
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit would fail
        logger.warning("Serving at %s; standard output cannot be written to: %s", url, error)


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP: the first requests a shutdown, the second an immediate one.

    A closing terminal may send SIGHUP twice, so SIGHUP is never urgent. If SIGHUP is ignored
    (nohup), it stays ignored.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.urgent = asyncio.Event()
        self._last = signal.SIGTERM
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    @property
    def is_urgent(self) -> bool:
        return self.urgent.is_set()

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
