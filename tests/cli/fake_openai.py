"""An OpenAI-compatible server that says what a test tells it to, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

# Bytes to send as they are, in pieces; closing the connection ends what is not complete.
Answer = AsyncIterator[bytes]
Script = Callable[["FakeServer", dict[str, Any]], Answer]


class FakeServer:
    """Used as a context manager. `script` answers every POST; `bodies` are those that came."""

    def __init__(self, script: Script) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.num_connections = 0
        self.metrics = ""  # with a place for the number of requests so far
        self.in_flight = 0
        self.max_in_flight = 0
        self._script = script
        self._connections: set[asyncio.Task[Any]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._connections:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (x.partition(": ") for x in lines if x)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(request, headers, content, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client is done
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(
        self, request: str, headers: dict[str, str], content: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection can go on."""
        method, path, _ = request.split(" ")
        if path == "/metrics":
            writer.write(whole(200, self.metrics.format(len(self.bodies))))
            return True
        if method == "GET":
            writer.write(whole(200, {"data": [{"id": "fake-model"}, {"id": "other"}]}))
            return True
        self.paths.append(path)
        if path.endswith("_profile"):
            writer.write(whole(200, ""))
            return True
        self.headers.append(headers)
        self.bodies.append(json.loads(content))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        last = b""
        async for last in self._script(self, self.bodies[-1]):
            writer.write(last)
            await writer.drain()
        self.in_flight -= 1
        return last.endswith(b"0\r\n\r\n") or last.startswith(b"HTTP/")


def whole(status: int, body: Any) -> bytes:
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """One server-sent event in a chunk of its own."""
    text = value if isinstance(value, str) else json.dumps(value)
    return chunked(f"data: {text}\n\n".encode())


def token(text: str = "x", finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": finish_reason}]}


async def complete(server: FakeServer, body: dict[str, Any]) -> Answer:
    """As many tokens as asked for, and the usage if asked for."""
    yield HEAD
    num_tokens = body["max_tokens"]
    for index in range(num_tokens):
        yield event(token(finish_reason="length" if index == num_tokens - 1 else None))
    if body.get("stream_options"):
        prompt = body.get("prompt") or body["messages"][0]["content"].split()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        yield event({"choices": [], "usage": usage})
    yield event("[DONE]")
    yield END
