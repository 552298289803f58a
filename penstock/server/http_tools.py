"""The faster one of uvicorn's HTTP parsers, see `http.py`; needs httptools."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server.http import MAX_HEAD_BYTES, refuse


class JsonHttpToolsProtocol(HttpToolsProtocol):
    """Also limits what a head may hold: httptools by itself keeps whatever comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._num_head_bytes = size
            raise ValueError("the head is too large")  # the parser stops, and we answer
        self._in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        refuse(self.transport, self.cycle, self._num_head_bytes > MAX_HEAD_BYTES)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # whoever offers an upgrade is answered without one
