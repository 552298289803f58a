"""Decides how answers are sent: as one JSON object or as server-sent events.

Work for a client that disconnects is cancelled. A stream that waits in the queue or for a long
prompt must not look dead to proxies. So its headers are sent after `stream_start_timeout_s` even
without a token. From then on it is never silent for longer than `stream_keep_alive_s`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.config import ServerConfig
from penstock.server.http.errors import body_of, encode_error

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_BYTES_A_TURN = 64 * 1024  # that one stream writes before it yields to the event loop
CLIENT_CLOSED_REQUEST = 499  # as in proxies' logs; the client does not see it


def json_response(content: BaseModel | bytes | str) -> Response:
    """Make a response from JSON or a reply. Unset fields are omitted unless it shows nulls."""
    if isinstance(content, BaseModel):
        only_set = not getattr(content, "shows_nulls", False)
        content = content.model_dump_json(exclude_unset=only_set)
    return Response(content, media_type="application/json")


class ClientGone(HTTPException):
    """The client has disconnected."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client has left")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client leaves first, cancel it and raise `ClientGone`."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancel(task, leaving)
        del task, leaving  # breaks the cycle of error, frame and task


class Answer(Protocol):
    """An answer to send, either whole or in chunks. Only one of the two is called, once."""

    async def whole(self) -> BaseModel: ...

    def chunks(self) -> AsyncGenerator[str, None]: ...


async def send_answer(
    request: Request, answer: Answer, stream: bool | None, frame: StreamFrame | None = None
) -> Response:
    """Send an answer, streamed if `stream` is true."""
    if stream:
        return await event_stream(request, answer.chunks(), frame)
    return json_response(await unless_gone(request, answer.whole()))


class StreamFrame(ABC):
    """How an API writes server-sent events."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    @abstractmethod
    def event(self, chunk: str) -> str: ...

    @abstractmethod
    def error(self, error: Exception) -> str:
        """The event for an error in the stream. Logs details that the client must not see."""

    @abstractmethod
    def end(self) -> str:
        """The last event, also after an error."""

    def keep_alive(self) -> str:
        """A comment that clients ignore."""
        return ": keep-alive\n\n"


class OpenAIFrame(StreamFrame):
    """Writes each chunk as a `data:` line, then ``[DONE]``."""

    def event(self, chunk: str) -> str:
        return f"data: {chunk}\n\n"

    def error(self, error: Exception) -> str:
        return self.event(encode_error(body_of(error, self._request_id)).decode())

    def end(self) -> str:
        return self.event("[DONE]")


class EventStream(Response):
    """Server-sent events, formatted by `frame`.

    An error is sent as an event and ends the stream. `first` is the first chunk, which may not be
    ready yet. `chunks` yields the others. It is always closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[str | None],
        chunks: AsyncGenerator[str, None],
        frame: StreamFrame,
        keep_alive_s: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._frame = frame
        self._keep_alive_s = keep_alive_s
        self._written_at = 0.0  # by the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await cancel(pump, leaving)
            await _close(self._first, self._chunks)

    async def _pump(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time

        num_bytes = 0  # since the last yield; chunks pile up while a client reads slowly

        async def write(text: str) -> None:
            nonlocal num_bytes
            self._written_at = clock()
            body = text.encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            num_bytes += len(body)
            if num_bytes > MAX_BYTES_A_TURN:
                num_bytes = 0
                await asyncio.sleep(0)

        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        keeping_alive = asyncio.ensure_future(self._keep_alive(write))
        try:
            if not self._first.done():
                await write(self._frame.keep_alive())  # some proxies hold back a bare head
            chunk = await self._first
            if chunk is not None:
                await write(self._frame.event(chunk))
            async for chunk in self._chunks:
                await write(self._frame.event(chunk))
        except Exception as error:
            await write(self._frame.error(error))
        finally:
            await cancel(keeping_alive)
        end = self._frame.end().encode()
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _keep_alive(self, write: Callable[[str], Awaitable[None]]) -> None:
        """Write a keep-alive whenever nothing was written for `keep_alive_s`."""
        clock = asyncio.get_running_loop().time
        self._written_at = clock()
        while True:
            await asyncio.sleep(self._written_at + self._keep_alive_s - clock())
            if clock() >= self._written_at + self._keep_alive_s:
                await write(self._frame.keep_alive())


async def event_stream(
    request: Request, chunks: AsyncGenerator[str, None], frame: StreamFrame | None = None
) -> Response:
    """Start a stream. Waits a little for the first chunk, so that an early error gets a status."""
    config: ServerConfig = request.app.state.service.server_config
    first = asyncio.ensure_future(_first(chunks))
    waiting = asyncio.wait({first}, timeout=config.stream_start_timeout_s)
    try:
        await unless_gone(request, waiting)
        if first.done():
            first.result()  # raises an early error
    except BaseException:
        await _close(first, chunks)
        raise
    frame = frame or OpenAIFrame(request.state.request_id)
    return EventStream(first, chunks, frame, config.stream_keep_alive_s)


async def _first(chunks: AsyncGenerator[str, None]) -> str | None:
    async for chunk in chunks:
        return chunk
    return None


async def _close(first: asyncio.Future[Any], chunks: AsyncGenerator[str, None]) -> None:
    await cancel(first)  # it may be using the generator
    await chunks.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def gather(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines concurrently. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
