"""A small HTTP/1.1 client for measuring: it times bytes the moment they arrive.

It calls back from the event loop, so that a token costs no task switch. One core keeps up with
hundreds of streams. It parses with httptools, like the server.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

import penstock
from penstock.protocol.errors import ConfigError, PenstockError


class HttpError(PenstockError):
    """There was no valid response: the connection failed, broke or was not HTTP."""


class Receiver(Protocol):
    """Receives a response as it arrives."""

    def on_status(self, status: int) -> None: ...

    def on_body(self, data: bytes) -> None: ...


@dataclass(frozen=True)
class Address:
    """A server's address: host and port, or a Unix socket. Every path begins with `prefix`."""

    host: str
    port: int
    prefix: str
    is_tls: bool
    uds: str | None = None

    @staticmethod
    def parse(url: str) -> Address:
        """Parse ``http(s)://host[:port][/prefix]`` or ``unix:///path``. A final /v1 is ignored."""
        parts = urlsplit(url)
        if parts.scheme == "unix" and parts.path:
            return Address("localhost", 0, "", False, uds=parts.netloc + parts.path)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"base_url must look like http://127.0.0.1:8000, got {url!r}")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Address(parts.hostname, port or (443 if is_tls else 80), prefix, is_tls)


class HttpClient:
    """Sends requests to one server. Concurrent requests use separate connections.

    Idle connections are reused. Use it from one event loop.
    """

    def __init__(
        self,
        address: Address,
        api_key: str | None = None,
        more_headers: Sequence[tuple[str, str]] = (),
        *,
        is_verified: bool = True,
        request_id_prefix: str | None = None,
    ) -> None:
        self.address = address
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.is_tls else None
        if self._tls is not None and not is_verified:
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE
        self._request_id_prefix = request_id_prefix
        self._numbers = itertools.count()
        host = f"[{address.host}]" if ":" in address.host else address.host
        headers = [f"Host: {host}:{address.port}", f"User-Agent: penstock/{penstock.__version__}"]
        if api_key is not None:
            headers.append(f"Authorization: Bearer {api_key}")
        headers += [f"{name}: {value}" for name, value in more_headers]
        self._headers = "".join(f"{header}\r\n" for header in headers)

    async def get(self, path: str, receiver: Receiver) -> None:
        await self._exchange(f"GET {self.address.prefix}{path}", "", b"", receiver)

    async def post(self, path: str, body: bytes, receiver: Receiver) -> None:
        """POST JSON and wait for the response to end. Raises `HttpError` if it is incomplete."""
        headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if self._request_id_prefix is not None:
            headers += f"X-Request-Id: {self._request_id_prefix}{next(self._numbers)}\r\n"
        await self._exchange(f"POST {self.address.prefix}{path}", headers, body, receiver)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, target: str, headers: str, body: bytes, receiver: Receiver) -> None:
        message = f"{target} HTTP/1.1\r\n{self._headers}{headers}\r\n".encode() + body
        while connection := self._take_idle():
            try:
                await self._on(connection, message, receiver)
                return
            except _StaleConnection:
                continue  # the server closed it while it was idle
        await self._on(await self._connect(), message, receiver)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _on(self, connection: _Connection, message: bytes, receiver: Receiver) -> None:
        try:
            await connection.exchange(message, receiver)
        except BaseException:
            connection.abort()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        where = self.address
        try:
            if where.uds is not None:
                _, connection = await loop.create_unix_connection(_Connection, where.uds)
            else:
                _, connection = await loop.create_connection(
                    _Connection, where.host, where.port, ssl=self._tls
                )
        except OSError as error:
            place = where.uds or f"{where.host}:{where.port}"
            raise HttpError(f"cannot connect to {place}: {error.strerror or error}") from error
        return connection


class _StaleConnection(HttpError):
    """A reused connection closed before the first byte of the response."""


class _Connection(asyncio.Protocol):
    """One connection with one exchange at a time. The `on_*` methods are httptools' callbacks."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._num_exchanges = 0

    async def exchange(self, message: bytes, receiver: Receiver) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver = receiver
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_begun = self._has_length = self.is_reusable = False
        self._num_exchanges += 1
        self._transport.write(message)
        try:
            await self._done
        finally:
            self._receiver = None

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.abort()  # no request is pending
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(HttpError(f"the response is not proper HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._receiver is None or self._done.done():
            return
        if not self._has_begun and self._num_exchanges > 1:
            self._fail(_StaleConnection("the connection was closed while idle"))
        elif self._has_begun and not self._has_length and error is None:
            self._done.set_result(None)  # the end of the connection is the end of the response
        else:
            why = f" ({error})" if error is not None else ""
            where = "in the middle of" if self._has_begun else "before"
            self._fail(HttpError(f"the connection was closed {where} the response{why}"))

    def _fail(self, error: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    # -- from the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._has_begun = True
        assert self._receiver is not None
        self._receiver.on_status(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_body(data)

    def on_message_complete(self) -> None:
        self.is_reusable = self.is_open and self._parser.should_keep_alive()
        if not self._done.done():
            self._done.set_result(None)
