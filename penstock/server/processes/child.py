"""An API process: speaks HTTP for the parent's engines. `main` is given two file descriptors.

One is the channel to the parent, the other passes connections. It exits when the parent is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import sys
from typing import TYPE_CHECKING

from penstock.config import EngineConfig
from penstock.engine.heap import return_large_blocks
from penstock.engine.process import PR_SET_NAME, PR_SET_PDEATHSIG, prctl
from penstock.protocol.errors import EngineDeadError, PenstockError
from penstock.server.outside import connect_outside
from penstock.server.processes.channel import Channel, DeltaBatch, Failed, Message, Problem
from penstock.server.processes.client import ParentClient
from penstock.server.processes.common import ParentAdapters, ParentStore
from penstock.server.processes.messages import AdapterInfo, ApiHello, Begin, Status
from penstock.server.serving import StopRequest, run_in_event_loop, serve_http

if TYPE_CHECKING:
    import uvicorn

    from penstock.loading.source import ModelSource
    from penstock.server.http.exchange import HttpExchange
    from penstock.server.responses.runner import ResponseRunner
    from penstock.server.service import Service
    from penstock.text.frontend import Frontend

logger = logging.getLogger(__name__)

PROCESS_NAME = b"penstock-api"


class ApiProcess:
    """Public methods are the parent's to call."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.channel = Channel(self, self._take, self._exit)
        self._stop = StopRequest()
        self._hello: asyncio.Future[ApiHello] = loop.create_future()
        self._begin: asyncio.Future[Begin] = loop.create_future()
        self._client: ParentClient | None = None
        self._adapters: ParentAdapters | None = None
        self._service: Service | None = None
        self._responses: ResponseRunner | None = None

    async def run(self, connections: socket.socket) -> None:
        """Serve until the parent stops it."""
        hello = await self._hello
        try:
            service = await self._start(hello)
        except PenstockError as error:
            self.channel.tell("give_up", Problem.of(error))
            await asyncio.Event().wait()  # the parent ends this process
            return
        from penstock.server.app import build_app
        from penstock.server.processes.arrivals import Arrivals
        from penstock.server.shared import Shared

        channel, loop = self.channel, asyncio.get_running_loop()

        async def metrics() -> bytes:
            return await channel.call(bytes, "render_metrics")

        async def stop_elsewhere(owner: str, response_id: str) -> None:
            await channel.call(None, "stop_response", owner, response_id)

        def on_exchange(exchange: HttpExchange) -> None:
            channel.tell("count_exchange", exchange)

        def on_tool_turn(is_streaming: bool, called: bool, api: str) -> None:
            channel.tell("count_tool_turn", is_streaming, called, api)

        def on_media_lookup(is_hit: bool) -> None:
            loop.call_soon_threadsafe(channel.tell, "count_media_lookup", is_hit)

        def on_start(server: uvicorn.Server) -> None:
            def report(num_seen: int, num_open: int) -> None:
                channel.tell("count_connections", num_seen, num_open)

            server.servers.append(Arrivals(connections, server, report))  # type: ignore[arg-type]
            channel.tell("start")

        store = ParentStore(channel, service.server_config)
        shared = Shared(store, metrics, on_exchange, on_tool_turn, on_media_lookup, stop_elsewhere)
        app = build_app(service, shared)
        self._responses = app.state.responses
        try:
            await serve_http(service, app, self._stop, [], on_start)
        finally:
            service.close()

    async def _start(self, hello: ApiHello) -> Service:
        """Load the frontend, and wait until the engines are loaded."""
        from penstock.observability.logs import setup_logging

        logs = hello.config.observability
        setup_logging(logs.log_level, logs.log_format)
        server_config = hello.server_config
        tracing, tool_servers = await connect_outside(server_config)
        version = hello.version
        frontend, source = await asyncio.to_thread(_load_frontend, version)
        from penstock.server.run import import_app, system_fingerprint
        from penstock.server.service import Service
        from penstock.text.frontend import open_media

        import_app()
        begin = await self._begin
        assert self._client is not None
        if begin.config.model.model != version.model.model:  # another one was rolled through
            version = begin.config
            frontend, source = await asyncio.to_thread(_load_frontend, version)
        frontend.max_model_len = begin.info.limits.max_model_len
        frontend.pooling = begin.info.pooling
        open_media(frontend, version.media, source, begin.info.limits)
        fingerprint = system_fingerprint(version, source.fingerprint)
        self._service = Service(
            hello.config,
            server_config,
            self._client,
            frontend,
            tool_servers,
            fingerprint if begin.shows_fingerprint else None,
            self._adapters,
            tracing,
            engine_id_suffix=f".{hello.number}",
        )
        self._service.root = version.model.model
        return self._service

    def _exit(self) -> None:
        """The parent is gone."""
        os._exit(1)

    def _take(self, message: Message) -> None:
        assert self._client is not None
        if isinstance(message, DeltaBatch):
            self._client.take(message.deltas)
        else:
            assert isinstance(message, Failed)
            self._client.take_failure(message)

    # -- calls

    def hello(self, hello: ApiHello) -> None:
        self._hello.set_result(hello)

    def begin(self, begin: Begin) -> None:
        hello = self._hello.result()
        self._client = ParentClient(self.channel, begin)
        if hello.config.lora.enable_lora:
            resolves = bool(hello.server_config.lora_resolver)
            self._adapters = ParentAdapters(self.channel, resolves)
            for info in begin.adapters:
                self._adapters.add(info)
        self._begin.set_result(begin)

    def take_status(self, status: Status) -> None:
        assert self._client is not None
        self._client.take_status(status)

    def lose(self, message: str) -> None:
        """All engines are gone for good."""
        assert self._client is not None
        self._client.lose(EngineDeadError(message))

    def stop(self, is_urgent: bool) -> None:
        self._stop.requested.set()
        if is_urgent:
            self._stop.urgent.set()

    def sync(self) -> None:
        """Answered after all that was told before."""

    def add_adapter(self, info: AdapterInfo) -> None:
        assert self._adapters is not None
        self._adapters.add(info)

    def retire_adapter(self, number: int, ends_requests: bool) -> None:
        assert self._adapters is not None
        self._adapters.retire(number, ends_requests)

    def hide_fingerprint(self) -> None:
        """Two versions of the model are served."""
        if self._service is not None:
            self._service.fingerprint = None

    async def show_version(self, config: EngineConfig) -> None:
        """This version of the model is served."""
        from penstock.server.operations.new_version import find_version

        if self._service is None or self._client is None:
            return
        version = await asyncio.to_thread(find_version, config, self._service.frontend)
        self._client.config = version.config
        version.show(self._service)

    async def stop_response(self, owner: str, response_id: str) -> None:
        if self._responses is not None:
            await self._responses.stop_here(owner, response_id)


def _load_frontend(config: EngineConfig) -> tuple[Frontend, ModelSource]:
    from penstock.loading.source import resolve_source
    from penstock.text.frontend import Frontend
    from penstock.text.text_pool import TextPool

    source = resolve_source(config.model, config.load)
    seeds = random.SystemRandom()
    frontend = Frontend(config.model, source, max_model_len=0, chat=config.chat, seeds=seeds)
    if frontend.tokenizer is not None:
        frontend.pool = TextPool(frontend.tokenizer)
    return frontend, source


async def serve(channel: socket.socket, connections: socket.socket) -> int:
    process = ApiProcess()
    await process.channel.open(channel)
    await process.run(connections)
    return 0


def main() -> int:
    # The parent gets the signals, and tells this process what to do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NAME, PROCESS_NAME)
    return_large_blocks()
    channel, connections = (socket.socket(fileno=int(text)) for text in sys.argv[1:3])
    return run_in_event_loop(serve(channel, connections))
