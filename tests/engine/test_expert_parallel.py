"""Experts that are spread over ranks give one rank's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_engine import open_llm, random_prompts
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.executor.multi_process import MultiProcessExecutor
from penstock.protocol.errors import ConfigError, EngineDeadError

PROMPTS = random_prompts(22, 3, 17, 40)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=2),
]
IN_CHUNKS = {"max_num_batched_tokens": 16}
ODD_EXPERTS = {"num_experts": 5}  # ranks have different numbers of them


def generate(llm: LLM) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens and log-probabilities of each prompt, greedy and seeded, all at once."""
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    results = []
    for output in llm.generate(prompts, PARAMS * len(PROMPTS), use_tqdm=False):
        (answer,) = output.outputs
        assert answer.logprobs is not None
        rows = [{token: found.logprob for token, found in row.items()} for row in answer.logprobs]
        results.append((list(answer.token_ids), rows))
    return results


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    """Tokens are equal, and log-probabilities nearly."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, rows), (_, others) in zip(found, expected, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert row == pytest.approx(other, abs=tolerance)


def kill_rank(llm: LLM, rank: int) -> None:
    executor = llm.engine.executor
    assert isinstance(executor, MultiProcessExecutor)
    executor._processes[rank].kill()


@pytest.mark.parametrize(
    ("variant", "sizes", "options"),
    [
        ("qwen3_moe", ODD_EXPERTS, IN_CHUNKS),
        pytest.param("mixtral", {}, IN_CHUNKS, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {}, IN_CHUNKS, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", {}, {"cpu_backend": "torch"}, marks=pytest.mark.slow),
        pytest.param("llama4", {}, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, {"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {}, IN_CHUNKS, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_with_some_experts_each_give_one_ranks_tokens(
    tmp_path: Path, variant: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    """Also from the prefix cache; and no rank goes on alone after the other was killed."""
    checkpoint = make_checkpoint(tmp_path, variant, **sizes)
    with open_llm(checkpoint, **options) as llm:
        expected = generate(llm)
    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with open_llm(checkpoint, **options, **spread) as llm:
        for _ in range(2):
            assert_same(generate(llm), expected, tolerance=1e-4)
        assert llm.engine.stats().num_prefix_hits > 0
        kill_rank(llm, 1)
        with pytest.raises(EngineDeadError, match="worker"):
            generate(llm)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="enable_expert_parallel is for models with experts"):
        open_llm(checkpoint, enable_expert_parallel=True)
