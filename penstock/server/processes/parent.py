"""The parent of several API processes: has the engines, and restarts the processes that die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from penstock.config import EngineConfig, ServerConfig
from penstock.engine.async_client import AsyncEngineClient
from penstock.protocol.errors import EngineDeadError, PenstockError
from penstock.protocol.processes import module_command
from penstock.server.adapters.holds import AdapterVersion
from penstock.server.adapters.registry import AdapterListener, AdapterRegistry
from penstock.server.operations.metrics import ServerMetrics
from penstock.server.processes.arrivals import Acceptor, Door
from penstock.server.processes.link import ApiLink, Parent
from penstock.server.processes.messages import ApiHello
from penstock.server.responses.store import memory_store

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.02
QUICK_DEATH_S = 10.0
FIRST_DELAY_S = 0.5  # after a quick death; then twice as long each time
LONGEST_DELAY_S = 30.0


class Child:
    """One API process from start to death."""

    def __init__(self, link: ApiLink, number: int, on_door_close: Callable[[], None]) -> None:
        self.link = link
        self.number = number
        self._on_door_close = on_door_close
        self._died: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._started_at = time.monotonic()

    async def start(self, hello: ApiHello) -> None:
        """Start the process. Raises OSError if the system has no process, memory or file left."""
        with contextlib.ExitStack() as on_failure:
            ours, theirs = map(on_failure.enter_context, socket.socketpair())
            door, arrivals = map(on_failure.enter_context, socket.socketpair())
            files = (theirs.fileno(), arrivals.fileno())
            self.process = subprocess.Popen(
                module_command("penstock.server.processes.child", *map(str, files)),
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                start_new_session=True,  # a terminal's Ctrl-C must not reach it
            )
            on_failure.pop_all()
        theirs.close()
        arrivals.close()
        self.door = Door(door, self.link, self._on_door_close)
        threading.Thread(target=self._wait, name="api-watch", daemon=True).start()
        await self.link.open(ours, hello)

    def _wait(self) -> None:
        code = self.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._died.get_loop().call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self.door.close()
        self.link.channel.close()
        self._died.set_result(code)

    async def ended(self) -> str:
        """Wait until it has ended. Returns how."""
        code = await asyncio.shield(self._died)
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    @property
    def is_serving(self) -> bool:
        started = self.link.started
        return started.done() and started.exception() is None and not self._died.done()

    @property
    def was_quick(self) -> bool:
        return time.monotonic() - self._started_at < QUICK_DEATH_S


class ApiProcesses(AdapterListener):
    """Starts the API processes, restarts those that die, and gives them connections."""

    def __init__(
        self, config: EngineConfig, server_config: ServerConfig, client: AsyncEngineClient
    ) -> None:
        """`config` is that of the model that was found."""
        self._config = config
        self._server_config = server_config
        self._client = client
        self._store = memory_store(server_config)
        is_fair = config.scheduler.scheduling_policy == "fair"
        self._parent = Parent(client, self._store, is_fair)
        self._children: list[Child] = []
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._acceptor: Acceptor | None = None
        self._is_stopping = False

    async def start(self) -> None:
        """Start the processes. They load their frontends in the background."""
        for _ in range(self._server_config.api_server_count):
            await self._start_one()

    async def _start_one(self) -> Child:
        link = ApiLink(self._parent, self._parent.links.remove)
        child = Child(link, next(self._numbers), self._on_door_close)
        version = self._client.config if self._client.info is not None else self._config
        await child.start(ApiHello(child.number, self._config, self._server_config, version))
        self._parent.links.append(link)
        self._children.append(child)
        return child

    async def started(self) -> None:
        """Wait until all processes serve. Raises the error of one that cannot."""
        starts = [child.link.started for child in self._children]
        done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        for start in done:
            start.result()

    async def serve(self, adapters: AdapterRegistry | None, listener: socket.socket) -> None:
        """The engines are loaded: let the processes serve. Raises the error of one that cannot."""
        metrics = ServerMetrics(self._config, self._client, self._store)
        self._parent.adapters, self._parent.metrics = adapters, metrics
        if adapters is not None:
            adapters.listeners.append(self)
        for child in self._children:
            child.link.begin()
        await self.started()
        self._acceptor = Acceptor(listener, self._doors)
        work = [self._tell_status(), *(self._keep(child) for child in self._children)]
        self._tasks += map(asyncio.ensure_future, work)

    def _doors(self) -> list[Door]:
        return [child.door for child in self._children if child.is_serving and child.door.is_open]

    def _on_door_close(self) -> None:
        """At the end, new connections are refused as soon as no process takes them."""
        if self._is_stopping and self._acceptor is not None and not self._doors():
            self._acceptor.close()

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            for link in self._parent.links:
                link.tell_status()

    async def _keep(self, child: Child) -> None:
        """Restart a process when it dies."""
        delay_s = 0.0
        while True:
            how = await child.ended()
            self._children.remove(child)
            logger.error("API process %d died (%s): its connections are lost", child.number, how)
            assert self._parent.metrics is not None
            self._parent.metrics.observer.on_api_restart()
            delay_s = min(max(2 * delay_s, FIRST_DELAY_S), LONGEST_DELAY_S) * child.was_quick
            await asyncio.sleep(delay_s)
            child = await self._restart()

    async def _restart(self) -> Child:
        """Start another process. It may end at once."""
        while True:
            try:
                child = await self._start_one()
                break
            except OSError as error:
                logger.error("An API process cannot be started: %s", error)
                await asyncio.sleep(LONGEST_DELAY_S)
        child.link.begin()
        try:
            await child.link.started
        except PenstockError as error:
            logger.error("API process %d cannot serve: %s", child.number, error)
            child.process.kill()
        return child

    # -- the end

    def stop(self, is_urgent: bool) -> None:
        """Let the processes finish their requests, or end them if it is urgent.

        They take connections until then, to refuse their requests.
        """
        self._is_stopping = True
        self._end_tasks()
        for child in self._children:
            if child.is_serving:
                child.link.channel.tell("stop", is_urgent)
            else:
                child.process.kill()

    def lose(self, error: EngineDeadError) -> None:
        """All engines are gone for good: let the processes end."""
        for child in self._children:
            child.link.channel.tell("lose", str(error))
        self.stop(is_urgent=False)

    async def wait_until_ended(self) -> None:
        """Wait until all processes have ended."""
        await asyncio.gather(*(child.ended() for child in self._children))

    async def close(self) -> None:
        """End the processes that are left."""
        self._end_tasks()
        if self._acceptor is not None:
            self._acceptor.close()
        for child in self._children:
            child.process.kill()
        await self.wait_until_ended()

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    # -- adapters

    def on_load(self, version: AdapterVersion) -> None:
        for link in self._parent.links:
            link.add_adapter(version)

    def on_retire(self, version: AdapterVersion, ends_requests: bool) -> None:
        for link in self._parent.links:
            link.retire_adapter(version, ends_requests)
