"""Streams that wait for their first token: headers and keep-alives, and errors on both sides.

Where a test needs that no token comes, the engine is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from server_process import DUMMY, ServerProcess, events
from starlette.requests import Request
from starlette.types import Message
from waiting import eventually

from penstock.config import ServerConfig
from penstock.server.anthropic.errors import AnthropicFrame
from penstock.server.http.errors import Overloaded
from penstock.server.http.replies import ClientGone, StreamFrame, event_stream

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
}
COMMENT = ": keep-alive"
PING = 'event: ping\ndata: {"type": "ping"}'
SILENCE = ("--engine-heartbeat-timeout-s", "3600")  # an engine that is stopped is not dead


@pytest.fixture(scope="module")
def hasty(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server whose streams send their headers at once, and keep-alives all the time."""
    flags = ("--stream-start-timeout-s", "0", "--stream-keep-alive-s", "0.02")
    with ServerProcess(
        str(tiny_model), *DUMMY, *SILENCE, *flags, *("--served-model-name", "tiny")
    ) as process:
        yield process


@pytest.fixture(scope="module")
def patient(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server whose streams wait for their first token, however long it takes."""
    with ServerProcess(str(tiny_model), *DUMMY, *SILENCE, "--served-model-name", "tiny") as process:
        yield process


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_sends_headers_and_keep_alives(hasty: ServerProcess, path: str) -> None:
    body = {**BODIES[path], "temperature": 0, "stream": True}
    expected = PING if path == "/v1/messages" else COMMENT
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(contextlib.ExitStack())
        engine.enter_context(hasty.engine_stopped())
        client = stack.enter_context(hasty.client())
        response = stack.enter_context(client.stream("POST", path, json=body))
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = response.iter_text()
        waited = ""
        while waited.count("\n\n") < 3:
            waited += next(pieces)
        assert set(waited.removesuffix("\n\n").split("\n\n")) == {expected}
        engine.close()  # and it goes on
        rest = "".join(pieces)
    last = {"/v1/responses": "response.incomplete", "/v1/messages": "message_stop"}.get(path)
    assert f"event: {last}\n" in rest if last else rest.endswith("data: [DONE]\n\n")


def stream_that_times_out(server: ServerProcess, path: str) -> httpx.Response:
    with server.engine_stopped():
        return server.post(path, {**BODIES[path], "timeout": 0.05, "stream": True})


some_paths = pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
)


@some_paths
def test_an_error_after_the_headers_is_an_event(hasty: ServerProcess, path: str) -> None:
    response = stream_that_times_out(hasty, path)
    assert response.status_code == 200
    told = [piece for piece in response.text.split("\n\n") if piece and piece != COMMENT]
    if path == "/v1/responses":
        (event,) = told
        assert event.startswith("event: error\n")
        assert "took longer than 0.05 s" in event
        assert '"code": "server_error"' in event
    else:
        error, end = events("\n".join(told))
        assert (error["error"]["code"], end) == (408, "[DONE]")


@some_paths
def test_an_error_before_the_headers_has_its_status(patient: ServerProcess, path: str) -> None:
    response = stream_that_times_out(patient, path)
    assert response.status_code == 408
    assert response.json()["error"]["type"] == "RequestTimeoutError"


def test_a_client_that_leaves_while_its_stream_waits_is_forgotten(hasty: ServerProcess) -> None:
    body = {**BODIES["/v1/completions"], "stream": True}
    with hasty.engine_stopped():
        with (
            hasty.client() as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert next(response.iter_text()).startswith(COMMENT)
        eventually(lambda: hasty.get("/load").json()["server_load"] == 0)


def test_the_official_clients_do_not_mind_keep_alives(hasty: ServerProcess) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24}
    asked["extra_body"] = {"temperature": 0}
    with (
        openai.OpenAI(base_url=f"{hasty.base_url}/v1", api_key="none") as client,
        anthropic.Anthropic(base_url=hasty.base_url, api_key="none") as other,
    ):
        whole = client.chat.completions.create(**asked).choices[0].message.content
        with hasty.engine_stopped():  # all of them get their headers and a keep-alive at least
            chunks = client.chat.completions.create(stream=True, **asked)
            response = client.responses.create(model="tiny", input="Hi", stream=True)
            message = other.messages.create(stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        assert next(event.type for event in response) == "response.created"
        text = ""
        for event in message:
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                text += event.delta.text
        assert text == whole


# -- in this process, where everything can be held


class Harness:
    """A stream whose chunks the test gives out one by one, and what is sent of it."""

    def __init__(
        self, start_timeout_s: float, keep_alive_s: float, frame: StreamFrame | None = None
    ) -> None:
        self._frame = frame
        self.chunks: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.is_closed = False
        self._is_gone = asyncio.Event()
        config = ServerConfig(
            stream_start_timeout_s=start_timeout_s, stream_keep_alive_s=keep_alive_s
        )
        service = SimpleNamespace(server_config=config)
        app = SimpleNamespace(state=SimpleNamespace(service=service))
        self.scope = {"type": "http", "app": app, "state": {"request_id": "r"}, "headers": []}

    async def respond(self) -> None:
        request = Request(self.scope, self.receive)
        response = await event_stream(request, self._generate(), self._frame)
        await response(self.scope, self.receive, self.sent.put)

    async def receive(self) -> Message:
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._is_gone.set()

    async def body(self) -> str:
        """The next part of the body."""
        return (await self.sent.get())["body"].decode()  # type: ignore[no-any-return]

    async def _generate(self) -> AsyncGenerator[str, None]:
        try:
            while (chunk := await self.chunks.get()) is not None:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.is_closed = True


def test_a_first_chunk_in_time_comes_without_a_comment() -> None:
    async def run() -> None:
        harness = Harness(start_timeout_s=3600, keep_alive_s=3600)
        task = asyncio.ensure_future(harness.respond())
        for chunk in ("a", "b", None):
            harness.chunks.put_nowait(chunk)
        assert (await harness.sent.get())["status"] == 200
        assert [await harness.body() for _ in range(3)] == [
            "data: a\n\n", "data: b\n\n", "data: [DONE]\n\n",
        ]  # fmt: skip
        await task
        assert harness.is_closed

    asyncio.run(run())


def test_a_stream_of_many_chunks_ends_when_its_client_leaves() -> None:
    """Its reader was slow, and everything waits for it: nothing suspends the stream by itself."""

    async def run() -> None:
        harness = Harness(start_timeout_s=3600, keep_alive_s=3600)
        for _ in range(1000):
            harness.chunks.put_nowait("x" * 32 * 1024)
        task = asyncio.ensure_future(harness.respond())
        assert (await harness.sent.get())["status"] == 200
        harness.leave()
        await task
        assert harness.is_closed
        assert harness.chunks.qsize() > 900

    asyncio.run(run())


def test_silence_between_chunks_is_filled_too() -> None:
    async def run() -> None:
        harness = Harness(start_timeout_s=3600, keep_alive_s=0.001)
        task = asyncio.ensure_future(harness.respond())
        harness.chunks.put_nowait("a")
        assert (await harness.sent.get())["status"] == 200
        parts = [await harness.body()]
        while parts[-2:] != [": keep-alive\n\n"] * 2:
            parts.append(await harness.body())
        harness.chunks.put_nowait(Overloaded("too much"))
        while parts[-1] != "data: [DONE]\n\n":
            parts.append(await harness.body())
        assert parts[0] == "data: a\n\n"
        assert "too much" in parts[-2]
        await task
        assert harness.sent.empty()

    asyncio.run(run())


def test_messages_have_pings_and_an_error_event() -> None:
    async def run() -> None:
        harness = Harness(0, 3600, AnthropicFrame("r"))
        task = asyncio.ensure_future(harness.respond())
        assert (await harness.sent.get())["status"] == 200
        assert await harness.body() == f"{PING}\n\n"
        harness.chunks.put_nowait(Overloaded("too much"))
        event = await harness.body()
        assert event.startswith("event: error\n")
        assert '"type": "rate_limit_error", "message": "too much"' in event
        await task

    asyncio.run(run())


@pytest.mark.parametrize("start_timeout_s", [0, 3600])
def test_whoever_leaves_before_the_first_chunk_ends_the_work(start_timeout_s: float) -> None:
    async def run() -> None:
        harness = Harness(start_timeout_s, keep_alive_s=3600)
        task = asyncio.ensure_future(harness.respond())
        if start_timeout_s == 0:
            assert (await harness.sent.get())["status"] == 200
        harness.leave()
        if start_timeout_s == 0:
            await task
        else:
            with pytest.raises(ClientGone):
                await task
        assert harness.is_closed

    asyncio.run(run())


def test_the_times_are_a_second_and_ten() -> None:
    config = ServerConfig()
    assert (config.stream_start_timeout_s, config.stream_keep_alive_s) == (1.0, 10.0)
