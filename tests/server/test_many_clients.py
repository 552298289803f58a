"""Many clients at once, some of which leave."""

from __future__ import annotations

import asyncio
import random

import httpx
import openai
import pytest
from server_process import ServerProcess
from waiting import eventually

NUM_TOKENS = 16


async def run_streams(server: ServerProcess, num_streams: int, drop_share: float = 0.0) -> int:
    """How many streams ran to their end; those to be dropped leave at a random moment."""
    draw = random.Random(7)
    limits = httpx.Limits(max_connections=None)
    async with openai.AsyncOpenAI(
        base_url=f"{server.base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=300,
        http_client=httpx.AsyncClient(limits=limits, timeout=300),
    ) as client:

        async def stream(index: int, leave_after: int | None) -> bool:
            chunks = await client.completions.create(
                model="",
                prompt=f"{index}. Once upon a time",
                max_tokens=NUM_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True, "model": None},
                stream_options={"include_usage": True},
            )
            received = []
            async for chunk in chunks:
                received.append(chunk)
                if len(received) == leave_after:
                    await chunks.close()
                    return False
            assert received[-1].usage is not None
            assert received[-1].usage.completion_tokens == NUM_TOKENS
            return True

        async def leave_early(index: int) -> bool:
            """A client that does not stream, and does not wait for its answer either."""
            body = {"prompt": f"{index}. And then", "max_tokens": 2000, "ignore_eos": True}
            async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as leaver:
                answer = asyncio.ensure_future(leaver.post("/v1/completions", json=body))
                await asyncio.wait({answer}, timeout=draw.random())
                answer.cancel()
            return False

        jobs = []
        for index in range(num_streams):
            kind = draw.random()
            if kind < drop_share / 2:
                jobs.append(leave_early(index))
            elif kind < drop_share:
                jobs.append(stream(index, draw.randint(1, NUM_TOKENS - 1)))
            else:
                jobs.append(stream(index, None))
        return sum(await asyncio.gather(*jobs))


def test_many_streams_all_finish(server: ServerProcess) -> None:
    assert asyncio.run(run_streams(server, 48)) == 48
    eventually(server.is_idle)


def test_clients_that_leave_take_their_requests_with_them(server: ServerProcess) -> None:
    num_finished = asyncio.run(run_streams(server, 40, drop_share=0.3))
    assert 0 < num_finished < 40
    eventually(server.is_idle)  # nothing runs, nothing waits, every block is free


@pytest.mark.slow
def test_256_streams_all_finish(server: ServerProcess) -> None:
    assert asyncio.run(run_streams(server, 256)) == 256
    eventually(server.is_idle)


@pytest.mark.slow
def test_256_clients_of_which_a_third_leave(server: ServerProcess) -> None:
    asyncio.run(run_streams(server, 256, drop_share=0.3))
    eventually(server.is_idle)
