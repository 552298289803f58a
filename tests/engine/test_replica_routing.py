"""Two engines behind one router: cached prefixes are found where they are."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from tiny_engine import OPTIONS, random_prompts
from tiny_models import make_checkpoint

from penstock import AsyncLLM, SamplingParams
from penstock.engine.observer import Observer, RequestRecord

BLOCK_SIZE = 8
PREFIX_TOKENS = 512
PARAMS = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


class Counts(Observer):
    def __init__(self) -> None:
        self.requests = Counter[int | None]()
        self.num_cached_tokens = 0

    def on_finish(self, record: RequestRecord) -> None:
        self.requests[record.replica] += 1
        self.num_cached_tokens += record.num_cached_tokens


def make_prompts(num_prefixes: int, num_requests: int) -> list[list[int]]:
    """The first prefix is in half of the prompts."""
    prefixes = [p["prompt_token_ids"] for p in random_prompts(0, *[PREFIX_TOKENS] * num_prefixes)]
    numbers = [0 if i % 2 else i // 2 % num_prefixes for i in range(num_requests)]
    suffixes = random_prompts(1, *[9] * num_requests)
    return [prefixes[n] + s["prompt_token_ids"] for n, s in zip(numbers, suffixes, strict=True)]


async def run(llm: AsyncLLM, prompts: list[list[int]]) -> list[list[int]]:
    tokens = []
    for prompt in prompts:  # one at a time: the choices do not depend on how fast engines are
        outputs = [o async for o in llm.generate({"prompt_token_ids": prompt}, PARAMS)]
        tokens.append(outputs[-1].outputs[0].token_ids)
    return tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(make_checkpoint(folder, "llama", max_position_embeddings=1024))


def test_replicas_have_the_hits_of_one_engine_and_share_the_work(checkpoint: str) -> None:
    prompts = make_prompts(4, 120)

    async def main() -> None:
        options = OPTIONS | {"block_size": BLOCK_SIZE, "data_parallel_size": 2}
        async with AsyncLLM(checkpoint, **options) as llm:
            counts = Counts()
            llm._client.observers.append(counts)
            tokens = await run(llm, prompts)
            ideal = (len(prompts) - 4) * PREFIX_TOKENS  # the first of each prefix computes it
            assert counts.num_cached_tokens >= 0.9 * ideal
            assert max(counts.requests.values()) <= 1.3 * len(prompts) / 2

            router = llm._client.replicas._router
            assert all(known.keys for known in router._replicas.values())
            await llm.reset_prefix_cache()
            assert not any(known.keys for known in router._replicas.values())
            before = counts.num_cached_tokens
            assert await run(llm, prompts[:1]) == tokens[:1]
            assert counts.num_cached_tokens == before

    asyncio.run(main())
