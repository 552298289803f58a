"""What a benchmark asks of a server, and what it sees of each answer as it streams in."""

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
    """How requests are written: what is the same for all of them."""

    backend: Backend
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # last; None removes a field
    takes_token_ids: bool = True
    takes_usage: bool = True

    @property
    def path(self) -> str:
        return PATHS[self.backend]

    def prompt_kind(self, requests: Sequence[BenchRequest]) -> str:
        """What the prompts are sent as, in words."""
        if all(isinstance(request.prompt, str) for request in requests):
            return "text"
        sends_ids = self.takes_token_ids and self.backend != "openai-chat"
        return "token ids" if sends_ids else "words in place of token ids"

    def body(self, request: BenchRequest) -> bytes:
        prompt = request.prompt if self.takes_token_ids else request.text()
        body: dict[str, Any] = {"model": self.model}
        if self.backend == "openai-embeddings":
            # base64, as openai's client asks for
            body |= {"input": prompt, "encoding_format": "base64"}
        else:
            body |= {"max_tokens": request.output_len, "stream": True}
            if self.backend == "openai-chat":
                body["messages"] = [{"role": "user", "content": request.text()}]
            else:
                body["prompt"] = prompt
            if self.takes_usage:
                body["stream_options"] = {"include_usage": True}
        body |= self.fields
        return msgspec.json.encode({k: v for k, v in body.items() if v is not None})

    def new_record(self, due: float) -> StreamRecord:
        """What takes in the answer of a request that is due then."""
        return EmbeddingRecord(due) if self.backend == "openai-embeddings" else StreamRecord(due)


# -- what is read of the answers; the rest is skipped


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
    def has_token(self) -> bool:
        """Some tokens have no text; but who speaks, and an end without text, are none."""
        if self.text or (self.delta is not None and self.delta.says_something):
            return True
        is_opening = self.delta is not None and self.delta.role is not None
        return self.finish_reason is None and not is_opening


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    message: str | None = None  # of an error without a wrapping


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_embeddings = msgspec.json.Decoder(_Embeddings).decode


class StreamRecord:
    """One request: when it was due, sent and answered, and why it failed if it did.

    Times are seconds of `clock`. It takes the response in as the HTTP client's receiver.
    """

    def __init__(self, due: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.due = due
        self.sent = due
        self.token_times: list[float] = []  # of each chunk that held tokens
        self.last: float | None = None  # the end of the answer
        self.status = 0
        self.usage: _Usage | None = None
        self.error: str | None = None
        self._clock = clock
        self._rest = b""  # a line that is not complete yet
        self._has_ended = False

    # -- as it comes

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        now = self._clock()
        self._rest += data
        if self.status != 200:
            return  # an error in one piece
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
            self._has_ended = self._has_ended or choice.finish_reason is not None
            self.last = now

    def end(self) -> None:
        """The response is over: was it a whole answer?"""
        if self.status != 200:
            self.fail(f"HTTP {self.status}: {_explain(self._rest)}")
        elif not self._has_ended:
            self.fail("the stream ended without a finish reason")
        elif self.last is None:
            self.fail("the stream held no tokens")

    def fail(self, error: str) -> None:
        """The first reason counts."""
        if self.error is None:
            self.error = error[:MAX_ERROR_CHARS]

    # -- afterwards, for a request that did not fail

    @property
    def num_output_tokens(self) -> int:
        """As the server counts, or by chunks where it does not."""
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
        """Time for each token after the first; None where there is none."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Times between chunks, each of which holds a token or, from a busy server, more."""
        return [b - a for a, b in itertools.pairwise(self.token_times)]


class EmbeddingRecord(StreamRecord):
    """A request whose answer comes in one piece: the vector of a text."""

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
    """The message in an error's body, or the body."""
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
    """Send a request and record its answer; never raises for a server's fault."""
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
    """A response taken in whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.body += data
