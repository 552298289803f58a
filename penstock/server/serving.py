"""Serves HTTP until it is told to stop, and lets requests finish then."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import EngineDeadError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from penstock.server.service import Service

# Of idle connections. Longer than clients and load balancers keep them (5 s in httpx, 60 s in many
# balancers), so that these close them: a request must not meet a connection that is being closed.
KEEP_ALIVE_S = 75
GRACE_S = 5.0  # for sending responses after the drain has ended
CANCEL_S = 10  # after that, before uvicorn cancels handlers whose clients are gone


class StopRequest:
    """A shutdown that lets requests finish, and one that does not."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.urgent = asyncio.Event()

    @property
    def is_urgent(self) -> bool:
        return self.urgent.is_set()


async def serve_http(
    service: Service,
    app: FastAPI,
    stop: StopRequest,
    sockets: list[socket.socket],
    on_start: Callable[[uvicorn.Server], None],
) -> None:
    """Serve until a stop is requested, or all engines are gone for good."""
    import uvicorn

    from penstock.server.http.connections import ConnectionWatch, usable_connections
    from penstock.server.http.protocols import MAX_HEAD_BYTES, protocol_class

    config = service.server_config

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # whoever has `stop` handles them

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_start(self)

    max_connections = -(-config.max_connections // config.api_server_count)
    server = Server(
        uvicorn.Config(
            app,
            http=protocol_class(usable_connections(max_connections)),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
            log_config=None,  # `setup_logging` has done it
            log_level=config.uvicorn_log_level,
            access_log=False,  # ours has the request's id and duration
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=2 if config.ssl_ca_certs else 0,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(config.shutdown_timeout + GRACE_S) + CANCEL_S,
        )
    )
    draining = asyncio.ensure_future(_drain(service, server, stop))
    losing = asyncio.ensure_future(_end_when_lost(service, server))
    watch = ConnectionWatch(config.request_read_timeout_s, config.slow_reader_timeout_s)
    watching = asyncio.ensure_future(watch.run(server.server_state.connections))
    try:
        await server.serve(sockets=sockets)
    finally:
        draining.cancel()
        losing.cancel()
        watching.cancel()


async def _drain(service: Service, server: uvicorn.Server, stop: StopRequest) -> None:
    """At the first request, refuse new requests. At the second or a timeout, end the others.

    Until then the server listens: a client that comes gets a 503, not a refused connection.
    """
    from penstock.server.http.connections import drop_all, end_arrivals

    await stop.requested.wait()
    timeout_s = service.server_config.shutdown_timeout
    service.is_draining = True
    _close_after_responses(server)
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


def _close_after_responses(server: uvicorn.Server) -> None:
    """Let the responses to further requests say that their connection ends.

    A client that kept it would send its next request into a connection that is being closed.
    """
    close = (b"connection", b"close")
    server.config.encoded_headers.append(close)  # uvicorn copies them every second
    server.server_state.default_headers = [*server.server_state.default_headers, close]


async def _end_when_lost(service: Service, server: uvicorn.Server) -> None:
    """End the server once the engine is gone for good. Its process manager may restart it."""
    await service.client.wait_until_lost()
    server.should_exit = True


def run_in_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run on uvloop if it is installed, else on asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
