"""What cannot be parsed as HTTP gets the same kind of error as everything else."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from waiting import eventually

from penstock.server.http.httptools_protocol import JsonHttpToolsProtocol
from penstock.server.http.protocols import MAX_HEAD_BYTES, JsonH11Protocol, protocol_class

CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Echo:
    """Answers with the body, in pieces: at /slow, the last of them waits for a request to /go.

    At /headers, it answers with the names of the request's headers.
    """

    def __init__(self) -> None:
        self._may_go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        if scope["path"] == "/headers":
            body = json.dumps([name.decode() for name, _ in scope["headers"]]).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body or b"ok", "more_body": True})
        if scope["path"] == "/go":
            self._may_go.set()
        if scope["path"] == "/slow":
            await self._may_go.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture(scope="module", params=[JsonH11Protocol, JsonHttpToolsProtocol])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    config = uvicorn.Config(
        Echo(),
        http=request.param,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    serving.start()
    eventually(lambda: server.started)
    yield listener.getsockname()[1]
    server.should_exit = True
    serving.join()
    listener.close()


def talk(
    port: int,
    *parts: bytes,
    until: bytes | None = None,
    then: Callable[[], object] | None = None,
) -> bytes:
    """Everything that the server says to `parts`, until it closes the connection."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for part in parts:
            connection.sendall(part)
            while until is not None and until not in said:
                said += connection.recv(65536)
        if then is not None:
            then()
        try:
            while got := connection.recv(65536):
                said += got
        except ConnectionResetError:  # it did not care for all that was sent
            pass
    return said


def check_error(said: bytes, status: int) -> str:
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ") for line in lines)}
    assert first.split()[1] == str(status)
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    assert len(body) == int(headers["content-length"])
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("BadRequestError", status)
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    "parts",
    [
        [b"nonsense\r\n\r\n"],
        [b"GET / HTTQ/1.1\r\nHost: x\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nHost: x\r\nname with spaces: y\r\n\r\n"],
        [b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n"],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],  # TLS, where there is none
        [CHUNKED, b"zz\r\nhello\r\n"],
        [CHUNKED, b"5\r\nhello\r\n", b"-1\r\n\r\n"],
    ],
    ids=["line", "version", "header", "name", "length", "tls", "chunk", "second-chunk"],
)
def test_what_is_not_http_is_a_json_error(port: int, parts: list[bytes]) -> None:
    assert "request line" in check_error(talk(port, *parts), 400)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_head_that_is_too_large_is_refused(port: int, at_once: bool) -> None:
    long = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * (2 * MAX_HEAD_BYTES)
    parts = [long + b"\r\n\r\n"] if at_once else [long[:1000], long[1000:]]
    assert str(MAX_HEAD_BYTES) in check_error(talk(port, *parts), 431)


def test_a_large_body_and_many_requests_are_no_large_head(port: int) -> None:
    body = b"x" * (3 * MAX_HEAD_BYTES)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for _ in range(3):
            connection.sendall(head + b"\r\n" + body)
            said = b""
            while not said.endswith(b"0\r\n\r\n"):
                said += connection.recv(65536)
            assert said.startswith(b"HTTP/1.1 200 ")
            assert said.count(b"x") >= len(body)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("offered", [b"h2c", b"websocket"])
def test_a_request_that_offers_an_upgrade_is_answered_without_one(
    port: int, at_once: bool, offered: bytes
) -> None:
    head = (
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: " + offered + b"\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: 5\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for part in [head + b"hello"] if at_once else [head, b"hello"]:
            connection.sendall(part)
        said = b""
        while not said.endswith(b"0\r\n\r\n"):
            said += connection.recv(65536)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"hello" in said


def test_a_proxys_connect_is_answered(port: int) -> None:
    said = talk(port, b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\nConnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 ")


def test_nothing_is_written_into_an_answer_that_has_begun(port: int) -> None:
    slow, go = (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"slow", b"go"))
    bad = b"nonsense\r\n\r\n"
    said = talk(port, slow, bad, until=b"ok", then=lambda: talk(port, go, bad))
    answer, is_refused, _ = said.partition(b"HTTP/1.1 400 ")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"0\r\n\r\n") or not is_refused


@pytest.mark.parametrize("at_once", [True, False])
def test_trailers_are_no_headers(port: int, at_once: bool) -> None:
    head = CHUNKED.replace(b"/echo", b"/headers")
    rest = b"5\r\nhello\r\n0\r\nX-Api-Key: secret\r\nX-More: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for _ in range(2):  # the next request of the connection has none of them either
            for part in [head + rest] if at_once else [head, rest]:
                connection.sendall(part)
            said = b""
            while not said.endswith(b"0\r\n\r\n"):
                said += connection.recv(65536)
            assert b'["host", "transfer-encoding"]' in said


@pytest.mark.parametrize("what", ["trailer", "trailers", "chunk extension"])
def test_what_comes_around_chunks_without_end_is_refused(port: int, what: str) -> None:
    chunk = b"5\r\nhello\r\n"
    endless = {
        "trailer": chunk + b"0\r\nX-Long: " + b"x" * (4 * MAX_HEAD_BYTES),
        "trailers": chunk + b"0\r\n" + b"X-Short: x\r\n" * MAX_HEAD_BYTES,
        "chunk extension": chunk + b"5;x=" + b"x" * (4 * MAX_HEAD_BYTES),
    }[what]
    pieces = [endless[at : at + 8192] for at in range(0, len(endless), 8192)]
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        try:
            for piece in (CHUNKED, *pieces):
                connection.sendall(piece)
            while got := connection.recv(65536):
                said += got
        except ConnectionError:  # it did not care for all that was sent
            return
    assert b"HTTP/1.1 200" not in said


def test_the_faster_parser_is_used_where_it_is_installed() -> None:
    assert issubclass(protocol_class(1), JsonHttpToolsProtocol)
