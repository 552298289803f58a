"""Serves in several API processes. This one, their parent, has the engines."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.async_client import AsyncEngineClient
from penstock.server.processes.parent import ApiProcesses
from penstock.server.run import announce, refuse_adapters, start_adapters, tell_stop
from penstock.server.serving import CANCEL_S, GRACE_S

if TYPE_CHECKING:
    from penstock.server.adapters.registry import AdapterRegistry
    from penstock.server.run import StopSignals

URGENT_S = 2.0  # for processes to end at once


async def serve_in_processes(
    config: EngineConfig,
    server_config: ServerConfig,
    client: AsyncEngineClient,
    listener: socket.socket,
    stop: StopSignals,
) -> bool:
    """Serve until a signal, or until all engines are gone. Returns False if it never started."""
    from penstock.loading.speculators import find_model

    if not config.lora.enable_lora:
        refuse_adapters(server_config)
    found, _ = await asyncio.to_thread(find_model, config)
    processes = ApiProcesses(found, server_config, client)
    adapters: AdapterRegistry | None = None

    async def start() -> bool:
        nonlocal adapters
        await processes.start()
        await _load(client, found, processes)
        adapters = await start_adapters(found, server_config, client)
        await processes.serve(adapters, listener)
        return True

    telling = asyncio.ensure_future(tell_stop(client, server_config, stop))
    try:
        if not await stop.unless_stopped(start()):
            return False
        announce(found, server_config, listener)
        await _wait(processes, server_config, client, stop)
        return True
    finally:
        telling.cancel()
        await processes.close()
        if adapters is not None:
            adapters.close()


async def _load(client: AsyncEngineClient, config: EngineConfig, processes: ApiProcesses) -> None:
    """Load the model, unless an API process cannot start."""
    loading = asyncio.ensure_future(client.load(config))
    failing = asyncio.ensure_future(processes.started())
    try:
        done, _ = await asyncio.wait({loading, failing}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        loading.cancel()
        failing.cancel()


async def _wait(
    processes: ApiProcesses, config: ServerConfig, client: AsyncEngineClient, stop: StopSignals
) -> None:
    """Wait for the end of the server, and let requests finish."""
    stopping = asyncio.ensure_future(stop.requested.wait())
    losing = asyncio.ensure_future(client.wait_until_lost())
    await asyncio.wait({stopping, losing}, return_when=asyncio.FIRST_COMPLETED)
    if losing.done():
        processes.lose(losing.result())
    else:
        processes.stop(is_urgent=False)
    ending = asyncio.ensure_future(processes.wait_until_ended())
    hurrying = asyncio.ensure_future(stop.urgent.wait())
    limit_s = config.shutdown_timeout + GRACE_S + CANCEL_S + URGENT_S
    await asyncio.wait({ending, hurrying}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        processes.stop(is_urgent=True)
        await asyncio.wait({ending}, timeout=URGENT_S)
    for task in (stopping, losing, hurrying, ending):
        task.cancel()
