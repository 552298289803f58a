"""Connections: the parent accepts them and gives each to the API process with the fewest.

The alternatives balance worse. With a listening socket for each process (SO_REUSEPORT), the kernel
chooses by a hash, so a few connections of a proxy may all meet in one process, and two servers
could take the same port without an error. From one socket that all processes accept from, the first
to wake takes a burst.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

    from penstock.server.processes.link import ApiLink

logger = logging.getLogger(__name__)

BACKLOG = 2048  # as uvicorn's
MAX_ACCEPTS = 64  # before other work has its turn
RETRY_S = 0.02
MAX_FILES = 64  # in a message


class Door:
    """The parent's end of the socket that connections are passed through to an API process.

    It closes when the process has closed its end. `on_close` is called then.
    """

    def __init__(
        self, sock: socket.socket, link: ApiLink, on_close: Callable[[], None] = lambda: None
    ) -> None:
        sock.setblocking(False)
        self.is_open = True
        self._socket = sock
        self._link = link
        self._on_close = on_close
        self._passed_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self.close)  # nothing ever comes but the end

    @property
    def order(self) -> tuple[int, float]:
        """Who has the fewest connections comes first, and then who has waited longest for one."""
        return self._link.num_connections, self._passed_at

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._on_close()

    def pass_on(self, connection: socket.socket) -> bool:
        """Pass a connection on. False if the process takes none now."""
        try:
            socket.send_fds(self._socket, [b"c"], [connection.fileno()])
        except OSError:  # it is slow, or it is gone
            return False
        self._link.num_handed += 1
        self._passed_at = time.monotonic()
        return True


class Acceptor:
    """Accepts connections from a listening socket while there are doors."""

    def __init__(self, listener: socket.socket, doors: Callable[[], Sequence[Door]]) -> None:
        self._listener = listener
        self._doors = doors
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[socket.socket] = deque()  # accepted, and no door took them
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more. Safe to call twice."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()
        for connection in self._waiting:
            connection.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                logger.error("Cannot accept connections: %s", error)
                self._pause()
                return
            self._waiting.append(connection)
            if not self._pass_waiting():
                self._pause()
                return

    def _pass_waiting(self) -> bool:
        """Pass connections on. False if some are left."""
        while self._waiting:
            for door in sorted(self._doors(), key=lambda item: item.order):
                if door.pass_on(self._waiting[0]):
                    self._waiting.popleft().close()
                    break
            else:
                return False
        return True

    def _pause(self) -> None:
        """Accept again in a moment. Further connections wait in the kernel."""
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(RETRY_S, self._resume)

    def _resume(self) -> None:
        if not self._pass_waiting():
            self._retry = self._loop.call_later(RETRY_S, self._resume)
            return
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._accept)


class Arrivals:
    """An API process's end: takes connections for its uvicorn server. uvicorn closes it."""

    def __init__(
        self, sock: socket.socket, server: uvicorn.Server, report: Callable[[int, int], None]
    ) -> None:
        """`report` is told how many connections have come, and how many are open."""
        sock.setblocking(False)
        self._socket = sock
        self._server = server
        self._report = report
        self._num_seen = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._take)
        self._reporting = asyncio.ensure_future(self._report_changes())

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._reporting.cancel()
        self._socket.close()

    async def wait_closed(self) -> None:
        pass

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data, files, _, _ = socket.recv_fds(self._socket, MAX_FILES, MAX_FILES)
            if not data:  # the parent is gone, and so will be this process
                self._loop.remove_reader(self._socket.fileno())
            for file in files:
                self._num_seen += 1
                task = asyncio.ensure_future(self._open(socket.socket(fileno=file)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _open(self, connection: socket.socket) -> None:
        config, server = self._server.config, self._server
        connection.setblocking(False)

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=server.server_state, app_state=server.lifespan.state
            )
            return made

        try:
            await self._loop.connect_accepted_socket(protocol, connection, ssl=config.ssl)
        except OSError as error:  # it has left, or its TLS handshake failed
            logger.debug("A connection was not opened: %s", error)
            connection.close()

    async def _report_changes(self) -> None:
        last = (0, 0)
        while True:
            await asyncio.sleep(RETRY_S)
            now = self._num_seen, len(self._server.server_state.connections) + len(self._tasks)
            if now != last:
                self._report(*now)
                last = now
