"""More than the server wants: slow clients, full queues, greedy keys, and who may reset the cache.

A slow client never slows the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, events
from waiting import eventually

from penstock.server.http.sockets import PROBE_AFTER_S

LIMIT_S = 4.0  # far longer than a client on a busy machine takes to send a request
# Ten megabytes of events or more: what sockets hold is at most about four.
VERBOSE = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "logprobs": 20, "n": 128}
ROOT_KEY = "key-of-rööt"
LONG = {"prompt": "x", "max_tokens": 240, "ignore_eos": True}


ServeModule = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def strict(serve_module: ServeModule) -> ServerProcess:
    """A server with little patience."""
    limits = ("--request-read-timeout-s", str(LIMIT_S), "--slow-reader-timeout-s", str(LIMIT_S))
    return serve_module(*limits)


@pytest.fixture(scope="module")
def shared(serve_module: ServeModule) -> ServerProcess:
    """A server whose keys take turns, one request at a time."""
    return serve_module(
        *("--api-key", "anna=key-of-anna", "--api-key", "key-of-bert", "--admin-api-key", ROOT_KEY),
        *("--scheduling-policy", "fair", "--max-num-seqs", "1", "--max-queued-requests", "5"),
        *("--access-log", "--log-level", "debug", "--max-connections", "40"),
        "--enable-log-requests",
    )


def connect(server: ServerProcess) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", server.port))
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": f"Bearer {key}".encode()}


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


UNFINISHED = [
    b"",
    b"POST /v1/comple",
    HEAD,
    HEAD + b"Content-Length: 1000\r\n\r\n",
    HEAD + b'Content-Length: 1000\r\n\r\n{"prompt": ',
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{    \r\n",
]


def test_requests_that_do_not_arrive_are_408s(strict: ServerProcess) -> None:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(strict)) for _ in range(len(UNFINISHED) + 1)]
        connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connections[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
        second = b"GET /hea"
        for connection, sent in zip(connections, [*UNFINISHED, second], strict=True):
            connection.sendall(sent)
        answers = [read_all(connection) for connection in connections]
    assert time.monotonic() - started >= LIMIT_S
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert "did not arrive" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_what_trickles_in_is_not_waited_for_any_longer(strict: ServerProcess) -> None:
    with connect(strict) as connection:
        connection.settimeout(0.1)
        connection.sendall(b"GET /")
        answer, deadline = b"", time.monotonic() + 120
        while not answer and time.monotonic() < deadline:
            with contextlib.suppress(ConnectionError):  # the answer may have come just now
                connection.send(b"X")  # a byte at a time, of a request line without end
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_does_not_read_is_cut_off_and_slows_nobody(strict: ServerProcess) -> None:
    body = json.dumps({**VERBOSE, "stream": True}).encode()
    with connect(strict) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: strict.get("/load").json()["server_load"] > 0)
        answer = strict.post("/v1/completions", LONG)  # beside it, and done long before it
        assert answer.json()["usage"]["completion_tokens"] == 240
        eventually(lambda: any("does not read its response" in line for line in strict.log))
        eventually(strict.is_idle)
        received = b""
        with contextlib.suppress(ConnectionError):
            received = read_all(connection)
    assert not received.endswith(b"0\r\n\r\n"), "the stream came to an orderly end"


def test_a_client_that_never_reads_is_cut_off_for_less_than_kernels_like_to_hold(
    strict: ServerProcess,
) -> None:
    """Left alone, Linux takes up to 4 MiB for it, and the request ends as if all were well."""
    body = json.dumps({**VERBOSE, "n": 8, "stream": True}).encode()
    num_before = sum("does not read its response" in line for line in strict.log)
    with connect(strict) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(
            lambda: sum("does not read its response" in line for line in strict.log) > num_before
        )
        eventually(strict.is_idle)


def test_a_client_that_takes_little_at_a_time_gets_everything(shared: ServerProcess) -> None:
    """The server waits for it again and again; how slow it may be is tested by another clock."""
    body = json.dumps({**VERBOSE, "n": 2, "stream": True}).encode()
    head = HEAD + b"Authorization: Bearer key-of-anna\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(shared) as connection:
        connection.sendall(head + body)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            part = connection.recv(2048)
            assert part, data[-2000:]
            data += part
    assert b"[DONE]" in data


def test_connections_are_limited(shared: ServerProcess) -> None:
    idle = [connect(shared) for _ in range(40)]
    try:
        with connect(shared) as one_more:
            answer = read_all(one_more)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in answer
    finally:
        for connection in idle:
            connection.close()

    def is_open() -> bool:
        try:
            return shared.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    eventually(is_open)


def test_the_kernel_looks_for_clients_that_vanished(strict: ServerProcess) -> None:
    """One whose machine lost its power, or its network, closes nothing."""
    with connect(strict) as connection:
        # The server's end of it in the kernel's table: which timer runs, and for how long yet.
        port, ours = strict.port, connection.getsockname()[1]
        ends = (f"0100007F:{port:04X}", f"0100007F:{ours:04X}")
        table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        (timer,) = [row[5] for row in table if (row[1], row[2]) == ends]
        kind, _, ticks = timer.partition(":")
        assert kind == "02", "keepalive"
        assert 0 < int(ticks, 16) / os.sysconf("SC_CLK_TCK") <= PROBE_AFTER_S


# -- keys


def test_operators_routes_have_a_key_of_their_own(shared: ServerProcess) -> None:
    with shared.client() as client:
        for key, status in (("key-of-anna", 401), (ROOT_KEY, 200), ("nonsense", 401)):
            answer = client.post("/reset_prefix_cache", headers=bearer(key))
            assert answer.status_code == status
        assert client.get("/v1/models", headers=bearer(ROOT_KEY)).status_code == 200


def test_a_key_in_a_trailer_opens_nothing(shared: ServerProcess) -> None:
    """A proxy in front, which checks keys too, would not have seen it."""
    body = json.dumps({"prompt": "x"}).encode()
    with connect(shared) as connection:
        connection.sendall(
            HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            b"%x\r\n%b\r\n0\r\nAuthorization: Bearer key-of-anna\r\n"
            b"x-api-key: key-of-anna\r\n\r\n" % (len(body), body)
        )
        assert read_all(connection).startswith(b"HTTP/1.1 401 ")


def test_no_key_can_fill_the_queue(shared: ServerProcess) -> None:
    anna, bert = bearer("key-of-anna"), bearer("key-of-bert")

    def load() -> int:
        return int(shared.get("/load", headers=bert).json()["server_load"])

    with shared.client() as client, ThreadPoolExecutor(2) as threads:
        with shared.engine_stopped():  # none of them ends meanwhile
            body: dict[str, Any] = {**LONG, "n": 3}  # of 6 places, 3 are one's share
            running = threads.submit(shared.post, "/v1/completions", body, headers=anna)
            eventually(lambda: load() == 3)
            more = client.post("/v1/completions", json=LONG, headers=anna)
            assert more.status_code == 429
            assert "share" in more.json()["error"]["message"]
            assert int(more.headers["retry-after"]) >= 1
            disguised = {b"x-api-key": b"key-of-anna", **bearer("of nobody")}
            assert client.post("/v1/completions", json=LONG, headers=disguised).status_code == 429
            other = threads.submit(shared.post, "/v1/completions", LONG, headers=bert)
            eventually(lambda: load() == 4)
        assert running.result().status_code == other.result().status_code == 200
        more_than_a_share = client.post("/v1/completions", json={**LONG, "n": 4}, headers=anna)
        assert more_than_a_share.status_code == 400
        assert "shared by the API keys" in more_than_a_share.json()["error"]["message"]
    shared.stop()
    log = "".join(shared.log)
    assert "POST /v1/completions 429, " in log, "the access log has every request"
    assert re.search(r"Request \S+ ended: key anna, finish_reason length, engine 0, ", log)
    assert "key-of" not in log, "and no log has a key"
    assert "Started server process" not in log, "uvicorn has a level of its own"


def test_a_request_that_waits_too_long_is_a_429(serve_tiny: Callable[..., ServerProcess]) -> None:
    server = serve_tiny("--max-num-seqs", "1", "--queue-timeout-s", "0.2")
    for stream in (False, True):
        with ThreadPoolExecutor(1) as threads:
            with server.engine_stopped():
                body = {**LONG, "n": 64, "stream": stream}
                asked = threads.submit(server.post, "/v1/completions", body)
                eventually(lambda: server.get("/load").json()["server_load"] == 64)
                time.sleep(0.3)  # longer than they may wait
            answer = asked.result()
        if answer.status_code == 429:
            error = answer.json()["error"]
            assert int(answer.headers["retry-after"]) >= 1
        else:  # its first tokens were on their way
            assert stream
            error = events(answer.text)[-2]["error"]
            assert error["code"] == 429
        assert "waited longer than 0.2 s" in error["message"]
    eventually(server.is_idle)

    def is_served() -> bool:
        return server.post("/v1/completions", LONG).status_code == 200

    eventually(is_served)
