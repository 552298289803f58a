"""Writes the requests of a server benchmark and records each answer as it streams in."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from penstock.cli.bench.http import HttpClient, HttpError
from penstock.cli.bench.prompts import BenchRequest

Backend = Literal["openai", "openai-chat", "openai-embeddings"]
PATHS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class Dialect:
    """How requests are written. The same for all requests of a run."""

    backend: Backend
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # last; None removes a field
    takes_token_ids: bool = True
    takes_usage: bool = True
    endpoint: str | None = None  # instead of the backend's path

    @property
    def path(self) -> str:
        return self.endpoint or PATHS[self.backend]

    def prompt_kind(self, requests: Sequence[BenchRequest]) -> str:
        """Describe how the prompts are sent."""
        if all(isinstance(request.prompt, str) for request in requests):
            return "text"
        sends_ids = self.takes_token_ids and self.backend != "openai-chat"
        return "token ids" if sends_ids else "words in place of token ids"

    def body(self, request: BenchRequest) -> bytes:
        prompt = request.prompt if self.takes_token_ids else request.text()
        body: dict[str, Any] = {"model": request.model or self.model}
        if self.backend == "openai-embeddings":
            # base64 is the default of OpenAI's client
            body |= {"input": prompt, "encoding_format": "base64"}
        else:
            body |= {"max_tokens": request.output_len, "stream": True}
            if self.backend == "openai-chat":
                turns = [*request.history, request.text()]  # the user's and the model's, in turn
                body["messages"] = [
                    {"role": ("user", "assistant")[index % 2], "content": text}
                    for index, text in enumerate(turns)
                ]
                if request.media:
                    text = {"type": "text", "text": request.text()}
                    body["messages"][-1]["content"] = [*request.media, text]
            else:
                body["prompt"] = prompt
            if self.takes_usage:
                body["stream_options"] = {"include_usage": True}
        body |= self.fields
        return msgspec.json.encode({k: v for k, v in body.items() if v is not None})

    def new_record(self, due: float) -> StreamRecord:
        """Make the record of a request that is due at `due`."""
        return EmbeddingRecord(due) if self.backend == "openai-embeddings" else StreamRecord(due)


# -- the fields that are read from answers; others are skipped


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def says_something(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    @property
    def has_token(self) -> bool:
        """Whether the choice holds a token. The opening role and an end without text are none."""
        if self.text or (self.delta is not None and self.delta.says_something):
            return True
        is_opening = self.delta is not None and self.delta.role is not None
        return self.finish_reason is None and not is_opening


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    message: str | None = None  # of an error that is not wrapped in `error`


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_embeddings = msgspec.json.Decoder(_Embeddings).decode


class StreamRecord:
    """One request: when it was due, sent and answered, and its error if it failed.

    Times are seconds of `clock`. It is the HTTP client's receiver.
    """

    def __init__(self, due: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.due = due
        self.sent = due
        self.token_times: list[float] = []  # of each chunk with tokens
        self.last: float | None = None  # the end of the answer
        self.status = 0
        self.usage: _Usage | None = None
        self.error: str | None = None
        self.texts: list[str] | None = None  # where the answer's text is needed
        self._clock = clock
        self._rest = b""  # an incomplete line
        self._has_ended = False

    # -- while the answer arrives

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        now = self._clock()
        self._rest += data
        if self.status != 200:
            return  # an error is parsed at the end
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), now)

    def _on_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._has_ended = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as error:
            self.fail(f"an event is not what it should be: {error}")
            return
        if chunk.error is not None:
            self.fail(f"error in the stream: {_message_of(chunk)}")
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if choice.has_token:
                self.token_times.append(now)
                if self.texts is not None:
                    self.texts.append(choice.content)
            self._has_ended = self._has_ended or choice.finish_reason is not None
            self.last = now

    def end(self) -> None:
        """The response has ended. Checks that the answer is complete."""
        if self.status != 200:
            self.fail(f"HTTP {self.status}: {_explain(self._rest)}")
        elif not self._has_ended:
            self.fail("the stream ended without a finish reason")
        elif self.last is None:
            self.fail("the stream held no tokens")

    def fail(self, error: str) -> None:
        """Record an error. Only the first one is kept."""
        if self.error is None:
            self.error = error[:MAX_ERROR_CHARS]

    # -- afterwards, for a request that did not fail

    @property
    def text(self) -> str:
        return "".join(self.texts or ())

    @property
    def num_output_tokens(self) -> int:
        """From the server's usage, or the number of chunks without usage."""
        return len(self.token_times) if self.usage is None else self.usage.completion_tokens

    @property
    def num_input_tokens(self) -> int | None:
        return None if self.usage is None else self.usage.prompt_tokens

    @property
    def num_cached_tokens(self) -> int | None:
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    @property
    def ttft(self) -> float:
        assert self.last is not None
        return (self.token_times[0] if self.token_times else self.last) - self.sent

    @property
    def e2e(self) -> float:
        assert self.last is not None
        return self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, or None if there is only one."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Times between chunks. A chunk of a busy server may contain several tokens."""
        return [b - a for a, b in itertools.pairwise(self.token_times)]


class EmbeddingRecord(StreamRecord):
    """An embedding request. Its answer is not streamed."""

    def on_body(self, data: bytes) -> None:
        self.last = self._clock()
        self._rest += data

    def end(self) -> None:
        if self.status != 200:
            self.fail(f"HTTP {self.status}: {_explain(self._rest)}")
            return
        try:
            answer = _decode_embeddings(self._rest)
        except msgspec.MsgspecError as error:
            self.fail(f"the answer is not what it should be: {error}")
            return
        self.usage = answer.usage
        if len(answer.data) != 1:
            self.fail(f"the answer to one text has {len(answer.data)} vectors")


def _explain(content: bytes) -> str:
    """Return the message in an error's body, or the whole body."""
    try:
        return _message_of(_decode_chunk(content))
    except msgspec.MsgspecError:
        return content.decode(errors="replace").strip()


def _message_of(chunk: _Chunk) -> str:
    if isinstance(chunk.error, dict) and "message" in chunk.error:
        return str(chunk.error["message"])
    return str(chunk.error or chunk.message or "no reason given")


async def ask(
    client: HttpClient,
    dialect: Dialect,
    request: BenchRequest,
    record: StreamRecord,
    timeout_s: float,
) -> StreamRecord:
    """Send a request and record its answer. A server's error is recorded, not raised."""
    body = dialect.body(request)
    record.sent = time.perf_counter()
    try:
        await asyncio.wait_for(client.post(dialect.path, body, record), timeout_s)
        record.end()
    except asyncio.TimeoutError:
        record.fail(f"no complete answer within {timeout_s:g} s")
    except HttpError as error:
        record.fail(str(error))
    return record


class Content:
    """Collects a whole response."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.body += data
