"""HTTP protocol classes: decide how invalid HTTP is answered, and limit connections.

uvicorn parses requests before the app sees them, with httptools if it is installed, else with h11.
Both protocols are changed here in the same places: invalid HTTP gets an error in the format of all
errors. These places are not part of uvicorn's public interface, so its version is pinned
(`tests/server/test_uvicorn_parts.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import sys
import uuid
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.server.http.errors import encode_error, error_body

MAX_HEAD_BYTES = 64 * 1024  # of the request line and headers
MAX_WAITING_BYTES = 16 * 1024  # unsent bytes of an answer in this process; then senders wait


def raw_error(status: int, message: str, headers: str = "") -> bytes:
    """Return a complete error response that closes the connection."""
    body = encode_error(error_body(status, message))
    head = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"X-Request-Id: {uuid.uuid4().hex}\r\n"
        f"{headers}"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


def refuse(transport: asyncio.Transport, cycle: Any, is_too_large: bool) -> None:
    """Answer a request that cannot be parsed, unless an earlier answer is being sent. Close."""
    if transport.is_closing():
        return
    if cycle is None or cycle.response_complete or not cycle.response_started:
        if is_too_large:
            message = f"the request line and headers must have at most {MAX_HEAD_BYTES} bytes"
            transport.write(raw_error(431, message))
        else:
            message = "this is not HTTP/1.1: check the request line, the headers and the chunks"
            transport.write(raw_error(400, message))
    transport.close()


class JsonH11Protocol(H11Protocol):
    def send_400_response(self, msg: str) -> None:
        error = sys.exc_info()[1]  # uvicorn calls this in its except block
        is_too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        refuse(self.transport, self.cycle, is_too_large)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # a request that offers an upgrade is answered without one


def protocol_class(max_connections: int) -> type[asyncio.Protocol]:
    """Return the protocol class for uvicorn, limited to `max_connections` connections."""
    base: Any = JsonH11Protocol
    with contextlib.suppress(ImportError):
        from penstock.server.http.httptools_protocol import JsonHttpToolsProtocol

        base = JsonHttpToolsProtocol

    class LimitedProtocol(base):  # type: ignore[misc]
        num_resumes = 0  # how often the client has read everything that waited

        def connection_made(self, transport: asyncio.Transport) -> None:
            transport.set_write_buffer_limits(high=MAX_WAITING_BYTES, low=0)
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                message = f"all {max_connections} connections are taken; try again later"
                transport.write(raw_error(503, message, "Retry-After: 1\r\n"))
                transport.close()

        def resume_writing(self) -> None:
            self.num_resumes += 1
            super().resume_writing()

    return LimitedProtocol
