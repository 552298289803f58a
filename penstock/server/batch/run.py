"""Runs the requests of a batch file through the app that serves HTTP, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from starlette.types import ASGIApp, Message

from penstock.protocol.errors import EngineDeadError
from penstock.server.batch.files import BadLine, BatchOutput, BatchRequest, Result, parse_line
from penstock.server.http.replies import gather

NUM_ERRORS_KEPT = 5


@dataclass
class BatchSummary:
    """Counts of a batch's lines. `num_skipped` lines had results from an earlier run."""

    num_completed: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    first_errors: list[str] = field(default_factory=list)

    def count_failure(self, what: str, message: str) -> None:
        self.num_failed += 1
        if len(self.first_errors) < NUM_ERRORS_KEPT:
            self.first_errors.append(f"{what}: {message}")


class _UsageFields(msgspec.Struct):
    """The names of chat completions and of the other APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0


class _Error(msgspec.Struct):
    message: str


class _Body(msgspec.Struct):
    """The fields that are read from an answer's body."""

    usage: _UsageFields | None = None
    error: _Error | None = None


class Batch:
    """Runs a batch with at most `max_concurrency` requests at a time. Calls `on_line` per line.

    Results are written as they finish, in any order. Lines that already have one are skipped.
    """

    def __init__(
        self,
        app: ASGIApp,
        output: BatchOutput,
        max_concurrency: int,
        on_line: Callable[[], object] = lambda: None,
    ) -> None:
        self.summary = BatchSummary()
        self._app = app
        self._output = output
        self._max_concurrency = max_concurrency
        self._on_line = on_line
        self._custom_ids: set[str] = set()  # seen in this run

    async def run(self, lines: Iterator[tuple[int, bytes]]) -> None:
        """Handle every line. Raises `EngineDeadError` if the engine dies.

        Another `Batch` with the same output can then run the remaining lines.
        """

        async def work() -> None:
            for number, line in lines:  # the workers share this iterator
                await self._handle(number, line)
                self._on_line()

        await gather(*(work() for _ in range(self._max_concurrency)))

    async def _handle(self, number: int, line: bytes) -> None:
        if number in self._output.failed_lines:
            self.summary.num_skipped += 1
            return
        try:
            request = self._parse(line)
        except BadLine as error:
            self._output.write(Result.of_bad_line(number, error))
            self.summary.count_failure(f"line {number}", str(error))
            return
        if request.custom_id in self._output.answered:
            self._output.answered.remove(request.custom_id)  # `_custom_ids` has it now
            self.summary.num_skipped += 1
            await asyncio.sleep(0)  # let other tasks run while many lines are skipped
            return
        await self._answer(request)

    def _parse(self, line: bytes) -> BatchRequest:
        request = parse_line(line)
        if request.custom_id in self._custom_ids:
            message = f"custom_id {request.custom_id} is already used on an earlier line"
            raise BadLine("duplicate_custom_id", message, request.custom_id, "custom_id")
        self._custom_ids.add(request.custom_id)
        return request

    async def _answer(self, request: BatchRequest) -> None:
        status, request_id, content = await call(self._app, request.url, request.body)
        body = msgspec.json.decode(content, type=_Body)
        message = "" if body.error is None else body.error.message
        if status == 503:  # not the request's fault: another run may answer it
            raise EngineDeadError(message)
        self._output.write(Result.of_answer(request.custom_id, status, request_id, content))
        if status != 200:
            self.summary.count_failure(request.custom_id, message)
            return
        self.summary.num_completed += 1
        if body.usage is not None:
            used = body.usage
            self.summary.num_input_tokens += (
                used.prompt_tokens + used.input_tokens + used.cache_read_input_tokens
            )
            self.summary.num_output_tokens += used.completion_tokens + used.output_tokens


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, str, bytes]:
    """POST JSON to an app in this process. Returns the status, the request id and the body."""
    unread = [body]
    status, request_id = 0, ""
    parts: list[bytes] = []

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        # A second call waits for a disconnect, which never comes.
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return status, request_id, b"".join(parts)
