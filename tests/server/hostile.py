"""Clients that mean no good, and the good ones beside them whose answers must not change.

Everything is drawn from one seed, and sent over sockets by hand: no client library would send it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
NUM_HOSTILE = 24  # at once: most of them wait most of the time
NUM_GOOD = 16
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "once", "max_tokens": 4}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "logprobs": 2}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True,
         "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "logit_bias": {"5": 1.0}},
    ),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ("/v1/responses/input_tokens", {"input": "hi", "instructions": "be brief"}),
    ("/v1/conversations", {"items": [{"role": "user", "content": "hi"}], "metadata": {"a": "b"}}),
    ("/tokenize", {"prompt": "some text"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]  # fmt: skip
JUNK: list[Any] = [
    None, True, -1, 0, 10**12, 2**64, -(2**63), 1e308, float("nan"), float("inf"), 0.5, "", "x",
    "\x00", "\ud800", "🦀" * 50, "a" * 20_000, [], [[]], [None], {}, {"": {}}, {"type": "text"},
    [1] * 3000, ["x"] * 500, [{"role": "user"}] * 200, [-1], [10**9], "{{ 7*7 }}", "../../etc/x",
    {"regex": "(a{1,999}){1,999}"},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
]  # fmt: skip
FIELDS = [
    "model", "prompt", "messages", "max_tokens", "n", "stream", "stop", "temperature", "top_p",
    "top_k", "seed", "logprobs", "logit_bias", "response_format", "structured_outputs", "tools",
    "tool_choice", "user", "echo", "best_of", "suffix", "stream_options", "min_tokens", "bad_words",
    "allowed_token_ids", "stop_token_ids", "truncate_prompt_tokens", "priority", "cache_salt",
    "timeout", "chat_template", "chat_template_kwargs", "documents", "request_id", "tokens",
    "prompt_logprobs", "add_generation_prompt", "continue_final_message", "extra", "input",
    "items", "metadata", "conversation", "previous_response_id", "store", "background", "text",
]  # fmt: skip
PATHS = [
    "/static/../../../etc/passwd", "/static/%2e%2e/%2e%2e/etc/passwd", "/static//etc/passwd",
    "/static/..%5c..%5cetc", "/%00", "/v1/models/../../health", "/v1/models/" + "a" * 5000, "//",
    "/v1/responses/../../x", "/?" + "a=b&" * 3000, "/metrics/..;/", "/docs/%ff", "*", "/v1/nothing",
]  # fmt: skip
RAW = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"\r\n" * 500,
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    + b"Authorization: Bearer key\r\n" * 5000
    + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"\x00\xff" * 2000,
]
GOOD = [
    {
        "prompt": f"The {word} way to", "max_tokens": 48, "stream": True, "ignore_eos": True,
        "seed": index, "temperature": 0.9 * (index % 2), "logprobs": 2 if index % 3 else None,
        "presence_penalty": 0.5 if index % 4 == 0 else 0.0,
    }
    for index, word in enumerate(["quick", "slow", "best", "old", "only", "long", "right", "north"])
]  # fmt: skip


@dataclass
class Report:
    statuses: Counter[str] = field(default_factory=Counter)
    server_errors: list[str] = field(default_factory=list)
    num_hostile: int = 0
    num_good: int = 0
    num_changed: int = 0
    # Requests so far, and bytes: of the server, and of its engine.
    memory: list[tuple[int, list[int]]] = field(default_factory=list)

    def growth_after(self, share: float) -> float:
        """Of the memory, from that share of the hostile requests on to the end."""
        later = [sum(sizes) for count, sizes in self.memory if count >= share * self.num_hostile]
        return later[-1] / later[0] - 1


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def http(path: str, body: bytes, method: str = "POST", length: int | None = None) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode("utf-8", "surrogatepass") + body


def fuzzed_body(rng: random.Random) -> tuple[str, bytes]:
    path, body = rng.choice(VALID)
    body = dict(body)
    for _ in range(rng.randrange(1, 4)):
        body[rng.choice(FIELDS)] = rng.choice(JUNK)
    encoded = json.dumps(body).encode()
    if rng.random() < 0.3:  # and damaged on the way
        damaged = bytearray(encoded)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        encoded = bytes(damaged)
    return path, encoded


def content_of(stream: bytes) -> bytes:
    """All that a stream says, however it is cut into events."""
    lines = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]", stream[-500:]
    text, tokens, logprobs, top, ends = "", [], [], [], []
    for line in lines[:-1]:
        (choice,) = json.loads(line)["choices"]
        text += choice["text"]
        ends.append(choice["finish_reason"])
        if choice.get("logprobs"):
            tokens += choice["logprobs"]["tokens"]
            logprobs += choice["logprobs"]["token_logprobs"]
            top += choice["logprobs"]["top_logprobs"]
    reasons = [end for end in ends if end is not None]
    return json.dumps([text, tokens, logprobs, top, reasons]).encode()


class Attack:
    """`count` hostile requests, drawn from `seed`, beside good streams that never pause."""

    def __init__(
        self, port: int, count: int, seed: int, memory: Callable[[], list[int]], max_body: int
    ) -> None:
        self.report = Report()
        self._port = port
        self._count = count
        self._rng = random.Random(seed)
        self._memory = memory
        self._max_body = max_body
        self._expected: list[bytes] = []

    async def run(self) -> Report:
        self._expected = [await self._good(index) for index in range(len(GOOD))]
        attackers = [asyncio.create_task(self._attack()) for _ in range(NUM_HOSTILE)]
        clients = [asyncio.create_task(self._stream(index)) for index in range(NUM_GOOD)]
        await asyncio.gather(*attackers)
        await asyncio.gather(*clients)
        self._note_memory()
        return self.report

    async def _stream(self, index: int) -> None:
        """A good client, that asks again and again while the attack lasts."""
        while self.report.num_hostile < self._count:
            answer = await self._good(index % len(GOOD))
            self.report.num_good += 1
            if answer != self._expected[index % len(GOOD)]:
                self.report.num_changed += 1
            index += 1

    async def _good(self, index: int) -> bytes:
        async with connection(self._port) as (reader, writer):
            writer.write(http("/v1/completions", json.dumps(GOOD[index]).encode()))
            answer = await asyncio.wait_for(reader.read(-1), TIMEOUT_S)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), answer[:500]
        return content_of(body)

    async def _attack(self) -> None:
        kinds = [
            self._fuzz, self._fuzz, self._fuzz, self._random_bytes, self._absurd, self._raw,
            self._wander, self._leave, self._leave, self._dawdle, self._never_read, self._store,
        ]  # fmt: skip
        while self.report.num_hostile < self._count:
            self.report.num_hostile += 1
            if self.report.num_hostile % max(self._count // 40, 1) == 0:
                self._note_memory()
            kind = self._rng.choice(kinds)
            try:
                await asyncio.wait_for(kind(), TIMEOUT_S)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.report.statuses["cut off"] += 1

    def _note_memory(self) -> None:
        self.report.memory.append((self.report.num_hostile, self._memory()))

    async def _ask(self, request: bytes) -> bytes:
        async with connection(self._port) as (reader, writer):
            writer.write(request)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            answer = await reader.read(-1)
        self._note(answer, request)
        return answer

    def _note(self, answer: bytes, request: bytes) -> None:
        status = answer[9:12].decode("latin-1") or "none"
        self.report.statuses[status] += 1
        in_stream = re.search(rb'"code": ?5\d\d', answer)
        if status.startswith("5") or in_stream:
            self.report.server_errors.append(f"{request[:600]!r} -> {answer[:900]!r}")

    async def _fuzz(self) -> None:
        await self._ask(http(*fuzzed_body(self._rng)))

    async def _random_bytes(self) -> None:
        path = self._rng.choice(VALID)[0]
        await self._ask(http(path, self._rng.randbytes(self._rng.randrange(2000))))

    async def _absurd(self) -> None:
        path, body = self._rng.choice(VALID[:5])
        which = self._rng.randrange(6)
        if which == 0:
            await self._ask(http(path, b"{}", length=2**62))
        elif which == 1:
            await self._ask(http(path, b'{"prompt": "' + b"x" * self._max_body + b'"}'))
        elif which == 2:
            await self._ask(http(path, b"[" * 50_000 + b"]" * 50_000))
        elif which == 3:
            await self._ask(http(path, b'{"seed": ' + b"9" * 50_000 + b"}"))
        elif which == 4:
            text = "word " * (self._max_body // 8)
            message = {"messages": [{"role": "user", "content": text}], "prompt": text}
            await self._ask(http(path, json.dumps({**body, **message}).encode()))
        else:
            many = {"prompt": [[1]] * 5000, "n": 10**6, "max_tokens": 10**9}
            await self._ask(http(path, json.dumps({**body, **many}).encode()))

    async def _raw(self) -> None:
        async with connection(self._port) as (reader, writer):
            request = self._rng.choice(RAW)
            writer.write(request)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                writer.write_eof()
            self._note(await reader.read(-1), request)

    async def _wander(self) -> None:
        method = self._rng.choice(
            ["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "BREW"]
        )
        await self._ask(http(self._rng.choice(PATHS), b"", method))

    async def _leave(self) -> None:
        """Ask for much, and go: at once, or after the first bytes of the answer."""
        path, body = self._rng.choice(VALID[:5])
        body = {**body, "stream": True, "max_tokens": 64, "n": 2, "ignore_eos": True}
        async with connection(self._port) as (reader, writer):
            request = http(path, json.dumps(body).encode())
            writer.write(request[: self._rng.choice([len(request), len(request) - 9, 40])])
            await writer.drain()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(self._rng.randrange(1, 400)), 0.2)
        self.report.statuses["left"] += 1

    async def _never_read(self) -> None:
        """Ask for much, and read nothing of it for a while."""
        path, body = self._rng.choice(VALID[:5])
        body = {**body, "stream": True, "max_tokens": 200, "n": 8, "ignore_eos": True}
        async with connection(self._port) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(http(path, json.dumps(body).encode()))
            await asyncio.sleep(4 * self._rng.random())
        self.report.statuses["did not read"] += 1

    async def _store(self) -> None:
        """Have much kept, look at a little of it, and have it answered."""
        items = [{"role": "user", "content": "x", "id": "a"}] * self._rng.randrange(2000)
        answer = await self._ask(http("/v1/conversations", json.dumps({"items": items}).encode()))
        made = json.loads(answer.partition(b"\r\n\r\n")[2]).get("id", "conv_none")
        path = f"/v1/conversations/{made}/items"
        await self._ask(http(f"{path}?limit=1&order={self._rng.choice(['asc', 'no'])}", b"", "GET"))
        body = {"conversation": made, "max_output_tokens": 2, "truncation": "auto"}
        await self._ask(http("/v1/responses", json.dumps(body).encode()))
        await self._ask(http(f"{path}/a", b"", "DELETE"))

    async def _dawdle(self) -> None:
        """A part of a request, and then nothing, until the server has enough of it."""
        request = http(*fuzzed_body(self._rng))
        part = request[: self._rng.randrange(len(request))]
        async with connection(self._port) as (reader, writer):
            writer.write(part)
            self._note(await reader.read(-1), part)


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024
