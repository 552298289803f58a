"""The faster of uvicorn's two HTTP parsers, see `protocols.py`. Needs httptools."""

from __future__ import annotations

import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server.http.protocols import MAX_HEAD_BYTES, refuse

UPGRADE_NAMES = (b"upgrade", b"http2-settings")


class JsonHttpToolsProtocol(HttpToolsProtocol):
    """Limits heads, chunk headers and trailers. httptools itself has no limit.

    Trailers are dropped. uvicorn would add them to the headers of a request that is already being
    handled, and a proxy in front would not have seen them.

    A client may offer an upgrade (such as to HTTP/2) with its request. It is answered without one.
    httptools would stop after the head of such a request and drop its body. So the request is
    parsed again without the offer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._num_head_bytes = 0  # bytes outside the body: head, chunk headers, trailers
        self._data = b""  # being parsed

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._num_head_bytes = size
            raise ValueError("the head is too large")  # stops the parser; we send the answer
        self._in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_head_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._num_head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        refuse(self.transport, self.cycle, self._num_head_bytes > MAX_HEAD_BYTES)

    def _should_upgrade(self) -> bool:
        return True  # keeps uvicorn from handling a request that offers an upgrade

    def handle_websocket_upgrade(self) -> None:
        """Called where the parser stopped, for any kind of upgrade."""
        stop = sys.exc_info()[1]
        assert isinstance(stop, httptools.HttpParserUpgrade)
        if self.scope["method"] == "CONNECT":  # an upgrade by itself, not supported
            self.send_400_response("")
            return
        rest = self._data[stop.args[0] :]
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(item for item in tokens if item.lower() not in UPGRADE_NAMES)
            if name not in UPGRADE_NAMES and value:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self._in_head, self._num_head_bytes = True, 0
        self.data_received(b"".join(head) + b"\r\n" + rest)
