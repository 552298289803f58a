"""The same request gives the same tokens, whatever the engine does around it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from drafters import Oracle, Stubborn
from sampling_kinds import KINDS
from tiny_engine import open_llm

from penstock import LLM, SamplingParams

PROMPT_LENGTHS = (3, 17, 40, 90)


def prompts() -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [{"prompt_token_ids": [rng.randrange(256) for _ in range(n)]} for n in PROMPT_LENGTHS]


def params() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=24, **options) for options in KINDS.values()]


def run(llm: LLM, neighbours: int = 0) -> list[list[int]]:
    """Tokens of every prompt under every kind of sampling, among some neighbours."""
    requests = [(prompt, own) for own in params() for prompt in prompts()]
    rng = random.Random(neighbours)
    others = [
        (
            {"prompt_token_ids": [rng.randrange(256) for _ in range(rng.randrange(1, 60))]},
            SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randrange(1, 40)),
        )
        for _ in range(neighbours)
    ]
    mixed = [(item, index) for index, item in enumerate(requests)] + [(item, -1) for item in others]
    rng.shuffle(mixed)
    outputs = llm.generate(
        [prompt for (prompt, _), _ in mixed], [own for (_, own), _ in mixed], use_tqdm=False
    )
    by_index = {index: out for (_, index), out in zip(mixed, outputs, strict=True)}
    return [by_index[index].outputs[0].token_ids for index in range(len(requests))]


@pytest.fixture(scope="module")
def alone(tiny_llama: str) -> list[list[int]]:
    """What each request gives in an engine of its own size, one at a time, nothing cached."""
    with open_llm(tiny_llama, enable_prefix_caching=False) as llm:
        return [
            llm.generate(prompt, own, use_tqdm=False)[0].outputs[0].token_ids
            for own in params()
            for prompt in prompts()
        ]


def test_among_thirty_others(tiny_llama: str, alone: list[list[int]]) -> None:
    with open_llm(tiny_llama) as llm:
        assert run(llm, neighbours=30) == alone


def test_with_the_prefix_cache_cold_and_warm(tiny_llama: str, alone: list[list[int]]) -> None:
    with open_llm(tiny_llama) as llm:
        assert run(llm) == alone
        before = llm.engine.stats().num_prefix_hits
        assert run(llm) == alone
        assert llm.engine.stats().num_prefix_hits > before


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_with_prompts_in_chunks(tiny_llama: str, alone: list[list[int]], chunk: int) -> None:
    with open_llm(tiny_llama, max_num_batched_tokens=chunk) as llm:
        assert run(llm) == alone


def test_with_long_prompts_held_back(tiny_llama: str, alone: list[list[int]]) -> None:
    with open_llm(tiny_llama, long_prefill_token_threshold=10) as llm:
        assert run(llm, neighbours=5) == alone


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_after_forced_preemptions(
    tiny_llama: str, alone: list[list[int]], policy: str, overlap: bool
) -> None:
    options = {"max_model_len": 128, "num_gpu_blocks_override": 14, "block_size": 16}
    with open_llm(tiny_llama, scheduling_policy=policy, async_scheduling=overlap, **options) as llm:
        assert run(llm) == alone
        assert llm.engine.stats().num_preemptions > 0
        assert llm.engine.stats().kv_cache_usage == 0.0


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_with_other_block_sizes(tiny_llama: str, alone: list[list[int]], block_size: int) -> None:
    with open_llm(tiny_llama, block_size=block_size, kv_cache_memory_bytes="64MiB") as llm:
        assert run(llm) == alone
        assert run(llm) == alone


def test_with_steps_in_flight(tiny_llama: str, alone: list[list[int]]) -> None:
    with open_llm(tiny_llama, async_scheduling=True) as llm:
        assert llm.engine.limits.max_in_flight == 2
        assert run(llm, neighbours=10) == alone
        assert run(llm) == alone


@pytest.mark.parametrize("overlap", [False, True])
def test_with_drafts_that_hold_and_drafts_that_do_not(
    tiny_llama: str, alone: list[list[int]], overlap: bool
) -> None:
    drafter = Oracle(alone, wrong=0)
    options = {"max_model_len": 160, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 48}
    with open_llm(tiny_llama, drafter=drafter, async_scheduling=overlap, **options) as llm:
        assert run(llm, neighbours=6) == alone
        assert llm.engine.stats().kv_cache_usage == 0.0
    assert drafter.num_accepted > 20


def test_after_a_request_whose_failed_drafts_are_in_flight(
    tiny_llama: str, alone: list[list[int]]
) -> None:
    """It leaves its slot to the next request before its last step is collected."""
    options = {"max_num_seqs": 1, "block_size": 1, "cpu_backend": "torch"}
    prompt = {"prompt_token_ids": prompts()[1]["prompt_token_ids"]}
    own = [
        SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[alone[1][at]]) for at in (0, 2)
    ]
    with open_llm(tiny_llama, enable_prefix_caching=False, **options) as llm:
        expected = [
            llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for params in own
        ]
    with open_llm(tiny_llama, drafter=Stubborn(), async_scheduling=True, **options) as llm:
        outputs = llm.generate([prompt] * 6, own * 3, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected * 3
