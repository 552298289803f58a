"""Concurrent streams whose every token is kept, and what may be done to their engine meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from server_process import ServerProcess

Body = dict[str, Any]


@dataclass
class Answer:
    """All that a stream said, put together choice by choice; two runs of a request are equal."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    prompt_logprobs: Any = None
    error: dict[str, Any] | None = None
    num_ends: int = 0  # [DONE]s

    def add(self, line: str) -> int:
        """How many tokens the line held."""
        if line == "[DONE]":
            self.num_ends += 1
            return 0
        event = json.loads(line)
        self.error = event.get("error", self.error)
        if event.get("usage"):
            # How much of a prompt was cached depends on who else came, kills or no kills.
            self.usage = {k: v for k, v in event["usage"].items() if isinstance(v, int)}
        choices = event.get("choices", [])
        for choice in choices:
            self._add_choice(choice)
        return sum(len(choice.get("token_ids") or []) for choice in choices)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        empty = {"text": "", "token_ids": [], "logprobs": [], "finish": None, "stop": None}
        into = self.choices.setdefault(choice["index"], empty)
        message = choice.get("delta") or choice.get("message") or {}
        into["text"] += choice.get("text") or message.get("content") or ""
        into["token_ids"] += choice.get("token_ids") or []
        into["logprobs"] += _logprobs(choice.get("logprobs"))
        if choice.get("prompt_logprobs"):
            assert "prompt_logprobs" not in into, "they came twice"
            into["prompt_logprobs"] = choice["prompt_logprobs"]
        if choice.get("finish_reason"):
            assert into["finish"] is None, "it ended twice"
            into["finish"], into["stop"] = choice["finish_reason"], choice.get("stop_reason")


def _logprobs(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    names = ("tokens", "token_logprobs", "top_logprobs")
    return [list(entry) for entry in zip(*(logprobs[name] for name in names), strict=True)]


class Streams:
    """Runs requests at once against a server; counts the tokens that come."""

    def __init__(
        self,
        server: ServerProcess,
        timeout_s: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._headers = headers
        self.num_tokens = 0
        self.num_begun = 0  # requests whose first token has come

    def run(
        self, bodies: Sequence[Body], fault: Callable[[Streams], Awaitable[None]] | None = None
    ) -> list[Answer]:
        """The requests' answers; `fault` happens meanwhile."""
        return asyncio.run(self._run(bodies, fault))

    async def _run(
        self, bodies: Sequence[Body], fault: Callable[[Streams], Awaitable[None]] | None
    ) -> list[Answer]:
        async with self._client() as client:
            answers = asyncio.gather(*(self.stream(client, body) for body in bodies))
            if fault is not None:
                await asyncio.gather(answers, fault(self))  # a fault that fails ends all
            return await answers

    def run_during(
        self, bodies: Sequence[Body], fault: Callable[[Streams], Awaitable[None]]
    ) -> list[list[Answer]]:
        """Every request's answers, each sent again and again until `fault` is over."""
        return asyncio.run(self._run_during(bodies, fault))

    async def _run_during(
        self, bodies: Sequence[Body], fault: Callable[[Streams], Awaitable[None]]
    ) -> list[list[Answer]]:
        async with self._client() as client:
            happening = asyncio.ensure_future(fault(self))

            async def repeat(body: Body) -> list[Answer]:
                answers = []
                while not happening.done():
                    answers.append(await self.stream(client, body))
                return answers

            answers = await asyncio.gather(*map(repeat, bodies))
            await happening
            return answers

    def _client(self) -> httpx.AsyncClient:
        # Each has a connection of its own. The server may close an idle one just as it is used.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return self._server.async_client(
            limits=limits, timeout=self._timeout_s, headers=self._headers
        )

    async def stream(self, client: httpx.AsyncClient, body: Body) -> Answer:
        answer, has_begun = Answer(), False
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = {"stream": True, "return_token_ids": True, **body}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                answer.error = json.loads(await response.aread())["error"]
                return answer
            last = time.monotonic()
            async for line in response.aiter_lines():
                if line:
                    now = time.monotonic()
                    self.on_event(now - last)
                    last = now
                    num_tokens = answer.add(line.removeprefix("data: "))
                    self.num_tokens += num_tokens
                    self.num_begun += num_tokens > 0 and not has_begun
                    has_begun = has_begun or num_tokens > 0
        answer.num_ends += not body["stream"]
        return answer

    def on_event(self, gap_s: float) -> None:
        """An event of a stream has come, so long after the one before it."""

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    # -- what may happen

    def kills(
        self, num_kills: int, tokens_between: tuple[int, int], seed: int
    ) -> Callable[[Streams], Awaitable[None]]:
        """Kill the engine, again and again, each time after some more tokens."""
        draw = random.Random(seed)
        self.times_back_s: list[float] = []

        async def kill_often(_: Streams) -> None:
            for _kill in range(num_kills):
                enough = self.num_tokens + draw.randint(*tokens_between)
                await self.until(lambda: self.num_tokens >= enough)  # noqa: B023
                await asyncio.sleep(draw.random() * 0.02)  # anywhere within a step
                self.times_back_s.append(await kill_and_wait(self._server))

        return kill_often

    def kills_at_any_time(
        self, num_kills: int, longest_pause_s: float, seed: int
    ) -> Callable[[Streams], Awaitable[None]]:
        """Kill the engine at random moments of its life, long or short."""
        draw = random.Random(seed)
        self.times_back_s = []

        async def kill_often(_: Streams) -> None:
            for _kill in range(num_kills):
                await asyncio.sleep(draw.random() * longest_pause_s)
                self.times_back_s.append(await kill_and_wait(self._server))

        return kill_often


async def kill_and_wait(server: ServerProcess, number: int = signal.SIGKILL) -> float:
    """End the engine; how many seconds it took until the server said that it is back."""
    pid, started = server.engine_pid, time.monotonic()
    os.kill(pid, number)
    async with server.async_client(timeout=120) as client:
        while True:
            # The next engine is there only once the server has seen the death of this one.
            is_replaced = server.engine_pids() not in ({pid}, set())
            if is_replaced and (await client.get("/health")).status_code == 200:
                return time.monotonic() - started
            await asyncio.sleep(0.01)
