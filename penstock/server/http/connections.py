"""ConnectionWatch: decides which connections are too slow: requests not sent, answers not read.

uvicorn waits for both forever. Here one task checks all connections periodically. That is cheap
and works with both of uvicorn's HTTP parsers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from penstock.server.http.protocols import MAX_WAITING_BYTES, raw_error

logger = logging.getLogger(__name__)

MIN_BYTES_READ = MAX_WAITING_BYTES  # that a client must read within the write timeout
CHECKS_PER_LIMIT = 8  # checks per timeout
NUM_SPARE_FILES = 64  # for the server itself and for starting another engine


def usable_connections(num_asked: int) -> int:
    """Return how many connections may be open. Some files are reserved for an engine restart.

    Raises this process's limit on open files if necessary and allowed.
    """
    try:
        import resource
    except ImportError:
        return num_asked
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = num_asked + NUM_SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return num_asked
    raised = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    with contextlib.suppress(ValueError, OSError):  # then the limit stays the same
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    num_usable = max(min(num_asked, soft - NUM_SPARE_FILES), 1)
    if num_usable < num_asked:
        logger.warning(
            "Only %d files may be open here: %d connections at once rather than the %d of "
            "--max-connections (raise ulimit -n for more)",
            *(soft, num_usable, num_asked),
        )
    return num_usable


@dataclass
class _IdleWait:
    """A phase in which the server waits for a connection."""

    cycle: Any  # uvicorn's last request on this connection, or None
    since: float
    is_writing: bool
    num_unsent: int = 0
    num_resumes: int = 0


class ConnectionWatch:
    """Closes connections that keep the server waiting.

    read_timeout_s: for a whole request, head and body, from the opening of the connection or the
    request's first byte. write_timeout_s: for a client to read `MIN_BYTES_READ` of the waiting
    bytes. uvicorn closes idle connections between two requests.
    """

    def __init__(self, read_timeout_s: float, write_timeout_s: float) -> None:
        self._read_timeout_s = read_timeout_s
        self._write_timeout_s = write_timeout_s
        self._interval_s = min(read_timeout_s, write_timeout_s) / CHECKS_PER_LIMIT
        self._last_look: float | None = None
        self._elapsed_s = 0.0  # the clock of `check`
        self._waits: WeakKeyDictionary[Any, _IdleWait] = WeakKeyDictionary()

    async def run(self, connections: Iterable[Any]) -> None:
        """Watch uvicorn's set of open connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            self.look(connections, loop.time())

    def look(self, connections: Iterable[Any], now: float) -> None:
        """Check all connections. Time in which this process was stopped does not count."""
        if self._last_look is not None:
            self._elapsed_s += min(now - self._last_look, 2 * self._interval_s)
        self._last_look = now
        for connection in list(connections):
            self.check(connection, self._elapsed_s)

    def check(self, connection: Any, now: float) -> None:
        """Close a connection that exceeded its timeout."""
        transport = connection.transport
        num_unsent = transport.get_write_buffer_size()
        is_writing = connection.flow.write_paused or (transport.is_closing() and num_unsent > 0)
        if not is_writing and not _awaits_request(connection):
            self._waits.pop(connection, None)
            return
        wait = self._waits.get(connection)
        if wait is None or wait.cycle is not connection.cycle or wait.is_writing != is_writing:
            self._waits[connection] = _IdleWait(
                connection.cycle, now, is_writing, num_unsent, connection.num_resumes
            )
        elif is_writing and (
            connection.num_resumes != wait.num_resumes
            or num_unsent <= wait.num_unsent - MIN_BYTES_READ
        ):
            wait.since, wait.num_unsent, wait.num_resumes = now, num_unsent, connection.num_resumes
        elif is_writing and now - wait.since > self._write_timeout_s:
            logger.info("A client does not read its response: dropped %d bytes", num_unsent)
            transport.abort()
        elif not is_writing and now - wait.since > self._read_timeout_s:
            message = (
                f"the request did not arrive within {self._read_timeout_s:g} s "
                "(--request-read-timeout-s)"
            )
            _refuse(connection, raw_error(408, message))


def end_arrivals(connections: Iterable[Any]) -> None:
    """Refuse requests that have not fully arrived: the server is shutting down."""
    for connection in list(connections):
        if _awaits_request(connection):
            message = "the server is shutting down"
            _refuse(connection, raw_error(503, message, "Retry-After: 1\r\n"))


def drop_all(connections: Iterable[Any]) -> None:
    """Abort connections, even with unsent data."""
    for connection in list(connections):
        connection.transport.abort()


def _refuse(connection: Any, answer: bytes) -> None:
    cycle = connection.cycle
    has_answer = cycle is not None and cycle.response_started and not cycle.response_complete
    if not has_answer and not connection.transport.is_closing():
        connection.transport.write(answer)
    connection.transport.close()


def _awaits_request(connection: Any) -> bool:
    """Whether the rest of a request's head or body has not arrived yet."""
    cycle = connection.cycle
    if cycle is None:
        return True  # the first request of the connection
    if getattr(connection, "pipeline", None):
        return False  # the client has sent more requests already
    if cycle.response_complete:  # a part of the next request, or the rest of this one's body
        return connection.timeout_keep_alive_task is None
    return bool(cycle.more_body and not cycle.response_started)
